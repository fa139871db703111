"""Brackets: x' (Wq' Wuk) c instead of (Wq x)' (Wuk c).

The absorbed form is multi-query attention: all heads share one key, the latent and its rotated
part, and the value is that key's beginning. Its heads are wide (R + Dr instead of Dn + Dr numbers),
so a long prompt takes *more* operations than in the explicit form. A step of decoding waits for the
cache to be read, and there it wins. The root stays that of the explicit head, because the scores
are the same numbers.

Merging the matrices themselves, as here, is not always what engines do. DeepSeek-V2 has R = 512,
Dn = 128, and a query matrix that reads E = 1536 numbers: to_latent has R * E = 786,432 numbers per
head, the two matrices it is made of Dn * (E + R) = 262,144. Merged, there are three times as many
weights to read. So minillm multiplies the *query* by the one matrix and then by the other: the same
brackets around the cache, without the product of the matrices.
"""

import torch
from torch import Tensor


def absorb(w_q: Tensor, w_uk: Tensor, w_uv: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices into the space of latents [H, R, E] and back [H, E, R]."""
    heads, value_dim, _ = w_uv.shape
    to_latent = torch.einsum("hdr,hde->hre", w_uk, w_q)
    per_head = w_o.view(-1, heads, value_dim)  # [E, H, Dv]
    return to_latent, torch.einsum("ehv,hvr->her", per_head, w_uv)


def attend(
    hidden: Tensor,
    rotated: Tensor,
    to_latent: Tensor,
    from_latent: Tensor,
    latents: Tensor,
    shared: Tensor,
    nope_dim: int,
) -> Tensor:
    """Causal attention of the last T of S tokens over latents alone -> [T, E]."""
    tokens, length, rope_dim = len(hidden), len(latents), shared.shape[1]
    queries = torch.einsum("te,hre->thr", hidden, to_latent)  # [T, H, R]
    scores = torch.einsum("thr,sr->ths", queries, latents)
    scores = scores + torch.einsum("thp,sp->ths", rotated, shared)
    scores = scores / (nope_dim + rope_dim) ** 0.5
    position = torch.arange(length - tokens, length)  # [T], of the queries
    future = torch.arange(length) > position[:, None]  # [T, S]
    weights = scores.masked_fill(future[:, None], -torch.inf).softmax(-1)
    mixed = torch.einsum("ths,sr->thr", weights, latents)  # [T, H, R]
    return torch.einsum("thr,her->te", mixed, from_latent)
