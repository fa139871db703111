"""The demo (``minillm`` without arguments): generates text, then compares speed with its bound.

Each measurement comes after a warm-up, which compiles the C functions if necessary, and counts what
other programs use of the processors meanwhile.

The embedded model fits into the CPU's cache, so its speed says little about larger models. The
second part therefore decodes with a model whose weights are read from memory for every token.
"""

import os
import shutil
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.api.sampling_params import SamplingParams
from minillm.cli.app import version
from minillm.cli.engine_import import import_engine
from minillm.cli.generate import stream, summary
from minillm.cli.terminal import Terminal, amount, billions, digits, plural, seconds
from minillm.lab.benchmarks.others import DISTURBED as MUCH
from minillm.lab.benchmarks.others import reported, watching
from minillm.lab.ceilings import DISTURBED, measure
from minillm.lab.hardware import Hardware
from minillm.lab.roofline import StepCost, step_cost, step_time
from minillm.plan import machine
from minillm.plan.parameters import parameter_count

if TYPE_CHECKING:
    from minillm.llm import LLM

PROMPT = "class Node:\n    def __init__(self, value, next=None):"
# Sampling, because greedy text of so small a model soon repeats itself.
WRITING = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=96)
BIG = "smollm2-135m"
CONTEXT = 1024  # longest context of the second part
LENGTH = 16  # tokens of its prompts
WARM_UP = 4  # tokens before timing starts
FIRST_PROMPT = "import os\n\n\ndef walk(folder, names=()):"  # of the warm-up: about as long
BUDGET = 2.5  # seconds of decoding
TOGETHER = 16  # size of the batch that is compared with batch 1


@dataclass(frozen=True)
class DecodeRun:
    """A decode measurement: counted bytes and measured seconds per token of all sequences."""

    num_tokens: int
    bytes_per_token: float
    weight_bytes: int  # of a step
    seconds_per_token: float

    @property
    def bandwidth(self) -> float:
        """Achieved memory traffic in bytes per second."""
        return self.bytes_per_token / self.seconds_per_token


def run(args: Namespace, terminal: Terminal) -> int:
    """Generate text, measure decoding, suggest commands, and return the exit code."""
    terminal.heading(f"minillm {version()}")
    with terminal.progress("Starting"):
        engine = import_engine()
        llm = engine("tiny")
        warm_up(llm)
    with llm, watching([]) as writing:
        write_text(llm, terminal)
    with terminal.progress("Measuring memory bandwidth"), watching([]) as reading:
        hardware = measure(refresh=True, device=str(llm.engine.device))
    with terminal.progress(f"Building a model of {BIG}'s shape with random weights"):
        llm = engine(f"preset:{BIG}", load_format="dummy", max_model_len=CONTEXT)
    with (
        llm,
        terminal.progress(f"Decoding at batch 1, then at batch {TOGETHER}"),
        watching([]) as decoding,
    ):
        decoded, together = decode(llm, 1, BUDGET), decode(llm, TOGETHER, BUDGET / 2)
    others = max(watch.share for watch in (writing, reading, decoding))
    show_card(llm, decoded, together, hardware, others, terminal)
    show_next(terminal)
    return 0


def warm_up(llm: "LLM") -> None:
    """Generate a few tokens, so that compilation and first memory accesses are not timed."""
    llm.generate([FIRST_PROMPT], replace(WRITING, max_tokens=WARM_UP), use_tqdm=False)


def write_text(llm: "LLM", terminal: Terminal) -> None:
    """Stream a text of the embedded model."""
    count = billions(parameter_count(llm.engine.source.config).total)
    terminal.line(f"The embedded model 'tiny', {count} parameters, continues a text:\n")
    output = stream(llm, PROMPT, WRITING, terminal, echo=True)
    terminal.line(f"\n  {summary(output, WRITING)}\n")


def decode(llm: "LLM", batch: int, budget: float) -> DecodeRun:
    """Decode `batch` sequences in every step, for `budget` seconds after a warm-up. The time is the
    median of the steps, and the bytes are those of the middle step."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT // 2, ignore_eos=True)
    names = [f"demo-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        engine.add(engine.make_request(name, None, [index, *range(LENGTH - 1)], params))
    times = [time.perf_counter()]
    while len(times) <= WARM_UP or times[-1] - times[WARM_UP - 1] < budget:
        if not engine.step():
            break
        times.append(time.perf_counter())
    for name in names:
        engine.abort(name)
    steps = [later - earlier for earlier, later in pairwise(times[WARM_UP - 1 :])]
    # The step before times[i] reads the KV of the prompt and i - 1 tokens.
    lengths = [LENGTH + WARM_UP - 1 + len(steps) // 2] * batch
    cost = step_cost(engine.source.config, [1] * batch, lengths, dtype=engine.dtype)
    return DecodeRun(
        num_tokens=batch * len(steps),
        weight_bytes=cost.weight_bytes,
        bytes_per_token=cost.total_bytes / batch,
        seconds_per_token=statistics.median(steps) / batch,
    )


def ceiling(hardware: Hardware, decoded: DecodeRun, together: DecodeRun) -> tuple[Hardware, str]:
    """The hardware with the highest bandwidth that any part of the run reached, and which part it
    was: a bound that the run itself exceeds is none."""
    reached = {"1": decoded.bandwidth, str(TOGETHER): together.bandwidth}
    batch = max(reached, key=reached.__getitem__)
    if reached[batch] <= hardware.bandwidth:
        return hardware, "measured just now"
    which = f"reached at batch {batch}; {amount(hardware.bandwidth, 'B/s')} measured before"
    return replace(hardware, bandwidth=reached[batch]), which


def show_card(
    llm: "LLM",
    decoded: DecodeRun,
    together: DecodeRun,
    hardware: Hardware,
    others: float,
    terminal: Terminal,
) -> None:
    """Show the memory-bandwidth bound of decoding, the measured speed, and their ratio; `others` is
    what other programs used of the processors."""
    engine = llm.engine
    hardware, which = ceiling(hardware, decoded, together)
    cost = step_cost(engine.source.config, [1], [CONTEXT // 2], dtype=engine.dtype)
    cache = decoded.bytes_per_token - decoded.weight_bytes
    bound = decoded.bytes_per_token / hardware.bandwidth
    terminal.heading(f"How fast could it be? {BIG}, random weights, {engine.dtype}, one sequence")
    terminal.line(
        "(tiny fits into the CPU's cache; a larger model is read from memory every step)\n"
    )
    terminal.rows(
        [
            ("reads per token", f"{amount(decoded.weight_bytes, 'B')} of weights and "
             f"{amount(cache, 'B')} of KV cache"),
            ("memory bandwidth", f"{amount(hardware.bandwidth, 'B/s')}, {which} "
             f"({hardware.name}, {threads(llm)})"),
            ("upper bound", rate(bound)),
            ("operations", operations(llm)),
            ("measured", f"{rate(decoded.seconds_per_token)} = "
             f"{amount(decoded.bandwidth, 'B/s')}"),
            (f"batch {TOGETHER}", f"{rate(together.seconds_per_token)}, "
             f"{digits(decoded.seconds_per_token / together.seconds_per_token)} times batch 1"),
        ]
    )  # fmt: skip
    fraction = decoded.bandwidth / hardware.bandwidth
    terminal.line(f"\n  {terminal.bar(fraction)} {share(fraction)} of the bound\n")
    terminal.paragraph(explanation(cost, hardware, fraction, others))


def operations(llm: "LLM") -> str:
    """The implementation that the model's operations run on."""
    import torch

    from minillm.ops import cpu, dispatch

    if llm.engine.device.type == "cpu":
        return cpu.describe(getattr(torch, llm.engine.dtype))
    return dispatch.explain(llm.engine.device)


def share(fraction: float) -> str:
    """``63%``; below 1% with three digits, ``0.3%``."""
    return f"{fraction:.0%}" if fraction >= 0.01 else f"{digits(100 * fraction)}%"


def rate(per_token: float) -> str:
    """``123 tokens/s (8.13 ms each)``."""
    return f"{digits(1 / per_token)} tokens/s ({seconds(per_token)} each)"


def threads(llm: "LLM") -> str:
    """The number of threads on a CPU, else the device."""
    import torch

    on_cpu = llm.engine.device.type == "cpu"
    return plural(torch.get_num_threads(), "thread") if on_cpu else str(llm.engine.device)


def explanation(cost: StepCost, hardware: Hardware, fraction: float, others: float = 0.0) -> str:
    """Which resource limits decoding, and why; a warning comes first if the machine was busy."""
    warning = busy(hardware, others)
    if step_time(cost, hardware).bound == "overhead":
        return (
            f"{warning}Starting the {cost.num_operations} operations of a token takes "
            f"{seconds(cost.num_operations * hardware.overhead)} or more, longer than reading the "
            "weights: host overhead limits decoding."
        )
    text = (
        f"{warning}Each token needs {digits(cost.intensity)} operations per byte read; this "
        f"machine can do {digits(hardware.ridge(cost.dtype))}. Decoding is therefore memory-bound; "
        "in a batch, the weights are read once for all sequences."
    )
    if fraction < 0.7 and not warning:
        text += (
            " The gap to the bound comes from matrix products that read more slowly than the "
            "memory allows, and from the small operations between them."
        )
    return text


def busy(hardware: Hardware, others: float) -> str:
    """A warning if other programs keep the processors busy, which distorts every figure. Where the
    kernel does not report their time, the load is used."""
    load, processors = getattr(os, "getloadavg", lambda: (0.0,))()[0], machine.cpu_count()
    if others > MUCH:
        what = f"Other programs used up to {others:.0%} of the processors meanwhile"
    elif hardware.source == DISTURBED:
        what = "Other programs ran during the bandwidth measurement"
    elif not reported() and load > 1.5 * processors:
        what = (
            f"Other programs are running (load {digits(load)} on {plural(processors, 'processor')})"
        )
    else:
        return ""
    return f"{what}, so the bound and these figures are too low: run it again on an idle machine. "


def show_next(terminal: Terminal) -> None:
    """Suggest commands to try; those of make only in a checkout, which contains the course."""
    program, checkout = program_name(), Path("notebooks", "lab.py").is_file()
    rows = [
        ("make chat" if checkout else f"{program} chat", "chat with a real model (93 MB, once)"),
        (f'{program} generate "import os"', "generate from your own prompt"),
        (f"{program} serve", f"answer over HTTP, with a page to try it{serving_needs()}"),
        (f"{program} info", "list the models, describe this machine"),
        (f"{program} plan preset:llama-3.1-70b", "memory that a 70B model needs"),
        (f"{program} trace --help", "look at the engine's steps"),
        (f"{program} bench speculation", "measure speculative decoding"),
    ]
    if checkout:
        rows.append(("make lab", "open the course"))
    terminal.line()
    terminal.heading("Next")
    terminal.rows(rows)


def serving_needs() -> str:
    """That `minillm serve` needs more packages, if they are not installed."""
    installed = all(find_spec(name) for name in ("fastapi", "uvicorn"))
    return "" if installed else "; it says what to install first"


def program_name() -> str:
    """How to call minillm from the current folder, also if its environment is not active."""
    script = Path(sys.executable).with_name("minillm")
    if shutil.which("minillm") or not script.is_file():
        return "minillm"
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)
