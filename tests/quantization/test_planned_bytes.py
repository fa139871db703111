"""The memory plan counts the bytes that a quantised model then takes, and a step those it reads."""

import json
from itertools import product

import gguf
import pytest
import torch

from minillm import LLM
from minillm.errors import UnsupportedFeatureError
from minillm.lab.parallel_layout import Layout as Parallel
from minillm.lab.parallel_layout import device_memory
from minillm.lab.roofline import step_cost
from minillm.models.checkpoint import ModelSource, open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.packing import pack_weights
from minillm.models.quantize import quantize_weights
from minillm.models.weight_sizes import Layout, planned_sizes
from minillm.plan.cost import weight_bytes
from minillm.plan.weight_sizes import WeightSizes
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.tiny import CASES
from tests.pairs import some
from tests.quantization.gguf.export import export
from tests.quantization.test_golden import GOLDEN, NAMES

BF16, CPU = torch.bfloat16, torch.device("cpu")


def allocated(model: Decoder) -> int:
    """Bytes of all tensors but the few frequencies of RoPE."""
    rope = sum(each.nbytes for each in model.rope.buffers())
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers())) - rope


def compare(source: ModelSource, packed: bool, quantization: str | None = None) -> WeightSizes:
    """The planned bytes are those of the loaded model, exactly."""
    sizes = planned_sizes(source, Layout(BF16, CPU, packed), quantization)
    model = load_model(source, BF16)
    if quantization is not None:
        quantize_weights(model, quantization)
    if packed:
        pack_weights(model)
    assert sizes is not None
    assert weight_bytes(source.config, weights=sizes) == allocated(model)
    return sizes


@pytest.mark.parametrize("packed", [False, True], ids=["eager", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_takes_the_planned_bytes(name, packed):
    compare(open_model(GOLDEN / name), packed)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_a_gguf_file_takes_the_planned_bytes(kind, tmp_path):
    folder = tmp_path / "model"
    CASES["qwen3"].write(folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = gguf.GGMLQuantizationType
    compare(open_model(export(folder, config, tmp_path / "m.gguf", kinds[kind])), True)


@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", "int4"), ("qwen2", "int8"), ("mixtral", "int4"), ("deepseek_v3", "int8")],
)
def test_quantisation_while_loading_takes_the_planned_bytes(family, how, checkpoint_of):  # noqa: F811
    compare(open_model(checkpoint_of(family).folder), False, how)


@pytest.mark.parametrize(
    ("how", "eager"),
    some([("int8", False), ("int4", True)], product(("int8", "int4"), (False, True))),
)
def test_an_engine_takes_the_planned_bytes(how, eager):
    with LLM("tiny", quantization=how, enforce_eager=eager, max_model_len=64) as llm:
        planned, found = llm.plan().weight_bytes, llm.engine.allocated()["weights"]
    assert planned == pytest.approx(found, rel=1e-4)
    assert planned < 0.55 * weight_bytes(open_model("tiny").config, "bfloat16")


def test_a_draft_model_of_another_format_is_counted(tmp_path):
    """The int4 target and the draft as it is."""
    arguments = {"speculative_config": {"model": "tiny-draft", "num_speculative_tokens": 2}}
    with LLM("tiny", quantization="int4", max_model_len=64, dtype="bfloat16", **arguments) as llm:
        plan, found = llm.plan(), llm.engine.allocated()
    assert plan.draft_weight_bytes == pytest.approx(found["draft_weights"], rel=1e-3)
    assert plan.weight_bytes - plan.draft_weight_bytes == pytest.approx(found["weights"], rel=1e-3)


def test_random_weights_are_not_read_from_a_quantised_folder():
    layout = Layout(BF16, torch.device("cpu"), True)
    assert planned_sizes(open_model(GOLDEN / "nf4"), layout, dummy=True) is None


def sizes_of(name: str, quantization: str) -> WeightSizes:
    """Sizes of a preset as it is served on a GPU."""
    layout = Layout(BF16, torch.device("cuda"), False)
    found = planned_sizes(open_model(name), layout, quantization, dummy=True)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
def test_a_step_reads_every_matrix_once(name):
    """All weights but the embedding, of which one row is read unless it is the output matrix."""
    source = open_model(f"preset:{name}")
    config, sizes = source.config, sizes_of(f"preset:{name}", "int4")
    cost = step_cost(config, [1], [1], dtype="bfloat16", weights=sizes)
    table = sizes.embedding * config.vocab_size * config.hidden_size
    unread = 0 if config.tie_word_embeddings else table
    row = sizes.embedding * config.hidden_size
    assert cost.weight_bytes == pytest.approx(sizes.total(config) - unread + row, rel=1e-9)
    plain = step_cost(config, [1], [1], dtype="bfloat16")
    assert (cost.kv_read_bytes, cost.flops) == (plain.kv_read_bytes, plain.flops)
    assert (cost.dtype, plain.dtype) == ("bfloat16", "bfloat16")


@pytest.mark.slow
def test_a_device_of_several_takes_its_part():
    """Parts keep their bytes per weight when they are divided (`parallel_layout.py`)."""
    config, sizes = (
        open_model("preset:mixtral-8x7b").config,
        sizes_of("preset:mixtral-8x7b", "int4"),
    )
    whole, half = (
        device_memory(config, 80 * 10**9, Parallel(tensor=size), weights=sizes) for size in (1, 2)
    )
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.01)
    assert sizes.router == 2
    assert sizes.experts == pytest.approx(0.5 + 4 / 32)


def test_a_row_that_no_group_divides_is_named_before_loading(checkpoint_of):  # noqa: F811
    source = open_model(checkpoint_of("deepseek_v3").folder)
    with pytest.raises(UnsupportedFeatureError, match="24 inputs cannot be divided into groups"):
        planned_sizes(source, Layout(BF16, CPU, True), "int4")
