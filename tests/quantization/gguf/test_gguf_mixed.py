"""Files with parts of several types in one product, as Q4_K_M has them: each part keeps its own."""

import json
from itertools import pairwise

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.cli import main
from minillm.lab.kernel_names import kernel_of
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from minillm.quantization.mixed import MixedMethod, members
from minillm.quantization.panels import PanelQuantizedMethod
from tests.models.parity import whole
from tests.models.tiny import Tiny, prompt
from tests.ops.small_decoders import bits, forward, new_cache, steps
from tests.quantization.gguf.export import export
from tests.quantization.test_planned_bytes import compare
from tests.quantization.test_quantized_products import rounded

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
MIXTURES = {  # types of q, k, v, gate and up; all others are Q8_0
    "v of Q4_K_M": "Q4_K Q4_K Q6_K Q4_K Q4_K",
    "Q8_0 and Q4_0": "Q4_0 Q4_0 Q8_0 Q8_0 Q8_0",
    "Q4_0 and Q4_1": "Q4_0 Q4_1 Q4_0 Q8_0 Q8_0",
    "gate and up differ": "Q8_0 Q8_0 Q8_0 Q4_0 Q5_1",
    "all K types": "Q2_K Q3_K Q5_K Q8_0 Q8_0",
    "v in 16 bits": "Q4_0 Q4_0 F16 Q8_0 Q8_0",
}
AT_ONCE = [name for name in MIXTURES if name != "gate and up differ"]


def types(mixture):
    """A function of a tensor's name."""
    parts = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    names = dict(zip(parts, mixture.split(), strict=True))
    return lambda full: Type[names.get(full.split(".")[-2], "Q8_0")]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of a mixture; qwen2 has biases of q, k and v, llama another order of rows."""
    made = {}

    def path(name, family="qwen2"):
        if (name, family) not in made:
            folder = tmp_path_factory.mktemp("mixed")
            Tiny(family, SIZES).write(folder / "model")
            config = json.loads((folder / "model" / "config.json").read_text())
            kind = types(MIXTURES[name])
            made[name, family] = export(folder / "model", config, folder / "m.gguf", kind)
        return made[name, family]

    return path


def load(path, dtype=torch.float32):
    return load_model(open_model(path), dtype)


def mixed(model):
    return [
        each for each in model.modules()
        if isinstance(each, Matrix) and isinstance(each.method, MixedMethod)
    ]  # fmt: skip


def decoded(path, name):
    """A tensor of a file as the `gguf` package decodes it."""
    found = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    return torch.from_numpy(gguf.quants.dequantize(found.data, found.tensor_type))


def made_dense(model):
    """The same model with the values of its mixed matrices in 32 bits."""
    for matrix in mixed(model):
        values, matrix.method = matrix.values(), Matrix(matrix.parts).method
        matrix.weight = torch.nn.Parameter(values, requires_grad=False)
        del matrix.members
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_parts_are_held_in_their_types(name, file):
    """The values are those of the `gguf` package, and the products those with these values."""
    path = file(name)
    model = load(path)
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    for matrix, names in (
        (attention.qkv_proj, ("attn_q", "attn_k", "attn_v")),
        (mlp.gate_up_proj, ("ffn_gate", "ffn_up")),
    ):
        expected = torch.cat([decoded(path, f"blk.1.{each}.weight") for each in names])
        assert torch.equal(matrix.values(), expected)
        kinds = [types(MIXTURES[name])(f"{each}.weight") for each in names]
        assert isinstance(matrix.method, MixedMethod) == (len(set(kinds)) > 1)
        assert len(members(matrix)) == 1 + sum(a != b for a, b in pairwise(kinds))
    held = sum(each.num_bytes for each in mixed(model))
    assert 0 < held < 0.6 * sum(each.values().nbytes for each in mixed(model))
    ids = prompt(30)
    found, expected = whole(model, ids), whole(made_dense(model), ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def check_product(matrix, values):
    """Members that are not quantised have activations of 16 bits."""
    torch.manual_seed(0)
    parts = members(matrix)
    rows = values.split([each.out_features for each in parts])
    for count in (1, 3, 40):
        x, bias = torch.randn(count, 256).bfloat16(), torch.randn(len(values)).bfloat16()
        exact = torch.cat([
            rounded(x) @ own.T if isinstance(each.method, PanelQuantizedMethod)
            else x.double() @ own.bfloat16().double().T
            for each, own in zip(parts, rows, strict=True)
        ], 1) + bias.double()  # fmt: skip
        for given, due in ((bias, exact), (None, exact - bias.double())):
            found = matrix.method.apply(matrix, x, given).double()
            assert (found - due).abs().max() <= 2**-8 * due.abs().max()


@pytest.mark.skipif(cpu.functions(torch.bfloat16) is None, reason="no C functions for bf16")
@pytest.mark.parametrize("name", MIXTURES)
def test_c_runs_each_part_in_its_layout(name, file, monkeypatch):
    """Beside float64 with rounded activations; one call for all layers has the bits of layer by
    layer."""
    monkeypatch.setenv(cpu.PANELS, "1")
    for family in ("qwen2", "llama") if name == "v of Q4_K_M" else ("qwen2",):
        model = load(file(name, family), torch.bfloat16)
        dense = [matrix.values().double() for matrix in mixed(load(file(name, family)))]
        pack_weights(model)
        for matrix in mixed(model):
            for member in members(matrix):
                plain = "F16" in MIXTURES[name] and member.parts[0].name.endswith("v_proj")
                assert isinstance(member.method, PanelQuantizedMethod) != plain
                assert "C panels" in kernel_of(member)
        for matrix, values in zip(mixed(model), dense, strict=True):
            check_product(matrix, values)
        assert (model.all_layers is not None) == (name in AT_ONCE)
        mine, theirs = new_cache(model), new_cache(model)
        for batch in steps(padded=False):
            expected = forward(model, batch, theirs, at_once=False)
            assert torch.equal(forward(model, batch, mine), expected)
        assert torch.equal(bits(mine.key), bits(theirs.key))
        assert torch.equal(bits(mine.value), bits(theirs.value))


@pytest.mark.parametrize("packed", [False, True], ids=["eager", "packed"])
@pytest.mark.parametrize("name", ["v of Q4_K_M", "gate and up differ", "v in 16 bits"])
def test_the_planned_bytes_are_those_of_the_model(name, packed, file):
    compare(open_model(file(name)), packed)


def test_inspect_names_what_is_stored_and_what_runs(file, capsys):
    assert main(["inspect", str(file("v of Q4_K_M")), "--json"]) == 0
    kinds = {each["names"]: each for each in json.loads(capsys.readouterr().out)["kinds"]}
    low, high = kinds["q_proj+k_proj"], kinds["v_proj"]
    assert (low["layout"], low["group"], low["bits"]) == ("int4, minima", 32, 6)
    assert (high["layout"], high["group"], high["bits"]) == ("int8", 16, 10)
    assert low["count"] == high["count"] == kinds["gate_proj+up_proj"]["count"]
    if cpu.panels_are_fast(torch.bfloat16):
        assert low["kernel"] == "C panels, int4, groups of 32, minima, activations of 8 bits"
        assert high["kernel"] == "C panels, int8, groups of 16, activations of 8 bits"
    assert not any("dense" in each["layout"] for each in kinds.values())
