"""Expert load imbalance: the load of the most loaded device in expert parallelism.

Tokens are assumed to choose experts independently and uniformly, as in
`parameters.expected_distinct`. Real traffic is less even: with expert popularity by Zipf's law of
exponent 0.8, the balance of 8 devices is 0.6 at any batch size without copies of popular experts.
"""

from math import sqrt
from statistics import NormalDist


def most_of(size: int, mean: float, deviation: float) -> float:
    """Expected maximum of `size` samples of a normal distribution (Blom, 1958)."""
    if size == 1:
        return mean
    return mean + deviation * NormalDist().inv_cdf((size - 0.375) / (size + 0.25))


def expert_balance(num_experts: int, per_token: int, size: int, num_tokens: int) -> float:
    """Mean number of rows per device over the maximum, if `num_tokens` tokens choose experts
    uniformly."""
    mean = num_tokens * per_token / size
    share = 1 / size
    spread = (num_experts - per_token) / max(num_experts - 1, 1)  # a token's experts are distinct
    deviation = sqrt(num_tokens * per_token * share * (1 - share) * spread)
    return mean / min(most_of(size, mean, deviation), num_tokens * per_token)


def most_experts_read(num_experts: int, per_token: int, size: int, num_tokens: int) -> float:
    """Expected number of experts that the most loaded device reads in a step."""
    held = num_experts / size
    chosen = 1 - (1 - per_token / num_experts) ** num_tokens  # probability, for each expert
    deviation = sqrt(held * chosen * (1 - chosen))
    return min(most_of(size, held * chosen, deviation), held, num_tokens * per_token)


def ranks_of_a_token(size: int, per_token: int) -> float:
    """Expected number of devices that have at least one of a token's experts."""
    return size * (1 - (1 - 1 / size) ** per_token)
