"""One queue of three groups: the order in which requests get tokens is the whole policy.

Decoding requests come first, because they cost one token of the budget each, and a user sees the
delay if they wait. Prompts take what is left. A step is never longer than the budget allows, so a
long prompt slows down the other requests by the same known amount in each step, instead of stopping
them until it is finished.

A request gets less than it needs only at the end of the budget or at its limit. So at most one
chunk per step is cut by the budget, and later requests get nothing. Therefore no request is
overtaken. The limit breaks this rule on purpose: it keeps one very long prompt from using the whole
rest of every step.
"""

from collections.abc import Sequence

Request = tuple[str, int]  # its name, and the number of tokens it still has to compute


def plan(
    running: Sequence[Request],
    waiting: Sequence[Request],
    budget: int,
    seats: int,
    limit: int | None = None,
) -> dict[str, int]:
    """Return the number of tokens of each request that computes any in this step."""
    decoding = [request for request in running if request[1] == 1]
    prefills = [request for request in running if request[1] > 1]
    admitted = waiting[: seats - len(running)]
    most = budget if limit is None else limit
    given, left = {}, budget
    for name, todo in [*decoding, *prefills, *admitted]:
        count = min(todo, most, left)
        if count > 0:
            given[name] = count
            left -= count
    return given
