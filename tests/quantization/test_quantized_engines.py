"""Engines with quantised weights on several ranks. What else engines do is in `tests/matrix`."""

from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.ops import cpu
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.quantization import test_quantized_products as products
from tests.quantization.test_golden import GOLDEN

PROMPTS = [[3, 17, 4, 31, 0, 9, 22, 5], [3, 17, 4, 31, 7], [12, 28, 1, 6, 30, 2, 2, 9, 8, 4, 19]]
FOLDERS = ("gptq-8bit", "nf4-double", "fp8-block", "gptq-order", "pack-order")
MORE = ("gptq-sym", "llm-int8", "pack-asym", "awq")


def tokens(folder: Path, **options: object) -> list[list[int]]:
    """What an engine in float32 generates, twice with one cache."""
    usual = {"dtype": "float32", "block_size": 8, "max_model_len": 32, "max_num_seqs": 4}
    llm = LLM(str(folder), **(usual | options))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
        return [each.outputs[0].token_ids for outputs in found for each in outputs]
    finally:
        llm.close()


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"}


@pytest.mark.parametrize("name", some(FOLDERS, FOLDERS + MORE))
def test_two_ranks_give_the_tokens_of_one(name):
    """With act order, too: a rank's columns belong to groups all over the matrix."""
    folder = GOLDEN / name
    assert tokens(folder, **RANKS) == tokens(folder)


def test_quantised_while_loading_by_several_ranks(tmp_path):
    """Row-parallel matrices have other scales on two ranks, so tokens may differ; int8 is close
    enough here that they do not."""
    folder = Tiny("llama", {"num_hidden_layers": 2, "vocab_size": 128}).write(tmp_path).folder
    ranks = RANKS | {"pipeline_parallel_size": 2, "quantization": "int8"}
    assert tokens(folder, **ranks) == tokens(folder, quantization="int8")


@pytest.mark.skipif(
    not cpu.panels_are_fast(torch.bfloat16), reason="C computes no products of panels here"
)
def test_a_scale_of_the_batch_is_seen(monkeypatch):
    """W8A8 with one scale for all rows is not batch-invariant."""
    linear = products.quantized_linear

    def per_tensor(x, matrix, bias, out):
        step = x.float().abs().max() / 127
        return linear(((x.float() / step).round() * step).to(x.dtype), matrix, bias, out)

    name = next(each for each in products.CASES if "int8" in each)
    products.check_bits(name, torch.bfloat16)
    monkeypatch.setattr(products, "quantized_linear", per_tensor)
    with pytest.raises(AssertionError):
        products.check_bits(name, torch.bfloat16)
