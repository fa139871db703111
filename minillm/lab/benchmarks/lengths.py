"""How long the requests of the offline benchmark are, in tokens."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

Lengths = tuple[list[int], list[int]]  # of prompts, of answers
LEAST = 8
LEAST_UNIFORM = 100


def lognormal_lengths(count: int, seed: int, most_prompt: int, most_new: int) -> Lengths:
    """Medians of 160 and 96 tokens with sigmas of 0.8 and 0.7, much as chats have them, cut off at
    both ends."""
    rng = random.Random(seed)

    def draw(middle: int, sigma: float, most: int) -> int:
        return int(min(max(middle * rng.lognormvariate(0.0, sigma), LEAST), most))

    lengths = [(draw(160, 0.8, most_prompt), draw(96, 0.7, most_new)) for _ in range(count)]
    return [prompt for prompt, _ in lengths], [new for _, new in lengths]


def uniform_lengths(count: int, seed: int, most_prompt: int, most_new: int) -> Lengths:
    """From 100 up, all alike: with 256 requests of up to 1024 tokens in and out the workload that
    nano-vllm measures itself with."""
    rng = random.Random(seed)
    draws = [
        [rng.randint(min(LEAST_UNIFORM, most), most) for _ in range(count)]
        for most in (most_prompt, most_new)
    ]
    return draws[0], draws[1]


LENGTHS: Mapping[str, Callable[[int, int, int, int], Lengths]] = MappingProxyType(
    {"lognormal": lognormal_lengths, "uniform": uniform_lengths}
)
