"""`minillm compare` with files: a folder that `minillm quantize` wrote, and a GGUF file."""

import json

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from minillm.lab.comparison import run
from minillm.lab.comparison.candidates import parse
from minillm.lab.comparison.sizes import disk_sizes
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.quantize_folder import quantize_folder
from minillm.quantization.recipe import Recipe
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


def test_a_gguf_file_is_compared(rows):
    *_, row = rows
    assert row["weight_bits"] == [4]
    assert row["group_sizes"] == [32]
    assert row["sixteen_bit"] == ["norms"]
    assert 0.005 < row["quality"][0]["kl"]["value"] < 0.08
