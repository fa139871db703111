"""An executor of several ranks: every plan goes to all of them, one answers with the result.

    scheduler --> plan --+--> rank 0: forward, sample --> tokens, hash
                         +--> rank 1: forward, sample -->         hash
                              |____ sums, gathers ____|

Ranks have no opinions: the same plan, the same logits and the same noise give the same tokens. Each
returns a hash of its tokens, so that a rank that has gone astray is noticed in the same step. With
several stages the last one chooses, and the others learn its tokens from a later plan.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import TypeVar

from minillm.errors import EngineDeadError, MinillmError, in_one_line
from minillm.execution.executor import Capacity
from minillm.execution.flight import Flight, StepResult
from minillm.execution.runner import Runner
from minillm.execution.wire import plan_from_bytes, plan_to_bytes
from minillm.parallel.balance import rebalance
from minillm.parallel.communicator import CommunicationError
from minillm.parallel.place import Place
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import RankTime

T = TypeVar("T")
Build = Callable[[Place], Runner]


def token_hash(result: StepResult) -> str:
    """64 bits that say which tokens a rank chose, for which sequences."""
    chosen = sorted(result.token_ids.items())
    return blake2b(repr(chosen).encode(), digest_size=8).hexdigest()


def carried_out(data: bytes, runner: Runner, place: Place) -> tuple[StepResult, RankTime]:
    """What a rank makes of a plan, and how long it takes."""
    start, before = perf_counter(), place.seconds
    plan = plan_from_bytes(data)
    if plan.rebalance:
        rebalance(runner.model, plan.rebalance)
    result = runner.execute(plan)
    return result, RankTime(place.rank, perf_counter() - start, place.seconds - before)


def smallest(capacities: Sequence[Capacity]) -> Capacity:
    """What all ranks have: a plan that uses more would overwrite memory on one of them."""
    return Capacity(*map(min, zip(*map(astuple, capacities), strict=True)))


def check_agreement(hashes: Sequence[str]) -> None:
    """EngineDeadError if ranks chose different tokens."""
    for rank, each in enumerate(hashes):
        if each != hashes[0]:
            raise EngineDeadError(
                f"Rank {rank} chose other tokens than rank 0 in the same step, so nothing that "
                "follows can be trusted; make a new engine, and report this."
            )


class Stages:
    """The plans and results of `num_copies` of a model, each of `count` stages of `size` ranks, and
    what the first stages have to learn. Before every `step_interval`-th plan, experts are placed
    anew."""

    def __init__(self, size: int, count: int, num_copies: int = 1, step_interval: int = 0):
        self.size, self.count, self.num_copies = size, count, num_copies
        self.step_interval, self._num_plans = step_interval, 0
        self._learned: dict[int, list[int]] = {}

    @property
    def num_ranks(self) -> int:
        """Of all copies."""
        return self.size * self.count * self.num_copies

    def bodies(self, plan: StepPlan) -> list[bytes]:
        """A plan for each rank: that of its copy, and what it has to learn."""
        self.teach(plan)
        number, rest = divmod(self._num_plans, self.step_interval or 2**63)
        self._num_plans += 1
        for each in plan.shares or [plan]:
            each.rebalance = 0 if rest else number
        bodies = [plan_to_bytes(each) for each in plan.shares or [plan]]
        return [body for body in bodies for _ in range(self.num_ranks // len(bodies))]

    def last(self, answers: Sequence[T]) -> list[Sequence[T]]:
        """Those of the last stage of each copy."""
        each = self.size * self.count
        ends = range(each, self.num_ranks + 1, each)
        return [answers[end - self.size : end] for end in ends]

    def teach(self, plan: StepPlan) -> None:
        """Put into a plan the tokens that were chosen since the last one."""
        if self.count > 1:
            plan.learned, self._learned = self._learned, {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """A step's tokens are here."""
        for row in plan.rows if self.count > 1 else ():
            own = result.token_ids[row.seq_id][:1] if row.num_logits else []
            self._learned[row.seq_id] = [token for token in own if token is not None]

    def forget(self) -> None:
        """No sequence is known any more."""
        self._learned = {}


def together(results: Sequence[StepResult]) -> StepResult:
    """What came out of a joint step, whose sequences have different numbers in each copy."""
    first, *others = results
    for each in others:
        for name in (
            "token_ids",
            "logprobs",
            "prompt_logprobs",
            "errors",
            "suspect",
            "num_drafted",
        ):
            getattr(first, name).update(getattr(each, name))
    return first


class RankThreads:
    """Ranks that are threads of this process; for tests and experiments."""

    def __init__(self, places: Sequence[Place], build: Build, step_interval: int = 0):
        self.places = places
        last = places[-1]
        self._stages = Stages(last.split.size, last.stage.count, last.copy + 1, step_interval)
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"minillm-rank-{each.rank}") for each in places
        ]
        self._is_closed = False
        self.runners: list[Runner] = []
        try:
            self.runners = self._on_all([partial(build, each) for each in places])
        except BaseException:
            self.close()
            raise

    def capacity(self) -> Capacity:
        """What the smallest rank has."""
        return smallest([each.capacity() for each in self.runners])

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step on all ranks."""
        ranks = zip(self._stages.bodies(plan), self.runners, self.places, strict=True)
        futures = self._submit([partial(carried_out, *rank) for rank in ranks])
        flight = Flight()

        def read() -> None:
            results, times = zip(*self._wait(futures), strict=True)
            copies = self._stages.last(results)
            for each in copies:
                check_agreement([token_hash(result) for result in each])
            flight.result = together([each[0] for each in copies])
            flight.result.ranks = list(times)
            self._stages.note(plan, flight.result)

        flight.reads.append(read)
        return flight

    def reset(self) -> None:
        """Forget all sequences."""
        self._stages.forget()
        self._on_all([each.reset for each in self.runners])

    def stats(self) -> dict[str, int]:
        """Bytes of all ranks together."""
        found: dict[str, int] = {}
        for each in self._on_all([each.stats for each in self.runners]):
            for name, value in each.items():
                found[name] = found.get(name, 0) + value
        return found

    def close(self) -> None:
        """End the threads. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            for each in self.places:
                each.abort()
            for pool in self._pools:
                pool.shutdown()
            self.runners = []

    def _on_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return self._wait(self._submit(calls))

    def _submit(self, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
        pairs = zip(self._pools, self.places, calls, strict=True)
        return [pool.submit(guarded, each, call) for pool, each, call in pairs]

    @staticmethod
    def _wait(futures: Sequence[Future[T]]) -> list[T]:
        """The results of all, or the error of the rank that failed first: the others' errors say
        only that it did."""
        errors = [each.exception() for each in futures]
        for rank, error in enumerate(errors):
            if isinstance(error, MinillmError) and not isinstance(error, CommunicationError):
                raise error  # says what is wrong with the model or the arguments
            if error is not None and not isinstance(error, CommunicationError):
                raise RankError(rank, len(futures), error) from error
        for error in errors:
            if error is not None:
                raise error
        return [each.result() for each in futures]


class RankError(EngineDeadError):
    """What went wrong on one rank."""

    def __init__(self, rank: int, size: int, error: BaseException):
        super().__init__(f"Rank {rank} of {size} failed: {in_one_line(error)}")


def guarded(place: Place, call: Callable[[], T]) -> T:
    """Call it; if it fails, the other ranks do not wait for this one."""
    try:
        return call()
    except BaseException:
        place.abort()
        raise
