"""Cases of `moe.moe_experts`.

The weights of unused experts and the gaps between rows of x are NaN, so that a kernel that reads a
wrong expert, or past the end of a row, has a wrong result.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from minillm_kernels import moe, moe_config, moe_route, reference
from minillm_kernels.check.case import (
    Guarded,
    Launch,
    Mismatch,
    blank,
    compare,
    generator,
    guarded,
    normal,
)
from minillm_kernels.moe_config import Config, Tile

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GAP = 8  # numbers between two rows, where rows have gaps
# Tiles so small that a toy model has several of everything.
SMALL = Config(16, Tile(16, 16), Tile(16, 16), group_bytes=6000)
SMALL_DESCRIBED = replace(SMALL, descriptors=True)
SMALL_DIRECT = replace(SMALL, gate_up=Tile(32, 32), down=Tile(32, 32), direct=True)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        routing: "random"; "same": every token has the experts of the first; "half": only
            experts of the lower half are chosen.
        config: None leaves the choice to the launcher.
        gaps: rows of x and of the result are not contiguous.
        scale: of x; with 1e4 SiLU's exponential overflows.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype = F32
    routing: str = "random"
    config: Config | None = None
    ids_dtype: torch.dtype = torch.int64
    gaps: bool = False
    scale: float = 1.0


CASES: tuple[Case, ...] = (
    Case(0, 32, 24, 4, 2),
    Case(1, 32, 24, 4, 2, ids_dtype=torch.int32),
    Case(7, 32, 24, 4, 1, gaps=True),
    Case(3, 32, 24, 4, 2),
    Case(5, 40, 24, 4, 2, BF16, scale=1e4),
    Case(1, 24, 8, 24, 8),
    Case(40, 48, 24, 4, 1, routing="same"),
    Case(9, 300, 140, 4, 2, F16, routing="half", gaps=True),
    Case(4, 32, 24, 8, 8, BF16),
    # Several tiles in every direction, and the end of a tile inside.
    Case(18, 40, 24, 4, 3, config=SMALL),
    Case(3, 40, 24, 3, 2, config=SMALL, gaps=True),
    Case(3, 36, 20, 2, 2, BF16, config=SMALL_DESCRIBED),  # 40-byte rows: no descriptors
    Case(18, 40, 24, 2, 2, F16, config=SMALL_DESCRIBED),
    Case(35, 24, 24, 3, 1, BF16, "same", config=SMALL_DESCRIBED, gaps=True),
    Case(1, 72, 40, 5, 3, config=SMALL_DIRECT),
    Case(2, 40, 24, 4, 2, BF16, "same", config=SMALL_DIRECT, ids_dtype=torch.int32, gaps=True),
    # The tiles of real calls.
    Case(1, 40, 264, 4, 1, BF16, config=moe_config.DIRECT),
    Case(20, 136, 40, 2, 1, BF16, config=moe_config.DECODE),
    Case(70, 136, 72, 4, 2, F16, "half", config=moe_config.MIDDLE_90),
    Case(40, 72, 72, 2, 2, BF16, config=moe_config.MIDDLE_80),
    Case(140, 264, 136, 2, 1, BF16, config=moe_config.PREFILL_90),
    Case(130, 136, 72, 1, 1, F16, "same", config=moe_config.PREFILL_80),
    Case(20, 72, 40, 2, 2, config=moe_config.FLOAT32),
)


def random_case(rng: random.Random) -> Case:
    """Any small call."""
    num_experts = rng.choice((1, 2, 3, 4, 8))
    config = rng.choice((None, None, SMALL, SMALL_DESCRIBED, SMALL_DIRECT))
    most = 2 if config is SMALL_DIRECT else 12
    return Case(
        num_tokens=rng.randint(0, most),
        hidden_size=rng.randint(1, 50) if config is None else 8 * rng.randint(1, 6),
        intermediate_size=rng.randint(1, 50) if config is None else 8 * rng.randint(1, 6),
        num_experts=num_experts,
        top_k=rng.choice([k for k in (1, 2, 3, 8) if k <= num_experts]),
        dtype=rng.choice((F32, F16, BF16)),
        routing=rng.choice(("random", "random", "same", "half")),
        config=config,
        ids_dtype=rng.choice((torch.int32, torch.int64)),
        gaps=rng.random() < 0.3,
    )


class Inputs(NamedTuple):
    """The tensors of a call, in its order."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor


def inputs_of(case: Case, device: str) -> Inputs:
    """The same numbers on every device."""
    rng = generator(1000 * case.num_tokens + case.hidden_size)
    num_experts, d, intermediate = case.num_experts, case.hidden_size, case.intermediate_size
    x = torch.full((case.num_tokens, d + GAP * case.gaps), math.nan, dtype=case.dtype)
    x[:, :d] = normal(rng, (case.num_tokens, d), case.dtype, "cpu", case.scale)
    gate_up = normal(rng, (num_experts, 2 * intermediate, d), case.dtype, "cpu", d**-0.5)
    down = normal(rng, (num_experts, d, intermediate), case.dtype, "cpu", intermediate**-0.5)

    liking = torch.rand(case.num_tokens, num_experts, generator=rng)
    if case.routing == "same":
        liking = liking[:1].expand(case.num_tokens, -1)
    elif case.routing == "half":
        liking[:, max(case.top_k, num_experts // 2) :] = -1
    ids = liking.topk(case.top_k, dim=-1).indices.to(case.ids_dtype).contiguous()
    weights = torch.rand(case.num_tokens, case.top_k, generator=rng) + 0.1
    unused = torch.ones(num_experts, dtype=torch.bool)
    unused[ids.long().flatten()] = False
    gate_up[unused], down[unused] = math.nan, math.nan

    tensors = [tensor.to(device) for tensor in (x, gate_up, down, weights, ids)]
    return Inputs(tensors[0][:, :d], *tensors[1:])


def guarded_output(case: Case, device: str) -> tuple[Guarded, Tensor]:
    """A guarded buffer, and the view of it that the call shall fill."""
    whole = guarded((case.num_tokens, case.hidden_size + GAP * case.gaps), case.dtype, device)
    return whole, whole.view[:, : case.hidden_size]


def verify(case: Case, device: str = "cpu", kernels: ModuleType = moe) -> None:
    """Mismatch if `kernels.moe_experts` is wrong in this case, or writes where it must not."""
    inputs = inputs_of(case, device)
    guard, out = guarded_output(case, device)
    got = kernels.moe_experts(*inputs, config=case.config, out=out)
    if got.data_ptr() != out.data_ptr():
        raise Mismatch("the result is not in `out`")
    guard.check(written=False)
    Guarded(guard.buffer, out).check()
    if not bool(guard.view[:, case.hidden_size :].isnan().all()):
        raise Mismatch("the kernel wrote between the rows of its output")
    on_cpu = [tensor.cpu() for tensor in inputs]
    x, gate_up, down, weights = (tensor.double() for tensor in on_cpu[:4])
    expected = reference.moe_experts(x, gate_up, down, weights, on_cpu[4])
    compare(out, expected, "the sum over experts")
    verify_route(case, device)


def verify_route(case: Case, device: str = "cpu", kernels: ModuleType = moe_route) -> None:
    """Mismatch if `kernels.route` chooses other experts or weights, with a bias or without one."""
    rng = generator(case.num_tokens + case.num_experts)
    logits = normal(rng, (case.num_tokens, case.num_experts), F32, "cpu", 2.0)
    bias = torch.rand(case.num_experts, generator=rng) - 1
    for softmax, normalize, factor, added in (
        (True, True, 1.0, None), (True, False, 1.5, None), (False, True, 2.5, bias),
    ):  # fmt: skip
        given = logits + 100.0 * (factor == 1)  # whose exponential is infinite
        scores = (given.softmax(-1) if softmax else given.sigmoid()).double()
        how = case.top_k, softmax, normalize, factor
        to_add = None if added is None else added.to(device)
        weights, ids = kernels.route(given.to(device), to_add, *how)
        expected, experts = reference.moe_route(scores, added, case.top_k, normalize=normalize)
        if not torch.equal(ids.cpu(), experts):
            raise Mismatch(f"tokens go to experts {ids.tolist()}, not {experts.tolist()}")
        compare(weights, expected * factor, "the weights of experts")


def verify_invariant(case: Case, device: str = "cpu", kernels: ModuleType = moe) -> None:
    """Mismatch if the bits of a token depend on the others in the batch-invariant mode.

    Interpreted, this needs `interpreter.ordered_dots()` around it.
    """
    x, gate_up, down, weights, ids = inputs_of(case, device)
    gate_up, down = gate_up.nan_to_num(0.5), down.nan_to_num(0.5)  # below, others get chosen

    def run(rows: Tensor, chosen: Tensor) -> Tensor:
        result: Tensor = kernels.moe_experts(
            x[rows], gate_up, down, weights[rows], chosen, batch_invariant=True, config=case.config
        )
        return result

    everyone = torch.arange(case.num_tokens, device=device)
    together = run(everyone, ids)
    tokens = sorted({0, case.num_tokens - 1} & set(range(case.num_tokens)))
    for token in tokens:
        alone = everyone[token : token + 1]
        crowd = ids[token].expand_as(ids).contiguous()
        for what, got in (
            ("alone", run(alone, ids[alone])[0]),
            ("where all choose its experts", run(everyone, crowd)[token]),
        ):
            _same_bits(got, together[token], f"token {token} {what}")
    backwards = everyone.flip(0)
    _same_bits(run(backwards, ids[backwards]).flip(0), together, "a batch in another order")


def _same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        raise Mismatch(f"{what} has other bits than in its batch")


# ---- calls of real models, to be compiled --------------------------------------------------------

# Experts, choices of a token, hidden and intermediate size (config.json of the models).
QWEN3_30B = (128, 8, 2048, 768)
MIXTRAL = (8, 2, 4096, 14336)
DEEPSEEK_LITE = (64, 6, 2048, 1408)
ALL = (80, 90, 100)
NEW = (90, 100)


def call(
    model: Sequence[int], num_tokens: int, dtype: torch.dtype, batch_invariant: bool = False
) -> Callable[[], object]:
    """A call at a model's sizes."""
    num_experts, top_k, d, intermediate = model
    weights, ids = (blank(num_tokens, top_k, dtype=dtype) for dtype in (F32, torch.int64))
    x = blank(num_tokens, d, dtype=dtype)
    gate_up = blank(num_experts, 2 * intermediate, d, dtype=dtype)
    down = blank(num_experts, d, intermediate, dtype=dtype)
    inputs = x, gate_up, down, weights, ids
    return partial(moe.moe_experts, *inputs, batch_invariant=batch_invariant)


LAUNCHES: tuple[Launch, ...] = (  # every row of the table of tiles, and every model
    Launch(
        "Qwen3-30B-A3B router",
        partial(moe_route.route, blank(4, 128, dtype=F32), None, 8, True, True, 1.0),
    ),
    Launch("Qwen3-30B-A3B decode 1", call(QWEN3_30B, 1, BF16), ALL),
    Launch("Qwen3-30B-A3B decode 32", call(QWEN3_30B, 32, BF16), ALL),
    Launch("Qwen3-30B-A3B decode 256", call(QWEN3_30B, 256, BF16), ALL, NEW),
    Launch("Qwen3-30B-A3B prefill 4096", call(QWEN3_30B, 4096, BF16), ALL, NEW),
    Launch("Qwen3-30B-A3B invariant", call(QWEN3_30B, 16, BF16, True), ALL, NEW),
    Launch("Qwen3-30B-A3B prefill float32", call(QWEN3_30B, 512, F32)),
    Launch("Mixtral-8x7B decode 1", call(MIXTRAL, 1, F16), ALL),
    Launch("Mixtral-8x7B decode 16", call(MIXTRAL, 16, F16), ALL),
    Launch("Mixtral-8x7B prefill 4096", call(MIXTRAL, 4096, F16), ALL, NEW),
    Launch("DeepSeek-V2-Lite decode 2", call(DEEPSEEK_LITE, 2, BF16), ALL),
    Launch("DeepSeek-V2-Lite decode 64", call(DEEPSEEK_LITE, 64, BF16), ALL),
    Launch("DeepSeek-V2-Lite prefill 2048", call(DEEPSEEK_LITE, 2048, BF16), ALL, NEW),
)
