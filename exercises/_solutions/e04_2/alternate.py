"""e04.2 another way: one head of keys for a tall matrix of queries, and no einsum.

All heads of all tokens are rows, [T * H, R + Dr], and are multiplied with one matrix of keys: the
latents with their rotated parts. Afterwards the heads are put next to each other, as in w_o.
"""

import torch
from torch import Tensor


def absorb(w_q: Tensor, w_uk: Tensor, w_uv: Tensor, w_o: Tensor) -> tuple[Tensor, Tensor]:
    """to_latent [H, R, E] and from_latent [H, E, R]."""
    columns = torch.stack(w_o.chunk(w_uv.shape[0], dim=1))  # [H, E, Dv]
    return w_uk.mT @ w_q, columns @ w_uv


def attend(
    hidden: Tensor,
    rotated: Tensor,
    to_latent: Tensor,
    from_latent: Tensor,
    latents: Tensor,
    shared: Tensor,
    nope_dim: int,
) -> Tensor:
    """The last T of S tokens over latents -> [T, E]."""
    heads, rank, wide = to_latent.shape
    tokens, length = hidden.shape[0], latents.shape[0]
    moved = hidden @ to_latent.reshape(heads * rank, wide).T  # [T, H * R]
    rows = torch.cat((moved.view(tokens, heads, rank), rotated), dim=2).flatten(0, 1)
    keys = torch.cat((latents, shared), dim=1)  # [S, R + Dr]
    scores = rows.mul((nope_dim + shared.shape[1]) ** -0.5) @ keys.T  # [T * H, S]
    hidden_from = torch.full((tokens, length), -torch.inf, dtype=scores.dtype)
    blocked = hidden_from.triu(length - tokens + 1).repeat_interleave(heads, dim=0)
    chances = (scores + blocked).softmax(dim=1)
    mixed = (chances @ latents).view(tokens, heads * rank)
    return mixed @ from_latent.transpose(1, 2).reshape(heads * rank, wide)
