"""Chapter 05: a model without weights, the products of a batch, and where decode turns."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm import LLM
from minillm.config import ModelConfig
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import StepCost, step_cost, step_time
from minillm.models.forward_pass import Chunk
from minillm.models.presets import preset
from minillm_exercises.chapters.ch01 import count_calls as calls_of
from minillm_exercises.chapters.ch01 import product_pass as product_pass
from minillm_exercises.chapters.ch03 import counted as counted
from minillm_exercises.chapters.common import rounds as rounds
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import bound, figure, note, series, show
from minillm_exercises.timing import measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, VOCABULARY = 64, 4096  # of a hollow model; its tokenizer is tiny's
Times = Mapping[int, float]  # batch to seconds of a step


def hollow(llm: LLM, **options: Any) -> LLM:
    """The same calls with next to nothing to do: the model of `llm` with random weights, its
    layers and heads, but so narrow between them that the weights need no time.

    `options` are further arguments of the engine. Its family is that of a dense decoder.
    """
    config = llm.engine.source.config
    narrow = {
        "model_type": config.family, "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": WIDTH, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True, "rope_theta": config.rope.theta,
        "rms_norm_eps": config.rms_norm_eps,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(narrow), encoding="utf-8")
        return LLM(folder, tokenizer="tiny", load_format="dummy", **options)


def product_seconds(llm: LLM, batches: Sequence[int]) -> dict[int, float]:
    """Median seconds of a decode step's products for each batch, the less disturbed of two
    sweeps. Each product is a call from Python: an upper limit of what they take in a step."""
    model, device = llm.engine.forward_pass.model, str(llm.engine.device)
    runs = [
        {b: measure(product_pass(model, b, b), budget=0.1, device=device).median for b in batches}
        for _ in range(rounds(2))
    ]
    return {b: min(run[b] for run in runs) for b in batches}


def count_calls(llm: LLM, batch: int) -> int:
    """How many of torch's operations a decode pass of `batch` sequences calls, views included."""
    by_hand = llm.engine.forward_pass
    cache = by_hand.allocate(batch, 2)
    by_hand.run([Chunk(number, 0, [0]) for number in range(batch)], cache)
    return calls_of(lambda: by_hand.run([Chunk(number, 1, [0]) for number in range(batch)], cache))


def decode_cost(
    config: ModelConfig, batch: int, context: int, dtype: str | None = None
) -> StepCost:
    """One step in which `batch` sequences of `context` tokens each compute their last one."""
    return step_cost(config, [1] * batch, [context] * batch, dtype=dtype)


def turn(
    config: ModelConfig, hardware: Hardware, context: int, dtype: str = "bfloat16"
) -> int | None:
    """The smallest batch whose operations take at least as long as its bytes; None if no batch
    is large enough, because each further sequence adds more time of bytes than of operations.

    Raises:
        ExerciseError: a mixture of experts, which reads more weights in a larger batch.
    """
    if config.moe is not None:
        raise ExerciseError("turn() is for dense models: the bytes of experts depend on the batch.")
    one, two = (decode_cost(config, batch, context, dtype) for batch in (1, 2))
    per_sequence = two.total_bytes - one.total_bytes
    shared = one.total_bytes - per_sequence
    rate, bandwidth = Fraction(hardware.rate(dtype)), Fraction(hardware.bandwidth)
    gained = Fraction(one.flops) / rate - per_sequence / bandwidth  # seconds, per sequence
    return ceil(shared / bandwidth / gained) if gained > 0 else None


def longest_turning(config: ModelConfig, hardware: Hardware, dtype: str = "bfloat16") -> int:
    """The longest context at which some batch still makes decode bound by operations."""
    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        turns = turn(config, hardware, middle, dtype) is not None
        low, high = (middle, high) if turns else (low, middle)
    return low


def draw_throughput(possible: Mapping[str, Times], measured: Mapping[str, Times]) -> None:
    """Draw tokens per second against the batch, for each way to run a model, under its bound."""
    fig, ax = figure(
        "batch (sequences, logarithmic)", "tokens per second (logarithmic)", size=(7, 4)
    )
    batches = list(next(iter(measured.values())))
    one = len({tuple(times.values()) for times in possible.values()}) == 1
    lower = max(possible, key=lambda name: sum(possible[name].values()))  # the slower program
    for name, times in list(possible.items())[: 1 if one else None]:
        label = "bound" if one else f"bound, {name}"
        side, at = ("below", 0.0) if name == lower and not one else ("above", 1.0)
        bound(ax, batches, [b / t for b, t in times.items()], label, side, at)
    for number, (name, times) in enumerate(measured.items()):
        rates = [b / t for b, t in times.items()]
        ax.plot(batches, rates, label=name, **series(number))
    least = min(times[batches[0]] for times in measured.values())
    ax.plot(batches, [b / least for b in batches], color="grey", linestyle=":",
            label="if no step took longer than with one")  # fmt: skip
    ax.legend(loc="lower right")
    _log_axes(ax, batches)
    most = max(batches)
    gains = {name: most * times[1] / times[most] for name, times in measured.items()}
    told = ", ".join(f"{gain:.1f} times with the {name}" for name, gain in gains.items())
    show(
        fig,
        f"Tokens per second of decode against the batch, measured, below the bound from bytes and "
        f"operations; compared with one request, a batch of {most} gives {told}.",
    )


@dataclass(frozen=True)
class Panel:
    """One model on one machine: seconds of a decode step by batch, as bounds and as measured."""

    title: str
    costs: Mapping[int, StepCost]
    machine: Hardware
    measured: Mapping[str, Times]


def draw_regimes(panels: Sequence[Panel]) -> None:
    """Draw the time of a step against the batch over the bounds of bytes and of operations."""
    fig, axes = figure("batch (sequences, log)", "time of a decode step (ms, log)",
                       cols=len(panels), size=(3.6 * len(panels), 4.4))  # fmt: skip
    names = list(dict.fromkeys(name for panel in panels for name in panel.measured))
    for ax, panel in zip(axes, panels, strict=True):
        _draw_bounds(ax, panel)
        for name, times in panel.measured.items():
            values = [1e3 * seconds for seconds in times.values()]
            ax.plot(list(times), values, label=name, **series(names.index(name)))
        ax.set_title(f"{panel.title}\n{_compared(panel)}", fontsize=10)
        ax.legend(loc="upper left", fontsize=10)
    low, high = (pick(ax.get_ylim()[end] for ax in axes) for end, pick in ((0, min), (1, max)))
    least = min(second for panel in panels for times in panel.measured.values()
                for second in times.values())  # fmt: skip
    for ax in axes:
        ax.set_ylim(min(low, 700 * float(least)), high * 20)  # one scale, and room for the legends
    told = "; ".join(f"{panel.title} ({_compared(panel)})" for panel in panels)
    show(fig, f"The time of a decode step against the batch; grey is below the bound: {told}.")


def _draw_bounds(ax: "Axes", panel: Panel) -> None:
    times = {batch: step_time(cost, panel.machine) for batch, cost in panel.costs.items()}
    batches = list(times)
    lines = {
        "bytes": [1e3 * time.memory_seconds for time in times.values()],
        "operations": [1e3 * time.compute_seconds for time in times.values()],
    }
    bound(ax, batches, lines["bytes"], "bytes", "below", 0.0)
    ax.plot(batches, lines["operations"], color="black", linestyle="--", linewidth=1.2, zorder=1.5)
    place = batches[-3], lines["operations"][-3]
    note(ax, "operations", place, (4, -2), va="top")
    highest = [max(pair) for pair in zip(*lines.values(), strict=True)]
    ax.fill_between(batches, highest, color="black", alpha=0.07, linewidth=0)
    _log_axes(ax, [b for b in batches if b.bit_length() % 2])
    ax.set_ylim(bottom=min(highest) / 8)


def _compared(panel: Panel) -> str:
    name, times = next(iter(panel.measured.items()))
    batch = max(times)
    time = step_time(panel.costs[batch], panel.machine)
    least = max(time.memory_seconds, time.compute_seconds)
    return f"{name}: {times[batch] / least:.1f} times the bound at {batch}"


def draw_contexts(model: str, machine: str, context: int) -> None:
    """Draw the bounds of a decode step of `model` on `machine`, with `context` tokens each."""
    config, hardware = preset(model), DATASHEET[machine]
    batches = [2**power for power in range(13)]
    costs = [decode_cost(config, batch, context, "bfloat16") for batch in batches]
    times = [step_time(cost, hardware) for cost in costs]
    weights = 1e3 * decode_cost(config, 1, 1, "bfloat16").weight_bytes / hardware.bandwidth
    fig, ax = figure(
        "batch (sequences, log)", "time of a decode step (ms, log), computed", size=(6.8, 4)
    )
    read, computed = (
        [1e3 * second for second in seconds]
        for seconds in zip(
            *((time.memory_seconds, time.compute_seconds) for time in times), strict=True
        )
    )
    ax.plot(batches, read, label="all bytes", **series(0))
    ax.plot(batches, computed, label="operations", **series(1))
    ax.axhline(weights, color="grey", linestyle="-.", label="the bytes of the weights")
    highest = [max(pair) for pair in zip(read, computed, strict=True)]
    ax.plot(batches, highest, color="black", linestyle="--", zorder=3, label="the bound")
    forbidden = "below the bound: impossible"
    ax.fill_between(batches, highest, color="black", alpha=0.07, linewidth=0, label=forbidden)
    at = turn(config, hardware, context)
    if at is not None and at <= batches[-1]:
        ax.axvline(at, color="grey", linestyle=":", label=f"operations take over: {at:,}")
    ax.set_title(f"{model} on {hardware.name}, {context:,} tokens each", fontsize=10)
    ax.legend(loc="upper left")
    _log_axes(ax, batches[::2])
    longest = longest_turning(config, hardware)
    where = "at no batch, however large" if at is None else f"from a batch of {at:,} on"
    show(
        fig,
        f"The higher line is the bound of a step: with {context:,} tokens each, operations take "
        f"longer than bytes {where}; beyond {longest:,} tokens they never do.",
    )


def rounded(values: Sequence[Fraction | float], digits: int = 1, unit: int = 1) -> str:
    """The values in multiples of `unit`, for a fact: "14.5, 16.5"."""
    return ", ".join(f"{float(value / unit):.{digits}f}" for value in values)


def _log_axes(ax: "Axes", ticks: Sequence[int]) -> None:
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
