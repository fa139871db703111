"""Measure speed, and compare it with upper bounds and other engines."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError, did_you_mean
from minillm.lab.commands.bench_options import BENCHMARKS, MODEL, QUICK_MODEL
from minillm.lab.commands.bench_options import add_options as add_options

USAGE = "WHAT [MODEL] [options]"
EXAMPLES = """\
'minillm bench WHAT --help' lists the options of a benchmark. --vs needs the
other engines; 'make peers' installs each in its own environment.

examples:
  minillm bench decode preset:qwen3-0.6b --batch 1,16 --context 128,1024
  minillm bench decode --vs vllm,openvino,transformers --beside 2 --isa avx2
  minillm bench decode --quantization int4 --vs llamacpp,openvino --json FILE
  minillm bench serve http://localhost:8000 --request-rate 1,2,4
"""


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the benchmark, print a table, write JSON, and return the exit code."""
    from minillm.plan import machine

    benchmark = BENCHMARKS[args.what]
    check_file("--json", args.json)
    check_file("--plot", getattr(args, "plot", None))
    args.given = frozenset(name for name, value in vars(args).items() if value is not None)
    for name, defaults in benchmark.options.items():
        if name not in args.given:
            setattr(args, name, defaults[args.quick])
    if benchmark.takes_model and args.what != "serve":
        args.model = args.model or (QUICK_MODEL if args.quick else MODEL)
        is_quantised = getattr(args, "quantization", None) is not None  # fast in bf16 everywhere
        on_gpu = (getattr(args, "device", None) or "cpu") != "cpu"
        fast = on_gpu or machine.cpu_has_bf16() or is_quantised
        args.dtype = args.dtype or ("bfloat16" if fast else "float32")
        args.threads = args.threads or machine.cpu_count()
    return int(import_module(benchmark.module).run(args, terminal))


def check_file(option: str, name: str | None) -> None:
    """Reject an output path that cannot be written, before the benchmark starts."""
    if name is not None and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
        raise ConfigError(f"{option} {name}: this is a folder, or its folder does not exist.")


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
    result: dict[str, Any],
    args: Namespace,
    terminal: Terminal,
    show: Callable[[Mapping[str, Any], Terminal], None],
) -> int:
    """Print the table and write the JSON; returns exit code 1 if minillm itself failed."""
    from minillm.lab.benchmarks.engine_process import OWN

    show(result, terminal)
    if args.json is not None:
        text = json.dumps(result, separators=(",", ":") if args.what == "serve" else None)
        Path(args.json).write_text(text + "\n", "utf-8")
    return 1 if OWN in result.get("left_out", {}) else 0


def engines_of(
    text: str, device: str = "cpu", quantization: str | None = None, kv_cache_dtype: str = "auto"
) -> tuple[str, ...]:
    """minillm and the engines that --vs names."""
    from minillm.api.arguments import check_kv_cache_dtype
    from minillm.lab.benchmarks.engine_process import OWN, PEERS, QUANTISED_PEERS

    check_kv_cache_dtype(kv_cache_dtype)
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
    if kv_cache_dtype != "auto":
        if device != "cpu":
            raise ConfigError(f"--kv-cache-dtype {kv_cache_dtype} is for a CPU; leave it out.")
        if others := [name for name in names if name != "openvino"]:
            raise ConfigError(
                f"--vs {others[0]} runs with a cache of 16 bits only; with --kv-cache-dtype "
                f"{kv_cache_dtype} compare with openvino."
            )
    if device != "cpu" and names:
        raise ConfigError(f"--vs compares on a CPU only; leave it out with --device {device}.")
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"--device is {device!r}; it must be cpu or cuda.")
    return (OWN, *dict.fromkeys(names))


def model_for(
    name: str, dtype: str, terminal: Terminal, layers: int | None = None, as_folder: bool = True
) -> str:
    """The model to open. For other engines (`as_folder`), or cut to some layers, a preset becomes a
    folder."""
    if name.startswith("preset:"):
        if not as_folder and layers is None:
            return name
        from minillm.lab.benchmarks.checkpoint import checkpoint_of

        with terminal.progress("Writing random weights"):
            folder = checkpoint_of(name.removeprefix("preset:"), dtype, layers)
        terminal.remark(f"{name} with random weights is in {folder}")
        return str(folder)
    if layers is not None:
        raise ConfigError(f"--layers cuts presets only, and {name} is not a preset; leave it out.")
    if not as_folder:
        return name
    from minillm.models.checkpoint import find_folder

    return str(find_folder(name).resolve())
