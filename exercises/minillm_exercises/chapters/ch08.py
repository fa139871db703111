"""Chapter 08: what a long prompt does to other requests, and what a preemption costs.

`outcome` and `live` read times out of traces, `again` and `moved` price a preemption, `flood` runs
many requests through a small pool, and the `draw_` functions are the chapter's charts.
"""

import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import step_cost, step_time
from minillm.lab.simulation import Simulation, StepTime
from minillm.models.forward_pass import Chunk
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token
from minillm.trace.recorder import Trace
from minillm_exercises.chapters.ch01 import knee as knee
from minillm_exercises.chapters.common import chosen
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.chapters.common import show_trace as show_trace
from minillm_exercises.plots import bars, bound, figure, note, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 2**17  # tokens, where the search for a crossing stops
Length = Callable[[random.Random, int], int]  # tokens of an answer, of at most so many

# The embedded model continues them with leads that no rounding overturns.
PROMPTS = (
    "def fib(n):",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import math\n\n\ndef area(r):\n    return",
    "for i in range(10):",
)

# How much of its max_tokens a request writes.
LENGTHS: Mapping[str, Length] = MappingProxyType({
    "a tenth": lambda rng, most: min(most, 1 + int(rng.expovariate(10 / most))),
    "a half": lambda rng, most: rng.randint(1, most), "all": lambda rng, most: most,
})  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Three times around one long prompt, in milliseconds.

    Attributes:
        ttft: from its arrival to its first token.
        gap: the longest gap between two tokens of another request.
        done: from its arrival to the end of the last request.
    """

    ttft: float
    gap: float
    done: float


def gaps(trace: Trace, but: str) -> list[float]:
    """Seconds between neighbouring tokens of all requests except one."""
    times = trace.token_times()
    return [b - a for name in times if name != but for a, b in pairwise(times[name])]


def outcome(trace: Trace, name: str = "long") -> Outcome:
    """The three times of a trace around the request `name`."""
    (arrival,) = (one.arrival for step in trace for one in step.added if one.request_id == name)
    first = trace.token_times()[name][0]
    moments = [first - arrival, max(gaps(trace, name)), trace[-1].delivered - arrival]
    return Outcome(*(1e3 * seconds for seconds in moments))


def live(llm: LLM, prompt: int, chats: int = 3, new: int = 24) -> tuple[float, float]:
    """Measured gaps in milliseconds: the median while `chats` write alone, and the longest one.

    Each chat writes `new` tokens. After a third of them, a prompt of `prompt` tokens arrives.
    """
    engine, rng = llm.engine, random.Random(0)

    def add(name: str, tokens: int, most: int) -> None:
        ids = rng.choices(range(engine.source.config.vocab_size), k=tokens)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        engine.add(engine.make_request(name, None, ids, params))

    add("warm-up", prompt, 1)  # the first long step is slower than the next ones
    engine.step()
    engine.abort("warm-up")
    llm.trace.clear()
    for number in range(chats):
        add(f"chat{number}", 10, new)
    for _ in range(new // 3):
        engine.step()
    usual = statistics.median(gaps(llm.trace, "long"))
    add("long", prompt, 2)
    while engine.has_work:
        engine.step()
    return 1e3 * usual, 1e3 * max(gaps(llm.trace, "long"))


def rows(trace: Trace) -> list[list[int]]:
    """How many tokens each row of each step computed."""
    return [[row.num_tokens for row in record.rows] for record in trace]


def last_logits(llm: LLM, ids: Sequence[int], size: int) -> Tensor:
    """Logits after the last of `ids` [1, V], which are fed `size` at a time."""
    by_hand = llm.engine.forward_pass
    cache = by_hand.allocate(1, len(ids))
    for start in range(0, len(ids), size):
        _, logits = by_hand.run([Chunk(0, start, ids[start : start + size])], cache)
    return logits


def draw_budgets(
    found: Mapping[int, Outcome], config: ModelConfig, machine: Hardware, prompt: int, chats: int
) -> None:
    """Draw the three simulated times of every token budget, and two bounds: the operations of the
    prompt, and the bytes of a step of the `chats` without it."""
    prompt_bound = 1e3 * step_cost(config, [prompt], [prompt]).flops / machine.peak_flops
    step = step_cost(config, [1] * chats, [20] * chats)  # they have about 20 tokens by then
    step_bound = 1e3 * step_time(step, machine).memory_seconds
    fig, ax = figure("tokens per step (logarithmic)", "time (ms, logarithmic)", size=(7, 4.2))
    budgets = sorted(found)
    curves = {
        "until all requests are done": [found[n].done for n in budgets],
        "first token of the long prompt": [found[n].ttft for n in budgets],
        "longest gap of the chats": [found[n].gap for n in budgets],
    }
    for number, (label, values) in enumerate(curves.items()):
        ax.plot(budgets, values, label=label, **series(number))
    bound(ax, budgets, [prompt_bound] * len(budgets), "the prompt's operations", at=0.0)
    bound(ax, budgets, [step_bound] * len(budgets), "the bytes of a step", at=1.0)
    full = knee(config, machine)
    ax.axvline(full, color="grey", linestyle=":", label=f"the knee, {full} tokens")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(step_bound / 2, None)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    _plain_ticks(ax)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    soonest = min(budgets, key=lambda n: found[n].done)
    show(
        fig,
        "Simulated. Down to the knee a smaller budget shortens the gaps; below it only the other "
        "two times change, and they grow. All "
        f"requests are done soonest with {soonest} tokens per step.",
    )


def again(
    config: ModelConfig, tokens: int, machine: Hardware, others: int = 32, length: int = 1000
) -> float:
    """Seconds by which a step of `others` that decode, `length` tokens each, becomes longer when a
    sequence computes its `tokens` again in it (bytes and operations of the datasheet)."""
    alone = step_cost(config, [1] * others, [length] * others)
    both = step_cost(config, [tokens] + [1] * others, [tokens] + [length] * others)
    return step_time(both, machine).seconds - step_time(alone, machine).seconds


def moved(config: ModelConfig, tokens: int, link: float) -> float:
    """Seconds that the cache of `tokens` takes to host memory and back, at `link` bytes/s."""
    return 2 * tokens * kv_bytes_per_token(config) / link


def cheaper(config: ModelConfig, tokens: int, machine: Hardware, link: float) -> str:
    """ "swap" or "recompute", for a victim of so many tokens."""
    swaps = moved(config, tokens, link) < again(config, tokens, machine)
    return "swap" if swaps else "recompute"


def cheaper_from(config: ModelConfig, machine: Hardware, link: float) -> int | None:
    """The length from which on it is cheaper to move a sequence's cache than to compute it again;
    None where that is longer than `LONGEST`."""

    lengths = range(1, LONGEST + 1)
    swaps = bisect_left(lengths, True, key=lambda n: cheaper(config, n, machine, link) == "swap")
    first = 1 + swaps
    return first if first <= LONGEST else None


def draw_exchange(model: str, machine: str, gigabytes: float) -> None:
    """Draw both prices against the length of the victim, over a link of so many GB/s."""
    config, device, link = preset(model), DATASHEET[machine], gigabytes * 1e9
    lengths = [round(2 ** (power / 2)) for power in range(18, 27)]  # 512 to 8,192
    fig, ax = figure("tokens of the preempted request (logarithmic)", "time (ms, logarithmic)")
    compute = [1e3 * again(config, n, device) for n in lengths]
    move = [1e3 * moved(config, n, link) for n in lengths]
    ax.plot(lengths, compute, label="recompute, beside 32 others", **series(0))
    ax.plot(lengths, move, label=f"swap out and in at {gigabytes:g} GB/s", **series(1))
    alone = [1e3 * step_time(step_cost(config, [n], [n]), device).seconds for n in lengths]
    ax.plot(lengths, alone, label="recompute, in a step of its own", **series(2))
    first = cheaper_from(config, device, link)
    if first is not None and first <= lengths[-1]:
        crossing = first, 1e3 * moved(config, first, link)
        ax.plot(
            *crossing, "kX", markersize=11, label=f"swap cheaper from {first:,} tokens", zorder=4
        )
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(lengths[::2], [f"{length:,}" for length in lengths[::2]])
    ax.xaxis.minorticks_off()
    _plain_ticks(ax)
    ax.set_title(f"{model} on {device.name}", fontsize=10)
    ax.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="white")
    says = f"swapping is cheaper from {first:,} tokens on" if first else "recomputing is cheaper"
    show(
        fig,
        "The computed price of one preemption, with recomputing in a step of its own for "
        f"comparison: for {model} on this device and link, {says}.",
    )


def _plain_ticks(ax: "Axes") -> None:
    """Ticks at 1, 2, 5, 10, 20, ... on a logarithmic y axis, as plain numbers."""
    low, high = ax.get_ylim()
    ticks = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5) if low < m * 10.0**e < high]
    ax.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    ax.yaxis.minorticks_off()
    ax.set_ylim(low, high)


@dataclass(frozen=True)
class Flood:
    """What became of many requests in a small pool.

    Attributes:
        batch: mean number of rows of a step.
        steps: number of steps.
        preemptions: how many times a request lost its blocks.
        again: tokens that were computed a second time.
        speed: new tokens per second.
        gap: the longest gap of any answer, in seconds.
    """

    batch: float
    steps: int
    preemptions: int
    again: int
    speed: float
    gap: float


def flood(
    admission: str,
    share: str,
    seconds: StepTime,
    requests: int = 60,
    blocks: int = 500,
    mode: str = "recompute",
) -> Flood:
    """Run `requests` of 100 prompt tokens and max_tokens 500 through a pool of `blocks`.

    A request writes the `share` of max_tokens that `LENGTHS` defines.

    Raises:
        ExerciseError: a share that is not in `LENGTHS`.
    """
    most, new = 500, _answers(share, requests)
    sim = Simulation(
        blocks, seconds=seconds, admission=admission, max_num_seqs=64,
        preemption_mode=mode, num_host_blocks=8 * blocks,
    )  # fmt: skip
    for tokens in new:  # all requests arrive at the beginning
        sim.add(prompt=100, new=tokens, max_tokens=most)
    trace, count = sim.run(), sim.scheduler.counters
    return Flood(
        batch=sum(len(step.rows) for step in trace) / len(trace),
        steps=len(trace),
        preemptions=count.num_preemptions_recompute + count.num_preemptions_swap,
        again=count.num_recomputed_tokens,
        speed=sum(new) / sim.now,
        gap=max(gaps(trace, but="")),
    )


def _answers(share: str, requests: int, most: int = 500) -> list[int]:
    """How many tokens each request of a flood writes."""
    rng, length = random.Random(0), chosen("share", share, LENGTHS)
    return [length(rng, most) for _ in range(requests)]


def full_pool(
    share: str, config: ModelConfig, hardware: Hardware, requests: int = 60, blocks: int = 500
) -> float:
    """New tokens per second that no admission of `flood` can exceed: no slot of the pool is ever
    empty, and a step takes no longer than reading the weights and the slots."""
    new = _answers(share, requests)
    held = sum(100 + n for tokens in new for n in range(tokens))  # slots, summed over the steps
    steps = max(held / (16 * blocks), max(new))
    read = steps * step_cost(config, [1], [1]).weight_bytes + held * kv_bytes_per_token(config)
    return sum(new) * hardware.bandwidth / read


def draw_floods(runs: Mapping[tuple[str, str], Flood], most: Mapping[str, float]) -> None:
    """Draw the simulated speed of both admissions, and the `most` that is possible, by share."""
    fig, ax = figure("share of max_tokens that is written", "new tokens/s", size=(7.4, 3.6))
    admissions = sorted({admission for _, admission in runs})
    for number, admission in enumerate(admissions):
        places = [place + 0.4 * number - 0.2 for place in range(len(most))]
        speeds = [runs[share, admission].speed for share in most]
        drawn = ax.bar(places, speeds, width=0.38, label=admission, **bars(number))
        ax.bar_label(drawn, [f"{speed:,.0f}" for speed in speeds], padding=2, fontsize=8)
    for place, speed in enumerate(most.values()):
        label = None if place else "bound: no slot is ever empty"
        ends = [place - 0.42, place + 0.42]
        ax.plot(ends, [speed] * 2, color="black", linestyle="--", linewidth=1.4, label=label)
        note(ax, f"{speed:,.0f}", (place, speed), (0, 3), ha="center", fontsize=8)
    ax.set_xticks(range(len(most)), list(most))
    ax.margins(y=0.12)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    gain = runs["all", "watermark"].speed / runs["all", "reserve_max"].speed
    show(
        fig,
        "Simulated speed of one pool with two kinds of admission: where answers use all of "
        f"max_tokens, watermark is {gain:.2f} times as fast as reserve_max.",
    )


def in_runs(sizes: Iterable[int]) -> str:
    """Equal neighbours as one: [3, 512, 512, 4] is "3, 2 x 512, 4"."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return ", ".join(f"{count} x {size}" if count > 1 else f"{size}" for count, size in runs)
