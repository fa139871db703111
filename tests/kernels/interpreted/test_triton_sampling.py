"""Argmax, Gumbel draws, top-k and top-p: all cases, random ones, bad inputs, deliberate bugs."""

import math
from pathlib import Path

import pytest
import torch

from minillm.api.sampling_params import SamplingParams
from minillm_kernels import philox, reference, sampling, truncation
from minillm_kernels.check.sampling import CASES, Case, verify
from minillm_kernels.launch import KernelError, tl, triton
from tests.kernels.mutants import convicted, mutant
from tests.sampling.sampling_rows import SamplingRow
from tests.sampling.sampling_rows import sample as engine_sample

# ---- noise ------------------------------------------------------------------------------------


@triton.jit
def _gumbel_of_words(words_ptr, out_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    words = tl.load(words_ptr + places).to(tl.uint32)
    tl.store(out_ptr + places, sampling.gumbel(words))


@triton.jit
def _noise_of_row(seed_ptr, sample_ptr, position_ptr, out_ptr, first, BLOCK: tl.constexpr):
    seed, sample_index = tl.load(seed_ptr), tl.load(sample_ptr)
    values = sampling.noise(seed, sample_index, tl.load(position_ptr), 2, first, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), values)


def test_noise_of_a_million_words_and_of_the_extreme_ones() -> None:
    count = 2**20
    words = torch.randint(0, 2**32, (count,), generator=torch.Generator().manual_seed(0))
    words[: count // 4] >>= torch.arange(count // 4) % 33  # small ones, which win
    words[:5000] = torch.arange(5000)
    words[5000:10000] = 2**32 - 1 - torch.arange(5000)
    got = torch.empty(count)
    _gumbel_of_words[(1,)](words, got, COUNT=count)
    wanted = philox.to_gumbel(words)
    differ = got != wanted
    assert int(differ.sum()) <= 2  # about one in 10^8, where two math libraries round apart
    assert torch.allclose(got, wanted, rtol=2e-7, atol=0)
    assert -3 < float(got.min()) < float(got.max()) < 23


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**63), 2**63 - 1])
def test_noise_is_that_of_the_engine(seed: int) -> None:
    numbers = [seed, 5, 2**32 - 2]
    stream = [torch.tensor([number]) for number in numbers]
    got = torch.empty(64)
    _noise_of_row[(1,)](*stream, got, 32, BLOCK=64)
    words = philox.random_words_of_vocabulary(*stream, philox.Purpose.ACCEPT, 96)
    assert torch.equal(got, philox.to_gumbel(words)[0, 32:])


# ---- the engine's sampler ---------------------------------------------------------------------


def test_the_engine_chooses_the_same_tokens() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.02),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=2.0, top_k=3),
    ]
    rows = [SamplingRow(p, 2**63 + 17 * i, i, 100 + i) for i, p in enumerate(params)]
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(1)) * 2
    wanted = engine_sample(logits, rows).token_ids
    got = sampling.sample(
        logits,
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params]),
        torch.tensor([p.min_p for p in params]),
        torch.tensor([row.seed - 2**64 for row in rows]),
        torch.tensor([row.sample_index for row in rows]),
        torch.tensor([row.position for row in rows]),
    )
    assert got.tolist() == wanted


# ---- whatever the blocks ----------------------------------------------------------------------


def test_sizes_of_programs_change_nothing() -> None:
    logits = (torch.randn(2, 300, generator=torch.Generator().manual_seed(2)) * 2).bfloat16()
    top_k, top_p = torch.tensor([0, 60], dtype=torch.int32), torch.tensor([0.9, 0.97])
    results = [
        sampling.truncate(logits, top_k, top_p, config=sampling.Config(block, 4, search, 4, gather))
        for block, search, gather in ((512, 512, 512), (64, 512, 16), (256, 256, 128))
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] > -math.inf).sum(1).tolist() == [
        int((row > -math.inf).sum()) for row in reference.truncate(logits, top_k, top_p)
    ]


def test_an_empty_batch() -> None:
    logits = torch.empty(0, 10)
    none, integers = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert sampling.truncate(logits, integers.int(), none).shape == (0, 10)
    drawn = sampling.gumbel_argmax(logits, none, none, integers, integers, integers)
    assert drawn.tolist() == []


def test_a_row_of_nan_alone_gets_some_token() -> None:
    logits = torch.full((1, 100), math.nan)
    one, zero, integer = torch.ones(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    drawn = sampling.sample(logits, one, integer.int() + 5, one / 2, zero, *[integer] * 3)
    assert 0 <= int(drawn) < 100


# ---- bad inputs -------------------------------------------------------------------------------


def greedy(logits: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(len(logits), device=logits.device)
    return sampling.gumbel_argmax(logits, zeros, zeros, *[zeros.long()] * 3, **more)


def test_bad_logits() -> None:
    with pytest.raises(KernelError, match=r"logits is \[5\]; it must be \[K, V\]\."):
        greedy(torch.zeros(5))
    with pytest.raises(KernelError, match=r"a vocabulary of 0 tokens; it must be 1 to 16777215\."):
        greedy(torch.zeros(2, 0))
    with pytest.raises(KernelError, match=r"logits is torch.float64; it must be float32 or"):
        greedy(torch.zeros(2, 5, dtype=torch.float64))
    with pytest.raises(KernelError, match=r"call logits\.contiguous\(\)"):
        greedy(torch.zeros(5, 2).T)
    with pytest.raises(KernelError, match=r"out is \[3\]; it must be \[2\]\."):
        greedy(torch.zeros(2, 5), out=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(KernelError, match=r"out is torch.int32 on cpu; it must be torch.int64"):
        greedy(torch.zeros(2, 5), out=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(KernelError, match=r"interpreted kernels need CPU tensors"):
        greedy(torch.zeros(2, 5, device="meta"))


def test_bad_parameters() -> None:
    logits, two = torch.zeros(2, 5), torch.ones(2)
    integers = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelError, match=r"top_k is torch.int64; it must be int32\."):
        sampling.truncate(logits, integers, two)
    with pytest.raises(KernelError, match=r"top_p is \[3\]; it must be \[2\]\."):
        sampling.truncate(logits, integers.int(), torch.ones(3))
    with pytest.raises(KernelError, match=r"out is torch.bfloat16 on cpu; it must be torch.float"):
        sampling.truncate(logits, integers.int(), two, out=logits.bfloat16())
    with pytest.raises(KernelError, match=r"temperature is torch.int64; it must be float32\."):
        sampling.gumbel_argmax(logits, integers, two, integers, integers, integers)
    with pytest.raises(KernelError, match=r"seed is torch.int32; it must be int64\."):
        sampling.gumbel_argmax(logits, two, two, integers.int(), integers, integers)
    strided = torch.zeros(4, dtype=torch.int64)[::2]
    with pytest.raises(KernelError, match=r"position has strides .* must be contiguous"):
        sampling.gumbel_argmax(logits, two, two, integers, integers, strided)
    with pytest.raises(KernelError, match=r"only one of top_k and top_p is given"):
        sampling.sample(logits, two, integers.int(), None, two, *[integers] * 3)


# ---- deliberate bugs --------------------------------------------------------------------------


def _cases(operation: str, vocab_size: int | None = None) -> list[Case]:
    found = [case for case in CASES if case.op == operation and case.vocab_size < 5000]
    return [case for case in found if vocab_size in (None, case.vocab_size)]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("operation", "old", "new"),
    [
        ("sample", "first = tl.min(tl.where(", "first = tl.max(tl.where("),
        ("sample", 'other=float("-inf")', "other=0.0"),
        ("sample", "blocks < num_blocks, other=size", "blocks < num_blocks - 1, other=size"),
        ("sample", "logits_ptr + row.to(tl.int64) * row_stride", "logits_ptr + row * size"),
        ("gumbel_argmax", "tl.interleave(word_0, word_2), tl.interleave(word_1, word_3)",
         "tl.interleave(word_0, word_1), tl.interleave(word_2, word_3)"),
        ("gumbel_argmax", "tl.interleave(even, odd)", "tl.interleave(odd, even)"),
        ("gumbel_argmax", "(first // 4 + tl", "(first + tl"),
        ("gumbel_argmax", "counters, position, sample_index, purpose",
         "counters, sample_index, position, purpose"),
        ("gumbel_argmax", "scale(scores, peak, temperature, floor)",
         "scale(scores, peak, 1.0, floor)"),
        ("gumbel_argmax", "scale(scores, peak, temperature, floor)",
         "scale(scores, tl.max(scores, axis=0), temperature, floor)"),
        ("gumbel_argmax", "== num_blocks - 1:", "== 0:"),
        ("gumbel_argmax", "1.0 - uniform", "uniform"),
        ("gumbel_argmax", 'if tl.max(scores, axis=0) > float("-inf")',
         "if tl.max(scores, axis=0) > -1.0"),
        ("sample", "if temperature > 0:", "if temperature != -1:"),
        ("gumbel_argmax", "scores = scale(scores, peak, temperature, floor)",
         "scores = tl.where(scores - peak < floor, -1e9, scale(scores, peak, temperature, -1e9))"),
        ("sample", "config, temperature, min_p)", "config)"),
        ("sample", "nan_if_any(best, logits)", "best"),
        ("sample", "row, best_of_row(values_ptr", "row, best_of_row(scores_ptr"),
        ("truncate", "out_ptr + row.to(tl.int64) * out_stride + ids, kept, mask=ids < size",
         "out_ptr + row.to(tl.int64) * out_stride + ids, kept"),
    ],
)  # fmt: skip
def test_bugs_of_draws_are_found(operation: str, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant(sampling, old, new, tmp_path)
    assert convicted(verify, _cases(operation), broken)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("vocab_size", "old", "new"),
    [
        (500, "distances < edge) | ((distances == edge) & (ids <= last))",
         "distances < edge) | ((distances == edge) & (ids < last))"),
        (3, "stays = (distances < edge) | ((distances == edge) & (ids <= last))",
         "stays = distances < edge"),
        (3, "top_k.to(tl.int64), _share", "top_k.to(tl.int64) + 1, _share"),
        (300, "reached = weight >= goal", "reached = weight > goal"),
        (3, "axis=0) >= goal:", "axis=0) > goal:"),
        (500, "if searches:", "if by_count:"),
        (3, "(goal - before + mass - 1) // mass", "(goal - before) // mass"),
        (500, "(goal - before + mass - 1) // mass", "(goal - before + mass - 1) // mass + 1"),
        (1000, "return tl.maximum(goal, 1)", "return goal"),
        (3, "ids < size, distances, NOWHERE", "ids < size, distances, 0"),
        (600, "places = count + tl.cumsum", "places = tl.cumsum"),
        (400, "left = tl.where(distances <= high, masses, 0)", "left = masses"),
        (3, "logits - peak", "logits"),
    ],
)  # fmt: skip
def test_bugs_of_the_search_are_found(vocab_size: int, old: str, new: str, tmp_path: Path) -> None:
    broken = mutant([sampling, truncation], old, new, tmp_path)
    assert convicted(verify, _cases("truncate", vocab_size), broken)


@pytest.mark.mutation
def test_a_right_copy_is_not_convicted(tmp_path: Path) -> None:
    copy = mutant(sampling, "# ---- sampling", "# ---- draws", tmp_path)
    assert not convicted(verify, [case for case in CASES if case.vocab_size == 128], copy)
