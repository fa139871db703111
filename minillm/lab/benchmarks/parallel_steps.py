"""Step times of one rank with all processors, and of several ranks that share the processors.

The engines have the same random weights and run in turn, so that disturbances affect all. A time is
the median over its turns; a ratio compares neighbouring turns.
"""

import gc
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from minillm.api.sampling_params import SamplingParams
from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.llm import LLM
from minillm.parallel import groups
from minillm.plan import machine

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.parallel_steps          two ranks, shared memory and sockets
  python -m minillm.lab.benchmarks.parallel_steps --ranks 4 --batch 1 --batch 16
  python -m minillm.lab.benchmarks.parallel_steps --quick  small sizes, to check that it runs
"""
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
MODEL, QUICK_MODEL = "preset:qwen3-0.6b", "tiny"
WARM_UP = 3  # steps that are not timed
TURNS = 7  # turns of each engine, for each batch size
PREFILLS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes and repetitions: decode steps of each batch size, and prompts of one length."""

    ranks: int = 2
    batches: tuple[int, ...] = (1, 8)
    context: int = 128
    steps: int = 8
    prefill: int = 256


@dataclass(frozen=True)
class Steps:
    """Seconds of one kind of step, with one rank and with several."""

    step: str
    group: str
    one: tuple[float, ...]
    several: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Speed-up over one rank."""
        return median(a / b for a, b in zip(self.one, self.several, strict=True))

    @property
    def middle_half(self) -> tuple[float, float]:
        """First and third quartile of the speed-up."""
        low, _, high = quantiles(a / b for a, b in zip(self.one, self.several, strict=True))
        return low, high


def kinds_of_ranks(ranks: int, has_experts: bool) -> dict[str, dict[str, Any]]:
    """Kinds of parallelism by name, with the engine's arguments: "tp" splits each layer,
    with all-reduce over shared memory or sockets; "pp" has pipeline stages; "dp" has copies of the
    model; "ep" distributes whole experts; "dp, ep" has copies that share the experts."""
    shared = {"tensor_parallel_size": ranks}
    found = {"tp, memory": shared, "tp, sockets": shared, "pp": {"pipeline_parallel_size": ranks}}
    found["dp"] = {"data_parallel_size": ranks}
    if has_experts:
        whole = {"enable_expert_parallel": True}
        found |= {"ep": shared | whole, "dp, ep": found["dp"] | whole}
    if not groups.shared_memory_works():
        del found["tp, memory"]
    return found


def open_engine(
    model: str, dtype: str, sizes: Sizes, kind: str = "", fields: Mapping[str, Any] = NO_FIELDS
) -> LLM:
    """An engine without a prefix cache, so that every prompt is computed."""
    has_memory = groups.shared_memory_works() and "sockets" not in kind
    with patch.object(groups, "shared_memory_works", lambda: has_memory):
        return LLM(
            model,
            dtype=dtype,
            device="cpu",
            load_format="auto" if model == QUICK_MODEL else "dummy",
            max_model_len=max(sizes.context + sizes.steps + 32, sizes.prefill + 1),
            kv_cache_memory_bytes=2**28,
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=max(2048, sizes.context * max(sizes.batches)),
            enable_prefix_caching=False,
            **fields,
        )


def add(llm: LLM, name: str, length: int, max_tokens: int) -> None:
    """Add a greedy request with a prompt of `length` tokens."""
    width = llm.engine.source.config.vocab_size
    ids = [(7919 * place + len(name)) % width for place in range(length)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add(llm.engine.make_request(name, None, ids, params))


def timed(llm: LLM) -> float:
    """Seconds of a step, with garbage collection off."""
    gc.disable()
    start = perf_counter()
    llm.engine.step()
    taken = perf_counter() - start
    gc.enable()
    return taken


def decode_times(engines: Sequence[LLM], batch: int, sizes: Sizes) -> list[list[float]]:
    """Seconds per decode step of `batch` sequences, for each engine and turn."""
    return [
        [decode_turn(llm, f"{batch}-{turn}", batch, sizes) for llm in engines]
        for turn in range(TURNS)
    ]


def decode_turn(llm: LLM, name: str, batch: int, sizes: Sizes) -> float:
    """Mean seconds per token of each sequence. Tokens are counted, because a step of a pipeline
    advances only a part of the sequences. At the end nothing is in flight, so that nothing runs
    during another engine's turn."""
    for place in range(batch):
        add(llm, f"{name}-{place}", sizes.context, sizes.steps + WARM_UP * 8)
    for _ in range(WARM_UP):
        llm.engine.step()
    before, taken = num_tokens(llm), 0.0
    while num_tokens(llm) - before < batch * sizes.steps:
        taken += timed(llm)
    found = taken * batch / (num_tokens(llm) - before)
    for place in range(batch):
        llm.engine.abort(f"{name}-{place}")
    return found


def num_tokens(llm: LLM) -> int:
    """Number of tokens of all running sequences."""
    return sum(len(each.token_ids) for each in llm.engine.scheduler.sequences.values())


def prefill_times(engines: Sequence[LLM], sizes: Sizes) -> list[list[float]]:
    """Seconds of prefill steps of one prompt, after one warm-up step."""
    times = []
    for turn in range(PREFILLS + 1):
        for llm in engines:
            add(llm, f"prefill {turn}", sizes.prefill, 1)
        times.append([timed(llm) for llm in engines])
    return times[1:]


def measure(model: str, dtype: str, sizes: Sizes, terminal: Terminal) -> list[Steps]:
    """Measure all kinds of steps."""
    found: list[Steps] = []
    engines: list[LLM] = []
    try:
        with terminal.progress(f"{model}: opening"):
            engines.append(open_engine(model, dtype, sizes))
            has_experts = engines[0].engine.source.config.moe is not None
            kinds = kinds_of_ranks(sizes.ranks, has_experts)
            engines += [open_engine(model, dtype, sizes, *each) for each in kinds.items()]
        names = list(kinds)
        for batch in sizes.batches:
            with terminal.progress(f"{model}: decode, {batch}"):
                one, *several = zip(*decode_times(engines, batch, sizes), strict=True)
            pairs = zip(names, several, strict=True)
            found += [Steps(f"decode, {batch}", name, one, each) for name, each in pairs]
        with terminal.progress(f"{model}: prefill"):
            one, *several = zip(*prefill_times(engines, sizes), strict=True)
        pairs = zip(names, several, strict=True)
        found += [Steps(f"prefill, {sizes.prefill}", name, one, each) for name, each in pairs]
    finally:
        for llm in engines:
            llm.close()
    return found


def table(steps: Sequence[Steps]) -> list[list[str]]:
    """Rows: step, parallelism, milliseconds with one and several ranks, speed-up, quartiles."""
    rows = []
    for each in steps:
        low, high = each.middle_half
        one, several = (f"{median(times) * 1e3:,.1f}" for times in (each.one, each.several))
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([each.step, each.group, one, several, f"{each.speed:.2f}", spread])
    return rows


def as_json(model: str, dtype: str, sizes: Sizes, steps: Sequence[Steps]) -> dict[str, Any]:
    """All measurements as JSON data."""
    return {
        "benchmark": "parallel_steps",
        "machine": machine.cpu_name(),
        "processors": machine.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "model": model,
        "dtype": dtype,
        "sizes": asdict(sizes),
        "threads": torch.get_num_threads(),
        "steps": [asdict(each) | {"speed": each.speed} for each in steps],
    }


def quick(ranks: int = 2) -> tuple[str, Sizes]:
    """A small model and sizes, to check that the benchmark runs."""
    return QUICK_MODEL, Sizes(ranks, (1,), context=16, steps=4, prefill=32)


def show(model: str, sizes: Sizes, steps: Sequence[Steps], terminal: Terminal) -> None:
    """Print the table."""
    terminal.heading(f"{model}: milliseconds per step, one rank and {sizes.ranks} ranks")
    columns = ["step", "parallelism", "1 rank", f"{sizes.ranks} ranks", "speed-up", "quartiles"]
    terminal.table(columns, table(steps))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table and JSON."""
    parser = benchmark_parser("parallel_steps", __doc__, EXAMPLES)
    parser.add_argument("--model", metavar="NAME", default=MODEL, help=f"shape ({MODEL})")
    parser.add_argument("--dtype", metavar="NAME", default="auto")
    parser.add_argument("--ranks", metavar="N", type=int, default=2)
    parser.add_argument("--batch", metavar="N", type=int, action="append", help="may be repeated")
    parser.add_argument("--steps", metavar="N", type=int, default=Sizes.steps)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    batches = tuple(chosen.batch or Sizes.batches)
    sizes = Sizes(chosen.ranks, batches, steps=chosen.steps)
    model = chosen.model
    if chosen.quick:
        model, sizes = quick(chosen.ranks)
    steps = measure(model, chosen.dtype, sizes, terminal)
    show(model, sizes, steps, terminal)
    write_result(as_json(model, chosen.dtype, sizes, steps), chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
