"""Makes the folders beside this file, with the tools of README.md; nothing of minillm is used.

    python make.py [NAME ...]

Each folder is a one-layer Llama checkpoint as a tool writes it, with `expected.json`: the SHA-256
of each matrix as the tool dequantises it, and the logits of transformers with these matrices.
"""

import argparse
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
PROMPT = [3, 17, 4, 31, 0, 9, 22, 5, 5, 12, 28, 1]
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MATRICES = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
PREFIX = "model.layers.0."


def plain_model() -> LlamaForCausalLM:
    """The model before quantisation, in float32 with values of float16."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).half().float().eval()


def finish(name: str, tensors: dict, quantization: dict, dense: dict, exact: bool = True) -> None:
    """Write a folder: the tool's tensors, the other tensors in float16, and what is expected."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = plain_model()
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    kept = {
        key: value.half()
        for key, value in model.state_dict().items()
        if not any(key.startswith(f"{PREFIX}{matrix}.") for matrix in MATRICES)
    }
    codes = {key: each.contiguous() for key, each in tensors.items() if key not in kept}
    save_file(kept | codes, folder / "model.safetensors", {"format": "pt"})
    state = {f"{PREFIX}{matrix}.weight": dense[matrix].float() for matrix in MATRICES}
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    sums = {
        matrix: {
            "dtype": str(each.dtype).removeprefix("torch."),
            "sha256": digest(each),
            "first": each.flatten()[:4].tolist(),
        }
        for matrix, each in dense.items()
    }
    found = {"prompt": PROMPT, "exact": exact, "matrices": sums, "logits": logits.tolist()}
    (folder / "expected.json").write_text(json.dumps(found) + "\n")


def digest(values: torch.Tensor) -> str:
    """SHA-256 of the bits, with -0 as 0."""
    data = (values.contiguous() + 0.0).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


# ---- auto-round: GPTQ and AWQ --------------------------------------------------------------------


def auto_round(fmt: str, sym: bool, bits: int = 4) -> tuple[dict, dict]:
    """The tensors and the configuration that auto-round writes (RTN)."""
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models

    words = models.WordLevel({str(i): i for i in range(32)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    with tempfile.TemporaryDirectory() as place:
        plain_model().save_pretrained(place)
        model = LlamaForCausalLM.from_pretrained(place, dtype=torch.float32)
        rounding = {"bits": bits, "group_size": 32, "sym": sym}
        tool = AutoRound(
            model, tokenizer, **rounding, iters=0, disable_opt_rtn=True, device_map="cpu"
        )
        tool.quantize_and_save(f"{place}/out", format=fmt)
        (file,) = Path(place, "out").rglob("model.safetensors")
        config = json.loads((file.parent / "config.json").read_text())
        return load_file(file), config["quantization_config"]


def gptq_dense(tensors: dict, bits: int) -> dict:
    """Dequantised by auto-round's own linear layer, in float32."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    dense = {}
    for matrix in MATRICES:
        words = {
            name: tensors[f"{PREFIX}{matrix}.{name}"] for name in ("qweight", "qzeros", "scales")
        }
        out, width = words["qweight"].shape[1], words["qweight"].shape[0] * 32 // bits
        layer = QuantLinear(bits, 32, width, out, bias=False)
        layer.load_state_dict(words, strict=False)
        layer.post_init()
        layer.scales = layer.scales.float()
        dense[matrix] = layer(torch.eye(width)).T.contiguous()
    return dense


def gptq(name: str, sym: bool, bits: int = 4) -> None:
    tensors, config = auto_round("auto_gptq", sym, bits)
    finish(name, tensors, config, gptq_dense(tensors, bits))


def awq(name: str) -> None:
    """AWQ's codes are those of GPTQ in another order (without a search, both round to nearest)."""
    tensors, config = auto_round("auto_awq", False)
    finish(name, tensors, config, gptq_dense(auto_round("auto_gptq", False)[0], 4))


# ---- bitsandbytes --------------------------------------------------------------------------------


def bits_and_bytes(name: str, **options: object) -> None:
    import bitsandbytes.functional as F

    settings = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options)
    with tempfile.TemporaryDirectory() as place:
        plain_model().save_pretrained(place)
        model = LlamaForCausalLM.from_pretrained(
            place, quantization_config=settings, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(f"{place}/out")
        tensors = load_file(f"{place}/out/model.safetensors")
        config = json.loads(Path(place, "out/config.json").read_text())["quantization_config"]
    dense = {}
    for matrix in MATRICES:
        weight = model.get_submodule(f"{PREFIX}{matrix}").weight
        if weight.dtype == torch.int8:
            dense[matrix] = F.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            dense[matrix] = F.dequantize_4bit(weight.data, weight.quant_state)
    finish(name, tensors, config, dense, exact="load_in_4bit" in options)


def outliers(name: str) -> None:
    """Products of q_proj of an LLM.int8() folder, row by row, with and without outliers in 16 bits:
    outliers.json. bitsandbytes rounds inputs to float16 first."""
    import bitsandbytes as bnb

    tensors = load_file(HERE / name / "model.safetensors")
    codes, scales = (tensors[f"{PREFIX}self_attn.q_proj.{each}"] for each in ("weight", "SCB"))
    x = torch.randn(4, codes.shape[1], generator=torch.Generator().manual_seed(8))
    for row, column, value in ((0, 5, 40), (1, 5, -9), (1, 30, 25), (2, 63, 6), (3, 7, 5.9)):
        x[row, column] = value
    x = x.bfloat16()
    found = {"x": x.float().tolist()}
    for threshold in (6.0, 0.0):
        layer = bnb.nn.Linear8bitLt(
            codes.shape[1], codes.shape[0], bias=False, has_fp16_weights=False, threshold=threshold
        )
        layer.weight = bnb.nn.Int8Params(codes.float(), has_fp16_weights=False, requires_grad=False)
        layer.weight.data = layer.weight.CB = layer.state.CB = codes
        layer.weight.SCB = layer.state.SCB = scales
        with torch.no_grad():
            rows = [layer.eval()(row[None]) for row in x]
        found[f"threshold {threshold:g}"] = torch.cat(rows).float().tolist()
    (HERE / name / "outliers.json").write_text(json.dumps(found) + "\n")


# ---- compressed-tensors --------------------------------------------------------------------------


def compressed(
    name: str, kind: str, group: int | None = None, order: bool = False, **weights
) -> None:
    """A scheme of compressed-tensors. `order`: the tool sees the columns in another order, and the
    file says so in `weight_g_idx`, as versions before 0.15 write it for act order."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(group_size=group, **weights), format=kind
    )
    tool = BaseCompressor.get_value_from_registry(kind)
    tensors, dense = {}, {}
    for matrix in MATRICES:
        weight = plain_model().get_submodule(f"{PREFIX}{matrix}").weight.data.bfloat16()
        width = weight.shape[1]
        perm = torch.randperm(width, generator=torch.Generator().manual_seed(width))
        seen = weight[:, perm] if order else weight
        low, high = ranges(seen, scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": seen, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
        stored = tool.compress(state, scheme)
        as_float = {"weight_scale": stored["weight_scale"].float()}
        values = tool.decompress(stored | as_float, scheme)["weight"]
        dense[matrix] = values.clone()
        if order:
            dense[matrix][:, perm] = values
            stored = back(stored, perm, group, scheme.weights.num_bits)
        tensors |= {f"{PREFIX}{matrix}.{key}": each for key, each in stored.items()}
    config = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    finish(name, tensors, config, dense)


def ranges(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value for each scale."""
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        return parts.amin(1), parts.amax(1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        parts = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return parts.amin((1, 3)), parts.amax((1, 3))
    parts = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return parts.amin(-1), parts.amax(-1)


def back(stored: dict, perm: torch.Tensor, group: int, bits: int) -> dict:
    """Codes in the order of the inputs, and the group of each input."""
    from compressed_tensors.compressors.pack_quantized.helpers import (
        pack_to_int32,
        unpack_from_int32,
    )

    shape = torch.Size(stored["weight_shape"].tolist())
    codes = unpack_from_int32(stored["weight_packed"], bits, shape)
    places = torch.argsort(perm)
    index = (places // group).to(torch.int32)
    packed = pack_to_int32(codes[:, places].contiguous(), bits)
    return stored | {"weight_packed": packed, "weight_g_idx": index}


# ---- act order in GPTQ's layout, and FP8 ---------------------------------------------------------


def gptq_act_order(name: str, version: str) -> None:
    """The tensors of `pack-order` in GPTQ's layout; no tool that writes them runs here."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    source, tensors = load_file(HERE / "pack-order" / "model.safetensors"), {}
    for matrix in MATRICES:
        stem = f"{PREFIX}{matrix}."
        scale = source[f"{stem}weight_scale"]
        shape = torch.Size(source[f"{stem}weight_shape"].tolist())
        signed = unpack_from_int32(source[f"{stem}weight_packed"], 4, shape)
        zeros = unpack_from_int32(source[f"{stem}weight_zero_point"], 4, scale.shape, packed_dim=0)
        offset = 8 - (version == "gptq")
        tensors |= {
            f"{stem}qzeros": words((zeros.int() + offset).T & 15),
            f"{stem}scales": scale.T,
            f"{stem}g_idx": source[f"{stem}weight_g_idx"],
        }
        tensors[f"{stem}qweight"] = words_down((signed.int() + 8).T)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    dense = json.loads((HERE / "pack-order" / "expected.json").read_text())
    finish(name, tensors, config | {"checkpoint_format": version}, ordered_dense())
    found = json.loads((HERE / name / "expected.json").read_text())
    if found["matrices"] != dense["matrices"]:
        raise SystemExit("The values of pack-order and of its copy differ.")


def ordered_dense() -> dict:
    """The values of `pack-order`, dequantised by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    source, dense = load_file(HERE / "pack-order" / "model.safetensors"), {}
    for matrix in MATRICES:
        stem = f"{PREFIX}{matrix}."
        scale, index = source[f"{stem}weight_scale"].float(), source[f"{stem}weight_g_idx"].long()
        shape = torch.Size(source[f"{stem}weight_shape"].tolist())
        codes = unpack_from_int32(source[f"{stem}weight_packed"], 4, shape)
        zeros = unpack_from_int32(source[f"{stem}weight_zero_point"], 4, scale.shape, packed_dim=0)
        steps = codes.to(scale.dtype) - zeros.to(scale.dtype)[:, index]
        dense[matrix] = steps * scale[:, index]
    return dense


def words(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes of a row in an int32, the first lowest."""
    parts = codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def words_down(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes of a column in an int32."""
    return words(codes.T).T


def fp8(name: str, block: list[int] | None) -> None:
    """transformers' own FP8 quantisation and dequantisation of each matrix."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=block, activation_scheme="dynamic")
    tool = SimpleNamespace(quantization_config=config)
    tensors, dense = {}, {}
    for matrix in MATRICES:
        key = f"{PREFIX}{matrix}.weight"
        weight = plain_model().get_parameter(key).data
        stored = Fp8Quantize(tool).convert({key: weight})
        back = Fp8Dequantize(tool)._dequantize_one(stored[key], stored[f"{key}_scale_inv"])
        tensors |= stored
        dense[matrix] = back
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    finish(name, tensors, settings, dense)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
FP8 = {"num_bits": 8, "type": "float"}
MAKERS = {
    "gptq-sym": lambda name: gptq(name, True),
    "gptq-asym": lambda name: gptq(name, False),
    "gptq-8bit": lambda name: gptq(name, True, 8),
    "awq": awq,
    "nf4": lambda name: bits_and_bytes(name, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4-double": lambda name: bits_and_bytes(
        name, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda name: bits_and_bytes(name, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "llm-int8": lambda name: [bits_and_bytes(name, load_in_8bit=True), outliers(name)],
    "pack-sym": lambda name: compressed(name, "pack-quantized", 32, **INT4),
    "pack-asym": lambda name: compressed(name, "pack-quantized", 32, **INT4, symmetric=False),
    "pack-order": lambda name: compressed(
        name, "pack-quantized", 32, order=True, **INT4, symmetric=False
    ),
    "int8-asym": lambda name: compressed(
        name, "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "float-tensor": lambda name: compressed(name, "float-quantized", strategy="tensor", **FP8),
    "float-channel": lambda name: compressed(name, "float-quantized", strategy="channel", **FP8),
    "float-block": lambda name: compressed(
        name, "float-quantized", strategy="block", block_structure=[32, 32], **FP8
    ),
    "gptq-order": lambda name: gptq_act_order(name, "gptq"),
    "gptq-v2-order": lambda name: gptq_act_order(name, "gptq_v2"),
    "fp8-block": lambda name: fp8(name, [32, 32]),
    "fp8-tensor": lambda name: fp8(name, None),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MAKERS))
    for each in parser.parse_args().names or MAKERS:
        MAKERS[each](each)
        logging.getLogger().warning("%s is made", each)
