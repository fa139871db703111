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

from minillm.errors import UnsupportedFeatureError
from minillm.layers.linear_methods import PLAIN, WeightSlice
from minillm.quantization.formats import Headers, setting
from minillm.quantization.readers.packed import Field, PackedFormat

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 columns


class AWQ(PackedFormat):
    """`quant_method: awq`."""

    fields: Mapping[str, Field] = {
        "codes": Field("qweight", "io", "o", ORDER),
        "scales": Field("scales", "go", dtypes=PLAIN),
        "zeros": Field("qzeros", "go", "o", ORDER),
    }

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

    def bits(self, part: WeightSlice) -> int:
        return 4
