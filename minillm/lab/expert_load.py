"""How unevenly tokens choose experts: what the device with the most of them computes and reads.

Counted for tokens that choose independently and evenly, as `parameters.expected_distinct` does.
Real traffic prefers some experts and is less even: with a popularity by Zipf's law of exponent 0.8
the balance of 8 devices is 0.6 at any batch size, until popular experts get copies.
"""

from math import sqrt
from statistics import NormalDist


def most_of(size: int, mean: float, deviation: float) -> float:
    """Expected largest of `size` numbers of a normal law (Blom, 1958)."""
    if size == 1:
        return mean
    return mean + deviation * NormalDist().inv_cdf((size - 0.375) / (size + 0.25))


def expert_balance(num_experts: int, per_token: int, size: int, num_tokens: int) -> float:
    """Mean over largest number of rows that devices compute, where `num_tokens` tokens choose
    experts evenly; real traffic is less even."""
    mean = num_tokens * per_token / size
    share = 1 / size
    spread = (num_experts - per_token) / max(num_experts - 1, 1)  # a token's choices differ
    deviation = sqrt(num_tokens * per_token * share * (1 - share) * spread)
    return mean / min(most_of(size, mean, deviation), num_tokens * per_token)


def most_experts_read(num_experts: int, per_token: int, size: int, num_tokens: int) -> float:
    """Experts that the device with the most of them reads in a step."""
    held = num_experts / size
    chosen = 1 - (1 - per_token / num_experts) ** num_tokens  # probability that an expert is
    deviation = sqrt(held * chosen * (1 - chosen))
    return min(most_of(size, held * chosen, deviation), held, num_tokens * per_token)


def ranks_of_a_token(size: int, per_token: int) -> float:
    """Devices that have at least one of a token's experts, on average."""
    return size * (1 - (1 - 1 / size) ** per_token)
