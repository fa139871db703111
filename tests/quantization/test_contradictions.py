"""Checkpoints whose settings contradict their tensors: one sentence each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import CheckpointError
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.quantization.layouts import LAYOUTS
from tests.quantization.test_reader_matrix import tiny, write

Q = "model.layers.0.self_attn.q_proj"
SETTINGS = {layout.settings["quant_method"]: layout.settings for layout in LAYOUTS.values()}


def opened(folder: Path, settings: dict[str, Any] | None, **fields: Any) -> None:
    """Load a folder with other settings."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config.pop("quantization_config", None)
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    load_model(open_model(folder), torch.float32)


def edit(folder: Path, change: Any) -> None:
    """Change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("method", sorted(SETTINGS))
def test_settings_without_any_codes_are_refused(checkpoint_of, tmp_path, method):  # noqa: F811
    checkpoint = checkpoint_of(tiny("llama"))
    checkpoint.reference.save_pretrained(tmp_path)
    opened(tmp_path, None)
    with pytest.raises(CheckpointError, match="no matrix of the files is quantised; remove"):
        opened(tmp_path, SETTINGS[method])


def test_settings_of_the_kv_cache_alone_promise_no_codes(checkpoint_of, tmp_path):  # noqa: F811
    checkpoint_of(tiny("llama")).reference.save_pretrained(tmp_path)
    scheme = {"num_bits": 8, "type": "float"}
    opened(tmp_path, {"quant_method": "compressed-tensors", "config_groups": {},
                      "kv_cache_scheme": scheme})  # fmt: skip


LISTS = {
    "awq": "modules_to_not_convert",
    "fp8 blocks": "modules_to_not_convert",
    "llm.int8": "llm_int8_skip_modules",
    "packed": "ignore",
}


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """The warning of a contradiction, or nothing."""
    return "".join(each.getMessage() for each in caplog.records if "decide" in each.getMessage())


@pytest.mark.parametrize("layout", LISTS)
def test_a_listed_module_that_is_quantised_is_logged(checkpoint_of, tmp_path, caplog, layout):  # noqa: F811
    write(checkpoint_of(tiny("llama")), layout, "plain", tmp_path)
    for listed in (["lm_head"], ["lm_head", "q"], ["norm", "re:.*k_proj.bias"]):
        opened(tmp_path, LAYOUTS[layout].settings | {LISTS[layout]: listed})
        assert not logged(caplog)
    for listed in ([Q], ["q_proj"], ["self_attn.q_proj"], ["re:.*q_proj$"]):
        caplog.clear()
        settings = LAYOUTS[layout].settings | {LISTS[layout]: listed}
        opened(tmp_path, settings)
        assert logged(caplog).startswith(f"{Q}")
        assert "lists them as not quantised; the files decide." in logged(caplog)


def test_a_rule_of_gptq_that_skips_a_quantised_module_is_logged(checkpoint_of, tmp_path, caplog):  # noqa: F811
    write(checkpoint_of(tiny("llama")), "gptq", "plain", tmp_path)
    opened(tmp_path, LAYOUTS["gptq"].settings | {"dynamic": {"+:.*v_proj": {}, "-:.*k_proj": {}}})
    assert logged(caplog).startswith(
        "model.layers.0.self_attn.k_proj and 1 more: quantised in the files"
    )


def test_a_plain_module_that_is_not_listed_is_logged(checkpoint_of, tmp_path, caplog):  # noqa: F811
    checkpoint = checkpoint_of(tiny("qwen3_moe"))
    write(checkpoint, "packed", "plain", tmp_path)
    settings = LAYOUTS["packed"].settings
    opened(tmp_path, settings)
    assert not logged(caplog)  # the router and the output matrix are plain

    def plain(tensors):
        for name in [each for each in tensors if each.startswith(f"{Q}.")]:
            del tensors[name]
        tensors[f"{Q}.weight"] = checkpoint.reference.state_dict()[f"{Q}.weight"].clone()

    edit(tmp_path, plain)
    opened(tmp_path, settings)
    assert logged(caplog).startswith(f"{Q}: not quantised in the files")
    caplog.clear()
    opened(tmp_path, settings | {"ignore": ["lm_head", Q]})
    opened(tmp_path, settings | {"ignore": []})  # this writer lists nothing
    rest = {"ignore": ["lm_head"], "modules_in_block_to_quantize": [["self_attn.k_proj"]]}
    opened(tmp_path, settings | rest)  # a list of what is quantised instead
    assert not logged(caplog)


@pytest.mark.parametrize("listed", ["q_proj", {"q": 1}, ["re:("]], ids=["text", "dict", "rule"])
def test_a_list_that_is_none(checkpoint_of, tmp_path, listed):  # noqa: F811
    write(checkpoint_of(tiny("llama")), "packed", "plain", tmp_path)
    with pytest.raises(CheckpointError, match=r"ignore|regular expression"):
        opened(tmp_path, LAYOUTS["packed"].settings | {"ignore": listed})


LEFT = {  # layout, name and shape of the tensor, what the sentence says
    "a scale beside a plain weight": ("packed", "lm_head.weight_scale", "lm_head.weight is not"),
    "codes beside a plain weight": ("gptq", "lm_head.qweight", "lm_head.weight is not"),
    "a second scale": ("fp8 blocks", f"{Q}.weight_scale", "FP8 e4m3.* does not use it"),
    "an order in AWQ": ("awq", f"{Q}.g_idx", "AWQ.* does not use it"),
    "zero points of GPTQ": ("packed", f"{Q}.qzeros", "pack-quantized.* does not use it"),
    "a scale of scales": ("nf4", f"{Q}.weight.nested_absmax", "NF4.* does not use it"),
    "rows beside blocks": ("nf4", "lm_head.SCB", "lm_head.weight is not"),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_tensor_that_nothing_reads_is_explained(checkpoint_of, tmp_path, case):  # noqa: F811
    layout, name, sentence = LEFT[case]
    write(checkpoint_of(tiny("llama")), layout, "plain", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(CheckpointError, match=f"{name} of shape .4., which nothing reads: .*") as e:
        opened(tmp_path, LAYOUTS[layout].settings)
    assert e.match(sentence)


@pytest.mark.parametrize("layout", ["gptq", "nf4", "fp8 blocks", "llm.int8", "packed"])
def test_codes_without_settings(checkpoint_of, tmp_path, layout):  # noqa: F811
    write(checkpoint_of(tiny("llama")), layout, "plain", tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json has no quantization_config; fetch"):
        opened(tmp_path, None)


@pytest.mark.parametrize("layout", ["gptq", "nf4", "fp8 blocks", "llm.int8", "packed"])
def test_a_quantised_output_matrix_beside_a_tied_embedding(checkpoint_of, tmp_path, layout):  # noqa: F811
    write(checkpoint_of(tiny("llama")), layout, "quantised", tmp_path)
    opened(tmp_path, LAYOUTS[layout].settings)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        opened(tmp_path, LAYOUTS[layout].settings, tie_word_embeddings=True)
