"""Choosing tokens in C: against torch, float64, and exact distributions."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops import c_library, cpu, cpu_sampling
from minillm.ops.philox import Purpose, random_words_of_vocabulary, to_gumbel
from minillm.ops.sampling import Pack, choose
from minillm.sampling.edits import Edits
from minillm.sampling.sampler import Sampler
from tests.ops.c_variants import PATHS, built, poisoned, torch_threads
from tests.pairs import cases, some
from tests.sampling.sampling_rows import NO_TOKEN, SamplingRow, sample

INF, NAN = math.inf, math.nan
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 1003, 4100)
SEEDS = (0, 7, 2**40 + 3, 2**63 - 1, -5, -(2**63))
EVERY_KIND = (
    dict(),
    dict(temperature=0.0),
    dict(temperature=0.3),
    dict(temperature=1e5),
    dict(temperature=0.8, min_p=0.05),
    dict(min_p=1.0),
    dict(top_k=1),
    dict(top_k=7, temperature=1.7),
    dict(top_k=70),
    dict(top_p=0.9),
    dict(top_p=0.01),
    dict(top_p=0.9999),
    dict(top_k=40, top_p=0.8),
    dict(top_k=40, top_p=0.8, min_p=0.01, temperature=0.9),
)


@contextmanager
def using(found: c_library.Library | None):
    """The sampler with these functions, whether or not the engine has any here; with None it is
    torch."""
    with patch.object(cpu, "functions", lambda dtype: found):
        yield


# Sampling has no products of pairs and no tiles: builds hardly differ, and all but one are slow.
@pytest.fixture(scope="module", params=some(["native"], PATHS))
def c(request) -> c_library.Library:
    """The functions of one library, each of which takes both types of logits."""
    return built(request.param, "F32")


def row(seed=0, position=0, sample_index=0, ids=(), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, sample_index, position, *ids)


def greedy(rows: int) -> Pack:
    """The best token of each row."""
    zeros, none = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    return Pack(zeros, zeros, zeros + 1, none.int(), none, none, none, False)


def draw(rows: int, size: int, dtype=torch.float32, seed: int = 0, ties: bool = False) -> Tensor:
    """Logits between NaN that must not be read."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3
    return poisoned(((x * 2).round() / 2 if ties else x).to(dtype))


def tokens(c: c_library.Library | None, logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    with using(c):
        assert cpu_sampling.takes(logits) == (c is not None)
        return sample(logits, rows).token_ids


def stream(rows: list[SamplingRow]) -> list[Tensor]:
    """Seeds, samples and positions as `philox` wants them."""
    names = ("seed", "sample_index", "position")
    return [torch.tensor([getattr(row, name) for row in rows]) for name in names]


def noise_of(rows: list[SamplingRow], size: int) -> Tensor:
    return to_gumbel(random_words_of_vocabulary(*stream(rows), Purpose.SAMPLE, size))


# ---- the same draws as torch -------------------------------------------------------------------


def test_the_words_are_philox(c):
    """Among equal logits the smallest word wins: no float is involved."""
    rows = [row(s, p, i) for s in SEEDS for p in (0, 1, 2**31, 2**33 + 9) for i in (0, 3, 63)]
    for size in (1, 5, 64, 200, 1003):
        words = random_words_of_vocabulary(*stream(rows), Purpose.SAMPLE, size)
        assert tokens(c, draw(1, size).expand(len(rows), -1) * 0, rows) == words.argmin(-1).tolist()


@cases("dtype", DTYPES)
@cases("size", SIZES)
def test_the_tokens_are_torch_s(c, dtype, size):
    for ties in (False, True):
        logits = draw(3 * len(EVERY_KIND), size, dtype, size, ties)
        rows = [row(i, i + 1, i % 3, **EVERY_KIND[i % len(EVERY_KIND)]) for i in range(len(logits))]
        assert tokens(c, logits, rows) == tokens(None, logits, rows)


def test_random_truncation_is_torch_s(c):
    """Many seeds for each distribution, so that a token too many or too few is drawn or missed."""
    generator = np.random.default_rng(0)
    for case in range(30):
        params = dict(
            temperature=float(generator.choice([0.3, 1, 3])),
            top_k=int(generator.choice([0, 1, 2, 5, 50, 399, 1000])),
            top_p=float(generator.choice([1, 0.05, 0.3, 0.5, 0.9, 0.99])),
            min_p=float(generator.choice([0, 0, 0.01, 0.5])),
        )
        logits = draw(1, int(generator.integers(1, 600)), seed=case, ties=case % 3 > 0)
        rows = [row(seed, case, **params) for seed in range(40)]
        logits = logits.expand(40, -1)
        assert tokens(c, logits, rows) == tokens(None, logits, rows), (case, params)


def test_a_nucleus_of_thousands_of_tokens_is_torch_s(c):
    """More than are looked at first."""
    logits = draw(12, 20_000) / 3
    rows = [row(i, top_p=[0.5, 0.9, 0.99][i % 3]) for i in range(12)]
    assert tokens(c, logits, rows) == tokens(None, logits, rows)


def test_ties_at_the_edge(c):
    """Top-k keeps all ties of the k-th, top-p those with the smallest ids, in whatever block."""
    logits = torch.full((1, 300), -50.0)
    logits[0, [3, 70, 71, 140, 299]] = 0.0
    logits[0, 200] = 1.0
    for params, kept in (
        (dict(top_k=2), {200, 3, 70, 71, 140, 299}),
        (dict(top_k=6), {200, 3, 70, 71, 140, 299}),
        (dict(top_k=1), {200}),
        (dict(top_p=0.5), {200, 3, 70}),  # e / (e + 5) is 0.352, each tie has 0.130
        (dict(top_p=0.62), {200, 3, 70, 71}),
        (dict(top_p=0.3), {200}),
        (dict(top_k=4, top_p=0.5), {200, 3, 70}),
    ):
        rows = [row(seed, **params) for seed in range(400)]
        assert set(tokens(c, logits.expand(400, -1), rows)) == kept, params


def test_masses_that_end_exactly_at_the_goal(c):
    """Half of eight equal tokens is four of them, not five."""
    rows = [row(seed, top_p=0.5) for seed in range(200)]
    assert set(tokens(c, torch.zeros(200, 8), rows)) == {0, 1, 2, 3}


@cases("size", [65, 200, 1003])
def test_shards_choose_what_the_whole_row_chooses(c, size):
    """The largest total of the shards belongs to the token that is drawn from all logits."""
    kinds = dict(), dict(temperature=0.4), dict(temperature=2.5, min_p=0.1), dict(min_p=1.0)
    rows = [row(i, i + 1, i % 3, **kinds[i % 4]) for i in range(80)]
    for dtype in DTYPES:
        logits = draw(80, size, dtype, seed=size, ties=True)
        whole, best = torch.tensor(tokens(None, logits, rows)), logits.float().amax(1)
        sampler = Sampler(80, size, torch.device("cpu"))
        for place, each in enumerate(rows):
            sampler.set_row(place, each)
        columns = sampler._pack(range(80), [each.position for each in rows], None)[:-1]
        parts = []
        with using(c):
            for start in range(0, size, 64):
                mine = logits[:, start : start + 64].contiguous()
                parts.append(
                    cpu_sampling.draw_from_shard(mine, start, best, Purpose.SAMPLE, *columns)
                )
        totals, places = map(torch.stack, zip(*parts, strict=True))
        winner = totals.argmax(0)
        assert torch.equal(places.gather(0, winner[None])[0] + 64 * winner, whole)
        # The noise differs by less than a rounding from torch's, which is computed in another way.
        scaled = (logits.float().gather(1, whole[:, None])[:, 0] - best) / columns[0]
        expected = scaled + noise_of(rows, size).gather(1, whole[:, None])[:, 0]
        torch.testing.assert_close(totals.amax(0), expected, rtol=1e-6, atol=1e-6)


@cases("by", [1e-4, -1e-4])
def test_no_bound_is_too_low(c, by):
    """The best token against one far below it that the noise lifts just above it, or just not."""
    rows = [row(seed, position) for seed in range(4) for position in range(3)]
    noise = noise_of(rows, 100_000)
    lucky = noise.argmax(-1)
    assert noise.max() > 15
    logits = torch.full_like(noise, -1000.0)
    for index, token in enumerate(lucky.tolist()):
        best = 77 if token != 77 else 78
        logits[index, best] = 0.0
        logits[index, token] = noise[index, best] - noise[index, token] + by
    expected = lucky.tolist() if by > 0 else logits.argmax(-1).tolist()
    assert tokens(c, poisoned(logits), rows) == expected == tokens(None, logits, rows)


def test_the_noise_has_torch_s_bits(c):
    """Two tokens whose sums are a few units in the last place apart, or none."""
    rows = [row(seed) for seed in range(200)]
    first, second = noise_of(rows, 2).unbind(1)
    gap = first - second
    for steps in range(-3, 4):
        other = gap
        for _ in range(abs(steps)):
            other = torch.nextafter(other, torch.full_like(other, math.copysign(INF, steps)))
        logits = torch.stack((torch.zeros(200), other), dim=1)
        assert tokens(c, poisoned(logits), rows) == tokens(None, logits, rows)


def test_of_equal_sums_the_lowest_id(c):
    """The best token is looked at first, and others may have as much: here all of them."""
    rows = [row(seed) for seed in range(300)]
    noise = noise_of(rows, 200)
    for scale in (1.0, 2.0**-20):  # rounded away, too
        logits = (-noise * 2**10).round() / 2**10 * scale + 8
        assert tokens(c, poisoned(logits), rows) == tokens(None, logits, rows)


@pytest.mark.parametrize(
    "params",
    [pytest.param(kind, marks=[pytest.mark.slow] * (len(kind) == 1)) for kind in EVERY_KIND[2:]],
)
def test_draws_follow_the_exact_dist(params):
    """With the library that this processor uses; against float64, without the sampler's torch."""
    c = built("native", "F32")
    logits, draws = draw(1, 150, seed=3), 10_000
    counts = np.bincount(
        tokens(c, logits.expand(draws, -1), [row(seed, **params) for seed in range(draws)]),
        minlength=150,
    )
    wanted = SamplingParams(**params)
    scores = logits[0].double().numpy() / wanted.temperature
    dist = np.exp(scores - scores.max())
    dist[dist < wanted.min_p] = 0
    order = np.argsort(-dist, kind="stable")
    if wanted.top_k > 0:
        dist[order[wanted.top_k :]] = 0
    dist /= dist.sum()
    dist[order[1:][np.cumsum(dist[order])[:-1] >= wanted.top_p]] = 0
    dist /= dist.sum()
    assert counts[dist == 0].sum() == 0
    expected, rare = dist * draws, dist * draws < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if (expected > 0).sum() > 1:
        assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


# ---- rows --------------------------------------------------------------------------------------


def test_a_row_is_drawn_alone_as_among_others_and_by_any_number_of_threads(c):
    logits = draw(400, 6007)
    rows = [row(i, i, **EVERY_KIND[i % len(EVERY_KIND)]) for i in range(400)]
    with torch_threads(1):
        together = tokens(c, logits, rows)
    with torch_threads(3):
        for _ in range(3):
            assert tokens(c, logits, rows) == together
            assert tokens(c, logits[::3], rows[::3]) == together[::3]
    assert [tokens(c, logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)] == together[:40]


def test_rows_that_lie_apart_and_columns_of_a_larger_tensor(c):
    wide = draw(30, 700)
    for logits in (wide[::2, 37:650], wide[:, :1], wide[:15].T.contiguous().T, wide[3:3]):
        rows = [row(i, **EVERY_KIND[i % len(EVERY_KIND)]) for i in range(len(logits))]
        with using(c):
            got = sample(logits, rows).token_ids
        assert got == tokens(None, logits.contiguous(), rows)


@cases("dtype", DTYPES)
def test_edited_rows_lie_elsewhere(c, dtype):
    """Penalties and masks make a row float32; the others stay what they are."""
    logits = draw(12, 300, dtype)
    kinds = (
        dict(),
        dict(repetition_penalty=1.7, presence_penalty=0.5),
        dict(allowed_token_ids=[4, 200, 299], temperature=0.0),
        dict(logit_bias={7: 40.0}, top_p=0.9),
        dict(temperature=0.0),
        dict(min_tokens=3, frequency_penalty=0.3),
    )
    rows = [
        row(i, logprobs=i % 3, ids=([1, 2, 2], [9, i], (5,)), **kinds[i % 6]) for i in range(12)
    ]
    with using(c):
        got = sample(logits, rows)
    with using(None):
        expected = sample(logits, rows)
    assert got.token_ids == expected.token_ids
    assert [set(each or ()) for each in got.logprobs] == [
        set(each or ()) for each in expected.logprobs
    ]


@cases("dtype", DTYPES)
@cases("size", SIZES)
def test_masks_need_no_copies_of_logits(c, dtype, size):
    """Tokens are those of edited logits, and NaN fails its row, also in an excluded token."""
    random = np.random.default_rng(size)
    masks = [random.choice(size, -(-size // 3), replace=False) for _ in EVERY_KIND]
    rows = [
        row(i, **params, allowed_token_ids=None if i % 5 == 4 else mask.tolist())
        for i, (params, mask) in enumerate(zip(EVERY_KIND, masks, strict=True))
    ]
    logits = draw(len(rows), size, dtype)
    logits[2, max(set(range(size)) - set(masks[2]), default=0)] = NAN
    with using(None):
        expected = sample(logits, rows)
    with using(c), patch.object(Edits, "apply", side_effect=AssertionError("copied")):
        assert sample(logits, rows) == expected
    assert list(expected.failed) == [2]


@cases("dtype", DTYPES)
@cases("value", [NAN, -NAN, INF])
@cases("place", [0, 63, 64, 129])
def test_what_is_not_finite_fails_its_row_only(c, dtype, value, place):
    for params in EVERY_KIND:
        logits, rows = draw(3, 130, dtype), [row(i, logprobs=2, **params) for i in range(3)]
        healthy = tokens(c, logits, rows)
        logits[1, place] = value
        with using(c):
            result = sample(logits, rows)
        assert list(result.failed) == [1]
        assert result.token_ids == [healthy[0], NO_TOKEN, healthy[2]]


@cases("size", SIZES)
def test_minus_infinity_is_never_chosen_where_another_is_finite(c, size):
    logits = torch.full((len(EVERY_KIND), size), -INF)
    logits[:, size // 2] = -1e30
    with using(c):
        result = sample(poisoned(logits), [row(3, **params) for params in EVERY_KIND])
        assert result.token_ids == [size // 2] * len(EVERY_KIND)
        logits[:] = -INF
        result = sample(poisoned(logits), [row(3, **params) for params in EVERY_KIND])
    assert len(result.failed) == len(EVERY_KIND)


def test_logits_of_any_size(c):
    logits = poisoned(torch.tensor([[3e38, -3e38, 3.3e38], [1e-45, 0, -1e-45]]))
    for params in EVERY_KIND:
        for seed in range(10):
            rows = [row(seed, **params)] * 2
            assert tokens(c, logits, rows) == tokens(None, logits, rows)


# ---- the best ----------------------------------------------------------------------------------


@cases("dtype", DTYPES)
@cases("size", SIZES)
def test_the_best_is_argmax_and_amax(c, dtype, size):
    logits = draw(9, size, dtype, ties=True)
    logits[0] = -INF
    logits[1, size // 2] = INF
    logits[2, -1] = 100.0
    logits[3] = 0.0
    logits[4] = -0.0
    logits[4, size // 2] = 0.0
    with using(c):
        place, best = choose(logits, greedy(9))
    assert torch.equal(place, logits.argmax(-1))
    assert torch.equal(best, logits.amax(-1).float())


# ---- log-probabilities -------------------------------------------------------------------------


@cases("dtype", DTYPES)
@cases("size", SIZES)
@cases("top", [0, 1, 5, 20])
def test_logprobs_are_those_of_float64(c, dtype, size, top):
    logits = draw(13, size, dtype, size, ties=top == 5)
    targets = torch.arange(13) * 7 % size
    with using(c):
        logprobs, ids, ranks = cpu_sampling.describe_tokens(logits, targets, top)
    count = min(top, size)
    assert ids.shape == logprobs.shape == ranks.shape == (13, count + 1)
    assert torch.equal(ids[:, 0], targets)
    order = logits.float().sort(descending=True, stable=True).indices[:, :count]
    assert torch.equal(ids[:, 1:], order)
    exact = logits.double().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=0)
    values = logits.gather(1, ids)
    assert torch.equal(ranks, (logits[:, None] > values[:, :, None]).sum(-1) + 1)


def test_logprobs_of_a_masked_vocabulary(c):
    logits = torch.full((1, 90), -INF)
    logits[0, [5, 80]] = torch.tensor([1.0, 2.0])
    with using(c):
        logprobs, ids, ranks = cpu_sampling.describe_tokens(logits, torch.tensor([7]), 4)
    assert ids.tolist() == [[7, 80, 5, 0, 1]]
    assert ranks.tolist() == [[3, 1, 2, 3, 3]]
    assert logprobs[0, [0, 3, 4]].eq(-INF).all()


# ---- what C would believe ------------------------------------------------------------------------


def test_what_c_would_read_wrongly_is_refused(c):
    logits, columns = torch.zeros(2, 30), greedy(2)[:-1]
    with using(c):
        for wrong in (torch.zeros(30, 2).T, logits.half(), logits.to("meta")):
            with pytest.raises(ValueError, match="logits are"):
                cpu_sampling.choose_tokens(wrong, *columns, model_dtype=torch.float32)
        for place, (name, _) in enumerate(cpu_sampling.COLUMNS):
            for wrong in (columns[place][:1], columns[place].to(torch.float64)):
                with pytest.raises(ValueError, match=f"{name} is .* one per row"):
                    cpu_sampling.choose_tokens(
                        logits, *columns[:place], wrong, *columns[place + 1 :]
                    )
        for targets in (torch.tensor([0]), torch.tensor([0, 1]).int()):
            with pytest.raises(ValueError, match="targets are"):
                cpu_sampling.describe_tokens(logits, targets, 1)
        for target in (-1, 30, 2**40):
            with pytest.raises(IndexError, match="from 0 to 29"):
                cpu_sampling.describe_tokens(logits, torch.tensor([0, target]), 1)


def test_what_it_takes(c):
    with using(c):
        assert cpu_sampling.takes(torch.zeros(2, 3))
        assert not cpu_sampling.takes(torch.zeros(2, 0))
        assert not cpu_sampling.takes(torch.zeros(3, 2).T)
        assert not cpu_sampling.takes(torch.zeros(3))
        assert not cpu_sampling.takes(torch.zeros(2, 3, device="meta"))
    with using(None):
        assert not cpu_sampling.takes(torch.zeros(2, 3))
        with pytest.raises(RuntimeError, match="there are no C functions"):
            cpu_sampling.choose_tokens(torch.zeros(2, 3), *greedy(2)[:-1])
