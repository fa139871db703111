"""Another way: ask the blocks instead of the sequences.

Victims go from the latest arrival on, so a block becomes free with the earliest of its holders.
Sort the blocks by that arrival, the latest first: the last victim is the one with whom the block
at place `missing` becomes free, and all who came after it go, too.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


def preempt(
    running: Sequence[Any],
    needy: str,
    missing: int,
    host_free: int,
    token_price: int | Fraction,
    block_price: int | Fraction,
) -> tuple[list[tuple[str, str]], int] | None:
    """Who has to go, in which way, and the tokens lost; None if it would be in vain."""
    if missing == 0:
        return [], 0
    freed_with: dict[int, int] = {}  # block: the arrival of its earliest holder
    for one in sorted(running, key=lambda one: -one.arrival):
        freed_with |= dict.fromkeys(one.blocks, one.arrival)
    (own,) = (one.arrival for one in running if one.name == needy)
    chances = sorted((a for a in freed_with.values() if a > own), reverse=True)
    if missing > len(chances):
        return None
    victims = [one for one in running if one.arrival >= chances[missing - 1]]
    victims.sort(key=lambda one: one.arrival, reverse=True)
    return ways(victims, host_free, token_price, block_price)


def ways(
    victims: Sequence[Any],
    host_free: int,
    token_price: int | Fraction,
    block_price: int | Fraction,
) -> tuple[list[tuple[str, str]], int]:
    """The cheaper way for each victim, while the host has room, and the tokens lost."""
    chosen, lost = [], 0
    for one in victims:
        count = len(one.blocks)
        if count <= host_free and 2 * count * block_price < one.computed * token_price:
            host_free -= count
            chosen.append((one.name, "swap"))
        else:
            lost += one.computed
            chosen.append((one.name, "recompute"))
    return chosen, lost
