"""The demonstration (``minillm`` without arguments): text first, then how fast it could have been.

The embedded model is small enough for a processor's cache, so its speed says little about real
models. The second card therefore runs a model that must come from memory for every token.
"""

import os
import shutil
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.api.sampling_params import SamplingParams
from minillm.cli.app import version
from minillm.cli.engine_import import import_engine
from minillm.cli.generate import stream, summary
from minillm.cli.terminal import Terminal, amount, billions, digits, plural, seconds
from minillm.lab.ceilings import DISTURBED, measure
from minillm.plan import machine
from minillm.plan.cost import StepCost, step_cost, step_time
from minillm.plan.hardware import Hardware
from minillm.plan.parameters import parameter_count

if TYPE_CHECKING:
    from minillm.llm import LLM

PROMPT = "class Node:\n    def __init__(self, value, next=None):"
# Sampled, because the most probable text of so small a model soon repeats itself.
WRITING = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=96)
BIG = "smollm2-135m"
CONTEXT = 1024  # longest context of the second card
WARM_UP = 4  # tokens before the clock starts
BUDGET = 2.5  # seconds of decoding
TOGETHER = 16  # sequences of the batch that is shown beside the single one


@dataclass(frozen=True)
class DecodeRun:
    """Decoding at batch 1 over some tokens: per token, bytes counted and seconds measured."""

    num_tokens: int
    bytes_per_token: float
    weight_bytes: int
    seconds_per_token: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that were read and written."""
        return self.bytes_per_token / self.seconds_per_token


def run(args: Namespace, terminal: Terminal) -> int:
    """Both cards and what to try next; returns the exit code."""
    terminal.heading(f"minillm {version()}")
    with terminal.progress("Starting"):
        engine = import_engine()
        llm = engine("tiny")
    with llm:
        write_text(llm, terminal)
    with terminal.progress("Measuring how fast this machine reads its memory"):
        hardware = measure(refresh=True, device=str(llm.engine.device))
    with terminal.progress(f"Building a model of {BIG}'s shape with random weights"):
        llm = engine(f"preset:{BIG}", load_format="dummy", max_model_len=CONTEXT)
    with llm, terminal.progress(f"Decoding one sequence, then {TOGETHER}"):
        decoded, together = decode(llm), decode_together(llm)
    show_card(llm, decoded, together, hardware, terminal)
    show_next(terminal)
    return 0


def write_text(llm: "LLM", terminal: Terminal) -> None:
    """The embedded model writes."""
    count = billions(parameter_count(llm.engine.source.config).total)
    terminal.line(f"The embedded model 'tiny', {count} parameters, continues a text:\n")
    output = stream(llm, PROMPT, WRITING, terminal, echo=True)
    terminal.line(f"\n  {summary(output, WRITING)}\n")


def decode(llm: "LLM") -> DecodeRun:
    """Decode one sequence for `BUDGET` seconds and count what each step had to move."""
    engine, prompt = llm.engine, list(range(16))
    room = CONTEXT - len(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True)
    times: list[float] = []
    for _ in llm.stream(prompt, params):
        times.append(time.perf_counter())
        if len(times) > 2 and times[-1] - times[0] > BUDGET:
            break
    first = min(WARM_UP, len(times) - 2)
    # Between times[i - 1] and times[i] one step read the i tokens before it and the prompt.
    costs = [
        step_cost(engine.source.config, [1], [len(prompt) + i], dtype=engine.dtype)
        for i in range(first + 1, len(times))
    ]
    return DecodeRun(
        num_tokens=len(costs),
        weight_bytes=costs[-1].weight_bytes,
        bytes_per_token=sum(cost.total_bytes for cost in costs) / len(costs),
        seconds_per_token=(times[-1] - times[first]) / len(costs),
    )


def decode_together(llm: "LLM") -> float:
    """Seconds per token with `TOGETHER` sequences in every step."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT // 2, ignore_eos=True)
    for index in range(TOGETHER):
        ids = [index, *range(15)]
        engine.add(engine.make_request(f"together-{index}", None, ids, params))
    times = [time.perf_counter()]
    while len(times) <= WARM_UP or times[-1] - times[WARM_UP - 1] < BUDGET / 2:
        if not engine.step():
            break
        times.append(time.perf_counter())
    for index in range(TOGETHER):
        engine.abort(f"together-{index}")
    steps = [later - earlier for earlier, later in pairwise(times[WARM_UP - 1 :])]
    return statistics.median(steps) / TOGETHER


def show_card(
    llm: "LLM", decoded: DecodeRun, together: float, hardware: Hardware, terminal: Terminal
) -> None:
    """The roofline of decoding: what memory allows, what was reached, and their ratio."""
    engine = llm.engine
    cost = step_cost(engine.source.config, [1], [CONTEXT // 2], dtype=engine.dtype)
    cache = decoded.bytes_per_token - decoded.weight_bytes
    bound = decoded.bytes_per_token / hardware.bandwidth
    terminal.heading(f"How fast could it be? {BIG}, random weights, {engine.dtype}, one sequence")
    terminal.line(
        "tiny fits into a processor's cache; a real model comes from memory every time.\n"
    )
    terminal.rows(
        [
            ("each token reads", f"{amount(decoded.weight_bytes, 'B')} of weights and "
             f"{amount(cache, 'B')} of KV cache"),
            ("this machine reads", f"{amount(hardware.bandwidth, 'B/s')}, measured just now "
             f"({hardware.name}, {threads(llm)})"),
            ("so at best", rate(bound)),
            ("it ran at", f"{rate(decoded.seconds_per_token)} = "
             f"{amount(decoded.bandwidth, 'B/s')}"),
            (f"{TOGETHER} together", f"{rate(together)}, "
             f"{digits(decoded.seconds_per_token / together)} times as many"),
        ]
    )  # fmt: skip
    fraction = decoded.bandwidth / hardware.bandwidth
    terminal.line(f"\n  {terminal.bar(fraction)} {share(fraction)} of the bound\n")
    terminal.paragraph(explanation(cost, hardware, fraction))


def share(fraction: float) -> str:
    """``63%``, and never ``0%``."""
    return f"{fraction:.0%}" if fraction >= 0.01 else f"{digits(100 * fraction)}%"


def rate(per_token: float) -> str:
    """``123 tokens/s (8.13 ms each)``."""
    return f"{digits(1 / per_token)} tokens/s ({seconds(per_token)} each)"


def threads(llm: "LLM") -> str:
    """With how much of the processor, or on which device."""
    import torch

    on_cpu = llm.engine.device.type == "cpu"
    return plural(torch.get_num_threads(), "thread") if on_cpu else str(llm.engine.device)


def explanation(cost: StepCost, hardware: Hardware, fraction: float) -> str:
    """What the card means, in a few sentences; first of all whether it means anything."""
    others = busy(hardware)
    if step_time(cost, hardware).bound == "overhead":
        return (
            f"{others}Every weight is read for every token, but starting the {cost.num_operations} "
            f"operations of a token ({seconds(cost.num_operations * hardware.overhead)} or more) "
            "takes longer than that here: the bound is overhead."
        )
    text = (
        f"{others}A token needs {digits(cost.intensity)} operations per byte it reads, and this "
        f"machine could do {digits(hardware.ridge(cost.dtype))}. So memory is the bound; in a "
        "batch, one reading of the weights serves every sequence."
    )
    if fraction < 0.7 and not others:
        text += (
            " The rest of the time went to matrix products that read more slowly than the memory "
            "could, and to the small operations between them."
        )
    if fraction > 1:
        text += " Above 100%: the machine was busier while it was measured than afterwards."
    return text


def busy(hardware: Hardware) -> str:
    """A warning when other programs want the processors too, which no engine can make up for."""
    load, processors = getattr(os, "getloadavg", lambda: (0.0,))()[0], machine.cpu_count()
    if load <= 1.5 * processors and hardware.source != DISTURBED:
        return ""
    return (
        f"Other programs are running (load {digits(load)} on {plural(processors, 'processor')}), "
        "so these figures are not the machine's: run it again when it is idle. "
    )


def show_next(terminal: Terminal) -> None:
    """What to type next; the course is there in a checkout only."""
    program = program_name()
    rows = [
        (f'{program} generate "import os"', "continue your own text"),
        (f"{program} info", "the models and this machine"),
        (f"{program} plan preset:llama-3.1-70b", "what a 70B model would need"),
        (f"{program} trace --help", "what each step did, and why"),
        (f"{program} bench speculation", "the same text in fewer steps"),
    ]
    if Path("notebooks", "lab.py").is_file():
        rows.append(("make lab", "the course: measure it all"))
    terminal.line()
    terminal.heading("Next")
    terminal.rows(rows)


def program_name() -> str:
    """How to call the command from here: its environment need not be active."""
    script = Path(sys.executable).with_name("minillm")
    if shutil.which("minillm") or not script.is_file():
        return "minillm"
    inside = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if inside else script)
