"""Chapter 18's own functions: models, watched routers, simulated choices, copies, placements."""

from collections import Counter

import numpy as np
import pytest
import torch

from minillm import ops
from minillm.models.presets import preset
from minillm.plan.hardware import DATASHEET
from minillm.plan.parameters import expected_distinct, parameter_count
from minillm_exercises.chapters import ch18

H100 = DATASHEET["h100-sxm"]


# Models: claims N13, N14 ---------------------------------------------------------------------


def test_the_published_numbers_of_parameters():
    """The model cards say 30.5 B and 3.3 B (3.35 with the input embedding), and 46.7 and 12.9."""
    counts = [parameter_count(each) for each in (ch18.qwen3_30b(), preset("mixtral-8x7b"))]
    assert [ch18.billions(each.total) for each in counts] == ["30.5", "46.7"]
    assert [ch18.billions(each.active) for each in counts] == ["3.4", "12.9"]
    assert counts[0].active == 3_353_032_704


def test_a_step_of_one_token_reads_the_weights_of_one_token():
    """Without the input embedding, of which a row is read; operations decide a long prompt."""
    large, dense = ch18.qwen3_30b(), preset("qwen2.5-3b")
    read = parameter_count(large).active - large.vocab_size * large.hidden_size
    assert ch18.seconds(large, H100, 1) == pytest.approx(2 * read / H100.bandwidth, rel=0.01)
    ratios = [ch18.ratio(large, dense, H100, tokens) for tokens in (1, 64, 4096)]
    assert ratios == pytest.approx([0.99, 9.64, 0.99], abs=0.01)


def test_what_distinct_experts_are_expected():
    """Claim N14's 2, 5.5 and 7.2 of 8, and the notes' 23 and 87 percent of 256."""
    found = [expected_distinct(8, 2, batch) for batch in (1, 4, 8)]
    assert [ch18.rounded(each) for each in found] == ["2.0", "5.5", "7.2"]
    shares = [expected_distinct(256, 8, tokens) / 256 for tokens in (8, 64)]
    assert shares == pytest.approx([0.224, 0.869], abs=0.001)


# The engine's experts ------------------------------------------------------------------------


def test_routers_are_watched_and_then_not():
    small = ch18.open_small()
    with ch18.watched(small) as seen:
        assert ch18.experts_read(small, [5]) == [8, 8, 8, 8]
    assert [tuple(each.shape) for each in seen] == [(1, 8)] * 4
    assert ch18.experts_read(small, [5] * 3) == [8] * 4
    assert len(seen) == 4
    counts = ch18.experts_read(small, ch18.random_tokens(16))
    assert sum(counts) / 4 == pytest.approx(expected_distinct(128, 8, 16), rel=0.06)


def test_a_capacity_keeps_the_first_rows():
    ids = torch.tensor([[0, 1], [0, 2], [0, 1]])
    kept = ch18.within_capacity(ids, 2, 3)
    assert kept.tolist() == [[True, True], [True, True], [False, True]]
    matrices = ch18.random_layer(3, 8)
    x, weights = torch.randn(3, 8), torch.full((3, 2), 0.5)
    whole = ops.moe_experts(x, *matrices, weights, ids)
    limited = ch18.with_capacity(x, matrices, weights, ids, 2)
    assert torch.allclose(whole[:2], limited[:2])
    want = ops.moe_experts(x[2:], *matrices, weights[2:, 1:], ids[2:, 1:])
    assert torch.allclose(limited[2:], want, atol=1e-5)


# Simulated choices ---------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_the_first_choice_has_the_law(exponent):
    law = ch18.popularity(16, exponent, seed=3)
    assert law.sum() == pytest.approx(1)
    assert sorted(law / law.max(), reverse=True) == pytest.approx(
        [1 / rank**exponent for rank in range(1, 17)]
    )
    one = ch18.choices(law, 1, 50_000).ravel()
    assert np.bincount(one, minlength=16) / 50_000 == pytest.approx(law, abs=0.01)
    many = ch18.choices(law, 4, 200)
    assert all(len(set(row)) == 4 for row in many.tolist())


def test_rows_of_an_expert_take_its_copies_in_turn():
    ids = np.array([[0, 1], [0, 2], [0, 1]])
    assert ch18.rows_per_gpu(ids, [[0, 1], [2, 3]]).tolist() == [5, 1]
    assert ch18.rows_per_gpu(ids, [[0, 1], [0, 2]]).tolist() == [4, 2]
    assert ch18.rows_per_gpu(ids, [[0, 0], [1, 2]]).tolist() == [3, 3]
    assert ch18.in_order(4, 2) == [[0, 1], [2, 3]]


def test_balance_is_mean_over_largest(monkeypatch):
    steps = iter([np.array([[0, 1]]), np.array([[0, 2], [1, 3]])])
    monkeypatch.setattr(ch18, "choices", lambda *arguments: next(steps))
    found = ch18.balance(np.ones(4) / 4, 2, 1, [[0, 1], [2, 3]], steps=2)
    assert found == (0.5 + 1.0) / 2


def test_the_published_balances():
    """The notes' simulation: 256 experts, 8 per token, all equally popular."""
    law = ch18.popularity(256, 0)
    for gpus, wanted in ((8, (0.66, 0.86)), (32, (0.38, 0.65))):
        found = [ch18.balance(law, 8, tokens, ch18.in_order(256, gpus)) for tokens in (8, 64)]
        assert found == pytest.approx(wanted, abs=0.04)


# Copies and placements -----------------------------------------------------------------------


def test_spares_go_to_the_largest_load_per_copy():
    assert ch18.copies([8, 2, 1, 1], 2) == [3, 1, 1, 1]
    assert ch18.copies([6, 5, 1], 2) == [2, 2, 1]
    assert ch18.copies([4, 4], 1) == [2, 1]


def test_copies_are_packed_largest_first_into_equal_slots():
    assert ch18.pack([8, 2, 1, 1], [3, 1, 1, 1], 2) == [[0, 0, 3], [0, 1, 2]]
    assert ch18.pack([9, 1, 1, 1], [1, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    loads = [int(1000 / rank**0.8) for rank in range(1, 65)]
    counts = ch18.copies(loads, 8)
    placement = ch18.pack(loads, counts, 8)
    assert {len(held) for held in placement} == {9}
    found = Counter(expert for held in placement for expert in held)
    assert [found[expert] for expert in range(64)] == counts
    sums = [sum(loads[e] / counts[e] for e in held) for held in placement]
    assert np.mean(sums) / max(sums) > 0.9
