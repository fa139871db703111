"""Expert load imbalance: the load of the most loaded device in expert parallelism.

Tokens are assumed to choose experts independently and uniformly, as in
`parameters.expected_distinct`. Real traffic is less even: with expert popularity by Zipf's law of
exponent 0.8, the balance of 8 devices is 0.6 at any batch size without copies of popular experts.

A router may first choose groups of neighbouring experts (DeepSeek-V3: 4 of 8), all groups equally
likely here. `most_experts_read` does not count groups; they leave the probability of each expert as
it is.
"""

from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple


def most_of(size: int, mean: float, deviation: float) -> float:
    """Expected maximum of `size` samples of a normal distribution (Blom, 1958)."""
    return mean + deviation * NormalDist().inv_cdf((size - 0.375) / (size + 0.25))


class Held(NamedTuple):
    """A device's part of the groups that a token chose, and the probability of it."""

    probability: float
    groups: int  # of which the device has at least a part
    part: float  # of each of them, the share that the device has
    share: float  # of all experts that the token can choose


def even_groups(size: int, groups: int, top_groups: int) -> tuple[int, int]:
    """The groups and how many a token chooses; one group if devices cut groups unevenly."""
    return (groups, top_groups) if groups % size == 0 or size % groups == 0 else (1, 1)


def parts_of_a_device(size: int, groups: int, top_groups: int) -> list[Held]:
    """What a device has of the groups of a token."""
    groups, top_groups = even_groups(size, groups, top_groups)
    held, part = max(groups // size, 1), min(groups / size, 1.0)
    ways = comb(groups, top_groups)
    return [
        Held(
            comb(held, n) * comb(groups - held, top_groups - n) / ways,
            n,
            part,
            n * part / top_groups,
        )
        for n in range(min(held, top_groups) + 1)
    ]


def expert_balance(
    num_experts: int,
    per_token: int,
    size: int,
    num_tokens: int,
    groups: int = 1,
    top_groups: int = 1,
) -> float:
    """Mean number of rows per device over the maximum, if `num_tokens` tokens choose experts
    uniformly, of all groups or of `top_groups` of them."""
    mean = num_tokens * per_token / size
    offered = num_experts // groups * top_groups
    spread = (offered - per_token) / max(offered - 1, 1)  # a token's experts are distinct
    variance = -((per_token / size) ** 2)  # of a device's rows of one token
    for held in parts_of_a_device(size, groups, top_groups):
        rows = per_token * held.share
        variance += held.probability * (rows**2 + rows * (1 - held.share) * spread)
    deviation = sqrt(num_tokens * max(variance, 0.0))
    return mean / min(most_of(size, mean, deviation), num_tokens * per_token)


def most_experts_read(num_experts: int, per_token: int, size: int, num_tokens: int) -> float:
    """Expected number of experts that the most loaded device reads in a step."""
    held = num_experts / size
    chosen = 1 - (1 - per_token / num_experts) ** num_tokens  # probability, for each expert
    deviation = sqrt(held * chosen * (1 - chosen))
    return min(most_of(size, held * chosen, deviation), held, num_tokens * per_token)


def ranks_of_a_token(size: int, per_token: int, groups: int = 1, top_groups: int = 1) -> float:
    """Expected number of devices that have at least one of a token's experts. Groups are chosen for
    their best experts, so each chosen group has one of the token's at least."""
    free = max(per_token - even_groups(size, groups, top_groups)[1], 0)
    return size * sum(
        held.probability * (1 - (1 - held.part) ** held.groups * (1 - held.share) ** free)
        for held in parts_of_a_device(size, groups, top_groups)
    )
