"""You admit a prompt only if all of it fits in the step: it gets what is left, as others do."""

from collections.abc import Sequence

Request = tuple[str, int]  # its name, and how many tokens it has still to compute


def plan(
    running: Sequence[Request],
    waiting: Sequence[Request],
    budget: int,
    seats: int,
    limit: int | None = None,
) -> dict[str, int]:
    """How many tokens each request computes in this step; who computes none is left out."""
    decoding = [request for request in running if request[1] == 1]
    prefills = [request for request in running if request[1] > 1]
    admitted = waiting[: seats - len(running)]
    most = budget if limit is None else limit
    given, left = {}, budget
    for name, todo in [*decoding, *prefills, *admitted]:
        count = min(todo, most, left)
        if (name, todo) in waiting and count < todo:
            break
        if count > 0:
            given[name] = count
            left -= count
    return given
