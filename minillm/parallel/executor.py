"""An executor of several ranks: every plan goes to all of them, one answers with the result.

    scheduler --> plan --+--> rank 0: forward, sample --> tokens, hash
                         +--> rank 1: forward, sample -->         hash
                              |____ sums, gathers ____|

Ranks decide nothing: the same plan, logits and noise give the same tokens. Each rank returns a hash
of its tokens, so that a rank that diverges is detected in the same step. With several stages the
last one samples; the others learn its tokens from a later plan.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import NamedTuple, TypeVar

from msgspec.msgpack import Decoder

from minillm.errors import EngineDeadError, MinillmError, in_one_line
from minillm.execution.executor import Capacity
from minillm.execution.flight import Flight, StepResult
from minillm.execution.runner import Runner
from minillm.execution.wire import plan_from_bytes, to_bytes
from minillm.parallel.balance import rebalance
from minillm.parallel.communicator import CommunicationError
from minillm.parallel.place import Place, Topology
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import RankTime

T = TypeVar("T")
Build = Callable[[Place], Runner]
# What is merged of the copies' results, whose sequences have different numbers.
MERGED = ("token_ids", "logprobs", "prompt_logprobs", "errors", "suspect", "num_drafted")


class Answer(NamedTuple):
    """What a rank returns for a plan. Only the first rank of the last stage returns the result;
    that of the others is empty."""

    time: RankTime
    hash: str
    result: StepResult


answer_from_bytes = Decoder(Answer).decode


def token_hash(result: StepResult) -> str:
    """A 64-bit hash of the tokens of all sequences."""
    chosen = sorted(result.token_ids.items())
    return blake2b(repr(chosen).encode(), digest_size=8).hexdigest()


def carried_out(data: bytes, runner: Runner, place: Place) -> Answer:
    """Execute one plan on one rank."""
    start, before = perf_counter(), place.seconds
    plan = plan_from_bytes(data)
    if plan.rebalance:
        rebalance(runner.model, plan.rebalance)
    result = runner.execute(plan)
    time = RankTime(place.rank, perf_counter() - start, place.seconds - before)
    tells = place.stage.is_last and not place.split.rank
    return Answer(time, token_hash(result), result if tells else StepResult())


def check_agreement(hashes: Sequence[str]) -> None:
    """EngineDeadError if ranks chose different tokens."""
    for rank, own in enumerate(hashes):
        if own != hashes[0]:
            raise EngineDeadError(
                f"Rank {rank} chose other tokens than rank 0 in the same step, so nothing that "
                "follows can be trusted; make a new engine, and report this."
            )


class Ranks(ABC):
    """Distributes plans to ranks and joins their answers; the ranks are threads or processes.

    With several stages, it adds to each plan the tokens that earlier stages have not seen. Before
    every `step_interval`-th plan, experts are placed anew.
    """

    def __init__(self, topology: Topology, step_interval: int = 0):
        self.topology, self.step_interval = topology, step_interval
        self._capacities: Sequence[Capacity] = ()
        self._num_plans = 0
        self._learned: dict[int, list[int]] = {}

    def capacity(self) -> Capacity:
        """What the smallest rank has: a plan that uses more would overwrite its memory."""
        return Capacity(*map(min, zip(*map(astuple, self._capacities), strict=True)))

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step on all ranks."""
        answers = self._execute(self.bodies(plan))
        flight = Flight()

        def read() -> None:
            flight.result = self.joined(plan, answers())

        flight.reads.append(read)
        return flight

    def reset(self) -> None:
        """Forget all sequences: after the launched steps, before later ones."""
        self._learned = {}

    def stats(self) -> dict[str, int]:
        """Bytes of all ranks together."""
        total: Counter[str] = Counter()
        for stats in self._stats():
            total.update(stats)
        return dict(total)

    def bodies(self, plan: StepPlan) -> list[bytes]:
        """The plan of each rank, which is that of its copy."""
        if self.topology.num_stages > 1:
            plan.learned, self._learned = self._learned, {}
        number, rest = divmod(self._num_plans, self.step_interval or 2**63)
        self._num_plans += 1
        for share in plan.shares or [plan]:
            share.rebalance = 0 if rest else number
        bodies = [to_bytes(share) for share in plan.shares or [plan]]
        return [body for body in bodies for _ in range(self.topology.num_ranks // len(bodies))]

    def joined(self, plan: StepPlan, answers: Sequence[Answer]) -> StepResult:
        """The result of a step: that of the last stage, or those of all copies.

        Raises:
            EngineDeadError: ranks chose different tokens.
        """
        size, each = self.topology.size, len(answers) // self.topology.num_copies
        copies = [answers[end - size : end] for end in range(each, len(answers) + 1, each)]
        for last_stage in copies:
            check_agreement([answer.hash for answer in last_stage])
        joined, *others = [last_stage[0].result for last_stage in copies]
        for other in others:
            for name in MERGED:
                getattr(joined, name).update(getattr(other, name))
        joined.ranks = [answer.time for answer in answers]
        self.note(plan, joined)
        return joined

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Remember a step's tokens for the next plan."""
        for row in plan.rows if self.topology.num_stages > 1 else ():
            own = result.token_ids[row.seq_id][:1] if row.num_logits else []
            self._learned[row.seq_id] = [token for token in own if token is not None]

    @abstractmethod
    def _execute(self, bodies: Sequence[bytes]) -> Callable[[], list[Answer]]:
        """Send each rank its plan; the returned function waits for the answers."""

    @abstractmethod
    def _stats(self) -> list[dict[str, int]]:
        """The counters of each rank."""


class RankThreads(Ranks):
    """Ranks that are threads of this process, for tests and experiments."""

    def __init__(self, places: Sequence[Place], build: Build, step_interval: int = 0):
        self.places, last = places, places[-1]
        super().__init__(Topology(last.split.size, last.stage.count, last.copy + 1), step_interval)
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"minillm-rank-{each.rank}") for each in places
        ]
        self._is_closed = False
        self.runners: list[Runner] = []
        try:
            self.runners = self._on_all([partial(build, place) for place in places])
            self._capacities = [runner.capacity() for runner in self.runners]
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        super().reset()
        self._on_all([runner.reset for runner in self.runners])

    def close(self) -> None:
        """End the threads. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for place in self.places:
                place.abort()
            for pool in self._pools:
                pool.shutdown()
            self.runners = []

    def _execute(self, bodies: Sequence[bytes]) -> Callable[[], list[Answer]]:
        ranks = zip(bodies, self.runners, self.places, strict=True)
        return partial(self._wait, self._submit([partial(carried_out, *rank) for rank in ranks]))

    def _stats(self) -> list[dict[str, int]]:
        return self._on_all([runner.stats for runner in self.runners])

    def _on_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return self._wait(self._submit(calls))

    def _submit(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        pairs = zip(self._pools, self.places, calls, strict=True)
        return [pool.submit(guarded, place, call) for pool, place, call in pairs]

    @staticmethod
    def _wait(futures: Sequence[Future[T]]) -> list[T]:
        """The results of all ranks, or the error of the rank that failed first: the others raise
        CommunicationError because of it."""
        errors = [future.exception() for future in futures]
        for rank, error in enumerate(errors):
            if error is None or isinstance(error, CommunicationError):
                continue
            if isinstance(error, MinillmError):
                raise error  # about the model or the arguments
            size = len(futures)
            raise EngineDeadError(f"Rank {rank} of {size} failed: {in_one_line(error)}") from error
        return [future.result() for future in futures]


def guarded(place: Place, call: Callable[[], T]) -> T:
    """Call it; if it raises, abort the other ranks' calls that wait for this one."""
    try:
        return call()
    except BaseException:
        place.abort()
        raise
