"""e08.2: who gives up memory, and in which way. The task is in README.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Running:
    """A running sequence, for your own trials; the checks pass objects with these fields."""

    name: str
    arrival: int  # smaller for who came earlier; no two are equal
    computed: int  # tokens in its cache
    blocks: tuple[int, ...]  # their numbers; who has the same number shares that block


def preempt(
    running: Sequence[Running],
    needy: str,
    missing: int,
    host_free: int,
    token_price: int | Fraction,
    block_price: int | Fraction,
) -> tuple[list[tuple[str, str]], int] | None:
    """Who has to go so that `missing` blocks become free: [(name, "swap" or "recompute"), ...] in
    the order of their preemption, and the number of tokens lost. None if it would be in vain.

    `host_free` blocks of the host are free. Recomputing costs `token_price` per computed token,
    swapping `block_price` per block and way.
    """
    raise NotImplementedError("TODO e08.2: victims from the latest on, each in the cheaper way")
