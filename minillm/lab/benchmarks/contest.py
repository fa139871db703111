"""Runs several engines on the same workload, in turn.

Every engine runs a case once to warm up, and then once per repeat. Within a repeat the engines run
one after the other; every repeat starts with a different engine, so that disturbances of a shared
machine affect all engines. Engines that wait are not stopped: what one of them uses while it spins
counts as that of other programs. Prompts are the same random token ids for all;
decoding is greedy, ignores the end token, and uses no prefix cache. With `beside`, each repeat also
runs every engine beside that many busy processes.

**Decode time** starts when every sequence of the batch has its first token and stops when the first
sequence is complete. Every step in between yields one token per sequence, so prefill is excluded,
whether an engine computes all prompts in one step or in several. **Prefill time** ends when the
last sequence has its first token.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from minillm.lab.benchmarks.beside import busy_processes
from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.benchmarks.others import DISTURBED, watching

WARM_UP = 8  # warm-up requests of the offline workload
T = TypeVar("T")
Row = Sequence[float]  # seconds, new tokens, sequences started, sequences complete


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `context` tokens, with `new_tokens` output tokens each."""

    batch: int
    context: int
    new_tokens: int

    def __str__(self) -> str:
        return f"B={self.batch} ctx {self.context}"


@dataclass(frozen=True)
class Run:
    """One run of one engine: prefill time, and `steps` decode steps that yielded `tokens`. `others`
    is the fraction of the processors that other programs used, `busy` that of our busy processes.
    """

    prefill_seconds: float
    decode_seconds: float
    tokens: int
    steps: int
    others: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True)
class OfflineRun:
    """One offline run; only minillm reports the fraction of the time outside the model."""

    seconds: float
    tokens: int
    others: float = 0.0
    busy: float = 0.0
    outside_model: float | None = None


AnyRun = TypeVar("AnyRun", Run, OfflineRun)


@dataclass
class Score(Generic[AnyRun]):
    """All counted runs of one engine at one case, beside this number of busy processes."""

    engine: str
    runs: list[AnyRun]
    beside: int = 0


class Contestant(Protocol):
    """The interface of an engine in a contest: an `EngineProcess`, or a fake in tests."""

    name: str
    group: int

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Answer a request, or raise EngineFailedError."""

    def close(self) -> None:
        """End."""


def decode_run(rows: Sequence[Row], case: Case) -> Run:
    """Split a run into prefill and decode; raises EngineFailedError for inconsistent rows."""
    total = sum(int(row[1]) for row in rows)
    if total != case.batch * case.new_tokens:
        raise EngineFailedError(
            f"The engine returned {total} tokens instead of {case.batch} x {case.new_tokens}."
        )
    first = next(place for place, row in enumerate(rows) if row[2] == case.batch)
    last = next(place for place, row in enumerate(rows) if row[3] > 0)
    start = rows[first][0]
    if case.new_tokens > 1 and last <= first:
        raise EngineFailedError(
            f"The first sequence was complete before the last one had started, so no step decodes "
            f"all {case.batch}; use more new tokens."
        )
    return Run(
        prefill_seconds=start,
        decode_seconds=max(rows[last][0] - start, 0.0),
        tokens=sum(int(row[1]) for row in rows[first + 1 : last + 1]),
        steps=max(last - first, 0),
    )


def prompts_of(case: Case, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts, without the last id, which may be a special token."""
    rng = random.Random(f"{seed} {case}")
    return [rng.choices(range(max(1, vocab_size - 1)), k=case.context) for _ in range(case.batch)]


class Contest:
    """Runs cases; an engine that fails is removed, and `failed` holds its error message."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        vocab_size: int,
        say: Callable[[str], Any] = lambda what: None,
        beside: int = 0,
    ):
        self.active = list(contestants)
        self.failed: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._vocab_size, self._say = vocab_size, say
        self._loads = (0, beside) if beside else (0,)

    def open(self, options: Mapping[str, Any]) -> None:
        """Load the model in each engine, one after the other."""
        for one in list(self.active):
            self._say(f"{one.name} loads the model")
            try:
                self.facts[one.name] = one.ask({"do": "open", **options})
            except EngineFailedError as error:
                self._drop(one, str(error))

    def _drop(self, one: Contestant, why: str) -> None:
        self.failed[one.name] = why
        self.active.remove(one)
        one.close()

    def play(self, case: Case, repeats: int, extra: int = 0) -> list[Score[Run]]:
        """Run one case `repeats` times."""

        def request(number: int) -> dict[str, Any]:
            prompts = prompts_of(case, self._vocab_size, number)
            return {"do": "steps", "prompts": prompts, "new_tokens": case.new_tokens}

        return self._collect(
            str(case), request, lambda answer: decode_run(answer, case), repeats, extra
        )

    def play_offline(
        self, prompts: list[list[int]], lengths: list[int], repeats: int, extra: int = 0
    ) -> list[Score[OfflineRun]]:
        """Run all requests at once, `repeats` times, after a warm-up with a few of them."""

        def request(number: int) -> dict[str, Any]:
            some = slice(None, WARM_UP if number < 0 else None)
            return {"do": "offline", "prompts": prompts[some], "new_tokens": lengths[some]}

        def read(answer: Any) -> OfflineRun:
            run = OfflineRun(**answer)
            if run.tokens not in (sum(lengths), sum(lengths[:WARM_UP])):
                raise EngineFailedError(
                    f"The engine returned {run.tokens} tokens instead of {sum(lengths)}."
                )
            return run

        return self._collect(f"{len(prompts)} requests", request, read, repeats, extra)

    def _collect(
        self,
        what: str,
        request: Callable[[int], dict[str, Any]],
        read: Callable[[Any], AnyRun],
        repeats: int,
        extra: int,
    ) -> list[Score[AnyRun]]:
        """Collect `repeats` undisturbed runs of every engine, with up to `extra` more repeats to
        replace disturbed runs. Engines that fail are left out."""
        scores: dict[tuple[int, str], Score[AnyRun]] = {
            (load, one.name): Score(one.name, [], load)
            for load in self._loads
            for one in self.active
        }
        for number in range(-1, repeats + extra):  # the first warms up
            left = [score for score in scores.values() if score.engine not in self.failed]
            if number >= repeats and all(len(undisturbed(one.runs)) >= repeats for one in left):
                break
            for load in self._loads if number >= 0 else (0,):
                for one in rotated(self.active, number + 1):
                    turn = "warm-up" if number < 0 else f"run {number + 1}"
                    beside = f", beside {load}" * (load > 0)
                    self._say(f"{what}: {turn} of {one.name}{beside}")
                    run = self._run(one, request(number), read, load)
                    if run is not None and number >= 0:
                        scores[load, one.name].runs.append(run)
        return [
            replace(score, runs=calmest(score.runs, repeats))
            for score in scores.values()
            if score.engine not in self.failed
        ]

    def _run(
        self,
        one: Contestant,
        request: Mapping[str, Any],
        read: Callable[[Any], AnyRun],
        load: int,
    ) -> AnyRun | None:
        """One run of one engine beside `load` busy processes; an engine that fails is removed, and
        None is returned."""
        answer = None
        try:
            with busy_processes(load) as busy, watching([one.group], busy=busy) as watch:
                answer = one.ask(request)
            return replace(read(answer), others=watch.share, busy=watch.busy)
        except EngineFailedError as error:
            self._drop(one, str(error) if answer is None else f"{one.name}: {error}")
        except (TypeError, ValueError, LookupError, StopIteration):  # malformed answer
            self._drop(one, f"{one.name} returned an invalid answer: {str(answer)[:60]!r}.")
        return None

    def close(self) -> None:
        """Close all engines."""
        for one in self.active:
            one.close()


def rotated(engines: Sequence[T], number: int) -> list[T]:
    """The order of the engines in a repeat: every repeat starts with the next one."""
    start = number % len(engines) if engines else 0
    return [*engines[start:], *engines[:start]]


def undisturbed(runs: Sequence[AnyRun]) -> list[AnyRun]:
    """The runs during which other programs used little of the processors."""
    return [run for run in runs if run.others <= DISTURBED]


def calmest(runs: Sequence[AnyRun], count: int) -> list[AnyRun]:
    """The `count` least disturbed runs, in their original order; selected by the processor use of
    other programs, never by their own duration."""
    order = sorted(range(len(runs)), key=lambda place: (max(runs[place].others, DISTURBED), place))
    return [runs[place] for place in sorted(order[:count])]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": median(values), "max": max(values)}
