"""The oracle of the kernels against torch's own attention, the engine's sampler, and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from minillm.api.sampling_params import SamplingParams
from minillm_kernels import reference
from tests.sampling.sampling_rows import SamplingRow, sample


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sdpa(q, k, v, mask, scale):
    """torch's attention of one sequence: q [T, H, D], k [S, Hkv, D] -> [T, H, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


MASKS = [(False, None), *((True, window) for window in (None, 1, 5, 100))]


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_flash_attention_is_torch_s(causal, window):
    queries, keys = (3, 1, 8), (3, 9, 12)
    q, k, v = normal(12, 6, 8), normal(24, 2, 8, seed=1), normal(24, 2, 5, seed=2)
    bounds = [torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (queries, keys)]
    out = reference.flash_attention(q, k, v, *bounds, 0.3, causal, window)
    at, key_at = 0, 0
    for count, length in zip(queries, keys, strict=True):
        mask = torch.ones(count, length, dtype=torch.bool)
        if causal:
            mask = mask.tril(length - count)
        if window:
            mask &= mask.triu(length - count - window + 1)
        part = slice(at, at + count)
        expected = sdpa(
            q[part], k[key_at : key_at + length], v[key_at : key_at + length], mask, 0.3
        )
        torch.testing.assert_close(out[part], expected)
        at, key_at = at + count, key_at + length


def test_a_query_that_sees_nothing_gives_zero():
    """More queries than keys: the first ones stand before the first key."""
    q, k = normal(4, 1, 8), normal(2, 1, 8)
    bounds = torch.tensor([0, 4]).int(), torch.tensor([0, 2]).int()
    out = reference.flash_attention(q, k, k, *bounds, 1.0)
    assert out[:2].eq(0).all()
    torch.testing.assert_close(out[2], k[0])


def test_paged_attention_with_a_soft_cap_and_padded_rows():
    """A cap so large that it does nothing gives what goes through torch's attention."""
    cache, other = normal(6, 2, 4, 8), normal(6, 2, 4, 8, seed=1)
    tables = torch.tensor([[3, 1, 0], [5, 5, 5], [2, 4, 0]])
    start, lengths = torch.tensor([0, 1, 2, 5]).int(), torch.tensor([9, 0, 7]).int()
    q = normal(5, 4, 8, seed=2)
    for window in (None, 3):
        plain = reference.paged_attention(q, cache, other, start, lengths, tables, 0.3, window)
        capped = reference.paged_attention(
            q, cache, other, start, lengths, tables, 0.3, window, soft_cap=1e9
        )
        torch.testing.assert_close(capped, plain)
        assert plain[1].eq(0).all()


def test_mla_is_attention_whose_value_is_a_part_of_its_key():
    cache, q = normal(3, 1, 4, 12), normal(2, 5, 12, seed=1)
    start, lengths = torch.tensor([0, 2]).int(), torch.tensor([7]).int()
    out = reference.mla_attention(q, cache, 8, start, lengths, torch.tensor([[2, 0]]), 0.3)
    keys = torch.cat((cache[2], cache[0]), dim=1)[0, :7, None]  # [S, 1, 12]
    mask = torch.ones(2, 7, dtype=torch.bool).tril(5)
    torch.testing.assert_close(out, sdpa(q, keys, keys[..., :8], mask, 0.3))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("num_queries", [0, 1, 2, 15, 16, 17, 20])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 1), (6, 2), (3, 3)])
def test_a_few_queries_see_what_many_do(num_heads, num_kv_heads, num_queries, window):
    """Of 20 positions, whatever their number; a prompt has as many queries as positions."""
    rng = torch.Generator().manual_seed(7)
    numbers = {"generator": rng, "dtype": torch.float64}
    q = torch.randn(num_queries, num_heads, 8, **numbers)
    k, v = torch.randn(num_kv_heads, 20, 8, **numbers), torch.randn(num_kv_heads, 20, 4, **numbers)
    visible = reference.visible_positions(num_queries, 20, window, q.device)
    wanted = reference.plain_attention(q, k.transpose(0, 1), v.transpose(0, 1), 0.3, visible)
    torch.testing.assert_close(reference.causal_attention(q, k, v, 0.3, window), wanted)


def test_a_few_queries_multiply_a_key_once(monkeypatch):
    """And not once for each of the heads that share it, which takes torch 20 times as long."""
    given, attend = [], reference.F.scaled_dot_product_attention

    def seen(q, k, v, **options):
        given.append((len(q) * q.shape[1], q.shape[2]))  # products, rows of each
        return attend(q, k, v, **options)

    monkeypatch.setattr(reference.F, "scaled_dot_product_attention", seen)
    k = torch.randn(2, 20, 8)
    for num_queries in (1, 5, 16, 17):
        reference.causal_attention(torch.randn(num_queries, 6, 8), k, k[..., :4], 0.3)
    assert given == [(2, 3), (2, 15), (2, 48), (6, 17)]


def test_write_cache_skips_negative_slots_and_padding():
    key, cache = normal(4, 2, 8), torch.full((3, 2, 4, 8), math.nan, dtype=torch.float64)
    reference.write_cache(key, None, cache, cache, torch.tensor([5, -1, 0]))
    assert torch.equal(cache[1, :, 1], key[0])
    assert torch.equal(cache[0, :, 0], key[2])
    assert int(cache.isnan().sum()) == cache.numel() - 2 * 16


@pytest.mark.parametrize("normed", [True, False])
def test_norm_rope_write_is_its_parts(normed):
    qkv, angle = normal(3, 8, 8), normal(3, 4, seed=1)
    weights = (normal(8, seed=2), normal(8, seed=3)) if normed else (None, None)
    k_cache, v_cache = normal(2, 2, 4, 8), normal(2, 2, 4, 8)
    slots = torch.tensor([1, 6, 3])
    q = reference.norm_rope_write(
        qkv, *weights, 1e-5, angle.cos(), angle.sin(), False, k_cache, v_cache, slots
    )

    def turned(x, weight):
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1)

    torch.testing.assert_close(q, turned(qkv[:, :4], weights[0]), atol=1e-6, rtol=1e-6)
    for row, (block, offset) in enumerate([(0, 1), (1, 2), (0, 3)]):
        expected = turned(qkv[:, 4:6], weights[1])[row]
        torch.testing.assert_close(k_cache[block, :, offset], expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(v_cache[block, :, offset], qkv[row, 6:])


def test_add_rms_norm_is_a_sum_and_a_norm():
    x, residual, weight = (torch.randn(3, 8).bfloat16() for _ in range(3))
    normed, total = reference.add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, F.rms_norm(x + residual, (8,), weight[0], 1e-5))


# ---- choosing a token -------------------------------------------------------------------------


def rows_of(params, count):
    return [SamplingRow(params, 3 + 2**40 * i, i % 2, i) for i in range(count)]


@pytest.mark.parametrize("options", [{}, {"min_p": 0.05}, {"temperature": 0.4}])
def test_gumbel_argmax_draws_what_the_engine_draws(options):
    params = SamplingParams(**({"temperature": 1.3} | options))
    logits = (normal(40, 500) * 3).float()
    rows = rows_of(params, 40)
    got = reference.gumbel_argmax(
        logits,
        torch.full((40,), params.temperature),
        torch.full((40,), params.min_p),
        torch.tensor([row.seed for row in rows]),
        torch.tensor([row.sample_index for row in rows]),
        torch.tensor([row.position for row in rows]),
    )
    assert got.tolist() == sample(logits, rows).token_ids


def test_truncate_keeps_what_a_loop_in_float64_keeps():
    """Token after token, the most probable first, of equal ones the smallest id."""
    logits = (normal(30, 300).float() * 4).round()  # many ties
    top_k = torch.arange(30, dtype=torch.int32) * 3 % 40
    top_k[7] = 1000  # more than there are tokens: off
    top_p = torch.linspace(0.05, 1, 30)
    got = reference.truncate(logits, top_k, top_p)
    for row, scaled in enumerate((logits - logits.amax(-1, keepdim=True)).tolist()):
        order = sorted(range(300), key=lambda token: (-scaled[token], token))
        if 0 < top_k[row] < 300:
            kth = scaled[order[int(top_k[row]) - 1]]
            order = [token for token in order if scaled[token] >= kth]
        total = math.fsum(math.exp(scaled[token]) for token in order)
        kept, mass = set(), 0.0
        for token in order:
            if mass >= float(top_p[row]) * total and top_p[row] < 1:
                break
            kept.add(token)
            mass += math.exp(scaled[token])
        expected = [value if token in kept else -math.inf for token, value in enumerate(scaled)]
        assert got[row].tolist() == expected, row
