"""Chapter 10: attention without the table of scores.

`Slow` is a memory behind a counter, `moved` what the counter must show, `attention_share` what a
faster attention can buy. Tables are in `ch10_tables`, pictures in `ch10_pictures`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillm.config import ModelConfig
from minillm.lab.hardware import Hardware
from minillm.lab.roofline import step_cost
from minillm.plan.weight_sizes import dtype_bytes
from minillm_exercises.counting import Counts, counting
from minillm_exercises.errors import ExerciseError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

ALL = slice(None)
LOOPS = ("standard", "keys outside", "queries outside")


def inputs(
    queries: int,
    width: int,
    keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [queries, width] and k, v [keys, width], the same on every machine but for the
    last digit; `keys` is as many as queries if not given."""
    generator = torch.Generator().manual_seed(10)
    rows = (queries, keys or queries, keys or queries)
    drawn = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in rows)
    q, k, v = (each.to(device, dtype) for each in drawn)
    return q, k, v


def counted(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> Counts:
    """What `attend` did with these tensors, operation by operation."""
    with counting() as seen:
        attend(q, k, v)
    return seen


class Slow:
    """Slow memory with Q, K, V and room for the result: what is read or written is counted.

    `moved` counts elements, `of` the same for each tensor. O, and per row the largest score m and
    the sum z, begin as 0, minus infinity and 0; these beginnings are not counted.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        rows = (len(q), 1)
        self.tensors = {"Q": q, "K": k, "V": v, "O": q.new_zeros(len(q), v.shape[1])}
        self.tensors |= {"m": q.new_full(rows, -math.inf), "z": q.new_zeros(rows)}
        self.of: Counter[str] = Counter()

    @property
    def moved(self) -> int:
        """Elements that crossed the boundary, in either direction."""
        return self.of.total()

    def tiles(self, name: str, block: int) -> list[slice]:
        """The rows of this tensor, cut into blocks; the last may be shorter."""
        count = len(self.tensors[name])
        return [slice(row, min(row + block, count)) for row in range(0, count, block)]

    def read(self, name: str, rows: slice = ALL) -> Tensor:
        """These rows, brought into fast memory."""
        tile = self.tensors[name][rows]
        self.of[name] += tile.numel()
        return tile

    def write(self, name: str, tile: Tensor, rows: slice = ALL) -> None:
        """Put these rows into slow memory; a whole tensor that is new gets its room there."""
        if name in self.tensors:
            self.tensors[name][rows] = tile
        else:
            self.tensors[name] = tile
        self.of[name] += tile.numel()


def run(attend: Callable[[Slow, int], None], width: int, block: int, tokens: int) -> Slow:
    """The slow memory after `attend` computed one head of `tokens` tokens in it."""
    slow = Slow(*inputs(tokens, width))
    attend(slow, block)
    return slow


def moved(loop: str, width: int, block: int, tokens: int) -> int:
    """Elements that one of `LOOPS` moves for one head of `tokens` tokens.

    Raises:
        ExerciseError: an unknown loop.
    """
    rows, blocks = tokens * width, -(-tokens // block)
    if loop == "standard":  # S and P are written and read
        return 4 * tokens**2 + 4 * rows
    if loop == "keys outside":  # per block Q, O, m, z come and O, m, z go; O / z at the end
        return 2 * rows + blocks * (3 * rows + 4 * tokens) + 2 * rows + tokens
    if loop == "queries outside":  # per block K and V come
        return 2 * rows + blocks * 2 * rows
    raise ExerciseError(f"loop is {loop!r}; it must be one of {', '.join(LOOPS)}.")


def ratio(loop: str, width: int, block: int, tokens: int) -> Fraction:
    """Elements that a loop moves, in those of standard attention."""
    standard = moved("standard", width, block, tokens)
    return Fraction(moved(loop, width, block, tokens), standard)


def new_maxima(scores: Sequence[float]) -> int:
    """How often a score is larger than all before it, the first included."""
    largest, count = -math.inf, 0
    for score in scores:
        if score > largest:
            largest, count = score, count + 1
    return count


def expected_maxima(count: int) -> float:
    """New maxima in random order: number n is the largest so far with probability 1 / n."""
    return math.fsum(1 / n for n in range(1, count + 1))


def weighted_mean(scores: Sequence[float], values: Sequence[float]) -> float:
    """The mean of the values, weighted by the softmax of the scores, in float64."""
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
    return float(weights @ torch.tensor(values, dtype=torch.float64))


def shuffled(length: int, rows: int) -> list[list[int]]:
    """So many rows of the numbers below `length`, each in a random order."""
    order, drawn = list(range(length)), Random(10)
    return [drawn.sample(order, length) for _ in range(rows)]


def worst(found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference, computed in float64; NaN where either has one."""
    return float((found.double() - exact.double()).abs().max())


def outcome(attempt: Callable[[], object]) -> str:
    """Whether this "runs" or "raises" what torch raises."""
    try:
        attempt()
    except RuntimeError:
        return "raises"
    return "runs"


def forced(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA of [heads, N, d] by one of `torch.nn.attention.SDPBackend`, or a RuntimeError."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


@dataclass(frozen=True)
class Share:
    """Least seconds of a prompt's forward pass: attention with tables of scores in slow memory,
    attention at its rate of operations, and everything else."""

    tables: float
    attention: float
    rest: float

    @property
    def share(self) -> float:
        """Attention's part of the pass when the tables go through slow memory."""
        return self.tables / (self.tables + self.rest)

    def gain(self, faster: float) -> float:
        """How many times as fast the pass is when attention is `faster` times as fast as with
        tables (Amdahl's law); infinity is an attention that costs nothing."""
        return 1 / (1 - self.share + self.share / faster)


def attention_share(
    config: ModelConfig, tokens: int, machine: Hardware, dtype: str = "bfloat16"
) -> Share:
    """The bounds of one pass over a prompt of `tokens` tokens.

    With tables, every head of every layer moves `moved("standard", ...)` elements; the rest is the
    larger of its operations over the rate and its weights over the bandwidth.
    """
    cost = step_cost(config, [tokens], [tokens], dtype=dtype)
    elements = config.num_layers * config.num_heads * moved("standard", config.head_dim, 1, tokens)
    rate = machine.rate(dtype)
    least = cost.attention_flops / rate
    return Share(
        max(least, elements * dtype_bytes(dtype) / machine.bandwidth),
        least,
        max(cost.linear_flops / rate, cost.weight_bytes / machine.bandwidth),
    )


def decode_share(config: ModelConfig, context: int) -> Fraction:
    """The part of a decode step's bytes that attention reads, one text of `context` tokens."""
    cost = step_cost(config, [1], [context], dtype="bfloat16")
    return Fraction(cost.kv_read_bytes, cost.total_bytes)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head with the whole table: q, k, v [N, d] -> [N, d]."""
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """torch's own attention of one head, [N, d], which takes [batch, heads, N, d]."""
    q, k, v = (each[None, None] for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)[0, 0]
