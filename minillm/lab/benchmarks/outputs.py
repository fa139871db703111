"""Host overhead of the engine without its model: microseconds per row and step.

The engine is the real one, with the embedded tokenizer, but the runner is replaced by a lookup of
tokens by a hash. What remains is scheduling, committing, recording the trace, detokenization,
output objects and streams. Three interfaces are measured: `LLM.generate`; 256 streams whose
consumers receive every output before the next step, as with a slow model; and the same streams with
steps back to back, so that an output often holds several tokens.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from minillm.api.arguments import AsyncEngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.engine.loop import Engine
from minillm.execution.flight import Flight, StepResult
from minillm.llm import LLM
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import Logbook
from minillm.scheduling.scheduler import Scheduler
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.step_thread import StepThread
from minillm.text.tokenizer import Tokenizer
from minillm.trace.recorder import Trace

PROMPT = 16  # prompt tokens of a request
TARGET = 12.0  # microseconds per row and step, including streams


@dataclass(frozen=True)
class Load:
    """Number of concurrent requests, output tokens of each, and repeats."""

    rows: int = 256
    new_tokens: int = 128
    repeats: int = 5


QUICK_LOAD = Load(8, 12, 2)


@dataclass
class Cost:
    """Microseconds per row and step for one interface: wall-clock time, processor time and its
    parts; and the mean number of tokens per output."""

    name: str
    wall: float
    processor: float
    tokens_per_output: float
    parts: dict[str, float] = field(default_factory=dict)


class FreeRunner:
    """A runner without a model: the next token is looked up by a hash. With a `loop`, a step starts
    when that event loop has run all its pending callbacks."""

    def __init__(self, corpus: list[int], loop: asyncio.AbstractEventLoop | None = None):
        self._corpus, self._loop = corpus, loop
        self.began: tuple[float, float] | None = None  # start of the first pure decode step
        self.num_rows = 0  # rows computed since then
        self.wall = self.processor = 0.0  # seconds from then to `stop`

    def stop(self) -> None:
        """Stop the clocks, after all outputs have arrived."""
        if self.began is not None:
            self.wall = perf_counter() - self.began[0]
            self.processor = process_time() - self.began[1]

    def launch(self, plan: StepPlan) -> Flight:
        """Return the tokens of a step at once."""
        if self._loop is not None:
            settle(self._loop)
        if self.began is None and all(row.num_tokens == 1 for row in plan.rows):
            self.began = perf_counter(), process_time()
        if self.began is not None:
            self.num_rows += len(plan.rows)
        corpus, result = self._corpus, StepResult()
        for row in plan.rows:
            place = (row.seq_id * 7919 + row.start + row.num_tokens) % len(corpus)
            result.token_ids[row.seq_id] = [corpus[place]]
        return Flight(result)

    def close(self) -> None:
        """Nothing to close, and no state per sequence to reset."""

    reset = close


def settle(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until an event loop has run its pending callbacks and those that they schedule."""
    done = threading.Event()
    loop.call_soon_threadsafe(lambda: loop.call_soon(done.set))
    done.wait()


# ---- interfaces -------------------------------------------------------------------------------


def arguments(load: Load) -> dict[str, Any]:
    """Engine arguments with capacity for all requests at once."""
    return {
        "model": "tiny",
        "max_num_seqs": load.rows,
        "max_num_batched_tokens": load.rows * PROMPT,
        "max_model_len": PROMPT + load.new_tokens,
        "num_gpu_blocks_override": load.rows * (PROMPT + load.new_tokens) // 8,
        "block_size": 16,
        "enable_prefix_caching": True,
    }


def corpus_of(tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of this source file."""
    return tokenizer.encode(Path(__file__).read_text("utf-8")) if tokenizer else []


def requests(load: Load, corpus: list[int]) -> tuple[list[Any], SamplingParams]:
    """A different prompt for each request; greedy sampling with a fixed output length."""
    prompts = [{"prompt_token_ids": [*corpus[i : i + PROMPT]]} for i in range(load.rows)]
    return prompts, SamplingParams(temperature=0, max_tokens=load.new_tokens, ignore_eos=True)


def offline(load: Load) -> tuple[FreeRunner, float]:
    """Measure `LLM.generate`, with one output per request."""
    with LLM(**arguments(load)) as llm:
        corpus = corpus_of(llm.tokenizer)
        runner = FreeRunner(corpus)
        llm.engine._runner = runner  # type: ignore[assignment]
        llm.generate(*requests(load, corpus), use_tqdm=False)
        runner.stop()
        return runner, load.new_tokens


def streams(load: Load, paced: bool) -> tuple[FreeRunner, float]:
    """Measure `AsyncLLMEngine.generate`, with one consumer per request."""
    args = AsyncEngineArgs(**arguments(load), max_num_requests=load.rows)
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        return asyncio.run(read_all(engine, load, paced))
    finally:
        engine.shutdown()


async def read_all(engine: AsyncLLMEngine, load: Load, paced: bool) -> tuple[FreeRunner, float]:
    """Read all streams concurrently; also returns the mean number of tokens per output."""
    corpus = corpus_of(await engine.get_tokenizer())
    runner = FreeRunner(corpus, asyncio.get_running_loop() if paced else None)
    engine._engine._runner = runner  # type: ignore[assignment]
    prompts, params = requests(load, corpus)

    async def read(number: int, prompt: dict[str, Any]) -> int:
        count = 0
        async for output in engine.generate(prompt, params, str(number)):
            output.outputs[0].text  # noqa: B018  (what a consumer would send on)
            count += 1
        return count

    counts = await asyncio.gather(*(read(i, prompt) for i, prompt in enumerate(prompts)))
    runner.stop()
    return runner, load.rows * load.new_tokens / sum(counts)


WAYS: Mapping[str, Callable[[Load], tuple[FreeRunner, float]]] = MappingProxyType(
    {
        "LLM.generate": offline,
        "streams, paced": partial(streams, paced=True),
        "streams, back to back": partial(streams, paced=False),
    }
)


# ---- measuring --------------------------------------------------------------------------------

# Methods by the part of the time that they are; all run in the thread that steps the engine.
TIMED: Sequence[tuple[Any, str, str]] = (
    (Scheduler, "schedule", "schedule"),
    (FreeRunner, "launch", "run"),
    (Scheduler, "commit", "commit"),
    *((Logbook, name, "trace") for name in vars(Logbook) if not name.startswith("_")),
    (Trace, "append", "trace"),
    (Engine, "_commit", "texts"),
    (StepThread, "_publish", "outputs"),
)
STREAMS = "streams"  # the rest of the processor time
PARTS = ("schedule", "run", "commit", "trace", "texts", "outputs", STREAMS)
HEADER = ("", "wall", "processor", "tokens an output", *PARTS)


class Clock:
    """Accumulates the seconds of one thread by part. The time of a timed function that another one
    calls counts for the inner one only, and the clock's own time for none."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*PARTS, ""), 0.0)
        self._part, self._own = "", 0.0
        empty, samples = self.around(lambda: None, ""), []
        for _ in range(200):
            self.seconds[""] = 0.0
            empty()
            samples.append(self.seconds[""])
        self._own = median(samples)

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrap a function so that its time counts for `part`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._part = self._part, part
            start = thread_time()
            try:
                return function(*arguments, **named)
            finally:
                spent = thread_time() - start
                self.seconds[part] += spent - self._own
                self.seconds[outer] -= spent
                self._part = outer

        return timed


def measure(name: str, load: Load) -> Cost:
    """The fastest of several runs, because disturbances only add time, and the parts from one more
    run, which the clocks slow down slightly."""
    gc.collect()
    runs = [WAYS[name](load) for _ in range(load.repeats)]
    wall = min(runner.wall / runner.num_rows for runner, _ in runs) * 1e6
    processor = min(runner.processor / runner.num_rows for runner, _ in runs) * 1e6
    return Cost(name, wall, processor, median(each for _, each in runs), parts(name, load))


def parts(name: str, load: Load) -> dict[str, float]:
    """Processor microseconds per row and step, by part."""
    clock = Clock()
    with ExitStack() as stack:
        for owner, method, part in TIMED:
            around = clock.around(getattr(owner, method), part)
            stack.enter_context(patch.object(owner, method, around))
        runner, _ = WAYS[name](load)
    found = {part: clock.seconds[part] for part in PARTS}
    found[STREAMS] = runner.processor - sum(found.values())
    return {part: seconds / runner.num_rows * 1e6 for part, seconds in found.items()}


def statement(costs: Sequence[Cost]) -> list[str]:
    """Whether each interface meets the target."""
    return [
        f"{one.name}: {one.wall:.1f} microseconds per row and step, "
        f"{'within' if one.wall <= TARGET else 'above'} the target of {TARGET:g}."
        for one in costs
    ]


def table(costs: Sequence[Cost]) -> list[list[str]]:
    """One row for each interface."""
    return [
        [one.name, *(f"{each:.1f}" for each in (one.wall, one.processor, one.tokens_per_output)),
         *(f"{one.parts[part]:.1f}" for part in PARTS)]
        for one in costs
    ]  # fmt: skip
