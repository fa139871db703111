"""e08.2: which sequences are preempted, and how. The task is in README.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Running:
    """A running sequence, for your own trials; the checks pass objects with these fields."""

    name: str
    arrival: int  # an earlier arrival has a smaller number; no two are equal
    computed: int  # the number of tokens in its cache
    blocks: tuple[
        int, ...
    ]  # the numbers of its blocks; a number in two sequences is a shared block


def preempt(
    running: Sequence[Running],
    needy: str,
    missing: int,
    token_price: int | Fraction,
    block_price: int | Fraction,
) -> list[tuple[str, str]] | None:
    """Return the victims, whose blocks make at least `missing` blocks free, in the order of their
    preemption: [(name, "swap" or "recompute"), ...].

    Return None if all later arrivals together do not make enough blocks free. Recomputing costs
    `token_price` per computed token; swapping costs `block_price` per block and direction.
    """
    raise NotImplementedError("TODO e08.2: victims from the latest arrival on, and each one's way")
