"""Another way: put the tokens of all requests in one line, and cut the line at the budget.

No request is skipped. So a request that ends before the cut gets all its tokens, one that begins
after the cut gets none, and one across the cut gets those before it. This is the difference of two
running sums, each of them limited to the budget.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

Request = tuple[str, int]


def plan(
    running: Sequence[Request],
    waiting: Sequence[Request],
    budget: int,
    seats: int,
    limit: int | None = None,
) -> dict[str, int]:
    """Return the number of tokens of each request that computes any in this step."""
    line = sorted(running, key=lambda request: request[1] > 1)  # stable: decoding first
    line += waiting[: seats - len(running)]
    wishes = [todo if limit is None else min(todo, limit) for _, todo in line]
    ends = [min(end, budget) for end in accumulate(wishes, initial=0)]
    granted = [after - before for before, after in pairwise(ends)]
    return {name: share for (name, _), share in zip(line, granted, strict=True) if share}
