"""Sampling on a CPU with the C functions of `c/sample.c`, a backend of `sampling.choose`.

The result is that of the reference in `sampling.py`. Random words and scaled logits are bitwise the
same, and both compute noise in float64 and round it once. Tokens can differ in two rare cases of
rounding: math libraries round the logarithm of about one word in 10^8 to another float32; and if
the top-p boundary is within about 10^-6 of a token, that token may be included or not, as on a GPU.
"""

from array import array
from collections.abc import Sequence
from ctypes import Structure, byref, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.philox import Purpose

BLOCK = 64  # tokens whose noise is generated together
MOST_TOKENS = 2**31  # vocabulary limit: sorting log-probabilities uses 32-bit ids
COLUMNS = (
    ("temperature", torch.float32),
    ("min_p", torch.float32),
    ("top_p", torch.float32),
    ("top_k", torch.int32),
    ("seed", torch.int64),
    ("sample_index", torch.int64),
    ("position", torch.int64),
)


class _Pack(Structure):
    """Addresses of the columns of a `sampling.Pack`; the struct `pack` in `c/sample.c`."""

    _fields_ = (*((name, c_void_p) for name, _ in COLUMNS), ("mask", c_void_p))


def takes(logits: Tensor, model_dtype: torch.dtype | None = None) -> bool:
    """Whether these logits [K, V] go to C."""
    return (
        cpu.takes(logits)
        and cpu.functions(model_dtype or logits.dtype) is not None
        and logits.dim() == 2
        and 0 < logits.shape[1] < MOST_TOKENS
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
    )


def choose_tokens(
    logits: Tensor,
    *columns: Tensor,
    model_dtype: torch.dtype | None = None,
    purpose: Purpose = Purpose.SAMPLE,
    masks: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, as `sampling.choose`.

    Args:
        logits: [K, V], for which `takes` is True.
        columns: those of a `sampling.Pack`.
        model_dtype: dtype of the model, if these are edited logits in float32. The library of a
            bf16 model supports them too, so no second one is built.
        purpose: selects the noise.
        masks: of each row, or none: uint8 [ceil(V / 8)], whose bit t % 8 of byte t // 8 says
            whether token t may be chosen. None: all tokens may.

    Returns:
        Tokens, int64 [K], arbitrary if a row's largest logit is not finite; and the largest logit
        of each row, float32 [K].
    """
    rows = Rows.of(logits)
    given, count, masked = checked(len(logits), *columns), len(logits), addresses(masks, rows)
    best, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
    status = cpu.ready(model_dtype or logits.dtype).choose_tokens(
        rows.at.buffer_info()[0],
        rows.wide,
        byref(_Pack(*(column.data_ptr() for column in given), masked.buffer_info()[0])),
        count,
        rows.size,
        int(purpose),
        best.data_ptr(),
        tokens.data_ptr(),
    )
    _check_memory(status)
    return tokens, best


def draw_from_shard(
    logits: Tensor, before: int, best: Tensor, purpose: Purpose, *columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample from one rank's shard of the vocabulary.

    Args:
        logits: [K, V / n], for which `takes` is True.
        before: tokens of the vocabulary before the shard, a multiple of 64.
        best: float32 [K], the largest logit of each row over the whole vocabulary.
        purpose: selects the noise.
        columns: columns of a `sampling.Pack` without top-k and top-p.

    Returns:
        The largest scaled logit plus noise of each row, float32 [K], and its index in the shard,
        int64 [K].
    """
    rows, given = Rows.of(logits), checked(len(logits), *columns)
    best, count = best.contiguous(), len(logits)
    totals, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
    status = cpu.ready(logits.dtype).draw_from_shard(
        rows.at.buffer_info()[0],
        rows.wide,
        byref(_Pack(*(column.data_ptr() for column in given))),
        count,
        rows.size,
        int(purpose),
        before // BLOCK,
        best.data_ptr(),
        totals.data_ptr(),
        tokens.data_ptr(),
    )
    _check_memory(status)
    return totals, tokens


def checked(count: int, *columns: Tensor) -> list[Tensor]:
    """The columns of a pack with `count` rows, checked and contiguous."""
    arrays = [column.contiguous() for column in columns]
    for (name, dtype), column in zip(COLUMNS, arrays, strict=True):
        if column.shape != (count,) or column.dtype != dtype:
            raise ValueError(
                f"{name} is {list(column.shape)}, {column.dtype}; it must be {dtype} {[count]}, "
                "one per row."
            )
    return arrays


def describe_tokens(logits: Tensor, targets: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of each row's target and top tokens.

    Args:
        logits: [K, V], for which `takes` is True; the largest of each row must be finite.
        targets: int64 [K].
        top: number of top tokens, at most V.

    Returns:
        Log-probabilities float32, ids and ranks int64, all [K, top + 1]: the target, then the top
        tokens in descending order, ties by lowest id.
    """
    rows, targets = Rows.of(logits), targets.contiguous()
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64 or top < 0:
        raise ValueError(
            f"targets are {list(targets.shape)}, {targets.dtype}, and top is {top}; they must be "
            f"int64 {list(logits.shape[:1])} and at least 0."
        )
    top = min(top, rows.size)
    logprobs = torch.empty(len(targets), top + 1)
    ids, ranks = torch.empty(2, len(targets), top + 1, dtype=torch.int64)
    status = cpu.ready(logits.dtype).describe_tokens(
        rows.at.buffer_info()[0],
        rows.wide,
        len(targets),
        rows.size,
        targets.data_ptr(),
        top,
        logprobs.data_ptr(),
        ids.data_ptr(),
        ranks.data_ptr(),
    )
    if status == 2:
        raise IndexError(f"A target is not a token id: ids are from 0 to {rows.size - 1}.")
    _check_memory(status)
    return logprobs, ids, ranks


@dataclass(frozen=True)
class Rows:
    """Addresses of rows of logits."""

    at: array
    wide: bool  # float32, else bf16
    size: int

    @classmethod
    def of(cls, logits: Tensor) -> "Rows":
        """All rows of a tensor."""
        count, size = logits.shape
        right = logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu"
        if not right or (logits.stride(1) != 1 and size != 1):
            raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}.")
        start, step = logits.data_ptr(), logits.stride(0) * logits.element_size()
        at = array("q", [start + i * step for i in range(count)])
        return cls(at, logits.dtype == torch.float32, size)


def addresses(masks: Sequence[Tensor | None], rows: Rows) -> array:
    """The address of each row's mask, 0 if it has none; empty if there are no masks."""
    wrong = [mask for mask in masks if mask is not None and not _is_mask(mask, rows.size)]
    if wrong or len(masks) not in (0, len(rows.at)):
        raise ValueError(
            f"masks are {[(list(mask.shape), mask.dtype) for mask in wrong] or len(masks)}; there "
            f"must be {len(rows.at)}, each uint8 {[-(-rows.size // 8)]} or None."
        )
    return array("q", [0 if mask is None else mask.data_ptr() for mask in masks])


def _is_mask(mask: Tensor, size: int) -> bool:
    right = mask.dtype == torch.uint8 and mask.device.type == "cpu" and mask.is_contiguous()
    return right and mask.shape == (-(-size // 8),)


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("Out of memory while sampling.")
