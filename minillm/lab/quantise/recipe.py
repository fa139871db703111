"""What to make: a method of quantisation with its settings, and the format that is written."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from minillm.errors import ConfigError, did_you_mean

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "rtn": "round to nearest, in groups",
        "gptq": "round column by column, correcting later columns (calibrated)",
        "awq": "scale important inputs up before rounding, and clip (calibrated)",
        "smoothquant": "8-bit weights and activations, outliers moved into weights (calibrated)",
        "int8": "8-bit codes, a scale per row",
        "nf4": "4-bit quantiles of a normal distribution, blocks of 64",
        "fp8": "8-bit floating point, a scale per row or per block of 128 x 128",
    }
)
# The formats that can hold the result of each method; the first is the default.
FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rtn": ("compressed-tensors", "gptq", "awq"),
        "gptq": ("compressed-tensors", "gptq", "awq"),
        "awq": ("compressed-tensors", "gptq", "awq"),
        "smoothquant": ("compressed-tensors",),
        "int8": ("compressed-tensors", "bnb"),
        "nf4": ("bnb",),
        "fp8": ("fp8", "compressed-tensors"),
    }
)
# Bits of a code that each format can hold.
WIDTHS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"compressed-tensors": (4, 8), "gptq": (4, 8), "awq": (4,), "bnb": (4, 8), "fp8": (8,)}
)
GROUPED = ("rtn", "gptq", "awq")  # methods with a choice of bits, groups and zero points
CALIBRATED = ("gptq", "awq", "smoothquant")
# The methods on which each setting has an effect.
SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bits": GROUPED,
        "symmetric": GROUPED,
        "group_size": (*GROUPED, "fp8"),
        "act_order": ("gptq",),
        "static_groups": ("gptq",),
        "damp": ("gptq",),
        "clip": ("awq",),
        "alpha": ("smoothquant",),
        "double": ("nf4",),
    }
)
BLOCK = 128  # side of a block of FP8 weights
NF4_BLOCK = 64


@dataclass(frozen=True)
class Recipe:
    """A method and its settings.

    Attributes:
        method: one of METHODS.
        bits: 2 to 8 bits of a code; only for rtn, gptq and awq.
        group_size: inputs that share a scale; -1: whole rows; None: the largest of 128, 64 and 32
            that divides all rows. FP8: 128 (blocks) or -1 (rows).
        symmetric: no zero points; only for rtn, gptq and awq.
        act_order: GPTQ rounds the columns with the largest inputs first.
        static_groups: GPTQ takes scales from the original weights.
        damp: GPTQ adds this share of the mean diagonal to the Hessian.
        clip: AWQ also searches for a smaller range of each group.
        alpha: SmoothQuant's share of an outlier that moves into the weights.
        double: NF4's scales are quantised too.
        head: the output matrix is rounded to 8 bits, a scale per row.
    """

    method: str = "rtn"
    bits: int = 4
    group_size: int | None = None
    symmetric: bool = False
    act_order: bool = False
    static_groups: bool = False
    damp: float = 0.01
    clip: bool = True
    alpha: float = 0.5
    double: bool = True
    head: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"There is no method {self.method!r}; choose {', '.join(METHODS)}."
                f"{did_you_mean(self.method, METHODS)}"
            )
        if self.grouped and not 2 <= self.bits <= 8:
            raise ConfigError(f"{self.bits} bits are not possible; choose 2 to 8.")
        if not 0 <= self.damp < 1:
            raise ConfigError(f"damp is {self.damp}; it must be at least 0 and below 1.")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be from 0 to 1.")
        self._check_group()

    def _check_group(self) -> None:
        size = self.group_size
        if size is not None and size != -1 and size < 1:
            raise ConfigError(f"group_size is {size}; it must be positive, or -1 for whole rows.")
        if self.method == "fp8" and size not in (None, -1, BLOCK):
            raise ConfigError(
                f"FP8 has blocks of {BLOCK} or whole rows (-1), not groups of {size}."
            )
        if self.method == "nf4" and size not in (None, NF4_BLOCK):
            raise ConfigError(f"NF4 has blocks of {NF4_BLOCK}, not {size}; leave group_size out.")
        if self.method in ("int8", "smoothquant") and size not in (None, -1):
            raise ConfigError(f"{self.method} has a scale per row; leave group_size out.")

    @property
    def grouped(self) -> bool:
        """Whether bits, groups and zero points can be chosen."""
        return self.method in GROUPED

    @property
    def calibrated(self) -> bool:
        """Whether the method needs a calibration text."""
        return self.method in CALIBRATED

    @property
    def width(self) -> int:
        """Bits of a code."""
        return self.bits if self.grouped else 4 if self.method == "nf4" else 8

    def format(self, wanted: str | None = None) -> str:
        """The format to write: `wanted`, or the method's default.

        Raises:
            ConfigError: the format cannot hold what the recipe makes.
        """
        possible = FORMATS[self.method]
        chosen = wanted or possible[0]
        if chosen not in possible:
            raise ConfigError(
                f"The format {chosen!r} cannot hold {self.method}; choose {' or '.join(possible)}."
            )
        if self.width not in WIDTHS[chosen]:
            allowed = " or ".join(map(str, WIDTHS[chosen]))
            raise ConfigError(
                f"The format {chosen} holds {allowed} bits, not {self.width}; 2 to 8 bits can only "
                "be measured in memory, with `minillm compare`."
            )
        if chosen == "awq" and (self.symmetric or self.act_order):
            raise ConfigError(
                "The format awq has zero points and no act order; leave --sym and --act-order out."
            )
        if self.head and (chosen != "compressed-tensors" or self.method == "fp8"):
            raise ConfigError(
                f"The format {chosen} of {self.method} has no place for an output matrix of 8 bits "
                "(--head); compressed-tensors has one, with rtn, gptq, awq, int8 and smoothquant."
            )
        if chosen == "fp8" and self.group_size == -1:
            raise ConfigError(
                "The format fp8 has blocks of 128; for a scale per row use compressed-tensors."
            )
        return chosen

    def settings(self) -> dict[str, Any]:
        """The settings that have an effect with this method, for a README."""
        used = {"method": (self.method,), "head": (self.method,) * self.head, **SETTINGS}
        return {name: value for name, value in asdict(self).items() if self.method in used[name]}
