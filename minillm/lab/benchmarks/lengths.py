"""Prompt and output lengths of the offline benchmark, in tokens."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

Lengths = tuple[list[int], list[int]]  # of prompts, of outputs
LEAST = 8
LEAST_UNIFORM = 100


def lognormal_lengths(count: int, seed: int, most_prompt: int, most_new: int) -> Lengths:
    """Log-normal lengths, similar to chats: medians of 160 and 96 tokens, sigmas of 0.8 and 0.7,
    clipped at both ends."""
    rng = random.Random(seed)

    def draw(middle: int, sigma: float, most: int) -> int:
        return int(min(max(middle * rng.lognormvariate(0.0, sigma), LEAST), most))

    lengths = [(draw(160, 0.8, most_prompt), draw(96, 0.7, most_new)) for _ in range(count)]
    return [prompt for prompt, _ in lengths], [new for _, new in lengths]


def uniform_lengths(count: int, seed: int, most_prompt: int, most_new: int) -> Lengths:
    """Uniform lengths from 100 up. With 256 requests of up to 1024 prompt and output tokens, this
    is nano-vllm's benchmark workload."""
    rng = random.Random(seed)
    draws = [
        [rng.randint(min(LEAST_UNIFORM, most), most) for _ in range(count)]
        for most in (most_prompt, most_new)
    ]
    return draws[0], draws[1]


LENGTHS: Mapping[str, Callable[[int, int, int, int], Lengths]] = MappingProxyType(
    {"lognormal": lognormal_lengths, "uniform": uniform_lengths}
)
