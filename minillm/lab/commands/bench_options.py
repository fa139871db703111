"""The benchmarks of `minillm bench` and their options.

They are apart from the commands, because the parser needs them on every start.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

MODEL, QUICK_MODEL = "preset:smollm2-135m", "tiny"
MOST_REQUESTS = 1_000_000


def within(
    kind: type, low: float, high: float = math.inf, above: bool = False, many: bool = False
) -> Callable[[str], Any]:
    """The type of an option whose value is a number from `low` (or `above` it) to `high`, or with
    `many` a tuple of such numbers, written as ``1,2``."""
    noun = {int: ("an integer", "a list of integers"), float: ("a number", "a list of numbers")}
    limits = [f"above {low:g}" if above else f"at least {low:g}"]
    limits += [f"at most {high:,.0f}"] if math.isfinite(high) else []

    def parse(text: str) -> Any:
        try:
            values = tuple(kind(part) for part in (text.split(",") if many else [text]))
        except ValueError:
            values = ()
        if not values or not all(low <= x <= high and not (above and x == low) for x in values):
            raise ArgumentTypeError(f"{text[:40]!r} is not {noun[kind][many]} {', '.join(limits)}")
        return values if many else values[0]

    return parse


def name_of(*names: str) -> Mapping[str, Any]:
    """The type of an option whose value is one of some names."""
    return MappingProxyType({"choices": names})


SIZES = within(int, 1, many=True)
SHARE = within(float, 0, 1, above=True)
POSITIVE = within(float, 0, above=True)
# Of each option: its value in the help, its type, and what it is.
OPTIONS: Mapping[str, tuple[str, Any, str]] = {
    "batch": ("1,16", SIZES, "batch sizes"),
    "context": ("128", SIZES, "prompt lengths, in tokens"),
    "new_tokens": ("N", within(int, 2), "output tokens per sequence"),
    "requests": ("N", within(int, 1, MOST_REQUESTS), "number of requests"),
    "repeats": ("N", within(int, 1, MOST_REQUESTS), "runs of each engine or load"),
    "vs": ("NAMES", str, "compare with transformers, vllm, openvino, llamacpp"),
    "threads": ("N", within(int, 1), "threads of each engine (all processors)"),
    "dtype": ("NAME", name_of("bfloat16", "float32"),
              "dtype of weights and KV cache (bfloat16 if it is fast here)"),
    "quantization": ("NAME", name_of("int8", "int4"), "weights in int8 or int4 (16 bits)"),
    "kv_cache_dtype": ("NAME", str, "KV cache in int8 (as --dtype)"),
    "device": ("NAME", str, "cpu or cuda"),
    "beside": ("N", within(int, 1), "run every engine also beside N busy processes"),
    "isa": ("NAME", str, "limit all engines to avx2, avx512, avx512_bf16 or amx (no limit)"),
    "layers": ("N", int, "only the first N layers of a preset"),
    "draft": ("MODEL", str, "draft model (tiny has tiny-draft)"),
    "plot": ("FILE", str, "plot the results to a .png, .svg or .pdf"),
    # Of `serve`:
    "request_rate": ("1,2,4", within(float, 0, above=True, many=True),
                     "offered loads in requests/s; inf sends all at once (4)"),
    "concurrency": ("1,8", SIZES,
                    "closed loop: requests at once; with --request-rate: the most at once"),
    "burstiness": ("B", POSITIVE, "shape of gamma arrivals: below 1 bursty, 1 Poisson, inf "
                   "constant (1)"),
    "duration": ("S", POSITIVE, "seconds of arrivals of each run, in place of --requests"),
    "workload": ("NAME[:key=value,...]", str,
                 "lognormal, fixed, shared-prefix, chat or long-short"),
    "endpoint": ("NAME", name_of("completions", "chat"), "completions or chat"),
    "prompts": ("KIND", name_of("ids", "text"), "send prompts as ids or text (ids if possible)"),
    "seed": ("N", within(int, 0), "seed of arrivals, lengths and prompts"),
    "slo": ("ttft=500ms,tpot=50ms", str, "objectives, of ttft, tpot and e2el"),
    "search": ("", bool, "find the highest rate that keeps the target attainment of --slo"),
    "target": ("X", SHARE, "target attainment"),
    "tolerance": ("X", SHARE, "relative tolerance of --search"),
    "warmup": ("N", within(int, 0), "first requests of each run that are not evaluated"),
    "served_model_name": ("NAME", str, "model to ask for (the server's first)"),
    "api_key": ("KEY", str, "key of the server"),
    "timeout": ("S", POSITIVE, "seconds of a whole request"),
    "respect_eos": ("", bool, "let the model end its output; lengths are then limits only"),
    "vocab_size": ("N", within(int, 8), "send random ids below N, for a server without tokenizer"),
    "server_options": ("TEXT", str,
                       'options of the server that is started, such as "--max-num-seqs 8"'),
    "label": ("TEXT", str, "hardware, for the figure (this machine's processor)"),
}  # fmt: skip
# Defaults of options: as usual, and with --quick.
Defaults = Mapping[str, tuple[Any, Any]]
NONE = (None, None)
ENGINE: Mapping[str, tuple[Any, Any]] = {"threads": NONE, "dtype": NONE}
CONTEST: Mapping[str, tuple[Any, Any]] = {
    **ENGINE,
    "repeats": (5, 2), "vs": ("", ""), "quantization": NONE, "kv_cache_dtype": NONE,
    "device": ("cpu", "cpu"), "beside": NONE, "isa": NONE,
}  # fmt: skip
STEPS: Mapping[str, tuple[Any, Any]] = {
    "batch": ((1, 16), (1, 2)),
    "context": ((128,), (16,)),
    "layers": NONE,
}
SERVE: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(OPTIONS, NONE),
    "requests": (100, 8), "repeats": (1, 1), "workload": ("lognormal", "lognormal"),
    "endpoint": ("completions", "completions"), "seed": (0, 0), "search": (False, False),
    "target": (0.9, 0.9), "tolerance": (0.05, 0.05), "warmup": (0, 0),
    "timeout": (600.0, 600.0), "respect_eos": (False, False),
}  # fmt: skip
ONLY_OTHERS = ("batch", "context", "new_tokens", "vs", "threads", "quantization",
               "kv_cache_dtype", "device", "beside", "isa", "layers", "draft")  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark measures, where its function `run(args, terminal)` is, and its options."""

    summary: str
    module: str
    options: Defaults
    takes_model: bool = True


COMPARE, OWN = "minillm.lab.commands.bench_compare", "minillm.lab.benchmarks"
BENCHMARKS: Mapping[str, Benchmark] = {
    "decode": Benchmark("decode steps, by batch and context", COMPARE,
                        {**STEPS, "new_tokens": (32, 6), **CONTEST}),
    "prefill": Benchmark("time to process the prompts", COMPARE, {**STEPS, **CONTEST}),
    "offline": Benchmark("throughput of requests of mixed lengths", COMPARE,
                         {"requests": (64, 4), **CONTEST}),
    "speculation": Benchmark("speculative decoding against plain decoding",
                             "minillm.lab.commands.bench_speculation",
                             {"batch": ((1, 4, 16, 64), (1, 2)), "new_tokens": (128, 6),
                              "repeats": (9, 2), "draft": NONE,
                              **ENGINE}),
    "serve": Benchmark("latency and throughput of a server under load",
                       "minillm.lab.commands.bench_serve",
                       {name: option for name, option in SERVE.items() if name not in ONLY_OTHERS}),
    "scheduler": Benchmark("scheduler alone, without a model", f"{OWN}.scheduler", {}, False),
    "parallel": Benchmark("collectives and ranks on this machine", f"{OWN}.parallel", {}, False),
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    """Declare each benchmark with its options."""
    each = parser.add_subparsers(
        dest="what", metavar="WHAT", title="benchmarks", required=True, prog="minillm bench"
    )
    for name, benchmark in BENCHMARKS.items():
        usage = f"minillm bench {name} {'[MODEL] ' * benchmark.takes_model}[options]"
        summary = benchmark.summary
        one = each.add_parser(name, help=summary, usage=usage, description=f"Measure: {summary}.")
        if benchmark.takes_model:
            url = " (tiny), or the URL of a running server" if name == "serve" else f" ({MODEL})"
            text = f"embedded name, folder, hub id or preset:NAME{url}"
            one.add_argument("model", metavar="MODEL", nargs="?", help=text)
        for option, (usual, _) in benchmark.options.items():
            add_option(one, option, usual)
        one.add_argument("--json", metavar="FILE", help="write all measurements to FILE")
        one.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")


def add_option(parser: ArgumentParser, name: str, usual: Any) -> None:
    """Declare one option; the value that it usually has is in its help."""
    metavar, kind, text = OPTIONS[name]
    shown = ",".join(map(str, usual)) if isinstance(usual, tuple) else usual
    text += "" if shown in (None, "") or isinstance(shown, bool) else f" ({shown})"
    more: dict[str, Any] = {"metavar": metavar, "type": kind}
    if isinstance(kind, Mapping):
        more = {"metavar": metavar, **kind}
    elif kind is bool:
        more = {"action": "store_true", "default": None}
    parser.add_argument(f"--{name.replace('_', '-')}", help=text, **more)
