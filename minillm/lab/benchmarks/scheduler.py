"""`minillm bench scheduler`: microseconds per scheduling step and per prefix-cache lookup.

No model runs and tokens are made up, so only the scheduler and the prefix cache are measured. Each
time comes with its growth, the exponent x of time = c * size ** x, which shows superlinear costs
independently of the machine's speed.
"""

import gc
import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import process_time
from typing import Any

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager, make_index
from minillm.cache.prefix import PrefixIndex
from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.report import about_machine
from minillm.lab.commands.bench import finish
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.policies import POLICIES
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT = 128  # prompt tokens of a request
BESIDE_LINE = 256  # running sequences beside a waiting queue
VOCABULARY = 50_000
Measure = Callable[[int], float]  # microseconds of a size


@dataclass(frozen=True)
class Sizes:
    """Sizes and repetitions of the measurement."""

    running: tuple[int, ...] = (1, 64, 256, 1024)
    waiting: tuple[int, ...] = (100, 1_000, 10_000)  # beside 256 that run
    blocks: tuple[int, ...] = (8, 64, 512, 2_048)  # 128 to 32,768 tokens
    steps: int = 16  # one block of growth
    repeats: int = 7


QUICK = Sizes((1, 8), (10, 100), (2, 4, 16), 4, 3)


@dataclass(frozen=True)
class Series:
    """Median times over several sizes; `item` names what the sizes count."""

    name: str
    item: str
    sizes: tuple[int, ...]
    microseconds: tuple[float, ...]

    def growth(self) -> list[float]:
        """The exponent x of time = c * size ** x between each size and the next."""
        points = list(zip(self.sizes, self.microseconds, strict=True))
        return [math.log(t / s) / math.log(n / m) for (m, s), (n, t) in pairwise(points)]


# ---- clocks -----------------------------------------------------------------------------------


def median_time(action: Callable[[], object], repeats: int, calls: int) -> float:
    """Microseconds per call: the median over `repeats` of the mean over `calls`.

    This is processor time, which other programs disturb less than wall-clock time.
    """
    gc.collect()
    times = []
    for _ in range(repeats):
        start = process_time()
        for _ in range(calls):
            action()
        times.append((process_time() - start) / calls)
    return median(times) * 1e6


def settled_time(action: Callable[[], object], repeats: int) -> float:
    """`median_time` with enough calls per sample to take at least 2 milliseconds."""
    once = median_time(action, 3, 1)
    return median_time(action, repeats, max(1, min(round(2_000 / once), 2_000)))


# ---- steps ------------------------------------------------------------------------------------


def commit(scheduler: Scheduler) -> None:
    """Schedule and commit one step with made-up tokens."""
    plan = scheduler.schedule()
    scheduler.commit(plan, {row.seq_id: [1] for row in plan.rows if row.num_samples})


class Workload:
    """A scheduler at its limit of running sequences, which all decode, with a waiting queue.

    Prompt lengths differ, so that in each step one in 16 sequences needs a new block.
    """

    def __init__(self, num_running: int, policy: str):
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=max(2048, 2 * num_running),
            policy=policy,
        )
        blocks = BlockManager(24 * num_running + 1024, BLOCK_SIZE, "hash")
        self.scheduler = Scheduler(config, blocks)
        self._random = random.Random(num_running)
        self._num_requests = 0
        self._to_come: list[Request] = []
        for request in self.make(num_running):
            self.scheduler.add(request)
        while len(self.scheduler.running) < num_running or any(
            sequence.num_uncomputed > 1 for sequence in self.scheduler.running
        ):
            commit(self.scheduler)

    def make(self, count: int) -> list[Request]:
        """Create requests; a quarter of the prompts share a prefix."""
        requests = []
        for number in range(self._num_requests, self._num_requests + count):
            alike = 64 if number % 4 == 0 else 0
            rest = self._random.choices(range(VOCABULARY), k=PROMPT + number % 16 - alike)
            prompt = (*range(alike), *rest)
            params = SamplingParams()
            requests.append(Request(str(number), prompt, params, 200, priority=number % 3))
        self._num_requests += count
        return requests

    def line_up(self, num_waiting: int, num_to_come: int) -> None:
        """Fill the waiting queue, and create the requests that arrive in later steps."""
        for request in self.make(num_waiting):
            self.scheduler.add(request)
        self._to_come = self.make(num_to_come)

    def step(self) -> None:
        """Every sequence decodes one token."""
        commit(self.scheduler)

    def step_with_change(self) -> None:
        """One sequence ends, a waiting request is admitted, and a new request arrives."""
        self.scheduler.finish(self.scheduler.running[0].seq_id)
        self.scheduler.add(self._to_come.pop())
        commit(self.scheduler)


def decode_time(sizes: Sizes, num_running: int) -> float:
    """Time of a step in which all sequences decode and nothing else happens."""
    load = Workload(num_running, "fcfs")
    return median_time(load.step, sizes.repeats, sizes.steps)


def change_time(policy: str, sizes: Sizes, num_waiting: int) -> float:
    """Time of a step with a waiting queue, of which one request is admitted."""
    load = Workload(BESIDE_LINE, policy)
    load.line_up(num_waiting, sizes.repeats * sizes.steps)
    return median_time(load.step_with_change, sizes.repeats, sizes.steps)


# ---- prefixes ---------------------------------------------------------------------------------


def text(num_blocks: int) -> list[int]:
    """Random token ids of `num_blocks` blocks, with a fixed seed."""
    return random.Random(num_blocks).choices(range(VOCABULARY), k=num_blocks * BLOCK_SIZE)


def filled(kind: str, tokens: Sequence[int]) -> PrefixIndex:
    """An index that holds a text."""
    index = make_index(kind, BLOCK_SIZE)
    cursor = index.start("")
    for block in range(len(tokens) // BLOCK_SIZE):
        chunk = tuple(tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])
        cursor = index.insert(cursor, chunk, block)
    return index


def lookup_time(kind: str, sizes: Sizes, num_blocks: int) -> float:
    """Time of a lookup that finds the whole prompt."""
    tokens = text(num_blocks)
    index = filled(kind, tokens)
    return settled_time(lambda: index.match(tokens, len(tokens), ""), sizes.repeats)


# ---- results ----------------------------------------------------------------------------------


def table(series: Sequence[Series]) -> list[list[str]]:
    """Rows: name, size, time, time per item, growth since the previous row."""
    return [
        [
            one.name * (not number),
            f"{size:,} {one.item}",
            f"{time:,.1f}",
            f"{time / size:.3f}",
            growth,
        ]
        for one in series
        for number, (size, time, growth) in enumerate(
            zip(one.sizes, one.microseconds, ["", *(f"{x:.2f}" for x in one.growth())], strict=True)
        )
    ]


def measure(sizes: Sizes) -> Iterator[Series]:
    """A step over the number of running sequences, and of waiting requests under each policy; a
    lookup in both indices over the prompt length in blocks."""
    plans: list[tuple[str, str, tuple[int, ...], Measure]] = [
        ("step: decode", "running", sizes.running, partial(decode_time, sizes)),
        *((f"step: {name}, {BESIDE_LINE} running", "waiting", sizes.waiting,
           partial(change_time, name, sizes)) for name in POLICIES),
        *((f"lookup: {kind}", "blocks", sizes.blocks, partial(lookup_time, kind, sizes))
          for kind in ("hash", "radix")),
    ]  # fmt: skip
    for name, item, counts, time_of in plans:
        yield Series(name, item, counts, tuple(map(time_of, counts)))


def run(args: Namespace, terminal: Terminal) -> int:
    """Measure, print the table, and write JSON."""
    with terminal.progress("Measuring steps and lookups"):
        series = list(measure(QUICK if args.quick else Sizes()))
    data = about_machine("scheduler") | {
        "block_size": BLOCK_SIZE,
        "series": [{**asdict(one), "growth": one.growth()} for one in series],
    }

    def show(_: Mapping[str, Any], terminal: Terminal) -> None:
        terminal.heading("Scheduling steps and lookups in the prefix cache")
        terminal.table(["", "size", "microseconds", "per item", "growth"], table(series))

    return finish(data, args, terminal, show)


if __name__ == "__main__":
    raise SystemExit("This is no program; run 'minillm bench scheduler'.")
