"""AWQ checkpoints (Lin et al., 2023), as AutoAWQ's "GEMM" version stores them.

| tensor of a module | type and shape | contents |
|---|---|---|
| `qweight` | int32 [in, out / 8] | 8 codes along `out`, in the order 0 2 4 6 1 3 5 7 |
| `qzeros` | int32 [groups, out / 8] | zero points in the same order |
| `scales` | float [groups, out] | |

The scales that AWQ multiplies into the weights are divided out of the layer before, so that a
reader need not know them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Headers, Stored, cut, setting, units
from minillm.quantization.grouping import Groups, arranged, few_bits, groups_of
from minillm.quantization.integers import AWQ_ORDER, unpack_words
from minillm.quantization.quantized import Quantized

WORD = 8  # codes of 4 bits in an int32


class AWQ(Format):
    """`quant_method: awq`."""

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        version = str(settings.get("version") or "gemm").lower()
        if version != "gemm":
            raise UnsupportedFeatureError(
                f"config.json says AWQ version {version!r}; this version reads 'gemm'."
            )
        bits = setting(settings, "bits", int, setting(settings, "w_bit", int, 4))
        if bits != 4:
            raise UnsupportedFeatureError(
                f"config.json says AWQ with {bits} bits; this version reads 4."
            )

    def describe(self) -> str:
        """For example "AWQ (GEMM), 4 bits, groups of 128"."""
        fallback = setting(self.settings, "q_group_size", int, -1)
        size = setting(self.settings, "group_size", int, fallback)
        groups = "a group per row" if size == -1 else f"groups of {size}"
        return f"AWQ (GEMM), 4 bits, {groups}"

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """Codes, zero points and scales."""
        self.header(part, "qweight")
        groups, rows = self.groups(part), slice(part.rows.start, part.rows.stop)
        words = units(part, part.rows, part.shape[0], WORD)
        packed = TensorSlice((groups.count, -(-part.shape[0] // WORD)), (groups.held, words))
        plain = TensorSlice((groups.count, part.shape[0]), (groups.held, rows))
        return {
            "qweight": Stored(cut(part, WORD, 1, transposed=True), torch.int32),
            "qzeros": Stored(packed, torch.int32),
            "scales": Stored(plain, self.scales(part, "scales").dtype),
        }

    def decode_packed(self, part: WeightSlice, found: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Transposed; the order inside words is undone."""
        rows = len(part.rows)
        codes, zeros = (
            unpack_words(found[name], 4, AWQ_ORDER)[:, :rows].T.contiguous()
            for name in ("qweight", "qzeros")
        )
        scales = found["scales"].T.contiguous()
        return arranged(self.groups(part).index(), scales, zeros, codes, few_bits)

    def groups(self, part: WeightSlice) -> Groups:
        """The groups of a part."""
        shape = self.scales(part, "scales").shape
        if len(shape) != 2:
            raise CheckpointError(f"{part.name}.scales has shape {list(shape)}; it has 2 sides.")
        return groups_of(part, shape[0])
