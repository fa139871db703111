"""`minillm compare` with files: a folder that `minillm quantize` wrote, and a GGUF file."""

import json

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.errors import ConfigError
from minillm.lab.comparison import run
from minillm.lab.comparison.candidates import facts, open_candidate, parse
from minillm.lab.comparison.sizes import disk_sizes, memory_sizes, packed_sizes, stored_bits
from minillm.lab.quantise.quantize_folder import quantize_folder
from minillm.lab.quantise.recipe import Recipe
from minillm.models.checkpoint import ASSETS, open_model
from tests.models.tiny import CASES
from tests.quantization.gguf.export import export
from tests.quantization.gguf.test_gguf_tokenizer import with_vocabulary

TINY = ASSETS / "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "rtn"
    quantize_folder(open_model("tiny"), Recipe("rtn", 4, 64), out, format="gptq")
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = json.loads((TINY / "config.json").read_text())
    return export(TINY, config, path, Type.Q4_0, with_vocabulary)


@pytest.fixture(scope="module")
def rows(folder, file):
    names = (str(folder), "rtn:4:64", str(file))
    work = run.Work("tiny", tuple(map(parse, names)), windows=4, length=96, speed=False)
    return run.compare(work)["results"][1:]


@pytest.mark.slow
def test_a_written_folder_is_what_was_made_in_memory(rows):
    written, made, _ = rows
    assert written["quality"][0]["kl"]["value"] == pytest.approx(
        made["quality"][0]["kl"]["value"], rel=1e-3
    )
    for kind in ("linears", "embedding", "head"):
        assert written["disk"][kind] == made["disk"][kind]
    config = open_model("tiny").config
    inputs = 6 * config.hidden_size + config.intermediate_size  # q k v o gate up, down
    g_idx = 4 * config.num_layers * inputs  # GPTQ's file also holds the group of each input
    assert written["disk"]["total"] == made["disk"]["total"] + g_idx
    assert written["disk"]["how"] == "measured"
    assert made["disk"]["how"] == "computed"
    assert written["group_sizes"] == made["group_sizes"] == [64]


def test_bytes_of_a_gguf_file_are_those_of_the_gguf_package(file):
    tensors = gguf.GGUFReader(file).tensors
    found = disk_sizes(open_model(file))
    assert found.total == sum(each.n_bytes for each in tensors)
    blocks = [each for each in tensors if each.tensor_type == Type.Q4_0]
    numbers = sum(each.n_elements for each in blocks)
    assert found.linears + found.embedding == numbers / 2
    assert found.scales == numbers / 32 * 2


def test_codes_of_5_bits_are_called_so(tmp_path):
    path = tmp_path / "five.gguf"
    config = json.loads((TINY / "config.json").read_text())
    source = open_model(export(TINY, config, path, Type.Q5_0, with_vocabulary))
    assert stored_bits(source) == [5]
    assert stored_bits(open_model("tiny")) == []


def test_a_gguf_file_is_compared(rows):
    *_, row = rows
    assert row["weight_bits"] == [4]
    assert row["group_sizes"] == [32]
    assert row["sixteen_bit"] == ["norms"]
    assert 0.005 < row["quality"][0]["kl"]["value"] < 0.08


@pytest.mark.slow
def test_a_quantised_model_stands_for_its_values(folder, file):
    """The same codes again are no change, and 16 bits need 16 bits."""
    for given in (folder, file):
        work = run.Work(
            str(given), (parse(str(given)), parse("rtn:3:32")), None, 2, 64, speed=False
        )
        found = run.compare(work)
        base, same, three = found["results"]
        assert base["weight_bits"] == [16]
        assert base["disk"]["total"] > 2 * same["disk"]["total"]
        assert same["quality"][0]["kl"]["value"] < 1e-9
        assert three["quality"][0]["kl"]["value"] > 0.01
        assert "is quantised" in found["notes"][0]


def test_parts_of_several_types_are_no_reference(tmp_path):
    config = json.loads((TINY / "config.json").read_text())

    def kind(name):
        return Type.Q8_0 if "attn_v" in name else Type.Q4_0

    path = export(TINY, config, tmp_path / "mixed.gguf", kind, with_vocabulary)
    with pytest.raises(ConfigError, match="cannot be made dense here; give the 16-bit model first"):
        run.compare(run.Work(str(path), (parse("int8"),), None, 2, 64, speed=False))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention_are_counted(name, tmp_path):
    CASES[name].write(tmp_path)
    source = open_model(tmp_path)
    opened = open_candidate(parse("rtn:4:8"), source, torch.float32, None)
    found, plain = memory_sizes(opened.model), disk_sizes(source)
    assert found.scales > 0
    assert found.linears < plain.linears / 2
    assert packed_sizes(opened).total < plain.total
    kept = facts(opened)["sixteen_bit"]
    assert {"gate", "output matrix", "embedding"} <= {*kept}
    assert ("kv_b_proj" in kept) == (name == "deepseek_v3")
