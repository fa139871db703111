"""`minillm bench startup`: seconds from the start of a process to its first token.

minillm runs ``minillm generate``; the other engines run a short script in their own environment
that loads the model and generates one token (peers/run.py). The first run of each engine is not
counted: it fills the page cache and compilation caches.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from minillm.cli.terminal import Terminal, seconds
from minillm.lab.benchmarks.checkpoint import cache_folder
from minillm.lab.benchmarks.contest import spread
from minillm.lab.benchmarks.engine_process import (
    OWN,
    RUN,
    EngineFailedError,
    end_group,
    environment,
    last_line,
    python_of,
)
from minillm.lab.benchmarks.others import watching
from minillm.lab.commands.bench import engines_of, finish, model_for, progress
from minillm.lab.commands.plan import find_config
from minillm.plan.machine import cpu_name

PROMPT = "Once upon a time"
TIMEOUT = 600.0


def run(args: Namespace, terminal: Terminal) -> int:
    """Check the arguments, start the engines, print the table and write JSON."""
    engines = engines_of(args.vs)
    find_config(args.model)
    # Creating random weights is not part of startup, so a preset is always written to a folder.
    folder = model_for(args.model, args.dtype, terminal)
    with progress(terminal) as say:
        found = measure(args.model, folder, engines, args.threads, args.dtype, args.repeats, say)
    return finish(found, args, terminal, show)


def command_of(name: str, folder: str, threads: int, dtype: str) -> list[str]:
    """The command of an engine; raises MissingPeerError if it is not installed."""
    if name == OWN:
        return [sys.executable, "-m", "minillm", "generate", PROMPT, "--model", folder,
                "--dtype", dtype, "--max-tokens", "2", "--ignore-eos"]  # fmt: skip
    told = {
        "prompt": list(range(1, len(PROMPT) + 1)),
        "model": folder,
        "dtype": dtype,
        "device": "cpu",
        "threads": threads,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "kv_cache_bytes": 2**30,
        "cache": str(cache_folder()),
    }
    return [python_of(name), str(RUN), name, json.dumps(told)]


def first_output(name: str, command: Sequence[str], threads: int, log: Path) -> tuple[float, float]:
    """Seconds until a process writes to its standard output, and the fraction of the processors
    that other programs used meanwhile. The process is ended afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        start = perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL,
            env=environment(name, threads), start_new_session=True,
        )  # fmt: skip
        try:
            with watching([process.pid]) as watch:
                first = process.stdout.read(1) if process.stdout else b""
                taken = perf_counter() - start
        finally:
            end_group(process)
    if not first:
        raise EngineFailedError(
            f"{name} ended without a token; last line of its log: {last_line(log)}"
        )
    return taken, watch.share


def measure(
    name: str,
    folder: str,
    engines: Sequence[str],
    threads: int,
    dtype: str,
    repeats: int,
    say: Callable[[str], Any] = lambda what: None,
) -> dict[str, Any]:
    """Start the engines in turn, `repeats` times after a warm-up."""
    left_out: dict[str, str] = {}
    runs: dict[str, list[tuple[float, float]]] = {}
    for number in range(-1, repeats):
        for engine in engines:
            if engine in left_out:
                continue
            say(f"{engine}: {'warm-up' if number < 0 else f'start {number + 1}'}")
            try:
                command = command_of(engine, folder, threads, dtype)
                log = cache_folder() / "logs" / f"{engine}-startup.log"
                runs.setdefault(engine, []).append(first_output(engine, command, threads, log))
            except EngineFailedError as error:
                left_out[engine] = str(error)
    results = [result(engine, each) for engine, each in runs.items() if engine not in left_out]
    return {
        "benchmark": "startup", "machine": cpu_name(), "model": name, "dtype": dtype,
        "threads": threads, "repeats": repeats, "left_out": left_out, "results": results,
        "statement": statement(results),
    }  # fmt: skip


def result(engine: str, runs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """JSON data of one engine: the first start separately, and all others."""
    first, *rest = runs
    return {
        "engine": engine,
        "first_run_seconds": first[0],
        "seconds": spread([taken for taken, _ in rest]),
        "others": max(others for _, others in rest),
        "runs": [taken for taken, _ in rest],
    }


def statement(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The startup time of the other engines relative to minillm."""
    own = [one["seconds"]["median"] for one in results if one["engine"] == OWN]
    return [
        f"{one['engine']} takes {one['seconds']['median'] / own[0]:.1f} times as long."
        for one in results
        if own and one["engine"] != OWN
    ]


def show(found: Mapping[str, Any], terminal: Terminal) -> None:
    """Print the table and the conclusions."""
    terminal.heading(f"startup: {found['model']}, {found['dtype']}, {found['machine']}")
    rows = [
        [one["engine"], *(seconds(one["seconds"][each]) for each in ("min", "median", "max")),
         seconds(one["first_run_seconds"]), f"{one['others']:.0%}"]
        for one in found["results"]
    ]  # fmt: skip
    if rows:
        terminal.table(
            ["process start to first token", "min", "median", "max", "first run", "others"], rows
        )
    for line in [*found["statement"], *found["left_out"].values()]:
        terminal.paragraph(line)


if __name__ == "__main__":
    raise SystemExit("This is no program; run 'minillm bench startup'.")
