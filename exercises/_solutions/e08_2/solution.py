"""The blocks that a victim frees are not the blocks that it holds.

Sequences that share a prompt hold most of their blocks together. Preempting one of them loses its
work and frees few blocks: only the last holder frees a shared block. So the solution counts the
holders of each block, and lowers these counts victim by victim. A scheduler that takes the length
of a victim's table for the number of freed blocks runs out of memory in the next step.

Victims are chosen by arrival, not by size and not by cost, because preemption must come to an end.
The request that arrived first is never preempted, so it finishes; then the second one is the
first. A scheduler that always preempts the cheapest victim could preempt the same one for ever.

Both costs grow with the length of a sequence: swapping by the block, recomputing by the token. With
fixed prices most victims therefore take the same way. A last block that is nearly empty can change
the choice, and so can a full host, which this exercise leaves out.
"""

from collections import Counter
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
    """Return the victims that make `missing` blocks free, each with "swap" or "recompute"."""
    since = next(sequence.arrival for sequence in running if sequence.name == needy)
    later = sorted((s for s in running if s.arrival > since), key=lambda s: s.arrival)
    victims = enough(later, Counter(b for s in running for b in s.blocks), missing)
    if victims is None:
        return None
    ways = []
    for victim in victims:
        size = len(victim.blocks)
        cheaper = 2 * size * block_price < victim.computed * token_price
        ways.append((victim.name, "swap" if cheaper else "recompute"))
    return ways


def enough(later: list[Running], holders: Counter[int], missing: int) -> list[Running] | None:
    """Return the latest arrivals that free `missing` blocks; None if all together are too few."""
    victims, freed = [], 0
    while freed < missing:
        if not later:
            return None
        victims.append(later.pop())
        for block in victims[-1].blocks:
            holders[block] -= 1
            freed += holders[block] == 0
    return victims
