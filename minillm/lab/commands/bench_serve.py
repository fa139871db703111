"""`minillm bench serve`: load a server and measure it."""

import asyncio
import json
import math
import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError, did_you_mean
from minillm.lab.commands.bench import check_dtype, check_file, progress

DEFAULT_RATES = "4"
REQUESTS, QUICK_REQUESTS = 100, 8
MOST_REQUESTS = 1_000_000
ENDPOINTS, KINDS = ("completions", "chat"), ("ids", "text")


def serve(args: Namespace, terminal: Terminal) -> int:
    """Run the benchmark, print the report, write JSON and the figure. Exit code 1 if no request
    succeeded."""
    from minillm.lab.benchmarks.scale_plot import check_plot
    from minillm.lab.benchmarks.serving.figure import draw
    from minillm.lab.benchmarks.serving.measurement import Wanted, measure
    from minillm.lab.benchmarks.serving.table import show

    plan = plan_of(args)
    check_options(args)
    check_file("--plot", args.plot)
    if args.plot is not None:
        check_plot(args.plot)
    wanted = Wanted(
        plan=plan,
        search=bool(args.search),
        target=share("--target", args.target, 0.9),
        tolerance=share("--tolerance", args.tolerance, 0.05),
        dollars_per_hour=args.dollars_per_hour,
        model=args.served_model_name,
        api_key=args.api_key,
        timeout=args.timeout or 600.0,
        chat=args.endpoint == "chat",
        kind=args.prompts,
        ignore_eos=not args.respect_eos,
        vocab_size=args.vocab_size or preset_vocabulary(args.model),
        hardware=args.label,
        dtype=args.dtype,
    )
    with progress(terminal) as say, server_of(args, say) as url:
        live = terminal.err.isatty()
        found = asyncio.run(measure(wanted, url, say, live))
    show(found, terminal)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found, separators=(",", ":")) + "\n", "utf-8")
    if args.plot is not None:
        draw(found, args.plot)
    return 0 if any(run["summary"]["ok"] for run in found["runs"]) else 1


def preset_vocabulary(model: str | None) -> int | None:
    """The size of a preset's vocabulary: presets have no tokenizer, so prompts are any ids."""
    if model is None or not model.startswith("preset:"):
        return None
    from minillm.lab.commands.plan import find_config

    return find_config(model).vocab_size


@contextmanager
def server_of(args: Namespace, say: Any) -> Iterator[str]:
    """The address of the server: given, or of one that is started for this benchmark."""
    from minillm.lab.benchmarks.serving.server_process import free_port, serve_command, serving
    from minillm.lab.benchmarks.serving.target import base_url, is_url

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
    if args.dtype is not None:
        check_dtype(args.dtype)
        options += ["--dtype", args.dtype]
    if model.startswith("preset:") and "--load-format" not in options:
        options += ["--load-format", "dummy"]
    for option, value in (("--api-key", args.api_key), ("--served-model-name",
                                                       args.served_model_name)):  # fmt: skip
        options += [option, value] if value is not None else []
    port = free_port()
    say(f"Starting minillm serve {model}")
    with serving(serve_command(model, port, options), port) as url:
        yield url


def plan_of(args: Namespace) -> Any:
    """The plan that the arguments ask for, after checking them."""
    from minillm.lab.benchmarks.serving.arrivals import read_replay
    from minillm.lab.benchmarks.serving.bench import Plan
    from minillm.lab.benchmarks.serving.slo import parse_slo
    from minillm.lab.benchmarks.serving.summary import Evaluation
    from minillm.lab.benchmarks.serving.workload import parse_workload

    replayed = read_replay(args.replay) if args.replay is not None else []
    workload = parse_workload(args.workload or "lognormal", replayed)
    if replayed and workload.name == "chat":
        raise ConfigError("--replay sends single requests; leave out --workload chat.")
    arrivals, loads, limit = process_of(args, [one.seconds for one in replayed])
    warmup = whole("--warmup", args.warmup, 0, 0)
    evaluation = Evaluation(
        parse_slo(args.slo) if args.slo is not None else {},
        share("--steady-ratio", args.steady_ratio, 0.8),
        warmup,
    )
    count = whole("--requests", args.requests, QUICK_REQUESTS if args.quick else REQUESTS, 1)
    if replayed:
        count = min(count, len(replayed)) if args.requests is not None else len(replayed)
    if warmup >= count:
        raise ConfigError(f"--warmup is {warmup}; it must be less than the {count} requests.")
    return Plan(
        workload=workload,
        arrivals=arrivals,
        loads=loads,
        count=count,
        seconds=seconds_of(args, loads),
        concurrency=limit,
        repeats=whole("--repeats", args.repeats, 1, 1),
        seed=whole("--seed", args.seed, 0, 0),
        evaluation=evaluation,
    )


def process_of(args: Namespace, replayed: list[float]) -> tuple[Any, tuple[float, ...], int | None]:
    """Arrivals (None for a closed loop), the loads of the sweep, and the limit of concurrency."""
    from minillm.lab.benchmarks.serving.arrivals import Arrivals

    given = [name for name in ("request_rate", "ramp", "replay") if getattr(args, name) is not None]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise ConfigError(f"{first} and {second} both set the arrivals; leave one of them out.")
    places = None if args.concurrency is None else concurrencies(args.concurrency)
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    if not burstiness > 0:
        raise ConfigError(f"--burstiness is {burstiness:g}; it must be above 0, or inf.")
    if places is not None and not given:
        if args.burstiness is not None:
            raise ConfigError("--burstiness is for an open loop; give --request-rate, too.")
        return None, tuple(float(each) for each in places), None
    if places is not None and len(places) > 1:
        raise ConfigError(
            "--concurrency with --request-rate, --ramp or --replay is a limit; give one number."
        )
    limit = places[0] if places else None
    if args.replay is not None:
        length = replayed[-1] or 1.0
        rate = len(replayed) / length
        return Arrivals(rate, replayed=tuple(replayed)), (round(rate, 3),), limit
    if args.ramp is not None:
        start, end = ramp_of(args.ramp)
        return Arrivals(start, burstiness, end), ((start + end) / 2,), limit
    loads = rates(args.request_rate or DEFAULT_RATES)
    return Arrivals(loads[0], burstiness), loads, limit


def rates(text: str) -> tuple[float, ...]:
    """Parse ``1,2.5,inf``."""
    try:
        found = tuple(float(item) for item in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(value > 0 for value in found):
        raise ConfigError(
            f"--request-rate is {text[:40]!r}; it must be a list of rates above 0 in requests/s, "
            "such as 1,2,4, or inf."
        )
    return found


def concurrencies(text: str) -> tuple[int, ...]:
    """Parse ``1,8``."""
    from minillm.cli.options import positive_integers

    return positive_integers("--concurrency", text)


def ramp_of(text: str) -> tuple[float, float]:
    """Parse ``1:8``."""
    start, _, end = text.partition(":")
    try:
        found = float(start), float(end)
    except ValueError:
        found = (0.0, 0.0)
    if not all(0 < value < math.inf for value in found):
        raise ConfigError(f"--ramp is {text[:40]!r}; it must be two rates above 0, such as 1:8.")
    return found


def seconds_of(args: Namespace, loads: tuple[float, ...]) -> float | None:
    """--duration, after checking that it can be combined with the rest."""
    seconds: float | None = args.duration
    if seconds is None:
        return None
    if args.requests is not None or args.replay is not None:
        raise ConfigError("--duration excludes --requests and --replay; leave one of them out.")
    if args.request_rate is None and args.ramp is None and args.concurrency is not None:
        raise ConfigError("--duration is for an open loop; give --request-rate, too.")
    if math.inf in loads:
        raise ConfigError("--duration needs finite rates; give --requests with the rate inf.")
    if not 0 < seconds <= MOST_REQUESTS / max(loads):
        raise ConfigError(
            f"--duration is {seconds:g}; it must be above 0 and give at most {MOST_REQUESTS:,} "
            "requests."
        )
    return seconds


def whole(option: str, value: int | None, default: int, least: int) -> int:
    """An integer option of at least `least`."""
    number = default if value is None else value
    if not least <= number <= MOST_REQUESTS:
        raise ConfigError(f"{option} is {number}; it must be from {least} to {MOST_REQUESTS:,}.")
    return number


def share(option: str, value: float | None, default: float) -> float:
    """An option above 0 and at most 1."""
    number = default if value is None else value
    if not 0 < number <= 1:
        raise ConfigError(f"{option} is {number:g}; it must be above 0 and at most 1.")
    return number


def check_options(args: Namespace) -> None:
    """Reject single options that are out of range, and those that need another one."""
    for option, value, known in (("--endpoint", args.endpoint, ENDPOINTS),
                                 ("--prompts", args.prompts, KINDS)):  # fmt: skip
        if value is not None and value not in known:
            raise ConfigError(
                f"{option} is {value[:40]!r}; it must be {' or '.join(known)}."
                f"{did_you_mean(value, known)}"
            )
    if args.endpoint == "chat" and args.prompts == "ids":
        raise ConfigError("--endpoint chat sends messages, which are text; leave out --prompts.")
    for option in ("search", "dollars_per_hour"):
        if getattr(args, option) is not None and args.slo is None:
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{name} needs objectives; add --slo, such as ttft=500ms,tpot=50ms.")
    if args.search and (args.concurrency or args.ramp or args.replay):
        raise ConfigError(
            "--search varies the request rate; leave out --concurrency, --ramp and --replay."
        )
    if args.search and args.request_rate and len(rates(args.request_rate)) > 1:
        raise ConfigError("--search starts from one rate; give a single --request-rate.")
    if args.search and args.request_rate and math.isinf(rates(args.request_rate)[0]):
        raise ConfigError("--search starts from a finite rate; give one in --request-rate.")
    for name, least in (("dollars_per_hour", 0.0), ("timeout", 0.0), ("vocab_size", 7)):
        value = getattr(args, name)
        if value is not None and not least < value < math.inf:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {value:g}; it must be above {least:g}.")
