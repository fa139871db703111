"""Layers and whole engines with quantised weights on interpreted kernels."""

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from minillm.ops import dispatch
from minillm.ops.dispatch import Backend
from minillm.quantization.kernels import pack_for_kernels
from minillm_kernels import quantized_reference
from tests.kernels.engine_cases import TINY, generate, logprobs, open_engine, tokens
from tests.quantization.test_kernel_layouts import FORMATS, OUT, WIDTH, layer

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("divide by zero", "invalid value")
]


@pytest.fixture
def kernels(monkeypatch) -> set[str]:
    """Send everything to kernels from now on; the names of those that ran."""
    ran: set[str] = set()
    call = GridExecutor.__call__

    def counted(self, *args, **kwargs):
        ran.add(self.fn.__name__)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", "interpreted"))
    return ran


KERNEL_OF = {"int4": "_int4_tile", "int8 rows": "_int8_tile"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_the_product_with_its_dense_values(name, dtype, kernels):
    rng = torch.Generator().manual_seed(8)
    found = FORMATS[name](rng)
    matrix = layer(found)
    pack_for_kernels(matrix, torch.device("cpu"))
    x, bias = torch.randn(3, WIDTH, generator=rng).to(dtype), torch.randn(OUT).to(dtype)
    got = matrix.method.apply(matrix, x, bias)
    rows = x.double()
    if name == "int8 rows":  # activations are rounded, too
        codes, scales = quantized_reference.quantize_rows(x)
        rows = codes.double() * scales.double()[:, None]
    due = rows @ found.dense().double().T + bias.double()
    assert got.dtype == dtype
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - due).abs().max() < limit * due.abs().max()
    assert KERNEL_OF.get(name, KERNEL_OF.get(name[:4], "_scaled_tile")) in kernels


@pytest.mark.parametrize(
    ("family", "how", "kernel", "near"),
    [
        ("llama", "int4", "_int4_tile", 2e-4),
        ("llama", "int8", "_int8_tile", 0.2),  # activations of 8 bits
        ("qwen3_moe", "int8", "_int8_tile", 0.2),
    ],
)
def test_an_engine_says_nearly_the_same(family, how, kernel, near, tmp_path, monkeypatch, request):
    folder = TINY[family].write(tmp_path).folder
    plain = generate(open_engine(folder, "cpu", quantization=how, enforce_eager=True), 2, only=1)
    kernels = request.getfixturevalue("kernels")
    outputs = generate(open_engine(folder, "cpu", quantization=how), 2, only=1)
    assert kernel in kernels
    if near < 1e-3:
        assert tokens(outputs) == tokens(plain)
    else:  # the prompt's log-probabilities do not depend on what was generated
        outputs[0].outputs[0].logprobs = plain[0].outputs[0].logprobs = None
    got, due = logprobs(outputs[0]), logprobs(plain[0])
    assert len(got) == len(due)
    assert got == pytest.approx(due, abs=near)
