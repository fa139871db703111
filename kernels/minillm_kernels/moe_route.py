"""The choice of a router in one launch: scores, the best k experts of each token, weights."""

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import padded, tl, triton


@triton.jit
def _route(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, factor,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    expert, places = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    inside = expert < EXPERTS
    scores = tl.load(logits_ptr + token * EXPERTS + expert, mask=inside, other=float("-inf"))
    if SOFTMAX:
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores /= tl.sum(scores, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    ids, weights = tl.zeros((PLACES,), tl.int64), tl.zeros((PLACES,), tl.float32)
    for k in tl.static_range(TOP_K):
        is_best = (choice == tl.max(choice, axis=0)) & inside
        best = tl.min(tl.where(is_best, expert, EXPERTS - 1), axis=0)  # of equal ones the first
        weight = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        ids, weights = tl.where(places == k, best, ids), tl.where(places == k, weight, weights)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORMALIZE:
        weights /= tl.maximum(tl.sum(weights, axis=0), 1e-20)
    tl.store(weights_ptr + token * TOP_K + places, weights * factor, mask=places < TOP_K)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=places < TOP_K)


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, softmax: bool, normalize: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """`reference.moe_route` without groups: logits and bias, float32 [N, E] and [E] -> weights
    times `factor`, float32 [N, k], and ids, int64 [N, k]. Scores are softmax or sigmoid."""
    device = require.device(logits=logits, bias=bias)
    require.shape("logits", logits, "N", "E")
    require.dtype((torch.float32,), logits=logits, bias=bias)
    require.contiguous(logits=logits, bias=bias)
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    if num_tokens:
        _route[(num_tokens,)](
            logits, bias, weights, ids, factor, EXPERTS=num_experts, BLOCK=padded(num_experts),
            TOP_K=top_k, PLACES=padded(top_k, 1), SOFTMAX=softmax, NORMALIZE=normalize, num_warps=2,
        )  # fmt: skip
    return weights, ids
