"""The training attention against torch's scaled_dot_product_attention, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from minillm.lab.training.attention import CausalRows
from minillm.lab.training.trainer import rows_batch


@pytest.mark.parametrize(("length", "window"), [(5, None), (300, None), (300, 7), (1100, None)])
def test_equals_sdpa(length: int, window: int | None) -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads, dim = 2, 4, 2, 8
    q = torch.randn(rows * length, heads, dim, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(rows * length, kv_heads, dim, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    batch = rows_batch(torch.zeros(rows * length, dtype=torch.int64), length)
    kv = CausalRows(length)
    kv.write(0, k, v, batch)
    out = kv.attend(0, q, batch, 0.3, window)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(rows, length, -1, dim).transpose(1, 2)

    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    mask = (distance >= 0) & (distance < (window or length))
    wanted = F.scaled_dot_product_attention(
        split(q), split(k), split(v), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    wanted = wanted.transpose(1, 2).reshape(-1, heads, dim)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0)  # scores pass through float32
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(wanted, (q, k, v), grad)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_latent_is_key_and_value() -> None:
    torch.manual_seed(0)
    length, heads, width, latent = 300, 4, 12, 8
    q, key = (torch.randn(length, n, width, dtype=torch.float64) for n in (heads, 1))
    batch = rows_batch(torch.zeros(length, dtype=torch.int64), length)
    kv = CausalRows(length, latent)
    kv.write(0, key, None, batch)
    out = kv.attend(0, q, batch, 0.3, None)
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, key, key[..., :latent])),
        is_causal=True,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, wanted[0].transpose(0, 1), atol=1e-6, rtol=0)
