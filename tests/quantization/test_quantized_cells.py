"""Deterministic engines with quantised weights in bfloat16: no setting changes a bit.

Deterministic mode makes a matrix dense for each call. The other products of a CPU (C panels) round
a row of inputs with that row's scale, so they are batch-invariant, too.
"""

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.ops import cpu
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.quantization import test_quantized_products as products
from tests.quantization.test_quantized_engines import CHANGES, PROMPTS
from tests.quantization.test_reader_matrix import tiny, write

pytestmark = pytest.mark.skipif(
    not cpu.panels_are_fast(torch.bfloat16), reason="C computes no products of panels here"
)
FAMILIES = ["llama", "qwen3_moe", "deepseek_v3"]
WEIGHTS = ["int8", "int4", "llm.int8", "gptq, act order"]


def tokens(folder, **options) -> list[tuple[list[int], float]]:
    """What an engine generates, twice with one cache, with the exact log-probabilities."""
    usual = {"dtype": "bfloat16", "block_size": 8, "max_model_len": 32, "max_num_seqs": 4,
             "deterministic": True, "enable_prefix_caching": False}  # fmt: skip
    llm = LLM(str(folder), **(usual | options))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
        outputs = [each.outputs[0] for outputs in found for each in outputs]
        return [(each.token_ids, each.cumulative_logprob) for each in outputs]
    finally:
        llm.close()


def folder_of(checkpoint, weights: str, place) -> tuple[object, dict[str, str]]:
    """A folder, and how it is quantised when it is loaded."""
    if weights in ("int8", "int4"):
        return checkpoint.folder, {"quantization": weights}
    write(checkpoint, weights, "plain", place)
    return place, {}


def cells() -> list:
    """All combinations; `make test` runs each kind of weights once, and each setting once."""
    changes = list(CHANGES)
    return [
        pytest.param(
            family, weights, change,
            marks=() if j == k and i == j % len(FAMILIES) else pytest.mark.slow)
        for i, family in enumerate(FAMILIES)
        for j, weights in enumerate(WEIGHTS)
        for k, change in enumerate(changes)
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "weights", "change"), cells())
def test_no_setting_changes_a_bit(checkpoint_of, tmp_path, family, weights, change):  # noqa: F811
    folder, how = folder_of(checkpoint_of(tiny(family)), weights, tmp_path)
    found, due = tokens(folder, **how, **CHANGES[change]), tokens(folder, **how)
    assert found == due
    assert all(isinstance(each[1], float) for each in due)


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
