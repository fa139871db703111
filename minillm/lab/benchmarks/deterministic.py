"""Cost of deterministic mode: milliseconds per step with the mode off and on.

Two engines with the same random weights alternate, step by step, so that disturbances affect both.
A time is the median over its steps. The ratio of the medians comes with the interquartile range of
the ratios of neighbouring steps.
"""

import gc
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch

from minillm.api.sampling_params import SamplingParams
from minillm.cli.terminal import Terminal
from minillm.execution.runner import runner_of
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.llm import LLM
from minillm.models.deterministic import TiledDecoder
from minillm.plan.machine import cpu_name

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.deterministic              two models, float32 and bfloat16
  python -m minillm.lab.benchmarks.deterministic --model DIR  a model's config, random weights
  python -m minillm.lab.benchmarks.deterministic --dtype float32 --json FILE
  python -m minillm.lab.benchmarks.deterministic --quick      small sizes, to check that it runs
"""
MADE_UP = "moe+mla"
MODELS = ("preset:smollm2-135m", MADE_UP)
# A small model with DeepSeek-V2's architecture; the presets with experts or MLA are too large.
MADE_UP_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "deepseek_v2",
        "architectures": ("DeepseekV2ForCausalLM",),
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1_408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "rope_theta": 10_000.0,
        "torch_dtype": "bfloat16",
    }
)


@dataclass(frozen=True)
class Sizes:
    """Sizes and repetitions of the measurement."""

    batches: tuple[int, ...] = (1, 16, 64)  # batch sizes of decode steps
    context: int = 128  # prompt length of decode steps
    prefill: int = 512
    steps: int = 15
    prefills: int = 5


QUICK = Sizes((1, 3), 8, 20, 3, 2)


@dataclass(frozen=True)
class Cost:
    """Seconds of one kind of step with the mode off and on, in pairs of neighbouring steps."""

    model: str
    dtype: str
    step: str
    tiles: tuple[int, ...]
    off: tuple[float, ...]
    on: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Ratio of the medians, on over off."""
        return median(self.on) / median(self.off)

    @property
    def middle_half(self) -> tuple[float, float]:
        """First and third quartile of the ratios of neighbouring steps."""
        low, _, high = quantiles(b / a for a, b in zip(self.off, self.on, strict=True))
        return low, high


def open_engine(model: str, dtype: str, deterministic: bool, sizes: Sizes) -> LLM:
    """An engine without a prefix cache, so that every prompt is computed."""
    longest = max(sizes.context + sizes.steps + 16, sizes.prefill + 1)
    return LLM(
        model,
        dtype=dtype,
        device="cpu",
        load_format="auto" if model == "tiny" else "dummy",
        max_model_len=longest,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=max(2_048, sizes.context * max(sizes.batches)),
        enable_prefix_caching=False,
        deterministic=deterministic,
    )


def add(llm: LLM, name: str, length: int, max_tokens: int) -> None:
    """Add a greedy request with a prompt of `length` tokens."""
    width = llm.engine.source.config.vocab_size
    ids = [(7919 * place + len(name)) % width for place in range(length)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add(llm.engine.make_request(name, None, ids, params))


def timed(action: Callable[[], object]) -> float:
    """Seconds of `action`, with garbage collection off."""
    gc.disable()
    start = perf_counter()
    action()
    taken = perf_counter() - start
    gc.enable()
    return taken


def decode_times(engines: Sequence[LLM], batch: int, sizes: Sizes) -> list[list[float]]:
    """Times of decode steps of `batch` sequences, after two warm-up steps."""
    names = [f"{batch}-{place}" for place in range(batch)]
    for llm in engines:
        for name in names:
            add(llm, name, sizes.context, sizes.steps + 8)
        for _ in range(3):
            llm.engine.step()
    times = [[timed(llm.engine.step) for llm in engines] for _ in range(sizes.steps)]
    for llm in engines:
        for name in names:
            llm.engine.abort(name)
    return times


def prefill_times(engines: Sequence[LLM], sizes: Sizes) -> list[list[float]]:
    """Times of prefill steps of one prompt, after one warm-up step."""
    times = []
    for turn in range(sizes.prefills + 1):
        for llm in engines:
            add(llm, f"prefill {turn}", sizes.prefill, 1)
        times.append([timed(llm.engine.step) for llm in engines])
    return times[1:]


def measure(model: str, path: str, dtype: str, sizes: Sizes, terminal: Terminal) -> Iterator[Cost]:
    """Measure all steps of one model in one dtype."""
    with terminal.progress(f"{model} in {dtype}: opening"):
        engines = [open_engine(path, dtype, mode, sizes) for mode in (False, True)]
    tiled = runner_of(engines[1].engine.runner).model
    tiles = tiled.tiles if isinstance(tiled, TiledDecoder) else ()
    for batch in sizes.batches:
        with terminal.progress(f"{model} in {dtype}: decode, {batch}"):
            off, on = zip(*decode_times(engines, batch, sizes), strict=True)
        yield Cost(model, dtype, f"decode, {batch}", tiles, off, on)
    with terminal.progress(f"{model} in {dtype}: prefill"):
        off, on = zip(*prefill_times(engines, sizes), strict=True)
    yield Cost(model, dtype, f"prefill, {sizes.prefill}", tiles, off, on)
    for llm in engines:
        llm.close()


def table(costs: Sequence[Cost]) -> list[list[str]]:
    """Rows: model and dtype, step, milliseconds off and on, ratio, quartiles of the ratio."""
    rows, shown = [], ""
    for cost in costs:
        name = f"{cost.model}, {cost.dtype}"
        low, high = cost.middle_half
        off, on = (f"{median(times) * 1e3:,.1f}" for times in (cost.off, cost.on))
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([name * (name != shown), cost.step, off, on, f"{cost.ratio:.2f}", spread])
        shown = name
    return rows


def statement(costs: Sequence[Cost]) -> list[str]:
    """The tile sizes of matrix products, and the smallest and largest ratio."""
    tiles = {(cost.model, cost.dtype): cost.tiles for cost in costs}
    lines = [
        f"{model}, {dtype}: tiles of {' or '.join(map(str, sizes))} rows."
        if sizes
        else f"{model}, {dtype}: every row by itself."
        for (model, dtype), sizes in tiles.items()
    ]
    extremes = [chosen(costs, key=lambda cost: cost.ratio) for chosen in (min, max)]
    least, most = (f"{x.ratio:.2f} ({x.model}, {x.dtype}, {x.step})" for x in extremes)
    return [*lines, f"A deterministic step takes from {least} to {most} times as long."]


def as_json(costs: Sequence[Cost]) -> dict[str, object]:
    """All measurements and conclusions as JSON data."""
    return {
        "benchmark": "deterministic",
        "machine": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "costs": [
            asdict(cost) | {"ratio": cost.ratio, "middle_half": cost.middle_half} for cost in costs
        ],
        "statement": statement(costs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table, the conclusions and JSON."""
    parser = benchmark_parser("deterministic", __doc__, EXAMPLES)
    parser.add_argument("--model", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--dtype", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    sizes = QUICK if chosen.quick else Sizes()
    costs: list[Cost] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(MADE_UP_CONFIG)), "utf-8")
        for model in chosen.model or (("tiny",) if chosen.quick else MODELS):
            for dtype in chosen.dtype or ("float32", "bfloat16"):
                path = folder if model == MADE_UP else model
                costs += measure(model, path, dtype, sizes, terminal)
    terminal.heading("Milliseconds per step with deterministic mode off and on")
    terminal.table(["", "step", "off", "on", "ratio", "quartiles"], table(costs))
    for line in statement(costs):
        terminal.paragraph(line)
    write_result(as_json(costs), chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
