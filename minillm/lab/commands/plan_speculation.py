"""``minillm plan --speculate``: predicted speed-up by batch and number of drafts."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from minillm.cli.terminal import Terminal, digits
from minillm.config import ModelConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.decode_law import decode_time
from minillm.lab.speculation_cost import (
    CostSeconds,
    Speculation,
    best,
    speculation,
    verification_seconds,
)
from minillm.plan.cost import step_cost, step_time
from minillm.plan.hardware import Hardware

NGRAM = "ngram"
BATCHES, COUNTS = (1, 4, 16, 64), (1, 2, 4, 8)
ASSUMED_NGRAM, ASSUMED_DRAFT = 0.5, 0.7  # default acceptance
NGRAM_SECONDS = 20e-6  # host time of the n-gram lookup, for each sequence
ROUNDS = 3  # repetitions of the measurement on this machine


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of the prediction of speculative decoding."""
    parser.add_argument("--speculate", metavar="DRAFT",
                        help="predict the speed-up of speculative decoding with a draft "
                             "model, or 'ngram'")  # fmt: skip
    parser.add_argument("--acceptance", metavar="A[,A...]",
                        help="acceptance probability of the first draft, the second, ... "
                             "(0.7; n-grams 0.5)")  # fmt: skip
    parser.add_argument("--answered", metavar="A",
                        help="fraction of steps that have drafts (1)")  # fmt: skip


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


def rates(text: str) -> tuple[float, ...]:
    """Parse ``0.8,0.7`` into probabilities."""
    return tuple(rate(each) for each in text.split(","))


def check(args: Namespace) -> None:
    """Check and parse --acceptance and --answered, which need --speculate."""
    if args.speculate is None and (args.acceptance is not None or args.answered is not None):
        raise ConfigError("--acceptance and --answered need --speculate; add it.")
    args.acceptance = None if args.acceptance is None else rates(args.acceptance)
    args.answered = 1.0 if args.answered is None else rate(args.answered)


def seconds_of(
    name: str,
    config: ModelConfig,
    dtype: str,
    hardware: Hardware,
    is_measured: bool,
    terminal: Terminal,
) -> tuple[CostSeconds, bool]:
    """The step-time model: rates measured for the model on this machine (True), or the roofline
    (False) for other hardware and for models whose steps cannot be measured in parts."""
    bound = lambda cost: step_time(cost, hardware).seconds  # noqa: E731
    if not is_measured:
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


def predictions(
    target: ModelConfig,
    draft: ModelConfig | None,
    acceptance: Sequence[float],
    answered: float,
    context: int,
    dtype: str,
    seconds: tuple[CostSeconds, CostSeconds],
) -> list[Speculation]:
    """Predictions for every batch and number of drafts; `seconds` holds the step-time models of
    the target and of the draft model."""
    verify = verification_seconds(target, context, seconds[0], dtype)

    def predict(batch: int, count: int) -> Speculation:
        host, drafting = batch * NGRAM_SECONDS, 0.0
        if draft is not None:
            ones = [1] * batch
            cost = step_cost(draft, ones, [context] * batch, dtype=dtype)
            host, drafting = 0.0, seconds[1](cost)
        return speculation(
            batch,
            count,
            acceptance,
            verify,
            answered=answered,
            draft_seconds=drafting,
            host_seconds=host,
        )

    return [predict(batch, count) for batch in BATCHES for count in COUNTS]


def as_json(found: Sequence[Speculation]) -> list[dict[str, Any]]:
    """The predictions as JSON data."""
    return [asdict(each) | {"step": each.step, "speedup": each.speedup} for each in found]


def show(
    name: str,
    found: Sequence[Speculation],
    acceptance: Sequence[float],
    is_assumed: bool,
    is_measured: bool,
    terminal: Terminal,
) -> None:
    """Print the predictions as text."""
    what = "n-grams" if name == NGRAM else name
    terminal.heading(f"Drafts of {what}: predicted speed-up")
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


def predict_for(
    args: Namespace,
    config: ModelConfig,
    draft: ModelConfig | None,
    dtype: str,
    context: int,
    hardware: Hardware | None,
    is_cpu: bool,
    terminal: Terminal,
) -> tuple[list[Speculation], tuple[float, ...], bool]:
    """The predictions, the acceptance they use, and whether rates were measured."""
    if hardware is None:
        raise ConfigError("--speculate needs the rates of hardware; add --hardware NAME, or leave "
                          "out --memory.")  # fmt: skip
    if draft is not None and draft.vocab_size != config.vocab_size:
        raise ConfigError(
            f"--speculate {args.speculate} has {draft.vocab_size} token ids and {args.model} has "
            f"{config.vocab_size}; a draft model must have the vocabulary of its target."
        )
    acceptance = args.acceptance or (ASSUMED_NGRAM if draft is None else ASSUMED_DRAFT,)
    timed = partial(seconds_of, dtype=dtype, hardware=hardware, terminal=terminal)
    target, is_measured = timed(args.model, config, is_measured=is_cpu)
    drafting: CostSeconds = target
    if draft is not None:
        drafting, _ = timed(args.speculate, draft, is_measured=is_cpu)
    found = predictions(
        config, draft, acceptance, args.answered, context, dtype, (target, drafting)
    )
    return found, acceptance, is_measured
