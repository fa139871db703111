"""`minillm quantize --head`: an output matrix of 8 bits in the written folder."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm.cli import main
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.quantise.quantize_folder import quantize_folder
from minillm.lab.quantise.recipe import Recipe
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.rounding import round_symmetric
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import whole
from tests.models.tiny import prompt

F32 = torch.float32
RECIPES = {
    "rtn": Recipe("rtn", group_size=32),
    "rtn, symmetric": Recipe("rtn", group_size=32, symmetric=True),
    "int8": Recipe("int8"),
}


def written(folder, name, out, head):
    recipe = RECIPES[name]
    settings = {"symmetric": recipe.symmetric, "group_size": recipe.group_size, "head": head}
    return quantize_folder(open_model(folder), Recipe(recipe.method, **settings), out)


@pytest.mark.parametrize("name", RECIPES)
def test_logits_are_those_of_the_rounded_output_matrix(name, checkpoint_of, tmp_path):  # noqa: F811
    folder = checkpoint_of("qwen3").folder
    plain = written(folder, name, tmp_path / "plain", head=False)
    report = written(folder, name, tmp_path / "head", head=True)
    found, due = (load_model(open_model(tmp_path / each), F32) for each in ("head", "plain"))
    assert isinstance(found.lm_head.method, QuantizedMethod)
    before = whole(due, prompt(20))
    codes = round_symmetric(due.lm_head.weight.data, dtype=torch.float16)
    due.lm_head.weight.data = codes.dense()
    assert torch.equal(found.lm_head.values(), codes.dense())
    assert torch.equal(whole(found, prompt(20)), whole(due, prompt(20)))
    assert not torch.equal(before, whole(due, prompt(20)))
    assert report.errors.keys() - plain.errors.keys() == {"lm_head"}
    assert 0 < report.errors["lm_head"] < 0.02
    assert report.num_bytes < plain.num_bytes
    settings = json.loads((tmp_path / "head" / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in settings["ignore"]


@pytest.mark.slow
def test_transformers_computes_the_same_logits(checkpoint_of, tmp_path):  # noqa: F811
    """It decompresses both groups of weights."""
    pytest.importorskip("compressed_tensors")
    written(checkpoint_of("qwen3").folder, "rtn, symmetric", tmp_path / "head", head=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "head", dtype=F32)
    with torch.no_grad():
        due = theirs(prompt(20)[None]).logits[0]
    found = whole(load_model(open_model(tmp_path / "head"), F32), prompt(20))
    assert (found - due).abs().max() <= 1e-3 * due.abs().max()


@pytest.mark.parametrize("format", ["gptq", "awq", "bnb", "fp8"])
def test_formats_without_a_place_refuse(format):
    method = {"bnb": "int8", "fp8": "fp8"}.get(format, "rtn")
    with pytest.raises(ConfigError, match=f"The format {format} of {method} has no place for"):
        Recipe(method, head=True).format(format)


def test_a_tied_embedding_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(UnsupportedFeatureError, match="embedding of tiny is also its output"):
        quantize_folder(open_model("tiny"), Recipe("int8", head=True), out)
    assert not out.exists()
    options = ["--head", "--type", "Q8_0", "--out", str(tmp_path / "m.gguf")]
    assert main(["quantize", "tiny", *options]) == 2
    assert "--head has no effect with --type" in " ".join(capsys.readouterr().err.split())
