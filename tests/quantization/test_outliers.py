"""LLM.int8() in C panels: outlying inputs in 16 bits, beside numpy and bitsandbytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError
from minillm.lab.kernel_names import kernel_of
from minillm.layers.linear_methods import Matrix, WeightSlice
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from minillm.quantization import outliers
from minillm.quantization.methods import install
from minillm.quantization.outliers import OutlierMethod, separate_outliers
from minillm.quantization.panels import PanelQuantizedMethod, pack_quantized
from minillm.quantization.quantized import Quantized
from minillm.quantization.rounding import round_symmetric
from tests.quantization.test_golden import GOLDEN
from tests.quantization.test_readers_refuse import damaged

pytestmark = pytest.mark.skipif(
    not cpu.panels_are_fast(torch.bfloat16), reason="C computes no products of panels here"
)
BF16 = torch.bfloat16
FOLDER = GOLDEN / "llm-int8"
BNB = json.loads((FOLDER / "outliers.json").read_text())


def layer(found: Quantized, threshold: float) -> Matrix:
    """A packed matrix with 8-bit codes."""
    matrix = Matrix([WeightSlice.whole("m", *found.shape)])
    install(matrix, found, BF16, threshold)
    assert pack_quantized([matrix]) == 1
    assert separate_outliers([matrix]) == bool(threshold)
    return matrix


def apply(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return matrix.method.apply(matrix, x, bias)


def by_numpy(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, threshold: float) -> np.ndarray:
    """Row by row, in float64."""
    found = np.zeros((len(x), len(codes)))
    for i, row in enumerate(x.astype(np.float64)):
        large = np.abs(row) >= threshold
        rest = np.where(large, 0, row).reshape(-1, 32)
        step = np.abs(rest).max(1, keepdims=True) / 127
        eight = (np.rint(rest / step) * step).reshape(-1) @ codes.T.astype(np.float64)
        found[i] = (eight + codes[:, large].astype(np.float64) @ row[large]) * scales
    return found


def sample(rows: int, out: int, width: int) -> tuple[torch.Tensor, Quantized]:
    """Inputs with an outlier in most rows, and a matrix."""
    dice = torch.Generator().manual_seed(rows + out)
    x = torch.randn(rows, width, generator=dice)
    x[torch.arange(rows), torch.randint(width, (rows,), generator=dice)] = 50.0
    x[0] = x[0].clamp(-3, 3)
    weight = torch.randn(out, width, generator=dice)
    return x.to(BF16), round_symmetric(weight)


def distance(found: torch.Tensor, due: torch.Tensor) -> float:
    """The difference relative to the values, of the worst row."""
    error = (found.double() - due.double()).norm(dim=1) / due.double().norm(dim=1)
    return float(error.max())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 32, 64), (5, 50, 96), (40, 96, 320)])
def test_products_are_those_of_numpy(rows, out, width, biased):
    x, weight = sample(rows, out, width)
    bias = torch.linspace(-2, 2, out).to(BF16) if biased else None
    due = torch.from_numpy(
        by_numpy(x.float().numpy(), weight.codes.numpy(), weight.scales[:, 0].numpy(), 6.0)
    )
    due = due if bias is None else due + bias.double()
    assert distance(apply(layer(weight, 6.0), x, bias), due) < 4e-3  # bfloat16
    if rows > 1:
        assert distance(apply(layer(weight, 0.0), x, bias), due) > 1e-2


def test_products_are_those_of_bitsandbytes():
    """To the rounding of its inputs, which is by rows, and of its scales; without outliers in 16
    bits it is twice as far away from itself."""
    model = load_model(open_model(FOLDER), BF16)
    matrix = model.layers[0].attention.qkv_proj
    weight = matrix.method.quantized(matrix).rows(slice(0, len(matrix.parts[0].rows)))
    x = torch.tensor(BNB["x"], dtype=BF16)
    due = {each: torch.tensor(BNB[f"threshold {each:g}"]) for each in (6.0, 0.0)}
    assert distance(apply(layer(weight, 6.0), x), due[6.0]) < 8e-3
    assert distance(due[0.0][:2], due[6.0][:2]) > 1.2e-2


def test_a_row_does_not_depend_on_other_rows():
    x, weight = sample(7, 64, 256)
    matrix = layer(weight, 6.0)
    whole = apply(matrix, x)
    assert all(torch.equal(whole[i : i + 1], apply(matrix, x[i : i + 1])) for i in range(len(x)))


def whole_columns(self, matrix, x, bias):
    """bitsandbytes' rule: a column is in 16 bits if any row has an outlier there."""
    outlying = (x.abs() >= self.threshold).any(0).expand_as(x)
    rest = PanelQuantizedMethod.apply(self, matrix, x.masked_fill(outlying, 0), bias)
    codes, scales = self.columns(matrix, outlying[0].nonzero().flatten())
    return rest + ((x[:, outlying[0]].double() @ codes.double().T) * scales).to(x.dtype)


@pytest.mark.mutation
def test_whole_columns_depend_on_other_rows(monkeypatch):
    monkeypatch.setattr(outliers.OutlierMethod, "apply", whole_columns)
    with pytest.raises(AssertionError):
        test_a_row_does_not_depend_on_other_rows()


def neighbour(self, matrix, columns):
    return COLUMNS(self, matrix, columns ^ 1)


def no_scale(self, matrix, columns):
    codes, scales = COLUMNS(self, matrix, columns)
    return codes, torch.ones_like(scales)


def unsigned(self, matrix, columns):
    codes, scales = COLUMNS(self, matrix, columns)
    return codes + 128, scales


COLUMNS = OutlierMethod.columns


@pytest.mark.mutation
@pytest.mark.parametrize("bug", [neighbour, no_scale, unsigned], ids=lambda bug: bug.__name__)
def test_wrong_columns_are_seen(monkeypatch, bug):
    monkeypatch.setattr(OutlierMethod, "columns", bug)
    with pytest.raises(AssertionError):
        test_products_are_those_of_bitsandbytes()


# ---- in a model ----------------------------------------------------------------------------------


def packed_model(**settings):
    """The golden model in panels."""
    source = open_model(FOLDER)
    source = replace(source, quantization={**source.quantization, **settings})
    model = load_model(source, BF16)
    pack_weights(model)
    return model


def test_a_folder_of_bitsandbytes_separates_outliers():
    model = packed_model()
    matrix = model.layers[0].attention.qkv_proj
    assert isinstance(matrix.method, OutlierMethod)
    assert model.all_layers is None  # one call of C for all layers would not
    assert kernel_of(matrix).endswith("activations of 8 bits, from 6 on of 16")


def test_a_threshold_of_0_separates_none():
    model = packed_model(llm_int8_threshold=0.0)
    assert type(model.layers[0].attention.qkv_proj.method) is PanelQuantizedMethod
    assert model.all_layers is not None


@pytest.mark.parametrize("threshold", ["6", -1, float("inf"), [6]], ids=str)
def test_a_threshold_that_is_none(tmp_path, threshold):
    with pytest.raises(CheckpointError, match="llm_int8_threshold"):
        damaged("llm-int8", tmp_path, settings={"llm_int8_threshold": threshold})


def test_an_engine_runs_it():
    llm = LLM(str(FOLDER), dtype="bfloat16", block_size=8, max_model_len=32, max_num_seqs=4)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompts = [[3, 17, 4, 31], [12, 28, 1, 6, 30]]
        together = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == 8 for each in together)
    finally:
        llm.close()
