"""Runs several engines on the same workload, in turn.

Every engine runs a case once to warm up, and then once per repeat. Within a repeat the engines run
one after the other, each alone on the machine; every repeat starts with a different engine, so that
disturbances of a shared machine affect all engines. Prompts are the same random token ids for all;
decoding is greedy, ignores the end token, and uses no prefix cache.

**Decode time** starts when every sequence of the batch has its first token and stops when the first
sequence is complete. Every step in between yields one token per sequence, so prefill is excluded,
whether an engine computes all prompts in one step or in several. **Prefill time** ends when the
last sequence has its first token.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.benchmarks.others import DISTURBED, watching

WARM_UP = 8  # warm-up requests of the offline workload
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
    is the fraction of the processors that other programs used."""

    prefill_seconds: float
    decode_seconds: float
    tokens: int
    steps: int
    others: float = 0.0


@dataclass(frozen=True)
class OfflineRun:
    """One offline run; only minillm reports the fraction of the time outside the model."""

    seconds: float
    tokens: int
    others: float = 0.0
    outside_model: float | None = None


AnyRun = TypeVar("AnyRun", Run, OfflineRun)


@dataclass
class Score:
    """All counted runs of one engine at one case."""

    engine: str
    case: Case
    runs: list[Run] = field(default_factory=list)


class Contestant(Protocol):
    """The interface of an engine in a contest: an `EngineProcess`, or a fake in tests."""

    name: str
    group: int

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Answer a request, or raise EngineFailedError."""

    def pause(self) -> None:
        """Stop using the processor."""

    def resume(self) -> None:
        """Continue after `pause`."""

    def close(self) -> None:
        """End."""


def decode_run(rows: Sequence[Row], case: Case, others: float = 0.0) -> Run:
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
        others=others,
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
    ):
        self.active = list(contestants)
        self.failed: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._vocab_size, self._say = vocab_size, say

    def open(self, options: Mapping[str, Any]) -> None:
        """Load the model in each engine, one after the other."""
        for one in list(self.active):
            self._say(f"{one.name} loads the model")
            answer = self._ask(one, {"do": "open", **options})
            if answer is not None:
                self.facts[one.name] = answer[0]

    def _ask(self, one: Contestant, request: Mapping[str, Any]) -> tuple[Any, float] | None:
        """Run one request while all other engines are paused; returns the answer and the fraction
        of the processors that other programs used."""
        one.resume()
        try:
            with watching([one.group]) as watch:
                answer = one.ask(request)
        except EngineFailedError as error:
            self._drop(one, str(error))
            return None
        one.pause()
        return answer, watch.share

    def _drop(self, one: Contestant, why: str) -> None:
        self.failed[one.name] = why
        self.active.remove(one)
        one.close()

    def turns(self, number: int) -> list[Contestant]:
        """The order of the engines in a repeat, rotated by one for each repeat."""
        start = number % len(self.active) if self.active else 0
        return self.active[start:] + self.active[:start]

    def play(self, case: Case, repeats: int, extra: int = 0) -> list[Score]:
        """Run one case `repeats` times."""

        def request(number: int) -> dict[str, Any]:
            prompts = prompts_of(case, self._vocab_size, number)
            return {"do": "steps", "prompts": prompts, "new_tokens": case.new_tokens}

        def read(answer: Any, others: float) -> Run:
            return decode_run(answer, case, others)

        runs = self._collect(str(case), request, read, repeats, extra)
        return [Score(name, case, each) for name, each in runs.items()]

    def play_offline(
        self, prompts: list[list[int]], lengths: list[int], repeats: int, extra: int = 0
    ) -> dict[str, list[OfflineRun]]:
        """Run all requests at once, `repeats` times, after a warm-up with a few of them."""

        def request(number: int) -> dict[str, Any]:
            some = slice(None, WARM_UP if number < 0 else None)
            return {"do": "offline", "prompts": prompts[some], "new_tokens": lengths[some]}

        def read(answer: Any, others: float) -> OfflineRun:
            run = OfflineRun(**answer, others=others)
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
        read: Callable[[Any, float], AnyRun],
        repeats: int,
        extra: int,
    ) -> dict[str, list[AnyRun]]:
        """Collect `repeats` undisturbed runs of every engine, with up to `extra` more repeats to
        replace disturbed runs. Engines that fail are left out."""
        runs: dict[str, list[AnyRun]] = {one.name: [] for one in self.active}
        for number in range(-1, repeats + extra):  # the first warms up
            calm = (len(undisturbed(runs[one.name])) >= repeats for one in self.active)
            if number >= repeats and all(calm):
                break
            for one in self.turns(number + 1):
                self._say(f"{what}: {turn_name(number)} of {one.name}")
                run = self._run(one, request(number), read)
                if run is not None and number >= 0:
                    runs[one.name].append(run)
        return {one.name: calmest(runs[one.name], repeats) for one in self.active}

    def _run(
        self, one: Contestant, request: Mapping[str, Any], read: Callable[[Any, float], AnyRun]
    ) -> AnyRun | None:
        """One run of one engine; an engine that fails is removed, and None is returned."""
        answer = self._ask(one, request)
        if answer is None:
            return None
        try:
            return read(*answer)
        except EngineFailedError as error:
            self._drop(one, f"{one.name}: {error}")
        except (TypeError, ValueError, LookupError, StopIteration):  # malformed answer
            self._drop(one, f"{one.name} returned an invalid answer: {str(answer[0])[:60]!r}.")
        return None

    def close(self) -> None:
        """Close all engines."""
        for one in self.active:
            one.close()


def turn_name(number: int) -> str:
    """The name of a repeat in progress messages."""
    return "warm-up" if number < 0 else f"run {number + 1}"


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
