"""`minillm bench serve`: load a server and measure it."""

import asyncio
import math
import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.benchmarks.plotting import check_plot
from minillm.lab.benchmarks.serving.bench import Plan
from minillm.lab.benchmarks.serving.figure import draw
from minillm.lab.benchmarks.serving.measurement import Wanted, measure
from minillm.lab.benchmarks.serving.server_process import free_port, serve_command, serving
from minillm.lab.benchmarks.serving.slo import parse_slo
from minillm.lab.benchmarks.serving.summary import Evaluation
from minillm.lab.benchmarks.serving.table import show
from minillm.lab.benchmarks.serving.target import base_url, is_url
from minillm.lab.benchmarks.serving.workload import Arrivals, parse_workload
from minillm.lab.commands.bench import finish, progress
from minillm.lab.commands.bench_options import MOST_REQUESTS
from minillm.lab.commands.plan import find_config

DEFAULT_RATES = (4.0,)


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the benchmark, print the report, write JSON and the figure. Exit code 1 if no request
    succeeded."""
    plan = plan_of(args)
    check_options(args)
    check_plot(args.plot)
    wanted = Wanted(
        plan=plan,
        search=args.search,
        target=args.target,
        tolerance=args.tolerance,
        model=args.served_model_name,
        api_key=args.api_key,
        timeout=args.timeout,
        chat=args.endpoint == "chat",
        kind=args.prompts,
        ignore_eos=not args.respect_eos,
        vocab_size=args.vocab_size or preset_vocabulary(args.model),
        hardware=args.label,
        dtype=args.dtype,
    )
    with progress(terminal) as say, server_of(args, say) as url:
        result = asyncio.run(measure(wanted, url, say, terminal.err.isatty()))
    finish(result, args, terminal, show)
    if args.plot is not None:
        draw(result, args.plot)
    return 0 if any(run["summary"]["ok"] for run in result["runs"]) else 1


def preset_vocabulary(model: str | None) -> int | None:
    """The size of a preset's vocabulary: presets have no tokenizer, so prompts are any ids."""
    if model is None or not model.startswith("preset:"):
        return None
    return find_config(model).vocab_size


@contextmanager
def server_of(args: Namespace, say: Any) -> Iterator[str]:
    """The address of the server: given, or of one that is started for this benchmark."""
    model = args.model or "tiny"
    if is_url(model):
        if args.server_options is not None:
            raise ConfigError("--server-options is for a MODEL; leave it out with a URL.")
        yield base_url(model)
        return
    try:
        options = shlex.split(args.server_options or "")
    except ValueError as error:
        raise ConfigError(f"--server-options has an error in its quotes: {error}.") from error
    if model.startswith("preset:") and "--load-format" not in options:
        options += ["--load-format", "dummy"]
    for name in ("dtype", "api_key", "served_model_name"):
        if getattr(args, name) is not None:
            options += [option(name), getattr(args, name)]
    port = free_port()
    say(f"Starting minillm serve {model}")
    with serving(serve_command(model, port, options), port) as url:
        yield url


def plan_of(args: Namespace) -> Plan:
    """The plan that the arguments ask for, after checking them."""
    workload = parse_workload(args.workload)
    arrivals, loads, limit = process_of(args)
    objectives = parse_slo(args.slo) if args.slo is not None else {}
    count = args.requests
    if args.warmup >= count:
        raise ConfigError(f"--warmup is {args.warmup}; it must be less than the {count} requests.")
    return Plan(
        workload=workload,
        arrivals=arrivals,
        loads=loads,
        count=count,
        seconds=seconds_of(args, loads),
        concurrency=limit,
        repeats=args.repeats,
        seed=args.seed,
        evaluation=Evaluation(objectives, args.warmup),
    )


def process_of(args: Namespace) -> tuple[Arrivals | None, tuple[float, ...], int | None]:
    """Arrivals (None for a closed loop), the loads of the sweep, and the limit of concurrency."""
    is_open = "request_rate" in args.given
    if args.concurrency is not None and not is_open:
        if args.burstiness is not None:
            raise ConfigError("--burstiness is for an open loop; give --request-rate, too.")
        return None, tuple(map(float, args.concurrency)), None
    if args.concurrency is not None and len(args.concurrency) > 1:
        raise ConfigError("--concurrency with --request-rate is a limit; give one number.")
    limit = args.concurrency[0] if args.concurrency else None
    loads = args.request_rate or DEFAULT_RATES
    return Arrivals(loads[0], args.burstiness or 1.0), loads, limit


def seconds_of(args: Namespace, loads: tuple[float, ...]) -> float | None:
    """--duration, after checking that it can be combined with the rest."""
    seconds: float | None = args.duration
    if seconds is None:
        return None
    if "requests" in args.given:
        raise ConfigError("--duration excludes --requests; leave one of them out.")
    if "request_rate" not in args.given and "concurrency" in args.given:
        raise ConfigError("--duration is for an open loop; give --request-rate, too.")
    if math.inf in loads:
        raise ConfigError("--duration needs finite rates; give --requests with the rate inf.")
    if not seconds <= MOST_REQUESTS / max(loads):
        raise ConfigError(
            f"--duration is {seconds:g}; it must give at most {MOST_REQUESTS:,} requests."
        )
    return seconds


def check_options(args: Namespace) -> None:
    """Reject options that need or exclude another one."""
    if args.endpoint == "chat" and args.prompts == "ids":
        raise ConfigError("--endpoint chat sends messages, which are text; leave out --prompts.")
    if args.search and args.slo is None:
        raise ConfigError("--search needs objectives; add --slo, such as ttft=500ms,tpot=50ms.")
    if args.search and "concurrency" in args.given:
        raise ConfigError("--search varies the request rate; leave out --concurrency.")
    rates = args.request_rate or ()
    if args.search and (rates[1:] or math.inf in rates):
        raise ConfigError("--search starts from one finite rate; give a single --request-rate.")


def option(name: str) -> str:
    """``served_model_name`` as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
