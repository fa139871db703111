"""Chapter 03: counting what a KV cache saves, and what it costs.

`counted` watches a model at work, `gains` computes the same from the model's configuration alone,
`rotated` plants a bug, and the `draw_` functions are the chapter's pictures.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from minillm import LLM
from minillm.config import ModelConfig
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import StepCost, step_cost, step_time
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token, weight_bytes
from minillm_exercises.chapters.ch01 import knee as knee
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import bound, figure, note, series, show

GIB = 2**30
Curves = tuple[Sequence[float], Sequence[float]]  # without and with a cache, token by token


@contextmanager
def counted(llm: LLM) -> Iterator[list[int]]:
    """The positions that each forward pass of `llm` computes inside the block, pass by pass."""
    seen: list[int] = []
    hook = llm.engine.forward_pass.model.register_forward_pre_hook(
        lambda model, args: seen.append(len(args[0].input_ids))
    )
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def rotated(llm: LLM, ahead: int) -> Iterator[None]:
    """Inside the block every pass of `llm` that does not begin at position 0 rotates its queries
    and keys `ahead` positions too far."""
    hook = llm.engine.forward_pass.model.rope.register_forward_pre_hook(
        lambda rope, args: (args[0] + ahead * int(args[0][0] > 0),)
    )
    try:
        yield
    finally:
        hook.remove()


def positions(prompt: int, new: int) -> tuple[int, int]:
    """Positions computed to write `new` tokens after `prompt`: without a cache the sum of P + i
    for i below N, with one P + N - 1 (the last token written is never read).

    Raises:
        ExerciseError: a length below 1.
    """
    _check(prompt, new)
    return new * prompt + new * (new - 1) // 2, prompt + new - 1


def steps(
    config: ModelConfig, prompt: int, new: int, cached: bool, dtype: str | None = None
) -> list[StepCost]:
    """What each of the `new` forward passes costs after a prompt of `prompt` tokens.

    Raises:
        ExerciseError: a length below 1.
    """
    _check(prompt, new)
    lengths = range(prompt, prompt + new)
    queries = [prompt] + [1] * (new - 1) if cached else lengths
    return [step_cost(config, [q], [s], dtype=dtype) for q, s in zip(queries, lengths, strict=True)]


@dataclass(frozen=True)
class Gains:
    """How many times as much a generation without a cache needs as one with it, after 1, 2, ...
    new tokens; `seconds` is the ratio of the bounds (see `least_seconds`)."""

    positions: tuple[float, ...]
    operations: tuple[float, ...]
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@cache
def gains(
    config: ModelConfig, prompt: int, new: int, machine: Hardware, dtype: str | None = None
) -> Gains:
    """What the cache saves in each currency on the way to `new` tokens."""
    naive, cached = (steps(config, prompt, new, flag, dtype) for flag in (False, True))
    return Gains(
        _ratios([c.num_tokens for c in naive], [c.num_tokens for c in cached]),
        _ratios([c.flops for c in naive], [c.flops for c in cached]),
        _ratios([c.total_bytes for c in naive], [c.total_bytes for c in cached]),
        _ratios(
            [least_seconds(c, machine) for c in naive],
            [least_seconds(c, machine) for c in cached],
        ),
    )


def least_seconds(cost: StepCost, machine: Hardware) -> float:
    """The bound of a step: the larger of bytes over bandwidth and operations over rate."""
    return step_time(cost, machine, num_operations=0).seconds


def bounds(llm: LLM, new: int, machine: Hardware) -> Curves:
    """The least possible milliseconds of each of `new` tokens after one."""
    config, dtype = llm.engine.source.config, llm.engine.dtype
    naive, cached = (
        [1e3 * least_seconds(cost, machine) for cost in steps(config, 1, new, flag, dtype)]
        for flag in (False, True)
    )
    return naive, cached


def middles(values: Sequence[float], size: int = 8) -> list[float]:
    """The median of every `size` values: a disturbed token does not show."""
    return [statistics.median(values[n : n + size]) for n in range(0, len(values), size)]


def clock_ratio(slow: Sequence[float], fast: Sequence[float], size: int = 8) -> float:
    """How many times as long the slow curve took in all, from the medians of `size` tokens."""
    return sum(middles(slow, size)) / sum(middles(fast, size))


def draw_times(times: Mapping[str, Curves], least: Mapping[str, Curves], size: int = 8) -> None:
    """Draw measured milliseconds per token of each model over the bounds of the machine."""
    from matplotlib.ticker import FuncFormatter

    fig, axes = figure(
        "tokens so far (logarithmic)",
        "time per token (ms, logarithmic)",
        cols=len(times),
        size=(8.0, 3.1),
    )
    for ax, name in zip(axes, times, strict=True):
        for number, label in enumerate(("without a cache", "with a cache")):
            values = middles(times[name][number], size)
            tokens = [size * group + size / 2 for group in range(len(values))]
            ax.plot(tokens, values, label=label, **series(number))
        length = range(1, len(times[name][0]) + 1)
        bound(ax, length, least[name][0], "bound without a cache", side="above", at=0.0)
        bound(ax, length, least[name][1], "bound with a cache")
        for number, floor in enumerate(least[name]):  # which line a bound belongs to
            mark = series(number) | {"fillstyle": "none", "linestyle": "none", "markersize": 8}
            ax.plot([length[0], length[-1]], [floor[0], floor[-1]], clip_on=False, **mark)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set(title=name, ylim=(least[name][1][0] / 2, None))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.legend(loc="upper left")
    without, kept = (middles(curve, size)[-1] for curve in times[name])
    show(
        fig,
        f"Measured times (medians of {size} tokens) above the bounds of this machine, which have "
        f"the same marks, open: at the end {name} needs {without:.0f} ms without a cache and "
        f"{kept:.0f} ms with one.",
    )


def draw_currencies(model: str, saved: Gains, clocks: Mapping[str, float]) -> None:
    """Draw how many times as much `model` needs without a cache, counted and on the clock; the
    clock of other models beside it."""
    found = {
        "positions": saved.positions[-1], "operations": saved.operations[-1],
        f"the bound, {model}": saved.seconds[-1],
        **{f"the clock, {name}": ratio for name, ratio in clocks.items()}, "bytes": saved.bytes[-1],
    }  # fmt: skip
    fig, ax = figure(
        "without a cache / with a cache (times, logarithmic)", "what is counted", size=(7, 3)
    )
    found = dict(sorted(found.items(), key=lambda pair: -pair[1]))
    style = series(0) | {"linestyle": "none", "markersize": 9}
    ax.plot(list(found.values()), range(len(found)), **style)
    for row, ratio in enumerate(found.values()):
        note(ax, f"{ratio:.3g}", (ratio, row), (9, 0), va="center", fontsize=None)
    ax.set_yticks(range(len(found)), list(found))
    ax.set(xscale="log", xlim=(0.7, 1.8 * max(found.values())), ylim=(-0.5, len(found) - 0.5))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.axvline(1, color="black", linestyle="--", linewidth=1.2)
    ax.invert_yaxis()
    gained = ", ".join(f"{ratio:.3g} times with {name}" for name, ratio in clocks.items())
    show(
        fig,
        f"What a cache saves, counted and on the clock; the dashed line is no gain. Positions fall "
        f"{found['positions']:.3g} times, bytes {found['bytes']:.3g} times. The clock gains "
        f"{gained}.",
    )


def leads(rows: Tensor, tokens: Sequence[int]) -> list[float]:
    """By how much each of `tokens` leads all others in its row of logits [T, V]."""
    winner = torch.tensor(tokens, device=rows.device)[:, None]  # [T, 1]
    others = rows.scatter(1, winner, -math.inf).amax(1)
    return (rows.gather(1, winner)[:, 0] - others).tolist()


def twice_from(saved: Gains) -> int | None:
    """The number of tokens from which on a text takes twice the time without a cache, if ever."""
    return next((n for n, gain in enumerate(saved.seconds, 1) if gain >= 2), None)


def draw_gains(model: str, prompt: int, machine: str, new: int = 2048) -> None:
    """Draw what a cache saves of positions and of time, token by token, on a machine of
    `minillm.lab.hardware.DATASHEET`."""
    config, device = preset(model), DATASHEET[machine]
    saved, tokens = gains(config, prompt, new, device), range(1, new + 1)
    fig, ax = figure(
        "new tokens written so far (log)",
        "without a cache / with one (times, log)",
        size=(6.4, 3.2),
    )
    shown = (("positions", saved.positions), ("time bound", saved.seconds), ("bytes", saved.bytes))
    for number, (label, values) in enumerate(shown):
        ax.plot(tokens, values, label=label, markevery=0.12, **series(number))
    ends = [1, new]
    bound(ax, ends, [1, 1], "no gain", at=1.0)
    ax.set(xscale="log", yscale="log", ylim=(0.6, None))
    powers = [4**n for n in range(new.bit_length()) if 4**n <= new]
    ax.set_xticks(powers, [f"{power:,}" for power in powers])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.set_title(f"computed: {model} on {device.name}, prompt of {prompt}", fontsize=10)
    ax.legend()
    twice = twice_from(saved)
    when = f"is reached with token {twice:,}" if twice else f"is not reached in {new:,} tokens"
    show(
        fig,
        f"How many times as much a text needs without a cache: after {new:,} tokens it is "
        f"{saved.seconds[-1]:,.1f} times the least possible time, and twice the time {when}.",
    )


def crossover(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Cached tokens (of all requests together) at which the cache is as large as the weights."""
    return weight_bytes(config, dtype) // kv_bytes_per_token(config, dtype)


def draw_prices(models: Sequence[str], tokens: int, card_gb: int, dtype: str = "bfloat16") -> None:
    """Draw the cache's size against the tokens in it, where it equals the model's weights, and
    the memory of a card of `card_gb` (decimal) gigabytes."""
    from matplotlib.ticker import FuncFormatter

    fig, ax = figure(
        "tokens in the cache, all requests together (log)",
        "size of the cache (GiB, log)",
        size=(7.6, 3.4),
    )
    prices = {name: kv_bytes_per_token(preset(name), dtype) for name in models}
    highest = max(prices, key=prices.__getitem__)
    lengths = [2**power for power in range(12, tokens.bit_length())]
    for number, name in enumerate(models):
        config, look = preset(name), series(number)
        label = f"{name}: {prices[name]:,} bytes per token"
        ax.plot(lengths, [n * prices[name] / GIB for n in lengths], label=label, **look)
        meets = crossover(config, dtype)
        star = {"color": look["color"], "marker": "*", "markersize": 18, "linestyle": ""}
        ax.plot(meets, meets * prices[name] / GIB, **star)
        inside = {"color": "white", "marker": look["marker"], "markersize": 4, "zorder": 4}
        ax.plot(meets, meets * prices[name] / GIB, **inside)
    ax.plot([], [], "k*", markersize=12, label="as large as the weights")
    card = [card_gb * 1e9 / GIB] * len(lengths)
    bound(ax, lengths, card, f"one {card_gb} GB card", side="above", at=0.0)
    ax.set_xscale("log", base=4)
    ax.set_yscale("log", base=4)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:,.0f} Ki"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    near = [name for name in models if name != highest and prices[name] > 0.95 * prices[highest]]
    close = "".join(f", and {name} is so near that the lines coincide" for name in near)
    show(
        fig,
        f"Each line is a model in {dtype}; at the star with its mark the cache weighs as much as "
        f"the model; "
        f"a token is dearest in {highest}{close}.",
    )


def _ratios(naive: Sequence[float], cached: Sequence[float]) -> tuple[float, ...]:
    pairs = zip(accumulate(naive), accumulate(cached), strict=True)
    return tuple(above / below for above, below in pairs)


def _check(prompt: int, new: int) -> None:
    if prompt < 1 or new < 1:
        raise ExerciseError(
            f"A generation of {new} new tokens after a prompt of {prompt}: both are at least 1."
        )
