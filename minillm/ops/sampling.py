"""Sampling: logits and sampling parameters of each row -> one token id per row.

Three backends sample the same tokens: Triton kernels (`minillm_kernels.sampling`), C on a CPU
(`cpu_sampling.py`), and the reference below, which defines the result. The noise of a token is a
function of (seed, sample index, position, token id), so there is no generator state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops import cpu_sampling
from minillm.ops.dispatch import uses_kernels
from minillm.ops.philox import Purpose
from minillm.ops.transfers import together
from minillm_kernels import reference

HALF_RANGE = 2**63  # of 64-bit integers


class Pack(NamedTuple):
    """Sampling parameters of K rows, on the device of the logits."""

    temperature: Tensor  # float32 [K]; 0 is greedy
    min_p: Tensor  # float32 [K]; 0 is off
    top_p: Tensor  # float32 [K]; 1 is off
    top_k: Tensor  # int32 [K]; 0 is off
    seed: Tensor  # int64 [K]
    sample_index: Tensor  # int64 [K]
    position: Tensor  # int64 [K], position of the sampled token
    truncates: bool  # whether any row has top-k or top-p

    def select(self, rows: Tensor | slice) -> "Pack":
        """The parameters of some rows: indices int64 [P], or a slice."""
        temperature, min_p, top_p, top_k, seed, sample_index, position = (
            column[rows] for column in self[:-1]
        )
        stream = seed, sample_index, position
        return Pack(temperature, min_p, top_p, top_k, *stream, self.truncates)


class DrawParams(NamedTuple):
    """A request's sampling parameters, in the form of a row of `Pack`, the kernel's input."""

    floats: tuple[float, float, float]  # temperature (0 is greedy), min-p, top-p
    top_k: int  # 0 is off
    truncates: bool


def draw_params(params: SamplingParams) -> DrawParams:
    """The row of a request."""
    temperature = 0.0 if params.greedy else params.temperature
    truncates = temperature > 0 and (params.top_k > 0 or params.top_p < 1)
    return DrawParams((temperature, params.min_p, params.top_p), max(params.top_k, 0), truncates)


def signed(seed: int) -> int:
    """A seed wrapped to a signed 64-bit integer."""
    return (seed + HALF_RANGE) % (2 * HALF_RANGE) - HALF_RANGE


def choose(
    logits: Tensor,
    pack: Pack,
    model_dtype: torch.dtype | None = None,
    purpose: Purpose = Purpose.SAMPLE,
    masks: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Tensor]:
    """Sample one token per row: temperature, min-p, top-k, top-p, then argmax of logits plus noise.

    Args:
        logits: [K, V], any floating-point dtype; not modified.
        model_dtype: dtype of the model, if these are edited logits in float32.
        purpose: selects the noise.
        masks: for logits that C samples: of each row, the tokens that may be chosen, as in
            `cpu_sampling.choose_tokens`.

    Returns:
        Tokens, int64 [K], and the largest logit of each row, float32 [K], NaN if the row has one.
        If the largest logit is not finite, the token is arbitrary.
    """
    if cpu_sampling.takes(logits, model_dtype):
        return cpu_sampling.choose_tokens(
            logits, *pack[:-1], model_dtype=model_dtype, purpose=purpose, masks=masks
        )
    if masks:
        raise ValueError("masks are for logits that C samples; check `cpu_sampling.takes` first.")
    if not uses_kernels(logits):
        best = logits.amax(dim=-1).float() if len(logits) else logits.new_empty(0).float()
        return _choose_by_reference(logits, pack, purpose), best
    from minillm_kernels import sampling

    top_k, top_p = (pack.top_k, pack.top_p) if pack.truncates else (None, None)
    stream = pack.seed, pack.sample_index, pack.position, purpose
    out, best = together(len(logits), logits.device, torch.int64, torch.float32)
    rows = pack.temperature, top_k, top_p, pack.min_p, *stream
    return sampling.sample(logits, *rows, out=out, best=best), best


def dist(logits: Tensor, pack: Pack) -> Tensor:
    """The distribution that `choose` samples from: [K, V] -> float32 [K, V], one-hot if greedy.

    Equal logits and parameters give equal bits. The noise of `pack` is not used.
    """
    greedy = pack.temperature <= 0
    scaled = reference.scale(logits, pack.temperature.masked_fill(greedy, 1.0), pack.min_p)
    if pack.truncates:
        scaled = reference.truncate(scaled, pack.top_k, pack.top_p)
    probabilities = scaled.softmax(dim=-1)
    probabilities.masked_fill_(greedy[:, None], 0.0)
    best = logits.argmax(dim=-1, keepdim=True)
    return probabilities.scatter_add_(1, best, greedy[:, None].float())


def _choose_by_reference(logits: Tensor, pack: Pack, purpose: Purpose) -> Tensor:
    """Sample row by row, so that rows are independent and only one sort is in memory."""
    tokens = logits.argmax(dim=-1)  # [K]
    for index in (pack.temperature > 0).nonzero()[:, 0].tolist():
        row = slice(index, index + 1)
        scaled = reference.scale(logits[row], pack.temperature[row], pack.min_p[row])
        if pack.truncates:
            scaled = reference.truncate(scaled, pack.top_k[row], pack.top_p[row])
        ones, off = torch.ones_like(pack.temperature[row]), torch.zeros_like(pack.min_p[row])
        stream = pack.seed[row], pack.sample_index[row], pack.position[row], purpose
        tokens[row] = reference.gumbel_argmax(scaled, ones, off, *stream)
    return tokens
