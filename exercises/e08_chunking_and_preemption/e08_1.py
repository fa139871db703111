"""e08.1: the tokens of one step. The task is in README.md."""

from collections.abc import Sequence

Request = tuple[str, int]  # its name, and the number of tokens it still has to compute


def plan(
    running: Sequence[Request],
    waiting: Sequence[Request],
    budget: int,
    seats: int,
    limit: int | None = None,
) -> dict[str, int]:
    """Return the number of tokens of each request that computes any in this step.

    `running` and `waiting` are in the order of arrival, and a running request with one token to
    compute is decoding. `budget` limits the tokens of the step, `seats` the running requests,
    and `limit` the tokens of one request.
    """
    raise NotImplementedError("TODO e08.1: decoding first, then running prompts, then admissions")
