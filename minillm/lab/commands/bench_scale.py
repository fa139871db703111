"""`minillm bench scale`: decode step time over a grid of batches and contexts."""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.commands.bench import (
    MODEL,
    QUICK_MODEL,
    check_dtype,
    check_file,
    progress,
    settings,
)

if TYPE_CHECKING:
    from minillm.config import ModelConfig


def scale(args: Namespace, terminal: Terminal) -> int:
    """Decode step time over a grid of batches and contexts."""
    from minillm.lab.commands.plan import find_config

    given = settings(args)
    check_dtype(given["dtype"])
    check_file("--plot", args.plot)
    name = args.model or (QUICK_MODEL if args.quick else MODEL)
    config = find_config(name)
    check_contexts(given, config, asked=args.context is not None)
    from minillm.lab.benchmarks import scale as benchmark
    from minillm.lab.benchmarks.scale_plot import check_plot, draw
    from minillm.lab.benchmarks.scale_table import show

    if args.plot is not None:
        check_plot(args.plot)
    cases = benchmark.cases_of(given["batch"], given["context"])
    options = (given["new_tokens"], given["repeats"], given["threads"], given["dtype"])
    work = benchmark.ScaleWork(name, config, cases, *options, fresh=not args.quick)
    with progress(terminal) as say:
        found = benchmark.measure(work, say)
    show(found, terminal)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(found) + "\n", "utf-8")
    if args.plot is not None:
        draw(found, args.plot)
    return 0


def check_contexts(given: dict[str, Any], config: "ModelConfig", asked: bool) -> None:
    """Check that each context holds the timed steps and fits the model's positions; default
    contexts that do not fit are dropped."""
    longest, least = config.longest_context, given["new_tokens"] + 4
    if not asked:
        fitting = tuple(n for n in given["context"] if least <= n <= longest)
        given["context"] = fitting or (longest,)
    if least > longest:
        raise ConfigError(
            f"--new-tokens is {given['new_tokens']}; with the {longest} positions of this model it "
            f"must be at most {longest - 4}."
        )
    for context in given["context"]:
        if not least <= context <= longest:
            raise ConfigError(
                f"--context is {context}; with {given['new_tokens']} new tokens it must be from "
                f"{least} to {longest}, the positions of this model."
            )
