"""One queue, three groups: the order in which requests are asked is the whole policy.

Decoding comes first because its price is small and its delay is seen: one token of the budget each,
against a gap in somebody's text. Prompts take what is left, and the step is always as long as the
budget allows, so a long prompt slows everybody down by the same known amount instead of stopping
them for as long as it is.

A request is given less than it needs only where the budget ends (or its limit): so at most one
chunk per step is cut by the budget, and whoever comes after it gets nothing. That is why nobody
overtakes although nobody waits for anybody by name. The limit breaks this on purpose: it keeps
one very long prompt from having the whole rest of every step to itself.
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
