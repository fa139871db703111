"""Cases for `sampling.py`: the reference's token, and what top-k and top-p leave, row by row."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from minillm_kernels import reference, sampling
from minillm_kernels.check.case import (
    Launch,
    Mismatch,
    blank,
    generator,
    guarded,
    normal,
    poisoned,
    short,
)

EDGE = 1e-6  # relative error of a mass in float32, within which the edge token is free
Kind = Literal["normal", "ties", "equal", "masked", "far", "tiny", "broken"]


@dataclass(frozen=True)
class Case:
    """One call. Parameters of rows are tuples that the rows take in turn.

    Attributes:
        kind: of logits. "ties": few different values; "equal": one value in all of a row; "masked":
            nine tenths are -inf; "far": one token far above the rest; "tiny": differences of
            1e-30; "broken": a row with NaN and one with +inf among others.
        gap: elements of NaN between rows.
        block, search_block, gather: of the kernel's `Config`; 0 is its own choice.
    """

    op: Literal["gumbel_argmax", "truncate", "sample"]
    num_rows: int
    vocab_size: int
    dtype: torch.dtype = torch.float32
    kind: Kind = "normal"
    spread: float = 3.0
    temperature: tuple[float, ...] = (1.0, 0.7, 1.5)
    min_p: tuple[float, ...] = (0.0, 0.05)
    top_k: tuple[int, ...] = (0,)
    top_p: tuple[float, ...] = (1.0,)
    purpose: int = 0
    gap: int = 0
    block: int = 0
    search_block: int = 0
    gather: int = 0
    seed: int = 0


BF16, FP16 = torch.bfloat16, torch.float16
SOME_K = (0, 1, 5, 40, 0, 7, 10**6)
SOME_P = (1.0, 0.9, 0.5, 0.99, 0.3, 1.0, 0.0, 0.8)

CASES: tuple[Case, ...] = (
    # -- vocabularies that end inside, at and behind a block; few and many blocks
    Case("sample", 1, 1, temperature=(0.0,)),
    Case("sample", 3, 3, FP16, gap=5, temperature=(0.0,)),
    Case("sample", 2, 128, block=128, temperature=(0.0,)),
    Case("sample", 3, 1000, BF16, kind="ties", block=256, gap=24, temperature=(0.0,)),
    Case("sample", 2, 4099, kind="equal", block=1024, seed=3, temperature=(0.0,)),
    Case("sample", 4, 300, kind="broken", block=128, temperature=(0.0,)),
    Case("sample", 2, 300, kind="masked", block=128, temperature=(0.0,)),
    # -- draws
    Case("gumbel_argmax", 1, 1),
    Case("gumbel_argmax", 3, 3, temperature=(1.0, 0.3)),
    Case("gumbel_argmax", 3, 250, kind="far", spread=1.0, block=128),  # the far token loses
    Case("gumbel_argmax", 6, 128, BF16, block=64, purpose=1),
    Case("gumbel_argmax", 4, 500, block=128, gap=3, purpose=2, spread=1.0),
    Case("gumbel_argmax", 6, 515, kind="equal", block=256, min_p=(0.0, 1.0), purpose=3),
    Case("gumbel_argmax", 4, 517, FP16, kind="ties", block=512, temperature=(5.0, 1.0, 0.1)),
    Case("gumbel_argmax", 3, 100, kind="masked", block=32, min_p=(0.0, 0.5, 0.01)),
    Case("gumbel_argmax", 3, 300, kind="far", spread=1e4, temperature=(1.0, 1e-3, 1e4)),
    Case("gumbel_argmax", 4, 200, kind="broken", block=64),
    Case("gumbel_argmax", 2, 5000, spread=0.1, min_p=(0.3, 0.0), block=2048),
    # -- top-k and top-p: gathered tokens, and more than can be gathered
    Case("truncate", 1, 1, top_k=(1,), top_p=(0.5,)),
    Case("truncate", 4, 3, top_k=(2, 0, 3, 1), top_p=(0.9, 0.1, 1.0)),
    Case("truncate", 8, 1000, BF16, top_k=SOME_K, top_p=SOME_P, gap=7),
    Case("truncate", 2, 300, top_k=(40, 0), top_p=(1.0, 0.95), search_block=256, gather=16),
    Case("truncate", 2, 600, top_k=(50, 0), top_p=(1.0, 0.8), search_block=256, gather=64),
    Case("truncate", 2, 200, kind="ties", top_k=(0, 60), top_p=(0.9, 0.6), gather=16),
    Case("truncate", 6, 400, kind="ties", top_k=SOME_K, top_p=SOME_P, block=256),
    Case("truncate", 2, 200, kind="equal", top_p=(0.5, 0.3), top_k=(0, 7), gather=16),
    Case("truncate", 3, 500, kind="equal", top_p=(0.5, 0.3, 0.0), top_k=(0, 7)),
    Case("truncate", 3, 400, kind="masked", top_k=(0, 60, 3), top_p=(0.9, 1.0), gather=16),
    Case("truncate", 3, 300, kind="far", spread=1e4, top_k=(0, 2), top_p=(0.9, 0.999999)),
    Case("truncate", 3, 300, kind="tiny", top_k=(0, 9), top_p=(0.4, 1.0, 0.9)),
    Case("truncate", 4, 200, kind="broken", top_k=(0, 9), top_p=(0.4, 1.0, 0.9), gather=16),
    Case("truncate", 1, 32000, FP16, top_k=(0,), top_p=(0.95,), spread=2.0),
    # -- all of it
    Case("sample", 1, 1, top_k=(1,), top_p=(0.5,)),
    Case("sample", 6, 600, temperature=(0.0, 1.0, 0.7, 2.0), top_k=SOME_K, top_p=SOME_P, block=256,
         gap=1),
    Case("sample", 4, 300, BF16, kind="ties", top_k=SOME_K, top_p=SOME_P, min_p=(0.0, 0.02)),
    Case("sample", 4, 200, kind="broken", top_k=SOME_K, top_p=SOME_P, block=64,
         temperature=(1.0, 0.0)),
)  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """Any case of moderate size."""
    vocab_size = rng.choice([1, 2, 63, 64, 65, 257, 300])
    return Case(
        op=rng.choice(["gumbel_argmax", "truncate", "sample"]),
        num_rows=rng.randint(1, 3),
        vocab_size=vocab_size,
        dtype=rng.choice([torch.float32, BF16, FP16]),
        kind=rng.choice(["normal", "ties", "equal", "masked", "far", "tiny"]),
        spread=rng.choice([0.1, 1.0, 4.0]),
        temperature=tuple(rng.choice([0.2, 1.0, 1.7]) for _ in range(3)),
        min_p=tuple(rng.choice([0.0, 0.1, 1.0]) for _ in range(3)),
        top_k=tuple(rng.choice([0, 1, 2, 30, vocab_size]) for _ in range(3)),
        top_p=tuple(rng.choice([0.05, 0.5, 0.97, 1.0]) for _ in range(3)),
        purpose=rng.randint(0, 3),
        gap=rng.choice([0, 3]),
        block=rng.choice([0, 64, 256]),
        search_block=rng.choice([0, 256]),
        gather=rng.choice([0, 16, 64]),
        seed=rng.randint(0, 2**31),
    )


def verify(case: Case, device: str = "cpu", kernels: ModuleType | Any = sampling) -> None:
    """Raise `Mismatch` where the launcher differs from the reference, or from itself alone."""
    arguments = _arguments(case, device)
    config = _config(case, kernels)
    healthy = [row for row in range(case.num_rows) if row not in _broken_rows(case)]
    launcher = getattr(kernels, case.op)
    shape = (case.num_rows, case.vocab_size) if case.op == "truncate" else (case.num_rows,)
    out = guarded(shape, torch.float32 if case.op == "truncate" else torch.int64, device)
    best = torch.zeros(case.num_rows, device=device)
    more = {"best": best} if case.op == "sample" else {}
    result = launcher(*arguments, out=out.view, config=config, **more)
    if result.data_ptr() != out.view.data_ptr():
        raise Mismatch("the result is not in the tensor that was given for it")
    out.check(written=case.kind != "broken")
    got, inputs = result.cpu(), [_on_cpu(argument) for argument in arguments]
    check = _check_truncated if case.op == "truncate" else _check_tokens
    check(case, got, inputs, healthy)
    largest = inputs[0].float().amax(dim=-1)
    if more and not torch.allclose(best.cpu(), largest, rtol=0.0, atol=0.0, equal_nan=True):
        raise Mismatch(f"the largest logits are {best.tolist()}, not {largest.tolist()}")
    row = healthy[-1]
    alone = launcher(*(_row(argument, row) for argument in arguments), config=config)
    if not torch.equal(alone.cpu()[0], got[row]):
        raise Mismatch(f"row {row} is another one without the other rows")


def _check_tokens(case: Case, got: Tensor, inputs: list, healthy: list[int]) -> None:
    if not bool(((got >= 0) & (got < case.vocab_size)).all()):
        raise Mismatch(f"tokens {got.tolist()} of a vocabulary of {case.vocab_size}")
    for row in healthy:
        wanted = _tokens(case, [_row(argument, row) for argument in inputs])
        if int(got[row]) not in wanted:
            raise Mismatch(f"the token of row {row} is {int(got[row])}, not {wanted}")


def _tokens(case: Case, arguments: list) -> list[int]:
    """Tokens that are right for one row: one, or two where the edge of top-p is that close."""
    if case.op == "gumbel_argmax":
        return [int(reference.gumbel_argmax(*arguments))]
    logits, temperature, top_k, top_p, min_p, *stream = arguments
    if float(temperature) == 0:
        return [int(reference.argmax(logits.float()))]
    raw = logits.float()
    scaled = (raw - raw.amax()) / temperature
    scaled = scaled.masked_fill(scaled < min_p.log(), -math.inf)
    one, zero = torch.ones(1), torch.zeros(1)
    return [
        int(reference.gumbel_argmax(kept[None], one, zero, *stream))
        for kept in truncations(scaled[0], int(top_k), float(top_p), _slack(case))
    ]


def _check_truncated(case: Case, got: Tensor, inputs: list, healthy: list[int]) -> None:
    logits, top_k, top_p = inputs
    for row in healthy:
        scaled = logits[row].float() - logits[row].float().amax()
        wanted = list(truncations(scaled, int(top_k[row]), float(top_p[row]), _slack(case)))
        if not any(torch.equal(got[row], kept) for kept in wanted):
            counts = [int((kept > -math.inf).sum()) for kept in wanted]
            found = int((got[row] > -math.inf).sum())
            raise Mismatch(f"row {row} keeps {found} tokens, or other ones than the right {counts}")


def _slack(case: Case) -> float:
    """Equal logits have masses of exactly 1, whose sums nothing rounds."""
    return 0.0 if case.kind == "equal" else EDGE


def truncations(scaled: Tensor, top_k: int, top_p: float, slack: float) -> Iterator[Tensor]:
    """What may be left of one row [V]: a prefix of its order, longer or shorter by what is close.

    Masses are summed in float64. A token before which the mass is within `slack` of the goal,
    relative to it, may stay or not; every other one is certain.
    """
    ordered, ids = scaled.sort(descending=True, stable=True)
    if 0 < top_k < len(ordered):
        ordered = ordered.masked_fill(ordered < ordered[top_k - 1], -math.inf)
    mass = ordered.double().exp()
    before = mass.cumsum(0) - mass
    goal = top_p * float(mass.sum())
    places = torch.arange(len(ordered))
    certain = (before < goal * (1 - slack)) | (top_p >= 1) | (places == 0)
    possible = certain | (before < goal * (1 + slack))
    for count in range(int(certain.sum()), int(possible.sum()) + 1):
        kept = ordered.masked_fill(places >= count, -math.inf)
        yield torch.empty_like(scaled).scatter_(0, ids, kept)
        if bool((ordered[count:] == -math.inf).all()):
            return


# ---- inputs -----------------------------------------------------------------------------------


def _arguments(case: Case, device: str) -> list:
    """The positional arguments of the case's launcher."""
    logits = _logits(case, device)
    rng = generator(case.seed + 1)
    rows = case.num_rows

    def taken(values: tuple, dtype: torch.dtype) -> Tensor:
        numbers = [values[row % len(values)] for row in range(rows)]
        return torch.tensor(numbers, dtype=dtype, device=device)

    top_k, top_p = taken(case.top_k, torch.int32), taken(case.top_p, torch.float32)
    temperature, min_p = (taken(v, torch.float32) for v in (case.temperature, case.min_p))
    bits = torch.iinfo(torch.int64)
    seed = torch.randint(bits.min, bits.max, (rows,), generator=rng).to(device)
    sample_index = torch.randint(0, 9, (rows,), generator=rng).to(device)
    position = torch.randint(0, 2**32 - 1, (rows,), generator=rng).to(device)
    stream = [seed, sample_index, position, case.purpose]
    arguments: dict[str, list] = {
        "gumbel_argmax": [logits, temperature, min_p, *stream],
        "truncate": [logits, top_k, top_p],
        "sample": [logits, temperature, top_k, top_p, min_p, *stream],
    }
    return arguments[case.op]


def _logits(case: Case, device: str) -> Tensor:
    """[K, V] with `gap` elements of NaN behind each row but the last."""
    rng, shape = generator(case.seed), (case.num_rows, case.vocab_size)
    values = normal(rng, shape, case.dtype, "cpu", case.spread)
    if case.kind == "ties":
        values = (values.float() / case.spread).round().to(case.dtype)
    elif case.kind == "equal":
        values = values[:, :1].expand(shape)
    elif case.kind == "masked":
        values = values.masked_fill(torch.rand(shape, generator=rng) < 0.9, -math.inf)
        values[:, case.vocab_size // 2] = 1.0
    elif case.kind == "far":
        values[:, case.vocab_size // 3] = 4 * case.spread
    elif case.kind == "tiny":
        values = (values.float() * 1e-30).to(case.dtype)
    for row in _broken_rows(case):
        values[row, case.vocab_size // 2] = math.nan if row % 2 else math.inf
    stride = case.vocab_size + case.gap
    buffer = poisoned(case.num_rows * stride, case.dtype, device)
    view = buffer.as_strided(shape, (stride, 1))
    view.copy_(values)
    return view


def _broken_rows(case: Case) -> tuple[int, ...]:
    return (1, 2) if case.kind == "broken" else ()


def _config(case: Case, kernels: ModuleType | Any) -> Any:
    """The kernel's own sizes with the case's in their place, or None."""
    if not (case.block or case.search_block or case.gather):
        return None
    own = kernels.pick_config(case.num_rows, case.vocab_size)
    search_block = max(case.search_block or own.search_block, case.gather)
    return kernels.Config(
        block=case.block or own.block,
        num_warps=own.num_warps,
        search_block=search_block,
        search_warps=own.search_warps,
        gather=case.gather or min(own.gather, search_block),
    )


def _row(argument: Any, row: int) -> Any:
    return argument[row : row + 1] if isinstance(argument, Tensor) else argument


def _on_cpu(argument: Any) -> Any:
    return argument.cpu() if isinstance(argument, Tensor) else argument


# ---- launches of real models ------------------------------------------------------------------


def _launch(op: str, model: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Launch:
    logits, top_k = blank(num_rows, vocab_size, dtype=dtype), blank(num_rows, dtype=torch.int32)
    floats, integers = (blank(num_rows, dtype=dtype) for dtype in (torch.float32, torch.int64))
    stream = (integers, integers, integers)
    runs = {
        "truncate": partial(sampling.truncate, logits, top_k, floats),
        "gumbel_argmax": partial(sampling.gumbel_argmax, logits, floats, floats, *stream),
        "sample": partial(
            sampling.sample, logits, floats, top_k, floats, floats, *stream, best=floats
        ),
    }
    return Launch(f"{op} {model} K={num_rows} {short(dtype)}", runs[op])


LAUNCHES: tuple[Launch, ...] = (
    _launch("gumbel_argmax", "Qwen3-0.6B", 1, 151936, torch.float32),
    _launch("gumbel_argmax", "Llama-3.1-8B", 64, 128256, BF16),
    _launch("gumbel_argmax", "Mistral-7B", 8, 32000, FP16),
    _launch("truncate", "Qwen3-0.6B", 64, 151936, torch.float32),
    _launch("truncate", "Llama-3.1-8B", 64, 128256, BF16),
    _launch("sample", "Qwen3-0.6B", 1, 151936, torch.float32),
    _launch("sample", "DeepSeek-V3", 64, 129280, BF16),
)
