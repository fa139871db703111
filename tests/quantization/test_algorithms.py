"""The quantisation algorithms beside independent ones."""

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.lab.quantise import awq, fp8, gptq, nf4, smoothquant
from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.lab.quantise.statistics import InputStatistics, output_error
from minillm.quantization.quantized import Quantized
from minillm.quantization.rounding import round_with_minima

F64 = torch.float64
GPTQ_CASES = ((8, 16, False), (12, 16, True), (24, 16, False), (96, 32, True))  # group, block, sym


def correlated(columns: int, rows: int, seed: int = 0) -> Tensor:
    """Inputs [rows, columns] float64 with correlated columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator, dtype=F64)
    sizes = torch.rand(columns, generator=generator, dtype=F64) * 3 + 0.1
    return torch.randn(rows, columns, generator=generator, dtype=F64) @ mixing * sizes


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    """A random matrix [rows, columns] float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=F64)


def hessian_of(x: Tensor) -> Tensor:
    """2/n X^T X"""
    return x.T @ x * (2 / len(x))


def numpy_grid(w: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of each row of w [out, g], scales rounded to float32."""
    most = 2**bits - 1
    low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scale = ((high - low) / most).astype(np.float32).astype(np.float64)
    zero = np.full_like(scale, 2 ** (bits - 1)) if symmetric else np.round(-low / scale)
    return scale, zero


def textbook_gptq(
    weight: np.ndarray, hessian: np.ndarray, bits: int, group: int, symmetric: bool, damp: float
) -> np.ndarray:
    """Optimal brain quantisation by column without Cholesky factors or blocks: after each column
    the inverse Hessian of the remaining columns is computed anew."""
    w, h = weight.copy(), hessian + damp * np.diag(hessian).mean() * np.eye(len(hessian))
    out = np.zeros_like(w)
    for i in range(w.shape[1]):
        if i % group == 0:
            scale, zero = numpy_grid(w[:, i : i + group], bits, symmetric)
        code = np.clip(np.round(w[:, i] / scale) + zero, 0, 2**bits - 1)
        out[:, i] = scale * (code - zero)
        inverse = np.linalg.inv(h[i:, i:])
        w[:, i:] -= np.outer((w[:, i] - out[:, i]) / inverse[0, 0], inverse[0])
    return out


def test_gptq_equals_the_textbook() -> None:
    """Several groups per block, several blocks, and blocks that groups do not divide."""
    for group, block, symmetric in GPTQ_CASES:
        w, h = weights(5, 96), hessian_of(correlated(96, 300))
        options = gptq.GPTQOptions(damp=0.01, block=block)
        found = gptq.gptq(w, h, Grid(4, symmetric, torch.float32), group, options)
        due = textbook_gptq(w.numpy(), h.numpy(), 4, group, symmetric, 0.01)
        assert np.abs(dense(found) - due).max() < 1e-6


def dense(found: Quantized) -> np.ndarray:
    """The values of a matrix."""
    return found.dense().double().numpy()


def test_two_columns_by_hand() -> None:
    """H = [[2, 1], [1, 2]], w = (0.4, 1.0) with steps of 1: column 0 becomes 0 with error 0.4, and
    column 1 must be 1.0 + 0.4 x 1/2 = 1.2, the least squares solution; with 3.9 it crosses 4.1."""

    class Steps(Grid):
        def fit(self, groups: Tensor) -> tuple[Tensor, Tensor]:
            ones = torch.ones(groups.shape[:-1], dtype=groups.dtype)
            return ones, ones * 0

    h = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=F64)
    w = torch.tensor([[0.4, 1.4], [0.4, 1.2], [-0.4, 1.6]], dtype=F64)
    options = gptq.GPTQOptions(damp=0.0)
    found = gptq.gptq(w.abs(), h, Steps(4, False, torch.float32), 2, options)
    assert dense(found).tolist() == [[0, 2], [0, 1], [0, 2]]
    # 1.4 + 0.2 = 1.6 -> 2;  1.2 + 0.2 = 1.4 -> 1


def test_unit_hessian_gives_rounding() -> None:
    """Without correlations no correction helps."""
    w, grid = weights(6, 64).float(), Grid(4, False)
    found, due = gptq.gptq(w, torch.eye(64), grid, 16), round_to_grid(w, grid, 16)
    assert torch.equal(found.codes, due.codes)
    assert torch.equal(found.scales, due.scales)


def test_every_block_size_is_the_same() -> None:
    """Blocks only reorder the sums."""
    w, h = weights(4, 256), hessian_of(correlated(256, 600))
    grid = Grid(4, False, torch.float32)
    one, many = (gptq.gptq(w, h, grid, 32, gptq.GPTQOptions(block=b)) for b in (1, 128))
    assert np.abs(dense(one) - dense(many)).max() < 1e-9


def test_error_is_below_rounding() -> None:
    """With every order and kind of groups the outputs are closer than after rounding."""
    w, h = weights(16, 128).float(), hessian_of(correlated(128, 500)).float()
    grid = Grid(4, False)
    rounding = float(output_error(round_to_grid(w, grid, 32).dense() - w, h))
    for act_order, static in ((False, False), (True, False), (True, True), (False, True)):
        options = gptq.GPTQOptions(act_order=act_order, static_groups=static)
        found = gptq.gptq(w, h, grid, 32, options)
        assert (found.order is not None) == (act_order and not static)
        assert float(output_error(found.dense() - w, h)) < 0.6 * rounding


def test_dead_inputs_are_ignored() -> None:
    """An input that is always 0 gets the value 0, and does not disturb the others."""
    x = correlated(32, 200)
    x[:, [3, 20]] = 0
    w = weights(4, 32)
    w[:, 3] = 100.0
    found = gptq.gptq(w, hessian_of(x), Grid(4, False, torch.float32), 32)
    assert (found.dense()[:, [3, 20]] == 0).all()
    assert float(found.scales.max()) < 1.0


def test_act_order_equals_the_textbook() -> None:
    """The columns in the order of the diagonal, put back afterwards."""
    w, h = weights(3, 48), hessian_of(correlated(48, 200))
    order = np.argsort(-h.diagonal().numpy(), kind="stable")
    options = gptq.GPTQOptions(damp=0.01, act_order=True)
    found = gptq.gptq(w, h, Grid(4, False, torch.float32), 16, options)
    due = textbook_gptq(w.numpy()[:, order], h.numpy()[order][:, order], 4, 16, False, 0.01)
    assert np.abs(dense(found)[:, order] - due).max() < 1e-6


def statistics_of(x: Tensor) -> InputStatistics:
    """The statistics of inputs, recorded in two parts."""
    found = InputStatistics(x.shape[1])
    found.add(x[: len(x) // 3])
    found.add(x[len(x) // 3 :])
    return found


def test_awq_protects_large_inputs() -> None:
    """A few inputs 50 times as large: their weights must become more exact. The error is measured
    with the inputs themselves."""
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(3))
    x[:, [5, 40]] *= 50
    w, grid = weights(32, 64).float(), Grid(4, False)
    scales = awq.awq_scales(w, statistics_of(x), grid, 32)
    found = round_to_grid(w * scales, grid, 32).dense() / scales
    error = (x @ (found - w).T).square().mean()
    plain = (x @ (round_to_grid(w, grid, 32).dense() - w).T).square().mean()
    assert error < 0.25 * plain
    assert set(scales.topk(2).indices.tolist()) == {5, 40}
    ratio = scales.max() * scales.min()
    assert torch.isclose(ratio, torch.tensor(1.0), atol=1e-4)


def test_awq_equals_a_plain_search() -> None:
    """The same search with the outputs of all inputs instead of the Hessian."""
    x = torch.randn(300, 32, generator=torch.Generator().manual_seed(4))
    x *= torch.linspace(0.2, 9, 32)
    w, grid = weights(8, 32).float(), Grid(3, True)
    best, least = torch.ones(32), float("inf")
    groups = w.abs().view(8, 2, 16)
    relative = (groups / groups.max(-1, keepdim=True).values).view(8, 32).mean(0)
    for r in [None, *(step * 0.05 for step in range(20))]:
        s = torch.ones(32) if r is None else x.abs().mean(0) ** r / (relative ** (1 - r) + 1e-4)
        s = s / (s.max() * s.min()).sqrt()
        out = (x / s) @ round_to_grid(w * s, grid, 16).dense().T
        error = float((out - x @ w.T).square().sum())
        if error < least:
            best, least = s, error
    found = awq.awq_scales(w, statistics_of(x), grid, 16)
    assert torch.allclose(found, best, rtol=1e-4)


def test_clipping_lowers_the_error() -> None:
    """One weight of a group is much larger, and its input is small."""
    x = torch.randn(300, 32, generator=torch.Generator().manual_seed(5))
    x[:, 7] *= 0.01
    w, grid = weights(8, 32).float() * 0.1, Grid(4, False)
    w[:, 7] = 1.0
    h = hessian_of(x)
    clipped = awq.clipped(w, h, grid, 16)
    before = output_error(round_to_grid(w, grid, 16).dense() - w, h)
    after = output_error(round_to_grid(clipped, grid, 16).dense() - w, h)
    assert after < 0.7 * before
    assert (clipped[:, 7] < 1).all()
    assert (clipped.abs() <= w.abs()).all()


def test_smoothing_balances_largest_values() -> None:
    """With alpha = 1/2 the largest input and the largest weight of a channel become equal."""
    x = correlated(24, 100).float()
    w = weights(10, 24).float()
    s = smoothquant.smooth_scales(w, statistics_of(x), 0.5)
    assert torch.allclose((x / s).abs().amax(0), (w * s).abs().amax(0), rtol=1e-4)
    all_in_weights = smoothquant.smooth_scales(w, statistics_of(x), 1.0)
    assert torch.allclose((x / all_in_weights).abs().amax(0), torch.ones(24), rtol=1e-4)


BITSANDBYTES_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def test_levels_are_those_of_bitsandbytes() -> None:
    """The 16 constants of bitsandbytes."""
    assert (nf4.nf4_levels() - torch.tensor(BITSANDBYTES_NF4)).abs().max() < 2e-7


def test_nf4_codes_are_nearest() -> None:
    """By brute force over all levels."""
    w = weights(6, 128).float()
    found, _ = nf4.nf4(w, double=False)
    largest = w.view(6, 2, 64).abs().amax(-1, keepdim=True)
    distance = (w.view(6, 2, 64) / largest)[..., None] - torch.tensor(BITSANDBYTES_NF4)
    due = torch.tensor(BITSANDBYTES_NF4)[distance.abs().argmin(-1)] * largest
    assert (found.dense() - due.view(6, 128)).abs().max() < 1e-6


def test_nested_scales_are_close() -> None:
    """Scales far from 0 keep a relative error of 8 bits, because their mean is taken out."""
    scales = 5 + torch.rand(700, generator=torch.Generator().manual_seed(6)) * 0.1
    found = nf4.nested_scales(scales).values()
    assert (found - scales).abs().max() < 0.002
    w = weights(4, 128).float()
    once, _ = nf4.nf4(w, double=False)
    twice, nested = nf4.nf4(w, double=True)
    assert nested is not None
    assert torch.equal(once.codes, twice.codes)
    assert (once.scales - twice.scales).abs().max() < 0.05 * once.scales.max()


def test_fp8_scales_reach_the_largest_number() -> None:
    """The largest weight of a row or block becomes 448, and no error exceeds half a step."""
    w = weights(200, 256).float()
    for blocks in (False, True):
        found = fp8.round_fp8(w, blocks=blocks)
        assert float(found.codes.float().abs().max()) == 448
        assert torch.isfinite(found.dense()).all()
        step = torch.maximum(w.abs() / 16, found.scales.float().max() * 2**-9)
        assert ((found.dense() - w).abs() <= step * 1.001).all()
    largest = w[:128, 128:].abs().max()
    scales = fp8.round_fp8(w, blocks=True).scales
    assert torch.allclose(scales[:128, 1], largest / 448)
    assert torch.allclose(scales[128:, 0], w[128:, :128].abs().max() / 448)


def test_minima_beside_numpy() -> None:
    """The best of four ranges for each group, with scales and minima as they are stored."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).numpy()
    found = round_with_minima(torch.from_numpy(weight), 32).dense().numpy()
    for group, values in zip(weight.reshape(-1, 32), found.reshape(-1, 32), strict=True):
        errors = []
        for shrink in (1, 0.95, 0.9, 0.85):
            half, middle = (group.max() - group.min()) / 2 * shrink, (group.max() + group.min()) / 2
            scale, least = np.float16(half / 7.5), np.float16(middle - half)
            codes = ((group - np.float32(least)) / np.float32(scale)).round().clip(0, 15)
            errors.append(((codes * np.float32(scale) + np.float32(least) - group) ** 2).sum())
        assert ((values - group) ** 2).sum() == pytest.approx(min(errors), rel=1e-3)


def test_too_little_damping_is_one_sentence() -> None:
    singular = torch.ones(8, 8)
    with pytest.raises(ConfigError, match="--damp 0"):
        gptq.gptq(torch.ones(2, 8), singular, Grid(), 8, gptq.GPTQOptions(damp=0.0))
