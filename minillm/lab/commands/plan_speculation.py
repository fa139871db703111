"""``minillm plan --speculate``: predicted speed-up by batch and number of drafts."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product

from minillm.cli.terminal import Terminal, digits
from minillm.config import ModelConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.commands.place import Place
from minillm.lab.decode_law import decode_time
from minillm.lab.roofline import step_cost, step_time
from minillm.lab.speculation_cost import (
    CostSeconds,
    Speculation,
    best,
    speculation,
    verification_seconds,
)

NGRAM = "ngram"
BATCHES, COUNTS = (1, 4, 16, 64), (1, 2, 4, 8)
ASSUMED_NGRAM, ASSUMED_DRAFT = 0.5, 0.7  # default acceptance
NGRAM_SECONDS = 20e-6  # host time of the n-gram lookup, for each sequence
ROUNDS = 3  # repetitions of the measurement on this machine


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of the prediction of speculative decoding."""
    add = parser.add_argument
    add("--speculate", metavar="DRAFT",
        help="predict the speed-up of speculative decoding with a draft model, or "
             "'ngram'")  # fmt: skip
    add("--acceptance", metavar="A[,A...]",
        help="acceptance probability of the first draft, the second, ... (0.7; n-grams "
             "0.5)")  # fmt: skip
    add("--answered", metavar="A", help="fraction of steps that have drafts (1)")


def rate(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(
            f"--acceptance and --answered take numbers from 0 to 1, not {text[:40]!r}."
        )
    return value


def check(args: Namespace) -> None:
    """Check and parse --acceptance and --answered, which need --speculate."""
    if args.speculate is None and (args.acceptance is not None or args.answered is not None):
        raise ConfigError("--acceptance and --answered need --speculate; add it.")
    if args.acceptance is not None:
        args.acceptance = tuple(map(rate, args.acceptance.split(",")))
    args.answered = 1.0 if args.answered is None else rate(args.answered)


def seconds_of(
    name: str, config: ModelConfig, dtype: str, place: Place, terminal: Terminal
) -> tuple[CostSeconds, bool]:
    """The step-time model: rates measured for the model on this CPU (True), or the roofline
    (False) for other hardware and for models whose steps cannot be measured in parts."""
    hardware = place.known
    bound = lambda cost: step_time(cost, hardware).seconds  # noqa: E731
    if not place.is_cpu:
        return bound, False
    from minillm.lab.benchmarks.decode_rates import DecodeProbes, check_explainable

    try:
        check_explainable(name, config)
    except UnsupportedFeatureError:
        return bound, False
    with terminal.progress("Measuring decode steps"):
        probes = DecodeProbes(config, dtype, max(BATCHES))
        try:
            for _ in range(ROUNDS):
                probes.run()
            found = probes.rates()
        finally:
            probes.close()
    return (lambda cost: decode_time(cost, found).seconds), True


def run(
    args: Namespace,
    config: ModelConfig,
    draft: ModelConfig | None,
    context: int,
    place: Place,
    terminal: Terminal,
) -> None:
    """Print predictions for every batch and number of drafts; `draft` is None for n-grams."""
    if draft is not None and draft.vocab_size != config.vocab_size:
        raise ConfigError(
            f"--speculate {args.speculate} has {draft.vocab_size} token ids and {args.model} has "
            f"{config.vocab_size}; a draft model must have the vocabulary of its target."
        )
    acceptance = args.acceptance or (ASSUMED_NGRAM if draft is None else ASSUMED_DRAFT,)
    timed = partial(seconds_of, dtype=args.dtype, place=place, terminal=terminal)
    target, is_measured = timed(args.model, config)
    drafting = target if draft is None else timed(args.speculate, draft)[0]
    verify = verification_seconds(config, context, target, args.dtype)
    found = []
    for batch, count in product(BATCHES, COUNTS):
        costs = {"host_seconds": batch * NGRAM_SECONDS}
        if draft is not None:
            cost = step_cost(draft, [1] * batch, [context] * batch, dtype=args.dtype)
            costs = {"draft_seconds": drafting(cost)}
        found.append(speculation(batch, count, acceptance, verify, answered=args.answered, **costs))
    if args.json:
        values = [asdict(e) | {"step": e.step, "speedup": e.speedup} for e in found]
        terminal.line(json.dumps({"acceptance": acceptance, "speculation": values}))
        return
    terminal.heading(f"Drafts of {'n-grams' if draft is None else args.speculate}: "
                     "predicted speed-up")  # fmt: skip
    show(found, acceptance, args.acceptance is None, is_measured, terminal)


def show(
    found: Sequence[Speculation],
    acceptance: Sequence[float],
    is_assumed: bool,
    is_measured: bool,
    terminal: Terminal,
) -> None:
    """Print the table of predictions, and what its columns mean."""
    rows = []
    for batch in BATCHES:
        group = [each for each in found if each.batch == batch]
        fastest = best(group)
        rows += [
            (str(batch), str(each.num_drafts), digits(each.tokens), digits(each.step),
             f"{each.speedup:.2f}", "best" if each is fastest else "")
            for each in group
        ]  # fmt: skip
    header = ("batch", "drafts", "tokens per step", "step cost", "speed-up", "")
    terminal.table(header, rows)
    shown = ", ".join(f"{each:g}" for each in acceptance)
    terminal.paragraph(
        f"Tokens per step: per sequence, with {'an assumed' if is_assumed else 'an'} "
        f"acceptance of {shown}{' (set it with --acceptance)' if is_assumed else ''}. "
        "Step cost: relative to a step without drafts, from "
        f"{'rates measured here' if is_measured else 'memory and compute bounds'}."
    )
