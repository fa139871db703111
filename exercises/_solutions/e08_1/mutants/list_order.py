"""You serve running requests as they stand in the list: those who decode come first."""

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
    decoding = list(running)
    prefills: list[Request] = []
    admitted = waiting[: seats - len(running)]
    most = budget if limit is None else limit
    given, left = {}, budget
    for name, todo in [*decoding, *prefills, *admitted]:
        count = min(todo, most, left)
        if count > 0:
            given[name] = count
            left -= count
    return given
