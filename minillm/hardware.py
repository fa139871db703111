"""What a machine can do at most: datasheet figures, measured ceilings, memory and processors.

A throughput means something only beside its ceiling: `measure()` finds the ceilings of the
machine at hand once (about two seconds) and caches them, `achieved()` divides by them, and
`check_physical()` refuses a measurement that no machine can have produced.
"""

import math
from dataclasses import dataclass

from minillm.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """The ceilings of one device.

    `bandwidth` is of main memory (bytes/s, decimal), `peak_flops` of dense bf16 matrix products
    and `peak_flops_fp32` of float32 ones (operations/s, a multiply-add being two; None: take
    the bf16 rate), `overhead` the seconds that one small operation takes.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: float
    overhead: float
    source: str
    peak_flops_fp32: float | None = None

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth", "peak_flops", "overhead", "peak_flops_fp32"):
            value = getattr(self, field)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field} of {self.name} is {value}; it must be positive.")

    def rate(self, dtype: str) -> float:
        """Peak operations per second of matrix products in `dtype`."""
        wide = dtype == "float32" and self.peak_flops_fp32 is not None
        return self.peak_flops_fp32 if wide and self.peak_flops_fp32 else self.peak_flops

    def ridge(self, dtype: str = "bfloat16") -> float:
        """Operations per byte above which a step is bound by operations (Williams et al., 2009)."""
        return self.rate(dtype) / self.bandwidth
