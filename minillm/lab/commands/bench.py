"""Measure speed, and compare it with upper bounds and other engines."""

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.options import positive_integers
from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError, did_you_mean
from minillm.lab.commands import bench_serve_options as serve

if TYPE_CHECKING:
    from minillm.config import ModelConfig
    from minillm.lab.benchmarks.compare import Work

USAGE = "WHAT [MODEL] [options]"
EXAMPLES = """\
benchmarks:
  decode       decode steps, by batch and context
  prefill      time to process the prompts
  offline      throughput of requests of mixed lengths
  startup      time from process start to the first token
  scale        decode steps over a grid of batches and contexts
  speculation  speculative decoding against plain decoding
  serve        latency and throughput of a server under load
  scheduler    scheduler alone, without a model
  parallel     collectives and ranks on this machine, and predictions
  kernels      Triton kernels, on a GPU

--vs needs the other engines; 'make peers' installs each in its own environment.

examples:
  minillm bench decode preset:qwen3-0.6b --batch 1,16 --context 128,1024
  minillm bench decode --vs vllm,openvino,transformers --beside 2 --isa avx2
  minillm bench decode --quantization int4 --vs llamacpp,openvino --json FILE
  minillm bench serve http://localhost:8000 --request-rate 1,2,4
"""
MODEL, QUICK_MODEL = "preset:smollm2-135m", "tiny"
COMPARED = ("decode", "prefill", "offline")
CONTEST = ("repeats", "vs", "threads", "dtype", "device", "beside", "isa", "quantization")
DRAFTING = ("draft", "acceptance")
# The options of each benchmark besides --json and --quick; any other option is an error.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "decode": ("batch", "context", "new_tokens", "layers", *CONTEST),
    "prefill": ("batch", "context", "layers", *CONTEST),
    "offline": ("requests", "lengths", *CONTEST),
    "startup": ("repeats", "vs", "threads", "dtype"),
    "scale": ("batch", "context", "new_tokens", "repeats", "threads", "dtype", "plot"),
    "speculation": ("batch", "new_tokens", "repeats", "vs", "threads", "dtype", *DRAFTING),
    "serve": (*serve.OWN, *serve.SHARED),
    "scheduler": (),
    "parallel": (),
    "kernels": (),
}
DEFAULTS: Mapping[str, Any] = {
    "batch": "1,16", "context": "128", "new_tokens": 32, "repeats": 5, "requests": 64,
    "lengths": "lognormal", "vs": "",
}  # fmt: skip
QUICK: Mapping[str, Any] = {
    "batch": "1,2", "context": "16", "new_tokens": 6, "repeats": 2, "requests": 4,
    "lengths": "lognormal", "vs": "",
}  # fmt: skip
# Defaults of single benchmarks that override DEFAULTS and QUICK.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "scale": {"batch": "1,2,4,8,16,32,64", "context": "128,512,1024,2048,4096,8192",
              "new_tokens": 8, "repeats": 3},
    "speculation": {"batch": "1,4,16,64", "new_tokens": 128, "repeats": 9},
}  # fmt: skip
QUICK_SIZES: Mapping[str, Mapping[str, Any]] = {"scale": {"context": "32,64", "new_tokens": 4}}
MODULES: Mapping[str, str] = {
    "scheduler": "minillm.lab.benchmarks.scheduler", "parallel": "minillm.lab.benchmarks.parallel",
    "kernels": "minillm_kernels.bench.__main__",
}  # fmt: skip
# At most: sequences at once, prompt tokens, output tokens.
OFFLINE: Mapping[str, tuple[int, int, int]] = {
    "lognormal": (64, 1024, 512), "uniform": (256, 1024, 1024),
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    option = parser.add_argument
    option("what", metavar="WHAT", help="the benchmark, see below")
    option("model", metavar="MODEL", nargs="?",
           help=f"embedded name, folder, hub id or preset:NAME ({MODEL})")  # fmt: skip
    option("--batch", metavar="1,16", help="batch sizes (1,16)")
    option("--context", metavar="128", help="prompt lengths, in tokens (128)")
    option("--new-tokens", metavar="N", type=int, help="output tokens per sequence (32)")
    option("--requests", metavar="N", type=int, help="offline, serve: number of requests (64, 100)")
    option("--lengths", metavar="NAME",
           help="offline: lognormal, or uniform from 100 to 1024 (lognormal)")  # fmt: skip
    option("--repeats", metavar="N", type=int, help="runs of each engine (5)")
    option("--vs", metavar="NAMES", help="compare with transformers, vllm, openvino, llamacpp")
    option("--threads", metavar="N", type=int, help="threads of each engine (all processors)")
    option("--dtype", metavar="NAME",
           help="dtype of weights and KV cache (bfloat16 if it is fast here)")  # fmt: skip
    option("--quantization", metavar="NAME", help="weights in int8 or int4 (16 bits)")
    option("--device", metavar="NAME", help="cpu or cuda (cpu)")
    option("--beside", metavar="N",
           help="run every engine also beside N busy processes (not done)")  # fmt: skip
    option("--isa", metavar="NAME",
           help="limit all engines to avx2, avx512, avx512_bf16 or amx (no limit)")  # fmt: skip
    option("--layers", metavar="N", type=int, help="only the first N layers of a preset")
    option("--draft", metavar="MODEL", help="speculation: draft model (tiny has tiny-draft)")
    option("--acceptance", metavar="0.9,0.8",
           help="speculation: accept drafts at random with these rates")  # fmt: skip
    option("--plot", metavar="FILE", help="scale, serve: plot the results to a .png, .svg or .pdf")
    option("--json", metavar="FILE", help="write all measurements to FILE")
    option("--quick", action="store_true", help="small sizes, to check that it runs")
    serve.add_serve_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the benchmark, print a table, write JSON, and return the exit code."""
    if args.what not in OPTIONS:
        raise ConfigError(
            f"There is no benchmark {args.what!r}; the benchmarks are {', '.join(OPTIONS)}."
            f"{did_you_mean(args.what, OPTIONS)}"
        )
    refuse_options(args)
    check_file("--json", args.json)
    return RUNNERS.get(args.what, compare)(args, terminal)


def refuse_options(args: Namespace) -> None:
    """Reject options that the benchmark does not use."""
    own = OPTIONS[args.what]
    for name in dict.fromkeys(name for names in OPTIONS.values() for name in names):
        if name not in own and getattr(args, name) is not None:
            owners = [what for what, names in OPTIONS.items() if name in names]
            raise ConfigError(
                f"--{name.replace('_', '-')} is for {', '.join(owners)}; leave it out of "
                f"'minillm bench {args.what}'."
            )
    if not own and args.model is not None:
        raise ConfigError(f"'minillm bench {args.what}' takes no model; leave out {args.model!r}.")


def check_file(option: str, name: str | None) -> None:
    """Reject an output path that cannot be written, before the benchmark starts."""
    if name is not None and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
        raise ConfigError(f"{option} {name}: this is a folder, or its folder does not exist.")


def compare(args: Namespace, terminal: Terminal) -> int:
    """The benchmarks decode, prefill and offline."""
    from minillm.lab.benchmarks.processor import limited

    isa = isa_of(args.isa, args.device)
    with limited(isa):  # torch is imported in this block
        work = replace(work_of(args, terminal), isa=isa)
        from minillm.lab.benchmarks.compare import measure
        from minillm.lab.benchmarks.compare_table import show

        with progress(terminal) as say:
            found = measure(work, say)
    return finish(found, args, terminal, show)


def isa_of(name: str | None, device: str | None) -> str | None:
    """The instruction set to which --isa, or else the variable of the C functions, limits all
    engines."""
    from minillm.lab.benchmarks.processor import FLAGS, ISA, check_isa, processor_class

    if name is None:
        given = os.environ.get(ISA)
        return given if given in FLAGS else None
    check_isa(name, processor_class())
    if device not in (None, "cpu"):
        raise ConfigError(f"--isa is for a CPU; leave it out with --device {device}.")
    return name


@contextmanager
def progress(terminal: Terminal) -> Iterator[Callable[[str], None]]:
    """Show progress messages: one line that is overwritten on a terminal, else a line each."""
    live = terminal.err.isatty()

    def say(what: str) -> None:
        terminal.err.write(f"\r\x1b[K{what[: terminal.width - 4]} ..." if live else what + "\n")
        terminal.err.flush()

    try:
        yield say
    finally:
        if live:
            terminal.err.write("\r\x1b[K")


def finish(
    found: dict[str, Any],
    args: Namespace,
    terminal: Terminal,
    show: Callable[[Mapping[str, Any], Terminal], None],
) -> int:
    """Print the table and write the JSON; returns exit code 1 if minillm itself failed."""
    from minillm.lab.benchmarks.engine_process import OWN

    show(found, terminal)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found) + "\n", "utf-8")
    return 1 if OWN in found["left_out"] else 0


def work_of(args: Namespace, terminal: Terminal) -> "Work":
    """The comparison that the arguments ask for, after checking them."""
    from minillm.lab.benchmarks.beside import parse_count

    given, beside = settings(args), parse_count(args.beside)
    engines = engines_of(given["vs"], given["device"], args.quantization)
    name = args.model or (QUICK_MODEL if args.quick else MODEL)
    from minillm.lab.commands.plan import find_config

    config = find_config(name)
    cases = cases_of(args.what, given, config)
    check_dtype(given["dtype"])
    model = model_for(name, engines, given["dtype"], terminal, args.layers)
    if args.layers is not None:
        name, config = f"{name}, {args.layers} layers", find_config(model)
    from minillm.lab.benchmarks.compare import Work
    from minillm.lab.commands.quantised_weights import weights_of

    weights = weights_of(model, args.quantization, given["dtype"], given["device"] == "cpu")
    return Work(
        what=args.what,
        name=name,
        model=model,
        config=config,
        cases=cases,
        repeats=given["repeats"],
        engines=engines,
        threads=given["threads"],
        dtype=given["dtype"],
        device=given["device"],
        requests=given["requests"],
        lengths=given["lengths"],
        extra=0 if args.quick else given["repeats"],
        fresh=not args.quick,
        beside=beside,
        quantization=args.quantization,
        weights=weights,
    )


def settings(args: Namespace) -> dict[str, Any]:
    """The options, with defaults for those that are not given."""
    from minillm.plan import machine

    is_quantised = getattr(args, "quantization", None) is not None  # fast in bf16 everywhere
    values = dict(QUICK if args.quick else DEFAULTS)
    values |= (QUICK_SIZES if args.quick else SIZES).get(args.what, {})
    values |= {
        "threads": machine.cpu_count(),
        "dtype": "bfloat16" if machine.cpu_has_bf16() or is_quantised else "float32",
        "device": "cpu",
    }
    values |= {name: value for name in values if (value := getattr(args, name)) is not None}
    for name in ("new_tokens", "repeats", "requests", "threads"):
        least = 2 if name == "new_tokens" else 1
        if values[name] < least:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {values[name]}; it must be at least {least}.")
    for name in ("batch", "context"):
        values[name] = positive_integers(f"--{name}", values[name])
    return values


def engines_of(text: str, device: str, quantization: str | None = None) -> tuple[str, ...]:
    """minillm and the engines that --vs names."""
    from minillm.lab.benchmarks.engine_process import OWN, PEERS, QUANTISED_PEERS
    from minillm.lab.commands.quantised_weights import check_quantization

    check_quantization(quantization)

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ConfigError(
                f"--vs has no engine {name!r}; the engines are {', '.join(PEERS)}."
                f"{did_you_mean(name, PEERS)}"
            )
    others = [name for name in names if name not in QUANTISED_PEERS]
    if quantization is not None and others:
        raise ConfigError(
            f"--vs {others[0]} runs 16-bit weights only; with --quantization compare with "
            f"{' or '.join(QUANTISED_PEERS)}."
        )
    if device != "cpu" and names:
        raise ConfigError(f"--vs compares on a CPU only; leave it out with --device {device}.")
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"--device is {device!r}; it must be cpu or cuda.")
    return (OWN, *dict.fromkeys(names))


def check_dtype(name: str) -> None:
    """Reject a dtype that some of the engines do not support."""
    if name not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype is {name!r}; it must be bfloat16 or float32.")


def cases_of(what: str, given: Mapping[str, Any], config: "ModelConfig") -> tuple[Any, ...]:
    """Every batch at every context; for "offline" one case with the maximum lengths."""
    from minillm.lab.benchmarks.contest import Case

    longest = config.longest_context
    if what == "offline":
        if given["lengths"] not in OFFLINE:
            raise ConfigError(
                f"--lengths is {given['lengths']!r}; it must be lognormal or uniform."
            )
        max_num_seqs, prompt, new_tokens = OFFLINE[given["lengths"]]
        batch = min(max_num_seqs, given["requests"])
        return (Case(batch, min(prompt, longest // 2), min(new_tokens, longest // 4)),)
    new_tokens = 1 if what == "prefill" else given["new_tokens"]
    for context in given["context"]:
        if context + new_tokens > longest:
            raise ConfigError(
                f"--context is {context}; with {new_tokens} new tokens it exceeds the "
                f"{longest} positions of this model."
            )
    return tuple(
        Case(batch, context, new_tokens) for context in given["context"] for batch in given["batch"]
    )


def model_for(
    name: str, engines: tuple[str, ...], dtype: str, terminal: Terminal, layers: int | None = None
) -> str:
    """The model to open. For other engines, or cut to some layers, a preset becomes a folder."""
    if name.startswith("preset:"):
        if len(engines) == 1 and layers is None:
            return name
        from minillm.lab.benchmarks.checkpoint import checkpoint_of

        with terminal.progress("Writing random weights"):
            folder = checkpoint_of(name.removeprefix("preset:"), dtype, layers)
        terminal.remark(f"{name} with random weights is in {folder}")
        return str(folder)
    if layers is not None:
        raise ConfigError(f"--layers cuts presets only, and {name} is not a preset; leave it out.")
    if len(engines) == 1:
        return name
    from minillm.models.checkpoint import find_folder

    return str(find_folder(name).resolve())


def startup(args: Namespace, terminal: Terminal) -> int:
    """Time from process start to the first token."""
    given = settings(args)
    engines = engines_of(given["vs"], "cpu")
    check_dtype(given["dtype"])
    name = args.model or (QUICK_MODEL if args.quick else MODEL)
    from minillm.lab.commands.plan import find_config

    find_config(name)
    # Creating random weights is not part of startup, so a preset is always written to a folder.
    folder = model_for(name, (*engines, ""), given["dtype"], terminal)
    from minillm.lab.benchmarks import startup as benchmark

    with progress(terminal) as say:
        found = benchmark.measure(
            name, folder, engines, given["threads"], given["dtype"], given["repeats"], say
        )
    return finish(found, args, terminal, benchmark.show)


def elsewhere(args: Namespace, terminal: Terminal) -> int:
    """Run a benchmark that is a separate module (``python -m MODULE``)."""
    code: int = import_module(MODULES[args.what]).main(passed_on(args))
    return code


def in_own_module(args: Namespace, terminal: Terminal) -> int:
    """A benchmark whose command is in a module and a function of its name."""
    module = import_module(f"minillm.lab.commands.bench_{args.what}")
    return int(getattr(module, args.what)(args, terminal))


def passed_on(args: Namespace) -> list[str]:
    """The arguments --quick and --json for a benchmark module."""
    return ["--quick"] * args.quick + (["--json", args.json] if args.json is not None else [])


RUNNERS: Mapping[str, Callable[[Namespace, Terminal], int]] = {
    "startup": startup,
    **dict.fromkeys(("scale", "speculation", "serve"), in_own_module),
    **dict.fromkeys(MODULES, elsewhere),
}  # fmt: skip
