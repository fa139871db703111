"""`minillm bench scale`: measured and predicted decode step time by batch and context.

Every round measures the rates of `lab/decode_law.py` and then every case, so that disturbances
affect both. Disturbed measurements are repeated, and figures are medians over the undisturbed
rounds. The prediction of a case uses counts (`roofline.step_cost`) and these rates; no rate is
fitted to the cases.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from minillm.api.arguments import EngineArgs
from minillm.cli.terminal import Terminal, amount, seconds
from minillm.config import ModelConfig
from minillm.engine.setup import CPU_BLOCK_SIZE
from minillm.errors import ConfigError
from minillm.lab.benchmarks.calm import LEAST_SECONDS, Calm, calmest, calmly
from minillm.lab.benchmarks.ceiling import Ceiling, best_of, measure_ceiling
from minillm.lab.benchmarks.contest import spread
from minillm.lab.benchmarks.decode_rates import DecodeProbes, check_explainable
from minillm.lab.benchmarks.decode_steps import NOT_TIMED, DecodeSteps, Step
from minillm.lab.benchmarks.others import disturbance
from minillm.lab.benchmarks.report import about_machine
from minillm.lab.benchmarks.scale_plot import check_plot, draw
from minillm.lab.commands.bench import finish, progress
from minillm.lab.commands.plan import find_config
from minillm.lab.decode_law import DecodeRates, decode_time
from minillm.lab.roofline import StepCost, step_cost
from minillm.plan import machine
from minillm.plan.cost import memory_plan

TOLERANCE = 0.25  # largest relative error of a prediction that explains a case
AIM, AIM_BATCH = 0.05, 64  # target for the fraction of host overhead, and its batch size
USED = 0.8  # largest fraction of the free memory to use
BUDGET = 2048  # tokens of a step
HEADER = ("", "step", "predicted", "ratio", "products", "pages", "overhead", "of bound", "host")
SLACK = 1.02  # extra KV cache: the scheduler keeps 1% free when it admits a request


@dataclass(frozen=True)
class ScaleCase:
    """`batch` sequences, `context` tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"B={self.batch} ctx {self.context}"


@dataclass(frozen=True)
class ScaleWork:
    """The benchmark to run. `steps` decode steps are timed in each case and round, the last one at
    `context` tokens."""

    name: str
    config: ModelConfig
    cases: tuple[ScaleCase, ...]
    steps: int
    repeats: int
    threads: int
    dtype: str
    fresh: bool = True  # measure the ceilings now

    @property
    def batch(self) -> int:
        """The largest batch."""
        return max(case.batch for case in self.cases)

    def cost(self, case: ScaleCase) -> StepCost:
        """Counts of the middle one of the timed steps."""
        length = case.context - NOT_TIMED + 1 - self.steps // 2
        return step_cost(self.config, [1] * case.batch, [length] * case.batch, dtype=self.dtype)


@dataclass
class Measured:
    """The measured steps of one case, by round."""

    case: ScaleCase
    rounds: list[Calm[list[Step]]] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """The steps of the undisturbed rounds."""
        return [step for each in calmest(self.rounds) for step in each.value]


def run(args: Namespace, terminal: Terminal) -> int:
    """Check the arguments, measure, print the table, write JSON and the plot."""
    check_plot(args.plot)
    config = find_config(args.model)
    contexts = contexts_of(args, config.longest_context)
    cases = tuple(ScaleCase(batch, context) for context in contexts for batch in args.batch)
    options = (args.new_tokens, args.repeats, args.threads, args.dtype)
    with progress(terminal) as say:
        found = measure(ScaleWork(args.model, config, cases, *options, not args.quick), say)
    if args.plot is not None:
        draw(found, args.plot)
    return finish(found, args, terminal, show)


def contexts_of(args: Namespace, longest: int) -> tuple[int, ...]:
    """The contexts, each of which must hold the timed steps and fit the model's positions; default
    contexts that do not fit are dropped."""
    least, contexts = args.new_tokens + 4, args.context
    if "context" not in args.given:
        contexts = tuple(n for n in contexts if least <= n <= longest) or (longest,)
    if least > longest:
        raise ConfigError(
            f"--new-tokens is {args.new_tokens}; with the {longest} positions of this model it "
            f"must be at most {longest - 4}."
        )
    for context in contexts:
        if not least <= context <= longest:
            raise ConfigError(
                f"--context is {context}; with {args.new_tokens} new tokens it must be from "
                f"{least} to {longest}, the positions of this model."
            )
    return contexts


def tokens_that_fit(work: ScaleWork) -> int:
    """Number of KV-cache tokens that fit into the free memory."""
    plan = memory_plan(
        work.config,
        machine.available_memory_bytes(),
        dtype=work.dtype,
        max_model_len=1,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=work.batch,
        block_size=CPU_BLOCK_SIZE,
        gpu_memory_utilization=USED,
    )
    return plan.num_tokens


def tokens_of(case: ScaleCase) -> int:
    """KV-cache tokens of a case, in whole blocks."""
    return case.batch * -(-case.context // CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE


def open_engine(work: ScaleWork, cases: Sequence[ScaleCase]) -> DecodeSteps:
    """An engine with a KV cache for the largest case."""
    num_tokens = int(max(map(tokens_of, cases)) * SLACK)
    return DecodeSteps(
        EngineArgs(
            work.name,
            load_format="dummy" if work.name.startswith("preset:") else "auto",
            dtype=work.dtype,
            device="cpu",
            block_size=CPU_BLOCK_SIZE,
            max_model_len=max(case.context for case in cases),
            max_num_seqs=work.batch,
            max_num_batched_tokens=max(BUDGET, work.batch),
            num_gpu_blocks_override=num_tokens // CPU_BLOCK_SIZE + 1,
            enable_prefix_caching=False,
        )
    )


def measure(work: ScaleWork, say: Callable[[str], Any] = lambda what: None) -> dict[str, Any]:
    """Run the benchmark; returns JSON data, see `as_json`."""
    check_explainable(work.name, work.config)
    torch.set_num_threads(work.threads)
    say("measuring the ceilings")
    before = measure_ceiling("cpu", work.threads, work.fresh)
    say("loading the model and filling the KV cache")
    folder = None if work.name.startswith("preset:") else work.name
    probes = DecodeProbes(work.config, work.dtype, work.batch, folder)
    room = tokens_that_fit(work)
    cases = [case for case in work.cases if tokens_of(case) * SLACK <= room]
    left_out = [case for case in work.cases if case not in cases]
    measured = [Measured(case) for case in cases]
    if cases:
        play(work, measured, probes, say)
    rates = probes.rates() if cases else None
    probes.close()
    say("measuring the ceilings again")
    after = measure_ceiling("cpu", work.threads, work.fresh)
    notes = [f"{case} is left out: its KV cache does not fit into memory." for case in left_out]
    return as_json(work, measured, rates, best_of(before, after), notes)


def play(
    work: ScaleWork, measured: Sequence[Measured], probes: DecodeProbes, say: Callable[[str], Any]
) -> None:
    """Run all rounds."""
    engine = open_engine(work, [one.case for one in measured])
    try:
        for number in range(work.repeats):
            say(f"round {number + 1}: rates")
            probes.run()
            for one in measured:
                say(f"round {number + 1}: {one.case}")
                one.rounds.append(calmly(partial(run_case, engine, one.case, work.steps)))
    finally:
        engine.close()


def run_case(engine: DecodeSteps, case: ScaleCase, count: int) -> list[Step]:
    """Time the steps of one case, repeated until disturbances can be detected."""
    steps: list[Step] = []
    end = perf_counter() + LEAST_SECONDS
    while not steps or perf_counter() < end:
        steps += engine.run(case.batch, case.context, count)
    return steps


# ---- results ----------------------------------------------------------------------------------


def as_json(
    work: ScaleWork,
    measured: Sequence[Measured],
    rates: DecodeRates | None,
    ceiling: Ceiling,
    notes: Sequence[str],
) -> dict[str, Any]:
    """All measurements, predictions and conclusions as JSON data."""
    results = [] if rates is None else [result(work, one, rates, ceiling) for one in measured]
    found = about_machine("scale") | {
        "model": work.name,
        "dtype": work.dtype,
        "threads": work.threads,
        "repeats": work.repeats,
        "steps": work.steps,
        "block_size": CPU_BLOCK_SIZE,
        "tolerance": TOLERANCE,
        "ceiling": ceiling.as_json(),
        "rates": None if rates is None else asdict(rates),
        "results": results,
        "notes": list(notes),
    }
    return found | summary(results)


def result(work: ScaleWork, one: Measured, rates: DecodeRates, ceiling: Ceiling) -> dict[str, Any]:
    """One case: measured time and its parts, predicted time, and bound."""
    cost, times = work.cost(one.case), spread([step.seconds for step in one.steps])
    predicted = decode_time(cost, rates)
    memory, compute = cost.total_bytes / ceiling.bandwidth, cost.flops / ceiling.rate(work.dtype)
    return {
        **asdict(one.case),
        "step_seconds": times,
        "model_seconds": median(step.model for step in one.steps),
        "sampling_seconds": median(step.sampling for step in one.steps),
        "host_seconds": median(step.host for step in one.steps),
        "predicted_seconds": predicted.seconds,
        "predicted": asdict(predicted),
        "ratio": predicted.seconds / times["median"],
        "bound_seconds": max(memory, compute),
        "bytes": cost.total_bytes,
        "flops": cost.flops,
        "others": max(each.others for each in calmest(one.rounds)),
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The accuracy of the predictions, and the fraction of host overhead."""
    if not results:
        return {"explained": 0, "worst_ratio": None, "host": None}
    explained = sum(abs(one["ratio"] - 1) <= TOLERANCE for one in results)
    worst = max(results, key=lambda one: abs(one["ratio"] - 1))
    largest = max(one["batch"] for one in results)
    fastest = min(
        (one for one in results if one["batch"] == largest),
        key=lambda one: one["step_seconds"]["median"],
    )
    host = {
        "batch": largest,
        "context": fastest["context"],
        "seconds": fastest["host_seconds"],
        "share": fastest["host_seconds"] / fastest["step_seconds"]["median"],
        "aim": AIM if largest == AIM_BATCH else None,
    }
    return {"explained": explained, "worst_ratio": worst["ratio"], "host": host}


def show(found: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a heading, the table, and the conclusions."""
    terminal.heading(
        f"scale: decode steps of {found['model']}, {found['dtype']}, {found['threads']} threads, "
        f"{found['machine']}"
    )
    if found["results"]:
        terminal.table(HEADER, table(found))
    for line in statement(found):
        terminal.paragraph(line)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """One row per case."""
    return [
        [
            f"B={one['batch']} ctx {one['context']}",
            seconds(one["step_seconds"]["median"]),
            seconds(one["predicted_seconds"]),
            f"{one['ratio']:.2f}",
            *(seconds(one["predicted"][part]) for part in ("products", "pages", "overhead")),
            f"{one['bound_seconds'] / one['step_seconds']['median']:.0%}",
            seconds(one["host_seconds"]),
        ]
        for one in found["results"]
    ]


def statement(found: Mapping[str, Any]) -> list[str]:
    """Lines about the rates, accuracy, host overhead, and cases that were left out."""
    rates, host, lines = found["rates"], found["host"], []
    if rates is not None:
        aim = ""
        if host["aim"] is not None:
            missed = ", missed" * (host["share"] >= host["aim"])
            aim = f" (target: under {host['aim']:.0%}{missed})"
        lines = [
            f"Separately measured rates: weights {amount(rates['stream'], 'B/s')} at one row, "
            f"products {amount(rates['matrix'], 'FLOP/s')} at the largest batch, pages "
            f"{amount(rates['pages'], 'B/s')}, overhead {seconds(rates['step_seconds'])} per step "
            f"and {seconds(rates['row_seconds'])} per sequence.",
            f"{found['explained']} of {len(found['results'])} steps are explained within "
            f"{found['tolerance']:.0%}; the worst prediction is {found['worst_ratio']:.2f} times "
            "the measured time.",
            f"Host overhead at B={host['batch']} ctx {host['context']}: {seconds(host['seconds'])} "
            f"or {host['share']:.1%} of a step{aim}, for scheduling, inputs, bookkeeping and "
            "outputs.",
        ]
    return [*lines, *found["notes"], *disturbance(found["results"])]
