"""You preempt somebody before you ask whether a block is missing: with 0 nobody goes."""

from collections import Counter
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
    """Who has to go so that `missing` blocks become free, in which way, and the tokens lost."""
    since = next(sequence.arrival for sequence in running if sequence.name == needy)
    later = sorted((s for s in running if s.arrival > since), key=lambda s: s.arrival)
    victims = enough(later, Counter(b for s in running for b in s.blocks), missing)
    if victims is None:
        return None
    ways, lost = [], 0
    for victim in victims:
        size = len(victim.blocks)
        cheaper = 2 * size * block_price < victim.computed * token_price
        if cheaper and size <= host_free:
            ways.append((victim.name, "swap"))
            host_free -= size
        else:
            ways.append((victim.name, "recompute"))
            lost += victim.computed
    return ways, lost


def enough(later: list[Running], holders: Counter[int], missing: int) -> list[Running] | None:
    """The latest of `later` whose leaving frees `missing` blocks; None if all are too few."""
    victims, freed = [], 0
    while freed < missing or not victims:
        if not later:
            return None if freed < missing else []
        victims.append(later.pop())
        for block in victims[-1].blocks:
            holders[block] -= 1
            freed += holders[block] == 0
    return victims
