"""The engine's scheduler and block manager without a model: made-up tokens, a virtual clock.

Scheduling depends on token counts and shared prefixes, not on the content of tokens. So a
simulation makes exactly the decisions of an engine with the same limits. Only step times are not
real: they come from a step-time model, which is an argument. Results are deterministic.

    sim = Simulation(num_blocks=64, block_size=16, seconds=linear(0.010, 0.0001), max_num_seqs=8)
    for number in range(20):
        sim.add(prompt=100, new=50, arrival=0.2 * number)
    trace = sim.run()              # the same Trace as llm.trace: requests(), figure(), table() ...
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count, islice
from numbers import Real
from typing import Any

from minillm.api.checks import is_whole
from minillm.api.outputs import PrefixReport
from minillm.api.sampling_params import SamplingParams, shown
from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.config import ModelConfig
from minillm.errors import ConfigError, UnknownArgumentError, did_you_mean
from minillm.lab.hardware import Hardware
from minillm.lab.roofline import step_cost, step_time
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.plan.cost import block_bytes
from minillm.scheduling.admission import check_fits
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row
from minillm.scheduling.policies import Policy
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace, TraceSettings

StepTime = Callable[[StepRecord], float]  # a step-time model: seconds of a step from its record

ONE = SamplingParams(temperature=1.0)  # of most requests; checking each takes long
MADE_UP = 10**9  # first made-up token id, larger than any vocabulary
PREFIX_CACHES = (None, "hash", "radix")
COUNTS = (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("long_prefill_token_threshold", 0))
MAX_IDLE_STEPS = 1000  # consecutive steps without a row, although requests are waiting


def every_step(seconds: float = 1.0) -> StepTime:
    """All steps take the same time; by default the clock counts steps."""
    return lambda record: seconds


def linear(fixed: float, per_token: float) -> StepTime:
    """A fixed time per step, plus a time per computed token."""
    return lambda record: fixed + per_token * sum(row.num_tokens for row in record.rows)


def roofline(
    config: ModelConfig,
    hardware: Hardware,
    block_size: int = 16,
    dtype: str | None = None,
    link: float = math.inf,
) -> StepTime:
    """The time of `roofline.step_time`, plus the transfer of swapped blocks over a `link` of
    so many bytes/s between device and host. `block_size` is that of the simulation.

    Raises:
        ConfigError: `link` is not positive.
    """
    if not link > 0:
        raise ConfigError(f"link is {link}; it must be above 0 bytes/s.")
    swapped = block_bytes(config, block_size, dtype)

    def seconds(record: StepRecord) -> float:
        swaps = len(record.swap_out) + len(record.swap_in)
        moved = swaps * swapped / link
        if not record.rows:
            return moved
        tokens = [row.num_tokens for row in record.rows]
        lengths = [row.start + row.num_tokens for row in record.rows]
        num_logits = sum(row.num_logits for row in record.rows)  # 0 for a chunk inside a prompt
        cost = step_cost(config, tokens, lengths, dtype=dtype, num_logits=num_logits)
        return moved + step_time(cost, hardware).seconds

    return seconds


class Simulation:
    """A scheduler with `num_blocks` of `block_size` tokens, a clock in seconds, and a trace.

    `prefix_cache` is "hash", "radix" or None. `seconds` is the step-time model. `policy` is a name
    of `POLICIES` or a custom `Policy`; `scheduler` is `Scheduler` or a subclass of it.
    `speculation` drafts tokens with simulated acceptance; drafting takes no time. `limits` are the
    other fields of `SchedulerConfig`; `max_num_batched_tokens` defaults to at least `max_num_seqs`.

    Raises:
        ConfigError: a value out of its range.
        UnknownArgumentError: no limit has this name.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_cache: str | None = None,
        num_host_blocks: int = 0,
        seconds: StepTime | None = None,
        policy: Policy | str = "fcfs",
        scheduler: type[Scheduler] = Scheduler,
        speculation: SimulatedDrafts | None = None,
        **limits: Any,
    ):
        check_counts(num_blocks, block_size, num_host_blocks, limits)
        check_choices(prefix_cache, seconds, policy, scheduler, speculation)
        max_num_seqs = limits.get("max_num_seqs", SchedulerConfig.max_num_seqs)
        usual = SchedulerConfig.max_num_batched_tokens
        if isinstance(policy, str):
            limits["policy"] = policy
        config = SchedulerConfig(**({"max_num_batched_tokens": max(usual, max_num_seqs)} | limits))
        blocks = BlockManager(num_blocks, block_size, prefix_cache, num_host_blocks)
        own = None if isinstance(policy, str) else policy
        drafts = speculation.limits if speculation else None
        self.scheduler = scheduler(config, blocks, own, drafts)
        named = policy if isinstance(policy, str) else None
        self.trace = Trace(simulated(config, blocks, named), capacity=2**40)
        self.now = 0.0
        self.reports: dict[str, PrefixReport] = {}  # prefix cache hits of admitted requests
        self._seconds, self._speculation = seconds or every_step(), speculation
        self._later: list[tuple[float, int, Request]] = []  # a heap, by arrival
        self._answers: dict[str, tuple[int, ...]] = {}
        self._names, self._tokens = count(), count(MADE_UP)

    @property
    def blocks(self) -> BlockManager:
        """The block manager."""
        return self.scheduler.blocks

    def add(
        self,
        prompt: int | Sequence[int],
        new: int | Sequence[int],
        *,
        arrival: float | None = None,
        name: str | None = None,
        max_tokens: int | None = None,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Add a request that arrives at `arrival` (in seconds; default: now); returns its name.

        `prompt` and `new` are token ids, or a number of ids that no other request has. With a
        `max_tokens` above the number of `new` tokens the request stops early, which the scheduler
        does not know beforehand. All `n` completions have the same length. The lowest `priority` is
        scheduled first; prompts with different salts share no prefix.

        Raises:
            ConfigError: a value is invalid, the name is in use, or the arrival is in the past.
            InvalidRequestError: the request can never fit, or `n` is invalid.
        """
        answer, ids = self._ids("new", new), self._ids("prompt", prompt)
        limit = len(answer) if max_tokens is None else max_tokens
        for what, value, kind, right in (
            ("max_tokens", limit, is_whole(limit), "a whole number"),
            ("priority", priority, is_whole(priority), "a whole number"),
            ("arrival", arrival, isinstance(arrival, Real | None), "a time in seconds"),
            ("name", name, name is None or (isinstance(name, str) and name), "a text"),
            ("cache_salt", cache_salt, isinstance(cache_salt, str), "a text"),
        ):
            if not kind:
                raise ConfigError(f"{what} is {shown(value)}; it must be {right}.")
        if not ids or not 1 <= len(answer) <= limit:
            raise ConfigError(
                f"A request has {len(ids)} prompt tokens, {len(answer)} new tokens and max_tokens "
                f"{limit}; each must be at least 1, and new at most max_tokens."
            )
        when = self.now if arrival is None else arrival
        if not self.now <= when < math.inf:
            raise ConfigError(f"arrival is {when}; it must be from {self.now} (now) to infinity.")
        number = next(self._names)
        if name is None:
            name = next(one for one in (f"r{n}" for n in count(number)) if one not in self._answers)
        if name in self._answers:
            raise ConfigError(f"There was already a request {name!r}; give each its own name.")
        params = ONE if type(n) is int and n == 1 else SamplingParams(n=n, temperature=1.0)
        request = Request(
            name, ids, params, limit, priority=priority, cache_salt=cache_salt, arrival=when
        )
        check_fits(request, self.scheduler.config, self.blocks)
        self._answers[name] = answer if isinstance(new, Sequence) else (-1,) * len(answer)
        heapq.heappush(self._later, (when, number, request))
        return name

    def _ids(self, what: str, tokens: Any) -> tuple[int, ...]:
        if isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes):
            whole = set(map(type, tokens)) <= {int} or all(map(is_whole, tokens))
            if whole and min(tokens, default=0) >= 0 and max(tokens, default=0) < MADE_UP:
                return tuple(tokens)
        elif is_whole(tokens):
            return tuple(islice(self._tokens, tokens))
        raise ConfigError(
            f"{what} is {shown(tokens)}; it must be a number of tokens, or a list of token ids, "
            f"which are whole numbers from 0 to {MADE_UP - 1:,}."
        )

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or has not arrived."""
        return self.scheduler.has_work or bool(self._later)

    def run(self, until: float = math.inf) -> Trace:
        """Step until all requests have finished, or the next step would start at `until` or later.
        `now` is then the end of the last step.

        Raises:
            ConfigError: `until` is not a number.
        """
        if not isinstance(until, Real) or math.isnan(until):
            raise ConfigError(f"until is {shown(until)}; it must be a time on the virtual clock.")
        idle = 0
        while self.has_work and self._begins < until:
            idle = 0 if self.step().rows else idle + 1
            if idle == MAX_IDLE_STEPS:
                raise AccountingError(
                    f"No request advanced in {MAX_IDLE_STEPS:,} steps; check the policy."
                )
        return self.trace

    @property
    def _begins(self) -> float:
        """The start of the next step: now, or the next arrival if there is no work."""
        waits = self._later and not self.scheduler.has_work
        return max(self.now, self._later[0][0]) if waits else self.now

    def step(self) -> StepRecord:
        """Run one step; without work, first advance the clock to the next arrival.

        Raises:
            ConfigError: the step-time model returned no valid time.
        """
        self.now = self._begins
        while self._later and self._later[0][0] <= self.now:
            self.scheduler.add(heapq.heappop(self._later)[2])
        plan = self.scheduler.schedule()
        record = self.scheduler.record
        self.trace.append(record)
        for seq_id in record.admitted:
            sequence = self.scheduler.sequences[seq_id]
            if sequence.report is not None:
                self.reports[sequence.request.request_id] = sequence.report
        record.started = record.planned = self.now
        took = self._seconds(record)
        if not (isinstance(took, Real) and 0 <= took < math.inf):
            raise ConfigError(
                f"The step-time model returned {shown(took)} seconds for step {record.step}; it "
                "must return a finite number of at least 0."
            )
        self.now += took
        record.computed = record.delivered = self.now
        rows = [row for row in plan.rows if row.num_samples]
        num_drafted = {row.seq_id: row.num_logits - 1 for row in rows if row.num_logits > 1}
        self.scheduler.commit(plan, {row.seq_id: self._sample(row) for row in rows}, num_drafted)
        for row in rows:  # forks right after their parent, in the engine's order of delivery
            self._stop(row.seq_id)
            for fork in record.forked if row.num_samples > 1 else ():
                if fork.parent_id == row.seq_id:
                    self._stop(fork.seq_id)
        return record

    def _sample(self, row: Row) -> list[int | None]:
        """The row's next tokens, up to the end of the answer. Forks get the same token if the
        answer was given as ids, else different made-up ids."""
        sequence = self.scheduler.sequences[row.seq_id]
        place = sequence.num_tokens - sequence.num_prompt_tokens
        answer = self._answers[sequence.request.request_id]
        tokens = [answer[place]] * row.num_samples
        if self._speculation and row.num_logits > 1:
            num_accepted = self._speculation.num_accepted(sequence, row.num_logits - 1)
            tokens = list(answer[place : place + 1 + num_accepted])
        return [next(self._tokens) if token < 0 else token for token in tokens]

    def _stop(self, seq_id: int) -> None:
        """Finish a sequence that has all tokens of its answer."""
        sequence = self.scheduler.sequences.get(seq_id)
        if sequence is None:
            return
        written = sequence.num_tokens - sequence.num_prompt_tokens
        if written == len(self._answers[sequence.request.request_id]):
            self.scheduler.finish(seq_id, "stop")


def check_counts(blocks: Any, size: Any, host: Any, limits: dict[str, Any]) -> None:
    """Check that limits have known names and that counts are whole numbers in range."""
    known = {field.name for field in fields(SchedulerConfig)}
    for name in limits:
        if name not in known:
            raise UnknownArgumentError(
                f"Simulation has no argument {shown(name)}.{did_you_mean(name, known)}"
            )
    counts = [("num_blocks", blocks, 1), ("block_size", size, 1), ("num_host_blocks", host, 0)]
    counts += [(name, limits[name], least) for name, least in COUNTS if name in limits]
    for name, value, least in counts:
        if not (is_whole(value) and value >= least):
            raise ConfigError(
                f"{name} is {shown(value)}; it must be a whole number of at least {least}."
            )


def check_choices(
    prefix_cache: object, seconds: object, policy: object, scheduler: object, speculation: object
) -> None:
    """Check the prefix cache, step-time model, policy, scheduler and speculation."""
    is_scheduler = isinstance(scheduler, type) and issubclass(scheduler, Scheduler)
    allowed = f"a function of a step's record, such as every_step({shown(seconds)})"
    caches = "one of hash, radix, or None"
    drafts = "a SimulatedDrafts, such as SimulatedDrafts((0.8, 0.6)), or None"
    for name, value, right, what in (
        ("prefix_cache", prefix_cache, prefix_cache in PREFIX_CACHES, caches),
        ("seconds", seconds, seconds is None or callable(seconds), allowed),
        ("policy", policy, isinstance(policy, str | Policy), "a name or a Policy"),
        ("scheduler", scheduler, is_scheduler, "Scheduler or a class derived from it"),
        ("speculation", speculation, isinstance(speculation, SimulatedDrafts | None), drafts),
    ):
        if not right:
            raise ConfigError(f"{name} is {shown(value)}; it must be {what}.")


def simulated(config: SchedulerConfig, blocks: BlockManager, policy: str | None) -> TraceSettings:
    """The trace settings of a simulation, which has no model and no date."""
    return TraceSettings(
        policy=policy, admission=config.admission, preemption=config.preemption_mode,
        prefix_cache=blocks.prefix_cache, block_size=blocks.block_size,
        num_blocks=blocks.pool.num_blocks, num_host_blocks=blocks.host.num_blocks,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        clock=None, wall=None,
    )  # fmt: skip
