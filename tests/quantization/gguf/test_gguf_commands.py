"""Commands that take a GGUF file or a quantised folder as MODEL."""

import json
import shutil

import pytest
from gguf import GGMLQuantizationType as Type

from minillm.cli import main
from minillm.models.checkpoint import ASSETS
from tests.quantization.gguf.export import export
from tests.quantization.gguf.test_gguf_tokenizer import with_vocabulary
from tests.quantization.test_golden import GOLDEN, NAMES


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder, path = ASSETS / "tiny", tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    config = json.loads((folder / "config.json").read_text())
    return export(folder, config, path, Type.Q8_0, with_vocabulary)


def test_info_counts_the_types_of_a_gguf_file(tiny, capsys):
    assert main(["info", str(tiny)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    # 6,553,600 weights of matrices in 34 bytes per 32, 4,736 of norms in 4 bytes
    assert "1 GGUF file: 6.64 MiB in Q8_0, 18.5 KiB in F32" in out
    assert "6.56 M (6,558,336)" in out
    assert "4,096 tokens; end: 0 '<|endoftext|>'; has a chat template" in out


@pytest.mark.parametrize("name", NAMES)
def test_info_of_every_quantised_format(name, capsys):
    assert main(["info", str(GOLDEN / name)]) == 0
    assert "1 safetensors file" in capsys.readouterr().out


def test_info_refuses_what_loading_refuses(tiny, tmp_path, capsys):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-40_000])
    assert main(["info", str(cut)]) == 2
    assert "fetch it again if it was cut off" in capsys.readouterr().err
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / "gptq-sym", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 33}))
    assert main(["info", str(folder)]) == 2
    assert "config.json describes" in capsys.readouterr().err
