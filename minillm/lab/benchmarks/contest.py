"""Several engines at the same work, in turn.

Every engine runs a case once to warm up, and then once per repeat: within a repeat one engine
after the other has the machine to itself, each repeat beginning with another one, so that a bad
minute of a shared machine falls on all of them. Prompts are random token ids, the same for all;
greedy, the end-of-sequence token ignored, no prefix cache.

**What counts as decoding.** The clock starts when every sequence of the batch has its first token
and stops when the first of them is complete: in between every step brings one token to each, so a
prompt of any length costs nothing, whether an engine computes all prompts in its first step or in
several. That is (time of prompt + n tokens) - (time of prompt + 1 token) taken in one run instead
of two, whose difference would have the noise of two prompts. **Prefill** is the time until the
last sequence has its first token.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.benchmarks.others import DISTURBED, watching

WARM_UP = 8  # requests of the offline work
Row = Sequence[float]  # seconds, new tokens, sequences started, sequences complete


@dataclass(frozen=True)
class Case:
    """`batch` prompts of `context` tokens, continued by `new_tokens` each."""

    batch: int
    context: int
    new_tokens: int

    def __str__(self) -> str:
        return f"B={self.batch} ctx {self.context}"


@dataclass(frozen=True)
class Run:
    """One run of one engine: until all have their first token, and then `steps` decode steps that
    brought `tokens`. `others` is the share of the processors that other programs used."""

    prefill_seconds: float
    decode_seconds: float
    tokens: int
    steps: int
    others: float = 0.0


@dataclass(frozen=True)
class OfflineRun:
    """One run of mixed requests; only this engine tells which part was not the model."""

    seconds: float
    tokens: int
    others: float = 0.0
    outside_model: float | None = None


AnyRun = TypeVar("AnyRun", Run, OfflineRun)


@dataclass
class Score:
    """All runs of one engine at one case."""

    engine: str
    case: Case
    runs: list[Run] = field(default_factory=list)


class Contestant(Protocol):
    """What takes part: an `EngineProcess`, or a stand-in of the tests."""

    name: str
    group: int

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Answer a request, or raise EngineFailedError."""

    def pause(self) -> None:
        """Use no processor from now on."""

    def resume(self) -> None:
        """Go on."""

    def close(self) -> None:
        """End."""


def decode_run(rows: Sequence[Row], case: Case, others: float = 0.0) -> Run:
    """The two parts of a run. Raises EngineFailedError where the rows do not add up."""
    total = sum(int(row[1]) for row in rows)
    if total != case.batch * case.new_tokens:
        raise EngineFailedError(
            f"{total} tokens came where {case.batch} x {case.new_tokens} were asked for."
        )
    first = next(place for place, row in enumerate(rows) if row[2] == case.batch)
    last = next(place for place, row in enumerate(rows) if row[3] > 0)
    start = rows[first][0]
    if case.new_tokens > 1 and last <= first:
        raise EngineFailedError(
            f"a sequence was complete before all had begun, so there is no step in which all "
            f"{case.batch} decode; ask for more new tokens."
        )
    return Run(
        prefill_seconds=start,
        decode_seconds=max(rows[last][0] - start, 0.0),
        tokens=sum(int(row[1]) for row in rows[first + 1 : last + 1]),
        steps=max(last - first, 0),
        others=others,
    )


def prompts_of(case: Case, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts. The last id is left out: it may be a special one."""
    rng = random.Random(f"{seed} {case}")
    return [rng.choices(range(max(1, vocab_size - 1)), k=case.context) for _ in range(case.batch)]


class Contest:
    """Runs cases; an engine that fails is out, with a sentence in `failed`."""

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
        """Load the model in one engine after the other."""
        for one in list(self.active):
            self._say(f"{one.name} loads the model")
            answer = self._ask(one, {"do": "open", **options})
            if answer is not None:
                self.facts[one.name] = answer[0]

    def _ask(self, one: Contestant, request: Mapping[str, Any]) -> tuple[Any, float] | None:
        """The answer of one engine that has the machine to itself, and what others used of it."""
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
        """The order of a repeat: each begins with another engine."""
        start = number % len(self.active) if self.active else 0
        return self.active[start:] + self.active[:start]

    def play(self, case: Case, repeats: int, extra: int = 0) -> list[Score]:
        """One case, `repeats` times."""

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
        """All requests at once, `repeats` times; a few of them warm up."""

        def request(number: int) -> dict[str, Any]:
            some = slice(None, WARM_UP if number < 0 else None)
            return {"do": "offline", "prompts": prompts[some], "new_tokens": lengths[some]}

        def read(answer: Any, others: float) -> OfflineRun:
            run = OfflineRun(**answer, others=others)
            if run.tokens not in (sum(lengths), sum(lengths[:WARM_UP])):
                raise EngineFailedError(f"{run.tokens} tokens came where {sum(lengths)} were due.")
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
        """`repeats` undisturbed runs of every engine, or what there is after `extra` more; those
        of an engine that failed on the way do not count."""
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
        """One run of one engine; None where it failed, and then it is out."""
        answer = self._ask(one, request)
        if answer is None:
            return None
        try:
            return read(*answer)
        except EngineFailedError as error:
            self._drop(one, f"{one.name}: {error}")
        except (TypeError, ValueError, LookupError, StopIteration):  # whatever a worker may say
            self._drop(one, f"{one.name} answered {str(answer[0])[:60]!r}, which makes no sense.")
        return None

    def close(self) -> None:
        """End all engines."""
        for one in self.active:
            one.close()


def turn_name(number: int) -> str:
    """What a repeat is called while it runs."""
    return "warm-up" if number < 0 else f"run {number + 1}"


def undisturbed(runs: Sequence[AnyRun]) -> list[AnyRun]:
    """Those during which other programs were quiet."""
    return [run for run in runs if run.others <= DISTURBED]


def calmest(runs: Sequence[AnyRun], count: int) -> list[AnyRun]:
    """The `count` least disturbed runs, in the order in which they were made. Chosen by what
    others did, never by how long they took."""
    order = sorted(range(len(runs)), key=lambda place: (max(runs[place].others, DISTURBED), place))
    return [runs[place] for place in sorted(order[:count])]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, median and most."""
    return {"min": min(values), "median": median(values), "max": max(values)}
