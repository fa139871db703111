"""Another way: ask the blocks instead of the sequences.

Victims are preempted from the latest arrival on, so a block becomes free when the earliest of its
holders is preempted. Sort the blocks by that arrival, the latest first. The last victim is the one
whose preemption frees block number `missing` of this order, and all later arrivals go as well.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any


def preempt(
    running: Sequence[Any],
    needy: str,
    missing: int,
    token_price: int | Fraction,
    block_price: int | Fraction,
) -> list[tuple[str, str]] | None:
    """Return the victims with their ways; None if all later arrivals together are too few."""
    if missing == 0:
        return []
    freed_with: dict[int, int] = {}  # block: the arrival of its earliest holder
    for one in sorted(running, key=lambda one: -one.arrival):
        freed_with |= dict.fromkeys(one.blocks, one.arrival)
    (own,) = (one.arrival for one in running if one.name == needy)
    chances = sorted((a for a in freed_with.values() if a > own), reverse=True)
    if missing > len(chances):
        return None
    victims = [one for one in running if one.arrival >= chances[missing - 1]]
    victims.sort(key=lambda one: one.arrival, reverse=True)
    return ways(victims, token_price, block_price)


def ways(
    victims: Sequence[Any], token_price: int | Fraction, block_price: int | Fraction
) -> list[tuple[str, str]]:
    """Return each victim's name with the cheaper of the two ways."""
    chosen = []
    for one in victims:
        gain = one.computed * token_price - 2 * len(one.blocks) * block_price
        chosen.append((one.name, "swap" if gain > 0 else "recompute"))
    return chosen
