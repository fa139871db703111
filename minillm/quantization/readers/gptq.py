"""GPTQ checkpoints (Frantar et al., 2022), as AutoGPTQ, GPTQModel and AutoRound write them.

| tensor of a module | type and shape | contents |
|---|---|---|
| `qweight` | int32 [in x bits / 32, out] | codes along `in`, the first in the lowest bits |
| `qzeros` | int32 [groups, out x bits / 32] | zero points along `out`; one less in version 1 |
| `scales` | float [groups, out] | may be negative |
| `g_idx` | int32 [in] | the group of each input; not in order with act order (`desc_act`) |

Symmetric codes have the zero point 2^(bits - 1), so the two versions can be told apart: files of
either kind carry the name of the other. Asymmetric zero points are read as `checkpoint_format` says
("gptq" is version 1), and refused if that shifts the mean of a matrix by one code.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import PLAIN, WeightSlice
from minillm.quantization.formats import Headers, setting
from minillm.quantization.readers.packed import INDICES, Field, PackedFormat

logger = logging.getLogger(__name__)

VERSIONS = ("gptq", "gptq_v2")
BITS = (2, 4, 8)
SURE = 0.1  # codes; the mean of a matrix tells the version if its standard error is below


class GPTQ(PackedFormat):
    """`quant_method: gptq`."""

    fields: Mapping[str, Field] = {
        "codes": Field("qweight", "io", "i"),
        "scales": Field("scales", "go", dtypes=PLAIN),
        "zeros": Field("qzeros", "go", "o"),
        "index": Field("g_idx", "i", dtypes=INDICES, optional=True),
    }

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        self.version = str(settings.get("checkpoint_format") or "gptq")
        if settings.get("is_marlin_format"):
            self.version = "marlin"
        if self.version not in VERSIONS:
            raise UnsupportedFeatureError(
                f"config.json says checkpoint_format {self.version!r} for GPTQ; this version reads "
                f"{' and '.join(VERSIONS)}."
            )
        self.rules = rules_of(setting(settings, "dynamic", dict, {}))

    def describe(self) -> str:
        """For example "GPTQ, 4 bits, groups of 128, act order"."""
        size = setting(self.settings, "group_size", int, -1)
        groups = "a group per row" if size == -1 else f"groups of {size}"
        order = ", act order" * bool(self.settings.get("desc_act"))
        kind = "symmetric" if self.settings.get("sym") else "with zero points"
        bits = setting(self.settings, "bits", int, 4)
        return f"GPTQ ({self.version}), {bits} bits, {kind}, {groups}{order}"

    def is_zero(self, name: str) -> bool:
        """Old writers add a bias of zeros to every module."""
        return name.endswith(".bias") and f"{name[:-5]}.qweight" in self.headers

    def zero_points(
        self, part: WeightSlice, stored: Tensor, codes: Tensor, index: Tensor
    ) -> Tensor:
        """Those of the version that the file has."""
        bits = self.bits(part)
        half, mask, offset = 1 << (bits - 1), (1 << bits) - 1, self.version == "gptq"
        if self.option(part, "sym"):
            if not bool((stored == half - 1).all()) and not bool((stored == half).all()):
                raise CheckpointError(
                    f"{part.name} is symmetric by config.json, but its stored zero points are "
                    f"{int(stored.min())} to {int(stored.max())}; all must be {half - 1} (version "
                    f"1) or all {half} (version 2)."
                )
            if stored.numel() and (int(stored.flatten()[0]) == half - 1) != offset:
                logger.warning(
                    "%s stores the zero points of another version than %s; they are %d.",
                    part.name,
                    self.version,
                    half,
                )
            return torch.full_like(stored, half)
        read, other = (
            ((stored.int() + add) & mask).to(torch.uint8) for add in (offset, not offset)
        )
        check_version(part, self.version, codes, read, other, index)
        return read

    def bits(self, part: WeightSlice) -> int:
        """Bits of a code, from the height of `qweight`."""
        shape, width = self.header(part, "qweight").shape, part.shape[1]
        bits = 32 * shape[0] // width
        if len(shape) != 2 or bits * width != 32 * shape[0]:
            raise CheckpointError(
                f"{part.name}.qweight has shape {list(shape)}, which does not fit {width} inputs."
            )
        if bits not in BITS:
            raise UnsupportedFeatureError(
                f"{part.name} has {bits} bits; this version reads GPTQ with 2, 4 and 8."
            )
        return bits

    def is_reordered(self, part: WeightSlice) -> bool:
        return bool(self.option(part, "desc_act"))

    def option(self, part: WeightSlice, name: str) -> Any:
        """A setting of a module: of the first matching rule, else the general one."""
        values = next((of_rule for rule, of_rule in self.rules if rule.match(part.name)), {})
        return values.get(name, self.settings.get(name))


def rules_of(dynamic: Mapping[str, Any]) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """GPTQModel's rules by regular expressions, "+:..." with other settings, "-:..." skipped.
    Raises CheckpointError if an expression is not valid."""
    try:
        return [
            (re.compile(re.sub(r"^[+-]:", "", rule)), values if isinstance(values, dict) else {})
            for rule, values in dynamic.items()
        ]
    except re.error as error:
        raise CheckpointError(
            f"quantization_config has a rule in `dynamic` that is no regular expression: {error}."
        ) from error


def check_version(
    part: WeightSlice, version: str, codes: Tensor, read: Tensor, other: Tensor, index: Tensor
) -> None:
    """Refuse zero points that are off by one: weights have a mean of about 0, which a wrong version
    shifts by one code. A few weights of 8 bits can have such a mean by chance; they are not judged.

    Raises:
        CheckpointError: the mean is 0.7 codes or more away, and below 0.3 in the other version.
    """
    values = codes.float()
    if codes.numel() < 2 or float(values.std()) > SURE * codes.numel() ** 0.5:
        return
    mean = float(values.mean())
    ours, theirs = (abs(mean - float(tensor.float()[:, index].mean())) for tensor in (read, other))
    if ours > 0.7 and theirs < 0.3:
        right = next(known for known in VERSIONS if known != version)
        raise CheckpointError(
            f"{part.name} has zero points of {right}, but config.json says {version}: its weights "
            f'would be shifted by one code; set "checkpoint_format": "{right}" in config.json.'
        )
