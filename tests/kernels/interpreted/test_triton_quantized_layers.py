"""Layers and whole engines with quantised weights on interpreted kernels."""

import pytest
import torch

from minillm.quantization.kernels import pack_for_kernels
from tests.kernels.engine_cases import TINY, generate, open_engine
from tests.quantization.test_kernel_layouts import FORMATS, OUT, WIDTH, layer

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("divide by zero", "invalid value")
]


KERNEL_OF = {"int4": "_int4_tile"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_the_product_with_its_dense_values(name, dtype, kernels):
    rng = torch.Generator().manual_seed(8)
    found = FORMATS[name](rng)
    matrix = layer(found)
    pack_for_kernels(matrix, torch.device("cpu"))
    x, bias = torch.randn(3, WIDTH, generator=rng).to(dtype), torch.randn(OUT).to(dtype)
    got = matrix.method.apply(matrix, x, bias)
    due = x.double() @ found.dense().double().T + bias.double()
    assert got.dtype == dtype
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - due).abs().max() < limit * due.abs().max()
    assert KERNEL_OF.get(name[:4], "_scaled_tile") in kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_threshold_keeps_its_inputs_in_16_bits(dtype, kernels):
    """LLM.int8(): no input is rounded to 8 bits, so none needs a product of its own."""
    rng = torch.Generator().manual_seed(8)
    found = FORMATS["int8 rows"](rng)
    matrix = layer(found)
    matrix.method.threshold = 6.0
    pack_for_kernels(matrix, torch.device("cpu"))
    x = torch.randn(3, WIDTH, generator=rng).to(dtype)
    x[0, 3], x[2, 9] = 60.0, -80.0
    got = matrix.method.apply(matrix, x, None)
    due = x.double() @ found.dense().double().T
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - due).abs().max() < limit * due.abs().max()
    assert "_scaled_tile" in kernels


@pytest.mark.parametrize(
    ("family", "how", "kernel"),
    [
        ("llama", "int4", "_int4_tile"),
        pytest.param("llama", "int8", "_scaled_tile", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "int8", "_scaled_tile", marks=pytest.mark.slow),
    ],
)
def test_an_engine_says_nearly_the_same(family, how, kernel, tmp_path, request):
    """The log-probability of each token of a prompt (the output matrix is int8 in both)."""
    folder = TINY[family].write(tmp_path).folder
    options = {"quantization": how, "enforce_eager": True}
    (plain,) = generate(open_engine(folder, "cpu", **options), 2, only=1)
    kernels = request.getfixturevalue("kernels")
    (found,) = generate(open_engine(folder, "cpu", **options), 2, only=1)
    assert kernel in kernels
    got, due = prompt_logprobs(found), prompt_logprobs(plain)
    assert len(got) == 20
    assert got == pytest.approx(due, abs=0.05)


def prompt_logprobs(output):
    tokens = output.prompt_token_ids
    rows = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]
