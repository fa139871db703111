"""What a soak serves and how it counts, and the run of it in which every token is checked.

Requests come with shared beginnings, several completions and two cache salts; some are aborted at
a random moment, and some fail. The pool of blocks is far too small for those that may run at once.
The oracle is a device without a model: its next token is a hash of all it reads through the block
table, so that any block that is mixed up, copied too late or given away too early changes a token.
"""

import gc
import random
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from zlib import crc32

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockCopy, BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.invariants import check_invariants
from minillm.scheduling.plan import NewSequence, Row, StepPlan
from minillm.scheduling.request import Request
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.scheduling.scheduler import Scheduler

POOL_SHARE = 0.3  # of the blocks that the running requests would fill at their ends
QUARTERS = 4
VOCABULARY = 11  # of the oracle: small, so that beginnings are shared by chance, too
STOP = 0  # this token ends some requests early


class Broken(RuntimeError):
    """A promise of the engine was broken."""


def require(condition: object, *facts: object) -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(" ".join(map(str, facts)))


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@dataclass(frozen=True)
class Load:
    """What one run is asked to serve."""

    name: str
    requests: int
    prefix_cache: str
    preemption: str
    seats: int = 24
    budget: int = 64
    block_size: int = 4
    longest_prompt: int = 28
    longest_output: int = 24
    abort_rate: float = 0.03  # per step
    failure_rate: float = 0.01  # per request
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """The pool: a share of what `seats` average sequences hold when they end."""
        mean = (self.longest_prompt + self.longest_output) / 2
        return round(POOL_SHARE * self.seats * mean / self.block_size)


@dataclass(frozen=True)
class Job:
    """One request to come."""

    name: str
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    salt: str
    stops: bool
    fails: bool


def draw(load: Load, number: int, rng: random.Random, vocabulary: int) -> Job:
    """Request `number`: one of a few beginnings, then anything."""
    head = random.Random(rng.randrange(6)).choices(range(1, vocabulary), k=rng.randrange(17))
    tail = rng.choices(range(1, vocabulary), k=rng.randint(1, load.longest_prompt - len(head)))
    return Job(
        str(number),
        (*head, *tail),
        rng.choices((1, 2, 3), (8, 1, 1))[0],
        rng.randint(1, load.longest_output),
        rng.choice(("", "", "", "other")),
        rng.random() < 0.3,
        rng.random() < load.failure_rate,
    )


@dataclass
class Result:
    """What came of a run; `objects` and `rss` are one number per quarter, when all was idle."""

    name: str
    requests: int
    num_blocks: int
    demand_blocks: int
    outcomes: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    objects: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_preemptions(self) -> int:
        """Of both kinds."""
        return self.counters["num_preemptions_recompute"] + self.counters["num_preemptions_swap"]


class Soak(ABC):
    """Adds requests, aborts some, and steps, until all have ended; counts how they ended."""

    vocabulary = VOCABULARY

    def __init__(self, load: Load):
        self.load, self.rng = load, random.Random(load.seed)
        self.outcomes: Counter[str] = Counter()
        self.new_tokens = 0
        self.live: list[str] = []
        demand = round(load.num_blocks / POOL_SHARE)
        self.result = Result(load.name, load.requests, load.num_blocks, demand)

    def run(self) -> Result:
        """All requests, a quarter at a time."""
        start, added = perf_counter(), 0
        for quarter in range(1, QUARTERS + 1):
            end = self.load.requests * quarter // QUARTERS
            while added < end or self.live:
                while added < end and len(self.live) < 3 * self.load.seats:
                    job = draw(self.load, added, self.rng, self.vocabulary)
                    self.add(job)
                    self.live.append(job.name)
                    added += 1
                if self.live and self.rng.random() < self.load.abort_rate:
                    self.end(self.rng.choice(self.live), "aborted")
                if self.live:
                    self.step()
            self.check_idle()
            gc.collect()
            self.result.objects.append(sys.getallocatedblocks())
            self.result.rss.append(resident_bytes())
        require(self.outcomes.total() == added == self.load.requests, "lost:", self.outcomes)
        result = self.result
        result.seconds = perf_counter() - start
        result.outcomes, result.new_tokens = dict(sorted(self.outcomes.items())), self.new_tokens
        counters, blocks = self.scheduler.counters, self.scheduler.blocks
        result.counters = {**asdict(counters), "num_copies": blocks.num_copies}
        result.counters["num_revived"] = blocks.pool.num_revived
        result.counters["num_evicted"] = blocks.pool.num_evicted
        return result

    def end(self, name: str, outcome: str) -> None:
        """A request has ended; it does so once."""
        self.live.remove(name)
        self.outcomes[outcome] += 1
        if outcome == "aborted":
            self.abort(name)

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        scheduler = self.scheduler
        check_invariants(scheduler)
        pools = (scheduler.blocks.pool, scheduler.blocks.host)
        require(not scheduler.sequences, "sequences are left:", scheduler.sequences)
        require(not scheduler.in_flight, "rows are in flight")
        require(all(pool.num_free == pool.num_blocks for pool in pools), "blocks are held")

    @property
    @abstractmethod
    def scheduler(self) -> Scheduler:
        """Whose books are checked."""

    @abstractmethod
    def add(self, job: Job) -> None:
        """Put a request in line."""

    @abstractmethod
    def abort(self, name: str) -> None:
        """End a request now."""

    @abstractmethod
    def step(self) -> None:
        """Advance, and `end` what ended."""


# ---- the scheduler alone, over an oracle ------------------------------------------------------


def next_value(before: int, token: int) -> int:
    """What a position holds: it stands for keys and values, so it depends on all before it."""
    return hash((before, token))


def next_token(values: Sequence[int], seed: int, index: int) -> int:
    """What the model and the sampler would choose after reading all of this."""
    return hash((seed, index, *values)) % VOCABULARY


def expected(request: Request, index: int, count: int) -> list[int]:
    """The first new tokens of a completion, from its prompt alone."""
    values, before, tokens = [], crc32(request.cache_salt.encode()), []
    for token in request.prompt_token_ids:
        values.append(before := next_value(before, token))
    for _ in range(count):
        tokens.append(next_token(values, request.seed, index))
        values.append(before := next_value(before, tokens[-1]))
    return tokens


class Memory:
    """Device and host memory of made-up values, and the rows that a runner keeps."""

    def __init__(self, blocks: BlockManager):
        self.size = blocks.block_size
        self.device = [[0] * self.size for _ in range(blocks.pool.num_blocks)]
        self.host = [[0] * self.size for _ in range(blocks.host.num_blocks)]
        self.rows: dict[int, tuple[NewSequence, list[int], list[int]]] = {}
        self.salts: dict[int, int] = {}  # by sequence: no plan tells of them

    def execute(self, plan: StepPlan) -> dict[int, list[int | None]]:
        """Carry out a plan in the order that its docstring asks for."""
        for seq_id in plan.dropped:
            del self.rows[seq_id]
        for new in plan.new:
            self.rows[new.seq_id] = (new, list(new.token_ids), [])
        move(plan.swap_out, self.device, self.host)
        move(plan.copies, self.device, self.device)
        move(plan.swap_in, self.host, self.device)
        for seq_id in set(plan.dropped) - self.rows.keys():
            del self.salts[seq_id]
        for row in plan.rows:
            self._write(row)
        return {row.seq_id: self._sample(row) for row in plan.rows if row.num_samples}

    def _write(self, row: Row) -> None:
        new, tokens, table = self.rows[row.seq_id]
        table[row.num_kept :] = row.blocks
        size, before = self.size, self.salts[new.seq_id]
        for position in range(max(row.start - 1, 0), row.start + row.num_tokens):
            block = self.device[table[position // size]]
            if position >= row.start:
                block[position % size] = next_value(before, tokens[position])
            before = block[position % size]

    def _sample(self, row: Row) -> list[int | None]:
        new, tokens, table = self.rows[row.seq_id]
        end = row.start + row.num_tokens
        values = [value for block in table for value in self.device[block]][:end]
        first = new.sample_index
        indices = range(first, first + row.num_samples)
        sampled: list[int | None] = [next_token(values, new.seed, i) for i in indices]
        tokens += [token for token in sampled[:1] if token is not None]
        return sampled


def move(copies: Sequence[BlockCopy], source: list[list[int]], target: list[list[int]]) -> None:
    """All are read before any is written."""
    contents = [list(source[copy.source]) for copy in copies]
    for copy, values in zip(copies, contents, strict=True):
        target[copy.target] = values


@dataclass
class OracleRequest:
    """A request on the oracle: its sequences and tokens by completion, and how many still run."""

    job: Job
    request: Request
    sequences: dict[int, ScheduledSequence]
    tokens: list[list[int]]
    num_running: int


class OracleSoak(Soak):
    """The scheduler, the block manager and made-up memory."""

    def __init__(self, load: Load):
        super().__init__(load)
        host = load.num_blocks if load.preemption == "swap" else 0
        blocks = BlockManager(load.num_blocks, load.block_size, load.prefix_cache, host)
        config = SchedulerConfig(
            load.seats, load.budget, watermark=0.0, preemption_mode=load.preemption
        )
        self._scheduler, self.memory = Scheduler(config, blocks), Memory(blocks)
        self.requests: dict[str, OracleRequest] = {}

    @property
    def scheduler(self) -> Scheduler:
        """Whose books are checked."""
        return self._scheduler

    def add(self, job: Job) -> None:
        """Put a request in line."""
        request = Request(
            job.name,
            job.prompt,
            SamplingParams(n=job.n),
            job.max_tokens,
            seed=len(job.prompt),
            cache_salt=job.salt,
        )
        first = self.scheduler.add(request)
        tokens: list[list[int]] = [[] for _ in range(job.n)]
        self.requests[job.name] = OracleRequest(job, request, {0: first}, tokens, job.n)

    def abort(self, name: str) -> None:
        """End a request now; what it has so far is right."""
        self.scheduler.abort(name)
        self._check(self.requests.pop(name))

    def step(self) -> None:
        """Plan, run, maybe abort, commit."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        require(plan.rows, "nothing can run:", scheduler.record)
        for new in plan.new:
            salt = scheduler.sequences[new.seq_id].request.cache_salt
            self.memory.salts[new.seq_id] = crc32(salt.encode())
        sampled = self.memory.execute(plan)
        owners = [(row, scheduler.in_flight[row.seq_id]) for row in plan.rows]
        for row, sequence in owners:
            job = self.requests[sequence.request.request_id].job
            if job.fails and row.num_samples and self.rng.random() < 0.2:
                sampled[row.seq_id] = [None] * row.num_samples
        if self.rng.random() < self.load.abort_rate:
            self.end(self.rng.choice(self.live), "aborted")
        for fork in scheduler.commit(plan, sampled):
            self.requests[fork.request.request_id].sequences[fork.index] = fork
        for row, sequence in owners:
            request = self.requests.get(sequence.request.request_id)
            if request is not None and row.num_samples:
                self._deliver(request, sequence.index, sampled[row.seq_id])

    def _deliver(self, live: OracleRequest, first: int, tokens: Sequence[int | None]) -> None:
        for index, token in enumerate(tokens, first):
            if token is None:
                self.abort(live.job.name)
                self.end(live.job.name, "failed")
                return
            live.tokens[index].append(token)
            if (live.job.stops and token == STOP) or len(live.tokens[index]) == live.job.max_tokens:
                self.scheduler.finish(live.sequences[index].seq_id)
                live.num_running -= 1
        if not live.num_running:
            self._check(self.requests.pop(live.job.name), whole=True)
            self.end(live.job.name, "finished")

    def _check(self, live: OracleRequest, whole: bool = False) -> None:
        """Exactly its tokens, and, of a finished request, all of them."""
        for index, tokens in enumerate(live.tokens):
            right = expected(live.request, index, live.job.max_tokens)
            if live.job.stops and STOP in right:
                right = right[: right.index(STOP) + 1]
            require(tokens == right[: len(tokens)], live.job, tokens, "instead of", right)
            require(not whole or len(tokens) == len(right), live.job, "ended early:", tokens)
            self.new_tokens += len(tokens)

    def check_idle(self) -> None:
        """No row either, beyond those that the next plan will drop."""
        super().check_idle()
        require(not self.requests, "requests are left:", self.requests)
        require(len(self.memory.rows) <= self.load.seats, "rows are left:", self.memory.rows)
