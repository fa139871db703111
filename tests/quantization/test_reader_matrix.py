"""Every layout for every family: logits beside transformers with the values of numpy.

Layouts without a writer of ours are made of random codes (`layouts.py`). Embeddings and output
matrices are plain, tied, or quantised.
"""

import copy
import json
import re
import zlib
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.api.arguments import EngineArgs
from minillm.lab.quantise.quantize_folder import quantize_folder
from minillm.lab.quantise.recipe import Recipe
from minillm.layers.linear_methods import MergedMatrices
from minillm.models.checkpoint import open_model, shard_files
from minillm.models.loader import load_model
from minillm.parallel.place import Topology, thread_places
from minillm.parallel.rank import load_rank
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import FlatRunner
from tests.models.tiny import FAMILY, Checkpoint, Tiny, prompt
from tests.quantization.layouts import LAYOUTS, as_array, as_tensor, values_of
from tests.quantization.test_quantize_folder import LAYOUTS as WRITTEN

F32 = torch.float32
# Widths that groups of 32 divide, and not all of them blocks of 64 or 128.
WIDTHS = {"num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16}
SPARSE = {"moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 24, "head_dim": 8}
FIELDS = {
    "qwen3": {"head_dim": 24},
    "qwen3_moe": SPARSE | {"head_dim": 24, "mlp_only_layers": [0]},
    "deepseek_v2": SPARSE | LATENT | {"n_shared_experts": 2},
    "deepseek_v3": SPARSE | LATENT,
}
HEADS = ("plain", "tied", "quantised")
FLOAT8 = ("fp8", "float")


def tiny(family: str, head: str = "plain") -> Tiny:
    """A model of two layers."""
    fields = WIDTHS | FIELDS.get(family, {}) | {"tie_word_embeddings": head == "tied"}
    return Tiny(family, fields)


def is_matrix(name: str, head: str) -> bool:
    """Whether a checkpoint tensor is a matrix that a quantiser takes."""
    if not name.endswith(".weight") or "norm" in name or name.endswith(".gate.weight"):
        return False
    return head == "quantised" or not re.search(r"embed_tokens|lm_head", name)


def write(
    checkpoint: Checkpoint, layout: str, head: str, folder: Path, merged: MergedMatrices = ()
) -> dict[str, torch.Tensor]:
    """Replace the matrices of a checkpoint by random ones in a layout. Their values."""
    made, values = LAYOUTS[layout], {}
    tensors = {k: v for path in shard_files(checkpoint.folder) for k, v in load_file(path).items()}
    for name, members in merged:
        for first in [each for each in tensors if each.endswith(f".{members[0]}.weight")]:
            parts = [tensors.pop(first.replace(members[0], each)) for each in members]
            tensors[first.replace(members[0], name)] = torch.cat(parts)
    for name in [each for each in tensors if is_matrix(each, head)]:
        out, width = tensors.pop(name).shape
        dice = np.random.default_rng(zlib.crc32(name.encode()))
        found, stem = made.make(dice, out, width), name.removesuffix("weight")
        values[name] = torch.from_numpy(made.values(found))
        for suffix, array in found.items():
            float8 = layout.startswith(FLOAT8) and suffix == "weight"
            tensors[f"{stem}{suffix}"] = as_tensor(array, float8)
    save_file(tensors, folder / "model.safetensors")
    settings = {"quantization_config": LAYOUTS[layout].settings}
    (folder / "config.json").write_text(json.dumps(checkpoint.config | settings))
    return values


def put(state: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Store a weight in a transformers model, which keeps experts stacked."""
    name = name.replace("block_sparse_moe", "mlp")  # Mixtral
    if name in state:
        state[name].copy_(values)
        return
    stem, expert, kind = name.removesuffix(".weight").rsplit(".", 2)
    if kind in ("down_proj", "w2"):
        state[f"{stem}.down_proj"][int(expert)].copy_(values)
        return
    half = len(values)
    start = 0 if kind in ("gate_proj", "w1") else half
    state[f"{stem}.gate_up_proj"][int(expert), start : start + half].copy_(values)


def reference_logits(checkpoint: Checkpoint, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [20, V] of transformers with these tensors."""
    reference = copy.deepcopy(checkpoint.reference)
    state = reference.state_dict()
    with torch.no_grad():
        for name, value in values.items():
            put(state, name, value)
        return reference(prompt(20)[None]).logits[0]


def read_logits(folder: Path) -> torch.Tensor:
    """Logits [20, V] of our model of a folder, in float32."""
    model = load_model(open_model(folder), F32)
    return FlatRunner(model, 16, 32, 1).step([(0, prompt(20))])[0]


def check(checkpoint: Checkpoint, values: dict[str, torch.Tensor], folder: Path) -> None:
    """Logits within 1e-3 of the largest, which those of the plain model are not."""
    due, found = reference_logits(checkpoint, values), read_logits(folder)
    assert (found - due).abs().max() <= 1e-3 * due.abs().max()
    plain = reference_logits(checkpoint, {})
    assert (plain - due).abs().max() > 1e-2 * due.abs().max()


def quick_cells() -> set[tuple[str, str, str]]:
    """Each layout at least once, and each family with each head: layouts go round in turn."""
    names, pairs = list(LAYOUTS), list(product(HEADS, FAMILY))
    return {
        (names[i % len(names)], *pairs[i % len(pairs)][::-1])
        for i in range(max(len(names), len(pairs)))
    }


def cells() -> list[Any]:
    """All layouts, families and heads."""
    quick = quick_cells()
    return [
        pytest.param(*each, marks=() if each in quick else pytest.mark.slow)
        for each in product(LAYOUTS, FAMILY, HEADS)
    ]


def test_the_quick_cells_have_each_layout_and_each_family_with_each_head():
    layouts = {layout for layout, _, _ in quick_cells()}
    pairs = {(family, head) for _, family, head in quick_cells()}
    assert layouts == set(LAYOUTS)
    assert pairs == set(product(FAMILY, HEADS))


@pytest.mark.parametrize(("layout", "family", "head"), cells())
def test_a_layout_is_read(checkpoint_of, tmp_path, layout, family, head):  # noqa: F811
    checkpoint = checkpoint_of(tiny(family, head))
    values = write(checkpoint, layout, head, tmp_path)
    check(checkpoint, values, tmp_path)


MERGED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_merged_matrix_is_cut_in_every_layout(checkpoint_of, tmp_path, layout):  # noqa: F811
    """q, k, v are one tensor, gate and up another: whole, and for each of two ranks."""
    checkpoint = checkpoint_of(Tiny("llama", WIDTHS | {"intermediate_size": 128}))
    values = write(checkpoint, layout, "plain", tmp_path, MERGED)
    source = open_model(tmp_path)
    source = replace(source, config=replace(source.config, merged_matrices=MERGED))
    args = EngineArgs("tiny", enforce_eager=True)
    load = partial(load_rank, args, source, F32, torch.device("cpu"), 64)
    for size in (1, 2):
        for rank, model in enumerate(map(load, thread_places(Topology(size)))):
            for number, layer in enumerate(model.layers):
                q, k, v = values[f"model.layers.{number}.self_attn.qkv_proj.weight"].split(
                    (64, 32, 32)
                )
                gate, up = values[f"model.layers.{number}.mlp.gate_up_proj.weight"].chunk(2)
                for matrix, parts in (
                    (layer.attention.qkv_proj, (q, k, v)),
                    (layer.mlp.gate_up_proj, (gate, up)),
                ):
                    due = torch.cat([each.chunk(size)[rank] for each in parts])
                    torch.testing.assert_close(matrix.values(), due)


# ---- written by `minillm quantize` ---------------------------------------------------------------

MARKS = (".qweight", ".weight_packed", ".weight.absmax", ".SCB", ".weight_scale_inv",
         ".weight_scale")  # fmt: skip
# Blocks of FP8 divide all numbers of inputs.
WIDE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
WIDE_FIELDS = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    "deepseek_v2": {"moe_intermediate_size": 128, "head_dim": 8} | dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank"), 128) | {"v_head_dim": 32},
}  # fmt: skip
WIDE_FIELDS["deepseek_v3"] = WIDE_FIELDS["deepseek_v2"]
WINDOWS = torch.randint(128, (6, 24), generator=torch.Generator().manual_seed(7))


def dequantised(folder: Path, bits: int) -> dict[str, torch.Tensor]:
    """All tensors of a folder, the quantised ones by numpy."""
    tensors = {k: v for path in shard_files(folder) for k, v in load_file(path).items()}
    stems = {name.removesuffix(mark) for name in tensors for mark in MARKS if name.endswith(mark)}
    values = {}
    for stem in sorted(stems):
        names = [name for name in tensors if name.startswith(f"{stem}.")]
        found = {name.removeprefix(f"{stem}."): as_array(tensors.pop(name)) for name in names}
        dense = values_of(found, bits, block=(128, 128) if "weight_scale_inv" in found else None)
        values[f"{stem}.weight"] = torch.from_numpy(np.ascontiguousarray(dense)).float()
    assert values
    return values | tensors


def writer_cells() -> list[Any]:
    """Format, settings and family. `make test` runs each format once, families in turn."""
    return [
        pytest.param(
            format, settings, family, id=f"{format}-{i}-{family}",
            marks=() if j == i % len(FAMILY) else pytest.mark.slow)
        for i, (format, settings) in enumerate(WRITTEN)
        for j, family in enumerate(FAMILY)
    ]  # fmt: skip


@pytest.mark.parametrize(("format", "settings", "family"), writer_cells())
def test_a_written_layout_is_read(checkpoint_of, tmp_path, format, settings, family):  # noqa: F811
    checkpoint = checkpoint_of(Tiny(family, WIDE | WIDE_FIELDS.get(family, {})))
    recipe = Recipe(**settings)
    quantize_folder(open_model(checkpoint.folder), recipe, tmp_path / "out", WINDOWS, format)
    check(checkpoint, dequantised(tmp_path / "out", recipe.bits), tmp_path / "out")
