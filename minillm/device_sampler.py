"""Choosing tokens where the logits are, with nothing for the host to read or to decide.

`sampler.sample` looks at every request and takes the cheapest way; here parameters are numbers in
tensors, one per row, so that a recorded graph can use them. The tokens are the same. What changes
logits before the choice (masks, biases, penalties) is left to `sampler.sample`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm import ops
from minillm.batches import put, upload
from minillm.sampler import SamplingRow
from minillm_kernels import reference


class Parameters(NamedTuple):
    """Of K rows: how each draws. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    floats: Tensor  # float32 [3, K]: temperature, min-p, top-p
    top_k: Tensor  # int32 [K]
    keys: Tensor  # int64 [2, K]: seed, sample index


class DeviceSampler:
    """The parameters of every persistent row, here and on the device."""

    def __init__(self, num_rows: int, device: torch.device):
        self.device = device
        self._floats = np.zeros((3, num_rows), dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._keys = np.zeros((2, num_rows), dtype=np.int64)
        self._floats[2] = 1.0
        self._there = upload(device, *(part.copy() for part in self._parts()))
        self._is_old = False

    def _parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._floats, self._top_k, self._keys

    def set_row(self, row: int, request: SamplingRow) -> None:
        """A sequence has this row from now on."""
        for part, values in zip(self._parts(), numbers_of([request]), strict=True):
            part[..., row] = values[..., 0]
        self._is_old = True

    def move(self, source: int, target: int) -> None:
        """A sequence moves to another row."""
        for part in self._parts():
            part[..., target] = part[..., source]
        self._is_old = True

    def bring_up_to_date(self) -> None:
        """Tell the device what has changed, if anything has."""
        if self._is_old:
            for there, part in zip(self._there, self._parts(), strict=True):
                put(there, part)
            self._is_old = False

    def of(self, size: int) -> Parameters:
        """Of the first `size` rows; always the same memory."""
        floats, top_k, keys = self._there
        return Parameters(floats[:, :size], top_k[:size], keys[:, :size])

    def choose(self, logits: Tensor, requests: Sequence[SamplingRow]) -> Tensor:
        """Tokens int64 [K] of any rows, in a step that is not recorded."""
        positions = np.array([request.position for request in requests], dtype=np.int64)
        floats, top_k, keys, ends = upload(self.device, *numbers_of(requests), positions)
        out = torch.empty(len(requests), dtype=torch.int64, device=self.device)
        truncates = any(map(truncated, requests))
        choose_into(out, logits, Parameters(floats, top_k, keys), ends, truncates)
        return out


def truncated(request: SamplingRow) -> bool:
    """Whether top-k or top-p leave tokens out."""
    params = request.params
    return not params.greedy and (params.top_k > 0 or params.top_p < 1)


def numbers_of(requests: Sequence[SamplingRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature, min-p and top-p [3, K]; top-k [K]; seeds and sample indices [2, K]."""
    listed = [request.params for request in requests]
    floats = [
        [0.0 if each.greedy else each.temperature for each in listed],
        [each.min_p for each in listed],
        [each.top_p for each in listed],
    ]
    seeds = [(request.seed + 2**63) % 2**64 - 2**63 for request in requests]  # the same 64 bits
    return (
        np.array(floats, dtype=np.float32),
        np.array([max(each.top_k, 0) for each in listed], dtype=np.int32),
        np.array([seeds, [request.sample_index for request in requests]], dtype=np.int64),
    )


def choose_into(
    out: Tensor, logits: Tensor, parameters: Parameters, positions: Tensor, truncates: bool
) -> None:
    """Choose a token per row of logits [K, V]; without `truncates` no row has a top-k or top-p.

    A row whose logits are not finite gets some token of the vocabulary, which harms nobody.
    """
    temperature, min_p, top_p = parameters.floats.unbind()
    seed, sample_index = parameters.keys.unbind()
    if ops.uses_kernels(logits):
        from minillm_kernels import sampling

        sampling.sample(
            logits,
            temperature,
            parameters.top_k if truncates else None,
            top_p if truncates else None,
            min_p,
            seed,
            sample_index,
            positions,
            out=out,
        )
        return
    greedy = temperature == 0
    raw = logits.float()
    scaled = raw - raw.amax(dim=-1, keepdim=True)
    scaled = scaled / temperature.masked_fill(greedy, 1.0)[:, None]
    scaled = scaled.masked_fill(scaled < min_p.log()[:, None], float("-inf"))
    if truncates:
        scaled = reference.truncate(scaled, parameters.top_k, top_p)
    ones, zeros = torch.ones_like(temperature), torch.zeros_like(min_p)
    drawn = reference.gumbel_argmax(scaled, ones, zeros, seed, sample_index, positions)
    out.copy_(torch.where(greedy, raw.argmax(dim=-1), drawn))
