"""e08.1: one step's tokens, shared out. The task is in README.md."""

from collections.abc import Sequence

Request = tuple[str, int]  # its name, and how many tokens it has still to compute


def plan(
    running: Sequence[Request],
    waiting: Sequence[Request],
    budget: int,
    seats: int,
    limit: int | None = None,
) -> dict[str, int]:
    """How many tokens each request computes in this step; who computes none is left out.

    `running` and `waiting` are in the order of arrival, and a running request with one token to
    compute is decoding. `budget` bounds the step, `seats` the running requests, `limit` one
    request's tokens.
    """
    raise NotImplementedError("TODO e08.1: decoding first, then running prompts, then admissions")
