"""Sampling on the GPU: argmax or sampling with Gumbel noise, top-k and top-p.

`argmax(logits / temperature + Gumbel noise)` is a sample of `softmax(logits / temperature)`
(Gumbel, 1954). It needs no sums, and blocks of the vocabulary are independent. The noise is a
function of seed, sample, position and token (Philox4x32-10, Salmon et al., 2011), computed where it
is added and never stored.

A single row of 152,000 logits must fill the GPU, so a program processes one block of one row::

    gumbel_argmax   best of every block (the division by the temperature needs the row's best to
                    round as torch does), then the noisy best of every block; the last program of a
                    row to finish compares the row's blocks. Greedy rows have no noise
    truncate        best of every block, the row's cut (`truncation.py`), then the result
    sample          best of every block, the cut if any row has one, then the sample

Programs share only a counter, and comparisons are exact. A row's token therefore does not depend on
blocks, other rows or the order of programs.

Shapes: `logits` [K, V], float32, float16 or bfloat16, any row stride -> int64 [K].

Memory: b K V bytes with logits of b bytes, read twice, the second time from the L2 cache; nothing
of that size is written. Operations: comparisons for greedy rows. Sampling adds about 25 integer
operations per token for a quarter of a Philox block, and two logarithms in float64, about 60
operations on the float64 units, which have half the rate of float32 on an A100 or H100 and a 32nd
or less on other GPUs. At K = 1 latency dominates (two launches, 300 to 600 kB); from about K = 8
greedy rows are memory-bound and sampling is bound by the logarithms. Blocks that truncation
excludes skip them.

A row with NaN, or whose largest logit is infinite, gets an arbitrary token of the vocabulary and
does not affect other rows; the engine checks for such rows first.
"""

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import KernelError, padded, tl, triton
from minillm_kernels.philox import Purpose
from minillm_kernels.truncation import (
    Config,
    best_of_row,
    cut_off,
    find_cuts,
    nan_if_any,
    pick_config,
    scale,
    scaling,
)

__all__ = ["Config", "gumbel_argmax", "pick_config", "sample", "truncate"]

PER_ROW = (
    "temperature_ptr", "min_p_ptr", "seed_ptr", "sample_index_ptr", "position_ptr",
    "out_ptr", "best_ptr",
)  # fmt: skip
SMALLEST = tl.constexpr(2.0**-32)  # spacing of uniform numbers near 0
LARGEST = tl.constexpr(1.0 - 2.0**-24)  # largest uniform number, the float32 before 1


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Check shape, dtype and strides of `logits`; returns its rows and vocabulary size."""
    require.shape("logits", logits, "K", "V")
    require.dtype(require.FLOATS, logits=logits)
    require.last_contiguous(logits=logits)
    num_rows, vocab_size = logits.shape
    if not 0 < vocab_size < 2**24:
        raise KernelError(
            f"logits has a vocabulary of {vocab_size} tokens; it must be 1 to {2**24 - 1}."
        )
    return num_rows, vocab_size


def check_per_row(num_rows: int, dtype: torch.dtype, **tensors: Tensor) -> None:
    """Check that each tensor has one number of this dtype per row, contiguous."""
    for name, tensor in tensors.items():
        require.shape(name, tensor, num_rows)
    require.dtype((dtype,), **tensors)
    require.last_contiguous(**tensors)


# ---- the best token of every block ------------------------------------------------------------


@triton.jit
def best_of(scores, ids, size):
    """The largest score and its id; ties go to the smallest id, and the id always exists."""
    best = tl.max(scores, axis=0)
    first = tl.min(tl.where((scores == best) & (ids < size), ids, size - 1), axis=0)
    return best, first


@triton.jit
def _best_of_block(
    logits_ptr, values_ptr, ids_ptr, arrivals_ptr, row_stride, size, BLOCK: tl.constexpr
):
    """Program (row, block): its best logit, NaN if it has one, and that token's id."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logits = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    best, first = best_of(logits, ids, size)
    place = row * tl.num_programs(1) + block
    tl.store(values_ptr + place, nan_if_any(best, logits))
    tl.store(ids_ptr + place, first)
    if arrivals_ptr is not None:
        tl.store(arrivals_ptr + row, 0, mask=block == 0)


def best_of_blocks(
    logits: Tensor, config: Config, arrivals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Best logit (float32) and its token id (int32) of each block, both [K, blocks].

    Also sets `arrivals` int32 [K] to 0, for a later kernel that counts.
    """
    num_rows, vocab_size = logits.shape
    shape = (num_rows, triton.cdiv(vocab_size, config.block))
    values = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _best_of_block[shape](
        logits, values, ids, arrivals, logits.stride(0), vocab_size,
        BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return values, ids


@triton.jit
def best_of_parts(values_ptr, ids_ptr, row, num_blocks, size, BLOCKS: tl.constexpr):
    """The token of the best block; blocks are in the order of ids. Bypasses the L1 cache."""
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    values = tl.load(
        values_ptr + places, mask=blocks < num_blocks, other=float("-inf"), cache_modifier=".cg"
    )
    ids = tl.load(ids_ptr + places, mask=blocks < num_blocks, other=size, cache_modifier=".cg")
    _, first = best_of(values, ids, size)
    return first


def _tokens(out: Tensor | None, logits: Tensor) -> Tensor:
    like = torch.empty(0, dtype=torch.int64, device=logits.device)
    return require.output(out, (logits.shape[0],), like)


# ---- sampling ---------------------------------------------------------------------------------


@triton.jit
def gumbel(words):
    """`philox.to_gumbel`: -log(-log(1 - u)), in float64 and rounded once.

    u is a multiple of 2^-33, so 1 - u is exact in float64 and needs no log1p.
    """
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * SMALLEST, LARGEST)
    return (-tl.log(-tl.log(1.0 - uniform.to(tl.float64)))).to(tl.float32)


@triton.jit
def noise(seed, sample_index, position, purpose, first, BLOCK: tl.constexpr):
    """Gumbel noise of the tokens first .. first + BLOCK - 1, all four words of each Philox block.

    Key and counter as in `minillm_kernels.philox`; `first` is a multiple of 4.
    """
    counters = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    position, sample_index = position.to(tl.uint32), sample_index.to(tl.uint32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, counters, position, sample_index, purpose)
    even, odd = tl.interleave(word_0, word_2), tl.interleave(word_1, word_3)
    return gumbel(tl.interleave(even, odd))


# The parameters of all rows come in one upload, so where a column begins depends on their number.
@triton.jit(do_not_specialize=("purpose",), do_not_specialize_on_alignment=PER_ROW)
def _draw(
    logits_ptr, values_ptr, temperature_ptr, min_p_ptr, cuts_ptr,
    seed_ptr, sample_index_ptr, position_ptr, purpose,
    scores_ptr, ids_ptr, arrivals_ptr, out_ptr, best_ptr, row_stride, size, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the block's noisy best; the last program of a row writes the token,
    and the row's best logit if it is asked for."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    scores = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    temperature, floor = scaling(temperature_ptr, min_p_ptr, row)
    if temperature > 0:  # else greedy
        peak = best_of_row(values_ptr, row, num_blocks, BLOCKS)
        scores = scale(scores, peak, temperature, floor)
        if cuts_ptr is not None:
            scores = cut_off(scores, ids, cuts_ptr, row)
        if tl.max(scores, axis=0) > float("-inf"):
            seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
            sample_index = tl.load(sample_index_ptr + row)
            scores += noise(seed, sample_index, position, purpose, block * BLOCK, BLOCK)
    best, first = best_of(scores, ids, size)
    place = row * num_blocks + block
    tl.store(scores_ptr + place, best)
    tl.store(ids_ptr + place, first)
    tl.debug_barrier()  # store both before signalling arrival
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel", scope="gpu") == num_blocks - 1:
        token = best_of_parts(scores_ptr, ids_ptr, row, num_blocks, size, BLOCKS)
        tl.store(out_ptr + row, token.to(tl.int64))
        if best_ptr is not None:
            tl.store(best_ptr + row, best_of_row(values_ptr, row, num_blocks, BLOCKS))


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    purpose: int = Purpose.SAMPLE,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`reference.gumbel_argmax`: a sample of softmax(logits / temperature), in two launches.

    Args:
        logits: [K, V], float32, float16 or bfloat16, any row stride.
        temperature: float32 [K]; 0 is greedy.
        min_p: float32 [K], minimum probability relative to the largest; 0 is off.
        seed, sample_index, position: int64 [K], the arguments of the noise.
        purpose: the draw's `philox.Purpose`.
        out: int64 [K] to write to.

    Returns:
        int64 [K]. -inf is never chosen if another logit is finite.
    """
    return sample(
        logits, temperature, None, None, min_p, seed, sample_index, position, purpose,
        out=out, config=config,
    )  # fmt: skip


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    purpose: int = Purpose.SAMPLE,
    *,
    out: Tensor | None = None,
    best: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Temperature, min-p, top-k, top-p and sampling, in this order, in two or three launches.

    `top_k` int32 [K] and `top_p` float32 [K] as in `truncate`, both None if no row uses them (one
    launch less); the other arguments as in `gumbel_argmax`. Rows with temperature 0 are greedy.
    `best` float32 [K] gets the largest logit of each row, NaN if it has one.
    """
    require.device(
        logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        sample_index=sample_index, position=position,
    )  # fmt: skip
    num_rows, vocab_size = check_logits(logits)
    check_per_row(num_rows, torch.float32, temperature=temperature, min_p=min_p)
    check_per_row(num_rows, torch.int64, seed=seed, sample_index=sample_index, position=position)
    if best is not None:
        check_per_row(num_rows, torch.float32, best=best)
    if (top_k is None) != (top_p is None):
        raise KernelError("only one of top_k and top_p is given; give both, or None for both.")
    out = _tokens(out, logits)
    if num_rows == 0:
        return out
    config = config or pick_config(num_rows, vocab_size)
    arrivals = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    values, ids = best_of_blocks(logits, config, arrivals)
    cuts = None
    if top_k is not None and top_p is not None:
        check_truncation(num_rows, top_k, top_p)
        cuts = find_cuts(logits, values, top_k, top_p, config, temperature, min_p)
    num_blocks = values.shape[1]
    _draw[(num_rows, num_blocks)](
        logits, values, temperature, min_p, cuts, seed, sample_index, position,
        int(Purpose(purpose)), torch.empty_like(values), ids, arrivals, out, best,
        logits.stride(0), vocab_size, num_blocks,
        BLOCKS=padded(num_blocks), BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return out


# ---- top-k and top-p --------------------------------------------------------------------------


def check_truncation(num_rows: int, top_k: Tensor, top_p: Tensor) -> None:
    """Check that `top_k` and `top_p` have one number per row."""
    check_per_row(num_rows, torch.int32, top_k=top_k)
    check_per_row(num_rows, torch.float32, top_p=top_p)


@triton.jit
def _write_kept(
    logits_ptr, values_ptr, cuts_ptr, out_ptr, row_stride, out_stride, size, num_blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): its logits minus the row's best, and -inf after the cut."""
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logits = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    peak = best_of_row(values_ptr, row, num_blocks, BLOCKS)
    kept = cut_off(scale(logits, peak, 1.0, float("-inf")), ids, cuts_ptr, row)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + ids, kept, mask=ids < size)


def truncate(
    logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`reference.truncate`: top-k, then top-p, -inf for excluded tokens, in three launches.

    Args:
        logits: [K, V], float32, float16 or bfloat16, any row stride.
        top_k: int32 [K]; 0 (or V and more) is off. Ties of the k-th logit are kept.
        top_p: float32 [K]; 1 is off. Among equal logits at the edge, the smallest ids are kept.
        out: float32 [K, V] to write to.

    Returns:
        float32 [K, V], the largest logit subtracted.

    If the mass reaches p within the last bits of a float32 sum, the edge token may differ from the
    reference. A row with NaN, or whose largest logit is infinite, does not affect other rows.
    """
    require.device(logits=logits, top_k=top_k, top_p=top_p)
    num_rows, vocab_size = check_logits(logits)
    check_truncation(num_rows, top_k, top_p)
    like = torch.empty(0, dtype=torch.float32, device=logits.device)
    out = require.output(out, (num_rows, vocab_size), like)
    if num_rows == 0:
        return out
    config = config or pick_config(num_rows, vocab_size)
    best_values, _ = best_of_blocks(logits, config)
    cuts = find_cuts(logits, best_values, top_k, top_p, config)
    num_blocks = best_values.shape[1]
    _write_kept[(num_rows, num_blocks)](
        logits, best_values, cuts, out, logits.stride(0), out.stride(0), vocab_size, num_blocks,
        BLOCKS=padded(num_blocks), BLOCK=config.block, num_warps=config.num_warps,
    )  # fmt: skip
    return out
