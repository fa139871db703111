"""Deliberate bugs, each with the configuration whose parity test must notice it.

A mutant changes a loaded model, or replaces an operation through pytest's `monkeypatch`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minillm import ops
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend
from minillm.layers.mla import MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import Experts, MoE, Router
from minillm.layers.norm import RMSNorm
from minillm.layers.post_norm import PostNormLayer, WholeNormAttention
from minillm.layers.rope import attention_factor, inverse_frequencies
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch, Prologue
from minillm_kernels import reference

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A bug, the case that catches it, and whether one whole prefill is enough to see it."""

    name: str
    case: str
    apply: Callable[[Patch, Decoder], None]
    whole: bool = True


def parts(model: Decoder, kind: type) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, kind))


def replace_op(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """A mutation that wraps an operation wherever the engine finds it."""

    def apply(patch: Patch, model: Decoder) -> None:
        original = getattr(reference, name)
        wrapped = make(original)
        patch.setattr(reference, name, wrapped)
        if getattr(ops, name, None) is original:
            patch.setattr(ops, name, wrapped)

    return apply


def change(kind: type, edit: Callable[[Any], None]) -> Any:
    """A mutation of every module of a kind."""

    def apply(patch: Patch, model: Decoder) -> None:
        for part in parts(model, kind):
            edit(part)

    return apply


def set_to(kind: type, **values: Any) -> Any:
    """Set attributes of every module of a kind."""

    def edit(part: Any) -> None:
        for name, value in values.items():
            setattr(part, name, value)

    return change(kind, edit)


def set_moe(**values: Any) -> Any:
    """Change the router's description."""
    return change(Router, lambda router: setattr(router, "moe", replace(router.moe, **values)))


def set_rope(**values: Any) -> Any:
    """Compute angles for another RoPE than the one of config.json."""

    def apply(patch: Patch, model: Decoder) -> None:
        config = model.config
        rope, length = replace(config.rope, **values), config.max_position_embeddings
        model.rope.frequencies = inverse_frequencies(rope, config.rotary_dim, length, length)
        model.rope.factor = attention_factor(rope, length)

    return apply


def drop_norm(suffix: str) -> Any:
    """Replace every norm whose checkpoint name ends so by nothing."""

    def apply(patch: Patch, model: Decoder) -> None:
        for norm in parts(model, RMSNorm):
            if norm.name.endswith(suffix):
                patch.setattr(norm, "forward", lambda x: x)
                patch.setattr(norm, "add", lambda x, past: (x if past is None else x + past,) * 2)

    return apply


def without_norm(of_query: bool) -> Any:
    """Queries, or keys, that are not normed."""

    def apply(patch: Patch, model: Decoder) -> None:
        works = ops.norm_rope

        def mutated(qkv: Tensor, prologue: Prologue, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = works(qkv, prologue, *args)
            bare = works(qkv, prologue._replace(q_norm=None), *args)
            return (bare[0], k, v) if of_query else (q, bare[1], v)

        patch.setattr(ops, "norm_rope", mutated)

    return apply


def swap_halves(weight: Tensor, dim: int = 0) -> None:
    first, second = weight.data.chunk(2, dim)
    weight.data = torch.cat((second, first), dim)


def swap_shared(moe: MoE) -> None:
    if moe.shared is not None:
        swap_halves(moe.shared.gate_up_proj.weight)


def shifted_rope(only_decode: bool) -> Any:
    """Positions one too high, for all tokens or for those that come one at a time."""

    def apply(patch: Patch, model: Decoder) -> None:
        forward = model.forward

        def mutated(batch: Batch, kv: AttentionBackend) -> Tensor:
            sizes = batch.query_start.diff()
            late = (sizes == 1) & (batch.seq_lens > 1) if only_decode else sizes > 0
            shift = torch.repeat_interleave(late.long(), sizes)
            return forward(replace(batch, positions=batch.positions + shift), kv)

        patch.setattr(model, "forward", mutated)

    return apply


def shift_query(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every first call of a pair (the query's) uses the angle of the position before."""
    calls = [0]

    def mutated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        calls[0] += 1
        if calls[0] % 2:
            cos, sin = cos.roll(1, 0), sin.roll(1, 0)
        return rotate(x, cos, sin, interleaved)

    return mutated


def interleaved_heads(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Query head h reads KV head h mod Hkv instead of h div G."""

    def mutated(q: Tensor, k_cache: Tensor, *args: Any) -> Tensor:
        num_kv_heads = k_cache.shape[1]
        mixed = q.unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2)
        out = attention(mixed, k_cache, *args)
        return out.unflatten(1, (num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)

    return mutated


def no_causal_mask(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every query sees every key; queries go one at a time, where no mask is needed."""

    def mutated(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        return torch.cat([attention(row[None], k, v, scale) for row in q])

    return mutated


def top_left_mask(visible: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Query i of a chunk sees keys 0..i, as if the chunk were at the start."""

    def mutated(num_queries: int, num_keys: int, window: int | None, device: Any) -> Tensor:
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()

    return mutated


def future_by_one(visible: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each query sees one key of the future, in chunks and windows."""

    def mutated(num_queries: int, num_keys: int, window: int | None, device: Any) -> Tensor:
        mask = visible(num_queries, num_keys, window, device)
        return mask | mask.roll(1, 1)

    return mutated


def window_by(step: int) -> Any:
    return change(Attention, lambda layer: setattr(layer, "window", layer.window + step))


def no_block_table(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Blocks in physical order."""

    def mutated(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
        return gather(cache, torch.arange(len(block_table)), seq_len)

    return mutated


def lost_first_key(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A later chunk does not see the first position."""

    def mutated(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        first = int(len(q) < k.shape[1])
        return attention(q, k[:, first:], v[:, first:], *args)

    return mutated


def bias_in_weights(route: Callable[..., Any]) -> Callable[..., Any]:
    """The router's bias not only chooses experts but also weights them."""

    def mutated(scores: Tensor, bias: Tensor | None, *args: Any) -> Any:
        return route(scores if bias is None else scores + bias, None, *args)

    return mutated


def no_bias(owner: type, name: str) -> Any:
    return change(owner, lambda part: setattr(getattr(part, name), "bias", None))


def no_rotation(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, cos, sin, interleaved=False: x.contiguous()


def no_silu(mlp: MLP) -> None:
    """gate * up without silu."""
    mlp.activation = lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1]


def unshared(patch: Patch, model: Decoder) -> None:
    for part in parts(model, MoE):
        part.shared = None


def untied(patch: Patch, model: Decoder) -> None:
    """Output logits from a matrix that is not the embedding's."""
    weight = model.embedding.weight.flip(0)
    patch.setattr(model.embedding, "as_output", lambda x: nn.functional.linear(x, weight))


def norm_each_head(part: WholeNormAttention) -> None:
    norm, shape = part.all_q_norm, (part.num_heads, part.head_dim)
    weight = norm.weight.view(shape)
    norm.forward = lambda x: torch.cat(
        [ops.rms_norm(x[:, h * shape[1] :][:, : shape[1]].contiguous(), weight[h], norm.eps)
         for h in range(shape[0])], dim=-1)  # fmt: skip


def norm_sums(patch: Patch, model: Decoder) -> None:
    """Post-norms as in the first transformer: norm(x + MLP(x))."""
    for layer in parts(model, PostNormLayer):

        def mutated(
            x: Tensor, residual: Tensor | None, *args: Any, layer: PostNormLayer = layer
        ) -> tuple[Tensor, Tensor]:
            x = x if residual is None else x + residual
            x = x + layer.attention_norm(layer.attention(x, *args))
            out = layer.mlp_norm(x + layer.mlp(x))
            return out, torch.zeros_like(out)

        patch.setattr(layer, "forward", mutated)


MUTANTS = (
    Mutant("no RoPE", "llama", replace_op("rotate", no_rotation)),
    Mutant("no RoPE (MLA)", "deepseek_v3", replace_op("rotate", no_rotation)),
    Mutant(
        "RoPE position + 1 for decoded tokens", "llama", shifted_rope(only_decode=True), whole=False
    ),
    Mutant("RoPE position - 1 for queries", "llama", replace_op("rotate", shift_query)),
    Mutant(
        "RoPE pairs (i, i + D/2) for (2i, 2i+1)",
        "deepseek_v3",
        set_to(MLAttention, interleaved=False),
    ),
    Mutant(
        "RoPE pairs (2i, 2i+1) for (i, i + D/2)",
        "deepseek_v3, tied, one group",
        set_to(MLAttention, interleaved=True),
    ),
    Mutant("rope_theta ignored", "llama / default", set_rope(theta=10000.0)),
    Mutant("linear scaling ignored", "llama / linear", set_rope(rope_type="default")),
    Mutant("dynamic scaling ignored", "llama / dynamic, beyond", set_rope(rope_type="default")),
    Mutant("llama3 scaling ignored", "llama / llama3", set_rope(rope_type="default")),
    Mutant("llama3 scaling as linear", "llama / llama3", set_rope(rope_type="linear")),
    Mutant("yarn as linear", "llama / yarn", set_rope(rope_type="linear", attention_factor=1.0)),
    Mutant("yarn's temperature ignored", "llama / yarn", set_rope(attention_factor=1.0)),
    Mutant(
        "yarn's attention_factor ignored",
        "llama / yarn, attention_factor",
        set_rope(attention_factor=None),
    ),
    Mutant(
        "yarn's truncate=False ignored", "llama / yarn, truncate=False", set_rope(truncate=True)
    ),
    Mutant("yarn's beta_fast ignored", "llama / yarn, truncate=False", set_rope(beta_fast=32.0)),
    Mutant("yarn's beta_slow ignored", "llama / yarn, truncate=False", set_rope(beta_slow=1.0)),
    Mutant(
        "yarn's mscale ignored", "qwen3 / yarn, mscale", set_rope(mscale=None, mscale_all_dim=None)
    ),
    Mutant(
        "MLA's softmax scale without mscale",
        "deepseek_v3",
        change(MLAttention, lambda layer: setattr(layer, "scale", 24**-0.5)),
    ),
    Mutant(
        "MLA's softmax scale without mscale (V2)",
        "deepseek_v2",
        change(MLAttention, lambda layer: setattr(layer, "scale", 24**-0.5)),
    ),
    Mutant("longrope's factors ignored", "llama / longrope, beyond", set_rope(rope_type="default")),
    Mutant(
        "longrope's short factors for long",
        "llama / longrope, beyond",
        set_rope(original_max_position_embeddings=256, attention_factor=1.154701),
    ),
    Mutant(
        "longrope's long factors for short",
        "llama / longrope, below",
        set_rope(original_max_position_embeddings=64, attention_factor=1.0),
    ),
    Mutant("longrope's factor ignored", "llama / longrope, beyond", set_rope(factor=1.0)),
    Mutant(
        "gate and up swapped",
        "llama",
        change(MLP, lambda mlp: swap_halves(mlp.gate_up_proj.weight)),
    ),
    Mutant("gate and up swapped (shared experts)", "deepseek_v2", change(MoE, swap_shared)),
    Mutant(
        "gate and up swapped (experts)",
        "mixtral",
        change(Experts, lambda experts: swap_halves(experts.gate_up.weight, 1)),
    ),
    Mutant("gate without silu", "qwen2", change(MLP, no_silu)),
    Mutant(
        "query head h reads KV head h mod Hkv",
        "llama",
        replace_op("paged_attention", interleaved_heads),
    ),
    Mutant("no causal mask", "llama", replace_op("causal_attention", no_causal_mask)),
    Mutant("no causal mask (MLA)", "deepseek_v2", replace_op("causal_attention", no_causal_mask)),
    Mutant(
        "mask of a chunk aligned at the top left",
        "llama",
        replace_op("visible_positions", top_left_mask),
        whole=False,
    ),
    Mutant(
        "mask shows one future token", "mistral", replace_op("visible_positions", future_by_one)
    ),
    Mutant("softmax scale missing", "qwen3", set_to(Attention, scale=1.0)),
    Mutant("window one too wide", "mistral", window_by(+1)),
    Mutant("window one too narrow", "mistral", window_by(-1)),
    Mutant("window ignored", "qwen3_moe, tied, sparse step", set_to(Attention, window=None)),
    Mutant("window in every layer", "qwen2, sliding", set_to(Attention, window=20)),
    Mutant(
        "block table ignored", "llama", replace_op("gather_blocks", no_block_table), whole=False
    ),
    Mutant(
        "first cached key lost",
        "llama",
        replace_op("causal_attention", lost_first_key),
        whole=False,
    ),
    Mutant("input norm missing", "llama", drop_norm("input_layernorm")),
    Mutant("MLP norm missing", "llama", drop_norm("post_attention_layernorm")),
    Mutant("final norm missing", "llama", drop_norm("model.norm")),
    Mutant("q_norm missing", "qwen3", without_norm(of_query=True)),
    Mutant("k_norm missing", "qwen3_moe", without_norm(of_query=False)),
    Mutant("query latent's norm missing", "deepseek_v3", drop_norm("q_a_layernorm")),
    Mutant("KV latent's norm missing", "deepseek_v2", drop_norm("kv_a_layernorm")),
    Mutant(
        "norm weights ignored", "llama", change(RMSNorm, lambda norm: norm.weight.data.fill_(1.0))
    ),
    Mutant("rms_norm_eps ignored", "llama", set_to(RMSNorm, eps=1e-6)),
    Mutant("rms_norm_eps also for latents", "deepseek_v2", set_to(RMSNorm, eps=1e-3)),
    Mutant("q, k and v biases dropped", "qwen2", no_bias(Attention, "qkv_proj")),
    Mutant("output bias dropped", "llama, biases", no_bias(Attention, "o_proj")),
    Mutant("gate and up biases dropped", "llama, biases", no_bias(MLP, "gate_up_proj")),
    Mutant("down bias dropped", "llama, biases", no_bias(MLP, "down_proj")),
    Mutant("latent biases dropped", "deepseek_v2, groups", no_bias(MLAttention, "kv_a_proj")),
    Mutant("query latent bias dropped", "deepseek_v2, groups", no_bias(MLAttention, "q_a_proj")),
    Mutant("router not normalised", "mixtral", set_moe(normalize=False)),
    Mutant("router not normalised (V3)", "deepseek_v3", set_moe(normalize=False)),
    Mutant("norm_topk_prob=False ignored", "qwen3_moe, tied, sparse step", set_moe(normalize=True)),
    Mutant("router bias ignored", "deepseek_v3", set_to(Router, bias=None)),
    Mutant(
        "router bias also in the weights", "deepseek_v3", replace_op("moe_route", bias_in_weights)
    ),
    Mutant("softmax for sigmoid", "deepseek_v3, tied, one group", set_moe(scoring="softmax")),
    Mutant("expert groups ignored", "deepseek_v3", set_moe(num_groups=1, topk_groups=1)),
    Mutant(
        "expert groups ignored (V2)", "deepseek_v2, groups", set_moe(num_groups=1, topk_groups=1)
    ),
    Mutant("group score max for top2", "deepseek_v3", set_moe(group_score="max")),
    Mutant("group score top2 for max", "deepseek_v2, groups", set_moe(group_score="top2")),
    Mutant(
        "routed_scaling_factor ignored", "deepseek_v2, groups", set_moe(routed_scaling_factor=1.0)
    ),
    Mutant("one expert too few", "qwen3_moe", set_moe(num_experts_per_token=2)),
    Mutant("shared experts missing", "deepseek_v3", unshared),
    Mutant("output matrix not tied", "qwen2", untied),
    Mutant("norms of q over each head alone", "olmo2", change(WholeNormAttention, norm_each_head)),
    Mutant("attention's output not normed", "olmo2", drop_norm("post_attention_layernorm")),
    Mutant("RoPE in every layer", "smollm3", set_to(Attention, has_rope=True)),
    Mutant("RoPE in no layer", "smollm3, tied, window", set_to(Attention, has_rope=False)),
    Mutant("the sum normed, not the MLP's output", "olmo2", norm_sums),
)
