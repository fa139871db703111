"""Chapter 15's own functions: rounding, bits, attention, readers."""

import math

import pytest
import torch

from minillm.cache.spec import cache_spec
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token
from minillm_exercises.chapters import ch15

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(20, 2, 8, generator=GENERATOR)


@pytest.mark.parametrize("shared", [ch15.ALL, ch15.TOKEN, ch15.HEAD, ch15.CHANNEL], ids=str)
def test_what_shares_a_scale_errs_by_half_a_step(shared) -> None:
    for bits in (4, 8):
        step = X.abs().amax(shared, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((ch15.uniform(X, shared, bits) - X).abs() <= step / 2 + 1e-6).all()
        low, high = X.amin(shared, keepdim=True), X.amax(shared, keepdim=True)
        error = (ch15.between(X, shared, bits) - X).abs()
        assert (error <= (high - low) / (2**bits - 1) / 2 + 1e-6).all()
    assert torch.equal(ch15.uniform(X * 0, shared), X * 0)


def test_bits_are_those_of_codes_and_scales() -> None:
    """The engine's own format takes the engine's bytes; a number with 4 bits takes half a byte."""
    config = preset("smollm2-135m")
    numbers = kv_bytes_per_token(config, "bfloat16") / 2
    bits = {kind.name: kind.bits for kind in ch15.kinds(config.head_dim, config.num_kv_heads)}
    assert bits["int8, token and head"] == 8 * kv_bytes_per_token(config, "int8") / numbers
    assert bits["int4, token and head"] == 4 + (16 + 16) / 64
    assert bits["int4 keys by channel"] == (4 + 32 / 16 + 4 + 32 / 64) / 2
    assert bits["int8 keys, int4 values"] == (8 + 16 / 64 + 4 + 32 / 64) / 2
    assert bits["int4 keys alone"] == bits["int4 values alone"] == (16 + 4 + 32 / 64) / 2


def test_channels() -> None:
    x = torch.tensor([[[1.0, -4.0, 2.0]], [[-3.0, 1.0, 0.0]]])  # [2 positions, a head, 3]
    assert ch15.largest(x).tolist() == [4, 3, 2]
    assert ch15.spread(x) == pytest.approx(4 / 3)


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_attention_is_that_of_torch(kind: str) -> None:
    query = torch.randn(3, 4, 32, generator=GENERATOR)
    key, value = torch.randn(2, 20, 2, 32, generator=GENERATOR)
    mask = torch.ones(20, 20).tril()[-3:].bool()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), mask, enable_gqa=True
    ).transpose(0, 1)
    error = (ch15.attend(kind, query, key, value) - want).norm() / want.norm()
    assert error < {"auto": 1e-5, "int8": 0.03}[kind]


def test_claim_c15() -> None:
    """40 GiB, 20.3 and 10.6 with scales; the other half of the verdict is in the record."""
    config = preset("llama-3.1-70b")
    sizes = [kv_bytes_per_token(config, kind) * 2**17 / 2**30 for kind in ("bfloat16", "int8")]
    assert sizes == [40.0, 40 * 130 / 256]
    assert round(40 * (4 + 32 / 128) / 16, 1) == 10.6
    kl = ch15.real()["kl"]
    assert kl["int8, token and head"] < 0.002
    assert kl["int4, token and head"] > 20 * kl["int8, token and head"]


def test_readers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_QUICK", "1")
    monkeypatch.setattr(ch15, "ROTATED", 2**22)
    config = preset("qwen3-0.6b")
    readers = {kind: ch15.Reader(kind) for kind in ("auto", "int8")}
    for kind, reader in readers.items():
        assert reader.token_bytes == cache_spec(config, kind).block_bytes(1, 2)
        assert 0 < reader.seconds(128) < math.inf
        assert all(bool(pages.float().isfinite().all()) for pages in reader.kv.tensors)
    took = {"auto": [1.0], "int8": [4096 / 1e6]}
    floors = ch15.bounds(readers, [128], 1e3, took)
    rate = readers["int8"].token_bytes * 128 / (4096 / 1e6)  # the highest that was seen
    assert floors["auto"] == [readers["auto"].token_bytes * 128 / rate]


def test_requests_run_while_their_blocks_last() -> None:
    """8 blocks hold two requests of 48 + 16 tokens; each step but the first writes a token."""
    counts = ch15.running(8, 4, 48, 16)
    assert max(counts) == 2
    assert sum(counts) == 4 * 16
    assert len(counts) == 2 * 16


def test_a_pool_of_codes_has_more_blocks() -> None:
    plain, eight = (ch15.pool(kind, 2**22) for kind in ("auto", "int8"))
    assert eight[0] / plain[0] == pytest.approx(128 / 66, rel=0.02)
    assert (plain[1], eight[1]) == (7 * 2 * 2 * 128, 7 * 2 * 2 * 66)


def test_fp8_has_three_bits_of_fraction() -> None:
    row = torch.tensor([448.0, 17.0, 18.0, -0.25]).view(1, 1, 4)
    assert ch15.fp8(row, 2).flatten().tolist() == [448.0, 16.0, 18.0, -0.25]


def test_blocks_are_rounded_by_themselves() -> None:
    def half(block):
        return block / len(block)

    found = ch15.in_blocks(X, half, 16)
    assert torch.equal(found, torch.cat((X[:16] / 16, X[16:] / 4)))
