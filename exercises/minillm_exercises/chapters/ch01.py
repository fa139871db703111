"""Chapter 01: the parts of a forward pass on their own, and a model's bounds on any machine."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import step_cost, step_time
from minillm.layers.kv_cache import KVCache
from minillm.layers.linear import Linear
from minillm.models.decoder import Decoder
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.models.presets import preset
from minillm.ops.batch import Batch
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import COLOURS, bound, figure, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 2**20  # tokens: no machine's knee is near it
LENGTHS = tuple(2**i for i in range(14))  # 1 to 8,192 tokens


def ones(model: Decoder, *shape: int) -> Tensor:
    """Activations of a model."""
    return torch.ones(shape, dtype=model.dtype, device=model.device)


def product_pass(model: Decoder, num_tokens: int, num_logits: int = 1) -> Callable[[], Tensor]:
    """A step that does all matrix products of `num_tokens`, and nothing between: those of a prompt
    with one row of logits, those of a batch of decoding sequences with as many as tokens.

    Every weight is read once, layer by layer as in a forward pass, so none is still in a cache.
    """
    layers = [part for part in model.layers.modules() if isinstance(part, Linear)]
    widths = {layer.in_features for layer in layers} | {model.embedding.in_features}
    rows = {width: ones(model, num_tokens, width) for width in widths}

    @torch.inference_mode()
    def step() -> Tensor:
        for layer in layers:
            layer(rows[layer.in_features])
        return model.logits(rows[model.embedding.in_features][-num_logits:])

    return step


class PlainCache(KVCache):
    """A KV cache whose attention is written as matrix products, one query at a time.

    torch's counter of operations reports zero for the fused attention of a CPU.
    """

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Each query over exactly the keys that it may see: [T, H, D] -> [T, H, D]."""
        rows = []
        for q, position in zip(query, batch.positions.tolist(), strict=True):
            seen = slice(position + 1)
            k, v = (cache[layer][0, :, seen] for cache in (self.key, self.value))  # [Hkv, S, D]
            grouped = q.view(len(k), -1, q.shape[-1])  # [Hkv, G, D]: a KV head and its queries
            rows.append(((grouped @ k.mT * scale).softmax(-1) @ v).flatten(0, 1))
        return torch.stack(rows)


def count_operations(forward_pass: ForwardPass, num_tokens: int) -> tuple[int, Tensor]:
    """The operations of a prompt as torch counts them while they run, and the logits."""
    config = forward_pass.model.config
    place = forward_pass.dtype, forward_pass.device
    plain = PlainCache(cache_spec(config), config.num_layers, 1, num_tokens, *place)
    with FlopCounterMode(display=False) as counter:
        _, logits = forward_pass.run([Chunk(0, 0, range(num_tokens))], plain)
    return counter.get_total_flops(), logits


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def count_calls(step: Callable[[], object]) -> int:
    """How many of torch's operations `step` calls, views included."""
    with _Counter() as counter:
        step()
    return counter.calls


def knee(config: ModelConfig, hardware: Hardware, dtype: str = "bfloat16") -> int:
    """The shortest prompt whose operations take at least as long as its bytes.

    Exact: both sides are integers, compared without a division.
    """

    def computes(num_tokens: int) -> bool:
        cost = step_cost(config, [num_tokens], [num_tokens], dtype=dtype)
        compute = cost.flops * Fraction(hardware.bandwidth)
        return compute >= cost.total_bytes * Fraction(hardware.rate(dtype))

    return 1 + bisect_left(range(1, LONGEST), True, key=computes)


def doubling_length(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """The length at which the time is twice that of the first length, between two measured ones
    on a straight line in log-log axes; infinite if the time never doubles.

    Raises:
        ExerciseError: the two sequences differ in length, or are empty.
    """
    if not lengths or len(lengths) != len(seconds):
        raise ExerciseError(
            f"doubling_length() was given {len(lengths)} lengths and {len(seconds)} times; it "
            f"needs one time for each length and at least one."
        )
    goal = 2 * seconds[0]
    for at in range(1, len(lengths)):
        if seconds[at] >= goal:
            low, high = seconds[at - 1], seconds[at]
            share = math.log(goal / low) / math.log(high / low)
            return lengths[at - 1] * (lengths[at] / lengths[at - 1]) ** share
    return math.inf


def draw_rows(tokens: Sequence[int], outputs: int = 2, inputs: int = 3) -> None:
    """Draw numbers of tokens that pass through one small matrix, with bytes and operations."""
    fig, axes = figure("numbers of a token", "tokens", cols=len(tokens), size=(7.4, 2.9))
    for ax, count in zip(axes, tokens, strict=True):
        top = max(tokens) / 2
        places = ((0, inputs, count, "tokens"), (inputs + 2, outputs, inputs, "weights"),
                  (inputs + outputs + 4, outputs, count, "results"))  # fmt: skip
        for number, (left, wide, high, name) in enumerate(places):
            style = {"facecolor": COLOURS[number], "edgecolor": "black"}
            low, hatch = top - high / 2, ("", "//", "..")[number]
            for row, column in product(range(high), range(wide)):
                ax.bar(left + column, 1, width=1, bottom=low + row, align="edge", hatch=hatch,
                       **style)  # fmt: skip
            ax.annotate(name, (left + wide / 2, -0.5), ha="center", va="top", fontsize=9)
        for at, sign in ((inputs + 1, "x"), (inputs + outputs + 3, "=")):
            ax.annotate(sign, (at, top), ha="center", va="center", fontsize=12)
        ax.set_axis_off()
        ax.set_ylim(-1.0, max(tokens) + 0.2)
        read, done = 2 * inputs * outputs, 2 * inputs * outputs * count
        title = f"{count} token{'s' * (count > 1)}: {read} bytes of weights, {done} operations"
        ax.set_title(title, fontsize=9.5)
    show(
        fig,
        f"The matrix is read once for {tokens[0]} token and once for {tokens[-1]}: the bytes of "
        "its weights stay the same, and the operations grow with the tokens.",
    )


def draw_floor(ax: "Axes", lengths: Sequence[int], bounds: Mapping[str, Sequence[float]]) -> None:
    """Draw each of the named bounds (one value per length) in log-log axes, and shade what lies
    under the higher of the first two: no measurement can be there. Ticks are powers of two."""
    rising = [name for name, values in bounds.items() if values[-1] > 4 * values[0]]
    for number, (name, values) in enumerate(bounds.items()):
        place = ("below" if number < 2 else "above", 1.0)
        if name in rising:  # the names of two steep lines stand at different ends, clear of both
            place = ("below", 0.2) if name == rising[0] else ("above", 0.85)
        bound(ax, lengths, values, name, *place)
    first, second, *_ = bounds.values()
    highest = [max(pair) for pair in zip(first, second, strict=True)]
    forbidden = "below the bound: impossible"
    ax.fill_between(lengths, highest, color="black", alpha=0.07, linewidth=0, label=forbidden)
    ax.set(xscale="log", yscale="log")
    ticks = [n for n in lengths if n.bit_count() == 1]
    ticks = ticks[:: 1 + (len(ticks) > 10)]
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")


def draw_bounds(model: str, machine: str) -> None:
    """Draw the bounds of the time to first token of a preset on a machine of the datasheets."""
    config, hardware = preset(model), DATASHEET[machine]
    costs = [step_cost(config, [n], [n], dtype="bfloat16") for n in LENGTHS]
    times = [step_time(cost, hardware) for cost in costs]
    turn = knee(config, hardware)
    fig, ax = figure(
        "prompt tokens (log)", "time to first token (ms, log), computed", size=(6.4, 3.6)
    )
    lines = {
        "bytes": [1e3 * time.memory_seconds for time in times],
        "operations": [1e3 * time.compute_seconds for time in times],
    }
    draw_floor(ax, LENGTHS, lines)
    ax.axvline(turn, color="grey", linestyle=":", label=f"the knee: {turn:,} tokens")
    ax.set_title(f"{model} on {hardware.name}", fontsize=10)
    ax.legend(loc="upper left")
    show(
        fig,
        f"No point can lie in the shaded area: {model} on {hardware.name} waits for memory "
        f"below {turn:,} prompt tokens and for arithmetic above.",
    )
