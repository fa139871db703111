"""Where each tensor of a model is in a GGUF file.

Models have the names of Hugging Face checkpoints. Three things differ in GGUF: the experts of a
layer are one stack, MLA's `kv_b_proj` is divided into `attn_k_b` (transposed) and `attn_v_b`, and
the architecture "llama" has the rows of q and k in ggml's rotary order (`rotated_heads`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from minillm.errors import CheckpointError
from minillm.gguf.container import GGUFFile, TensorInfo
from minillm.gguf.settings import config_fields

OUTSIDE: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
INSIDE: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",  # with attn_k_b
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
MIXTRAL: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
MAX_EXPERTS = 4096  # as in models/families/
READ_ELSEWHERE = ("rope_freqs.weight",)  # part of the configuration
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Place:
    """A tensor of a model: where it is in the file.

    `expert`: its index in a stack. `rotated_heads`: number of heads whose rows are in ggml's
    rotary order. `keys`: MLA's transposed W_uk, if `tensor` is W_uv.
    """

    tensor: TensorInfo
    expert: int | None = None
    rotated_heads: int = 0
    keys: TensorInfo | None = None


def places(file: GGUFFile) -> dict[str, Place]:
    """The tensors of a model by their names in a Hugging Face checkpoint.

    Raises:
        CheckpointError: the file has a tensor that no supported model has, or half of MLA's pair.
    """
    fields = config_fields(file)
    family, num_heads = fields["model_type"], fields["num_attention_heads"]
    num_kv_heads = fields["num_key_value_heads"]
    permuted = file.fields.get("general.architecture") == "llama"
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if permuted else {}
    own = {**INSIDE, **(MIXTRAL if family == "mixtral" else {})}
    found: dict[str, Place] = {}
    for info in file.tensors.values():
        if info.name in READ_ELSEWHERE:
            continue
        layer = BLOCK.fullmatch(info.name)
        if layer and int(layer[1]) >= fields["num_hidden_layers"]:
            found[f"model.layers.{layer[1]}.{layer[2]}"] = Place(info)  # multi-token prediction
            continue
        for name, place in named(file, info, own, heads):
            if name in found:
                raise CheckpointError(f"{file.path} has two tensors for {name}.")
            found[name] = place
    return found


def named(
    file: GGUFFile, info: TensorInfo, own: Mapping[str, str], heads: Mapping[str, int]
) -> Iterator[tuple[str, Place]]:
    """The tensors of the model that one tensor of the file holds: one, or one per expert."""
    stem, _, suffix = info.name.rpartition(".")
    layer = BLOCK.fullmatch(stem)
    if layer is None:
        name = OUTSIDE.get(stem)
    elif f"{layer[2]}.{suffix}" in own:
        yield f"model.layers.{layer[1]}.{own[f'{layer[2]}.{suffix}']}", Place(info)
        return
    elif layer[2] == "attn_k_b":
        if f"blk.{layer[1]}.attn_v_b.weight" not in file.tensors:
            raise CheckpointError(f"{file.path} has {info.name} without attn_v_b.")
        return
    else:
        name = own.get(layer[2])
        name = None if name is None else f"model.layers.{layer[1]}.{name}"
    if name is None or suffix not in ("weight", "bias"):
        raise CheckpointError(
            f"{file.path} has a tensor {info.name} that no supported model has a place for."
        )
    kind = layer[2] if layer else ""
    place = Place(info, rotated_heads=heads.get(kind, 0))
    if kind == "attn_v_b":
        keys = file.tensors.get(f"blk.{layer[1]}.attn_k_b.weight")  # type: ignore[index]
        if keys is None:
            raise CheckpointError(f"{file.path} has {info.name} without attn_k_b.")
        place = replace(place, keys=keys)
    if "{}" in name and (len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS):
        raise CheckpointError(
            f"{file.path} has {info.name} of shape {list(info.shape)}; a stack of up to "
            f"{MAX_EXPERTS:,} matrices is expected."
        )
    if "{}" not in name:
        yield f"{name}.{suffix}", place
        return
    for expert in range(info.shape[0]):
        yield f"{name.format(expert)}.{suffix}", replace(place, expert=expert)
