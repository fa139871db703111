"""Chapter 22, the last section: configurations of Llama-3.1-70B on a virtual clock, and prices.

The engine's own scheduler decides. A step takes the time of the roofline model, which is computed
here from a few constants: `roofline.step_cost` for each of a million steps would take minutes.
"""

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import Any

from minillm.config import ModelConfig
from minillm.lab.benchmarks.serving.reply import Reply
from minillm.lab.benchmarks.serving.slo import Objectives, evaluate
from minillm.lab.hardware import Hardware
from minillm.lab.links import Link, all_gather_seconds, all_reduce
from minillm.lab.parallel_cost import CANDIDATE_BYTES
from minillm.lab.parallel_layout import Layout, device_config
from minillm.lab.roofline import step_cost
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.lab.simulation import MADE_UP, Simulation
from minillm.plan.weight_sizes import dtype_bytes
from minillm.scheduling.record import StepRecord
from minillm_exercises.chapters.ch22 import answered

BLOCK, BLOCKS = 16, 20_000  # tokens of a block; blocks of a cache that is never too small
SYSTEM = tuple(range(500))  # the beginning of every prompt, as token ids
MOST = {"own": 6000, "new": 300}  # tokens
RATES = tuple(sorted({round(4 * 1.12**power) for power in range(31)}))  # requests per second
ARRIVALS = 20  # seconds
HOUR = 3600


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step of a dense model by the roofline, on `ranks` GPUs that share every layer.

    Bytes and operations of a step grow linearly with four counts: computed tokens, rows of logits,
    pairs of a token and one before it, and tokens that are read from the cache. Steps are recorded
    graphs, so launches take no time.
    """

    config: ModelConfig
    hardware: Hardware
    ranks: int = 1
    link: Link | None = None

    @cached_property
    def part(self) -> ModelConfig:
        """What one GPU has of the model."""
        return device_config(self.config, Layout(tensor=self.ranks))

    def probe(self, query: int, length: int, logits: int) -> tuple[float, float]:
        """Bytes and operations of one step with one sequence."""
        cost = step_cost(self.part, [query], [length], num_logits=logits)
        return cost.total_bytes, cost.flops

    @cached_property
    def constants(self) -> list[tuple[float, float, float, float, float, float]]:
        """For bytes and for operations: fixed, head, and per token, row of logits, pair and read
        token."""
        found = []
        for which in (0, 1):
            one, longer, two, more, none = (
                self.probe(*counts)[which]
                for counts in ((1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 0))
            )
            context, row = longer - one, more - one  # bytes are read, operations are pairs
            pair, read = (0.0, context) if which == 0 else (context, 0.0)
            token, head = two - longer - pair, one - none - row
            found.append((none - token - pair - read, head, token, row, pair, read))
        return found

    def communication(self, tokens: int, logits: int) -> float:
        """Seconds of the sums of tensor parallelism, as in `parallel_cost`."""
        if self.link is None or self.ranks == 1:
            return 0.0
        row = self.config.hidden_size * dtype_bytes(self.config.dtype)
        sums = (2 * self.config.num_layers + 1) * all_reduce(
            self.link, self.ranks, tokens * row
        ).seconds
        gather = all_gather_seconds(self.link, self.ranks, logits * CANDIDATE_BYTES)
        return sums + (gather if logits else 0.0)

    def of(self, queries: Sequence[int], lengths: Sequence[int], logits: int) -> float:
        """Seconds of one step."""
        tokens, read = sum(queries), sum(lengths)
        pairs = sum(q * n - q * (q - 1) // 2 for q, n in zip(queries, lengths, strict=True))
        counts = 1, bool(logits), tokens, logits, pairs, read
        moved, operations = (sum(map(mul, each, counts)) for each in self.constants)
        rate = self.hardware.rate(self.config.dtype)
        longer = max(moved / self.hardware.bandwidth, operations / rate)
        return longer + self.communication(tokens, logits)

    def __call__(self, record: StepRecord) -> float:
        """Seconds of a simulated step."""
        rows = record.rows
        if not rows:
            return 0.0
        queries = [row.num_tokens for row in rows]
        lengths = [row.start + row.num_tokens for row in rows]
        return self.of(queries, lengths, sum(row.num_logits for row in rows))


@dataclass(frozen=True)
class Configuration:
    """What is shipped: the limits of the scheduler, and how many GPUs at which price.

    Attributes:
        dollars: price of one GPU for one hour.
        drafts: probabilities that at least 1, 2, ... drafts are accepted; None without speculation.
    """

    hardware: Hardware
    dollars: float
    seats: int = 8
    budget: int = 8192
    prefix_cache: bool = False
    drafts: tuple[float, ...] | None = None
    ranks: int = 1
    link: Link | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    def simulation(self, config: ModelConfig) -> Simulation:
        """An idle server."""
        return Simulation(
            BLOCKS, BLOCK, prefix_cache="hash" if self.prefix_cache else None,
            seconds=StepSeconds(config, self.hardware, self.ranks, self.link),
            speculation=SimulatedDrafts(self.drafts) if self.drafts else None,
            max_num_seqs=self.seats, max_num_batched_tokens=self.budget, **self.limits,
        )  # fmt: skip


def demand(requests: int, seed: int) -> list[tuple[float, int, int]]:
    """For each request: its gap to the one before (in mean gaps), the tokens of its own prompt, and
    its output tokens. Gaps are exponential, numbers of tokens log-normal."""
    rng = random.Random(seed)
    return [
        (rng.expovariate(1), length(rng, 150, 1.0, MOST["own"]), length(rng, 40, 0.6, MOST["new"]))
        for _ in range(requests)
    ]


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside the block Python does not search for cycles of unused objects. In a notebook with many
    objects this search takes as long as the simulation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(
    model: ModelConfig, config: Configuration, rate: float, requests: int, seed: int
) -> Iterator[Reply]:
    """Serve Poisson arrivals: each prompt is the system prompt and own tokens. Yields replies as
    they end, with the times of their first and last token on the virtual clock, in seconds."""
    sim, due, at = config.simulation(model), [], 0.0
    first: dict[int, float] = {}
    sim.add((*SYSTEM, MADE_UP - 1), 1, name="warm-up")  # the server has run before
    start = sim.run()[-1].delivered
    for number, (gap, own, new) in enumerate(demand(requests, seed)):
        at += gap / rate
        other = len(SYSTEM) + MOST["own"] * number
        ids = (*SYSTEM, *range(other, other + own)) if config.prefix_cache else len(SYSTEM) + own
        sim.add(ids, new, arrival=start + at)
        due.append(start + at)
    while sim.has_work:
        record = sim.step()
        for row in record.rows:
            if row.num_logits:
                first.setdefault(row.seq_id, record.computed)
        for one in record.ended:  # sequences are numbered as they arrive, from the warm-up on
            place, times = one.seq_id - 1, (first[one.seq_id], record.computed)
            yield answered(place, due[place], times, one.num_tokens)


def least_price(
    model: ModelConfig, config: Configuration, requests: int = 200, seed: int = 0
) -> float:
    """Dollars of a million output tokens if the arithmetic units computed all prompts and answers
    without a pause, and nothing else cost time."""
    seconds = StepSeconds(model, config.hardware, config.ranks)
    cached = len(SYSTEM) // BLOCK * BLOCK if config.prefix_cache else 0
    _, _, token, _, pair, _ = seconds.constants[1]
    operations = tokens = 0.0
    for _, own, new in demand(requests, seed):
        length = len(SYSTEM) + own + new - 1
        query = length - cached
        operations += token * query + pair * (query * length - query * (query - 1) // 2)
        tokens += new
    return price(config, tokens / (operations / seconds.hardware.rate(model.dtype)))


def length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    """A log-normal number of tokens."""
    return min(most, max(1, round(median * rng.lognormvariate(0, sigma))))


@dataclass(frozen=True)
class Sold:
    """A configuration at the highest of `RATES` that keeps an SLO.

    Attributes:
        rate: requests per second; 0 if the lowest of `RATES` is too high.
        tokens: output tokens per second: the rate times the mean length of an answer. The time in
            which the last answers end is not counted, because a server that goes on has no end.
        dollars: price of a million of them.
    """

    rate: int
    tokens: float
    dollars: float


@without_collector()
def highest_rate(
    model: ModelConfig,
    config: Configuration,
    limits: Objectives,
    share: float = 0.9,
    fewest: int = 200,
    seed: int = 0,
) -> Sold:
    """Halve the list of rates until the highest is found at which `share` of all requests are
    within the limits. Each rate is kept up for `ARRIVALS` seconds, or for `fewest` requests if
    that takes longer, and ends early when it is certain whether it holds."""
    low, high, best = 0, len(RATES), Sold(0, 0.0, float("inf"))
    while low < high:
        middle = (low + high) // 2
        rate = RATES[middle]
        count = max(fewest, ARRIVALS * rate)
        good = late = 0
        for reply in run(model, config, rate, count, seed):
            within = evaluate([reply], limits, 1.0)["good"]
            good, late = good + within, late + 1 - within
            if good / count >= share or (count - late) / count < share:
                break
        if good / count >= share:
            tokens = rate * sum(new for _, _, new in demand(count, seed)) / count
            best = Sold(rate, tokens, price(config, tokens))
            low = middle + 1
        else:
            high = middle
    return best


def price(config: Configuration, tokens: float) -> float:
    """Dollars of a million output tokens, at so many per second."""
    return config.dollars * config.ranks / HOUR / tokens * 1e6
