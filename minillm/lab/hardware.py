"""Peak rates of devices from their datasheets, and how a measurement compares with them.

`achieved()` divides a measurement by the peak rates of a device; `check_physical()` rejects one
that the device cannot have produced. `lab/ceilings.py` measures the rates of this machine.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minillm.errors import ConfigError, MinillmError


@dataclass(frozen=True)
class Hardware:
    """The peak rates of one device.

    `bandwidth` is of main memory (bytes/s, decimal), `peak_flops` of dense bf16 matrix products and
    `peak_flops_fp32` of float32 ones (operations/s, two per multiply-add). Those of 8-bit products
    are 0 if they are not known. `overhead` is the time of one small operation in seconds.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: float
    overhead: float
    source: str
    peak_flops_fp32: float
    peak_ops_int8: float = 0.0
    peak_flops_fp8: float = 0.0

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth", "peak_flops", "overhead", "peak_flops_fp32"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field} of {self.name} is {value}; it must be positive.")

    def rate(self, dtype: str) -> float:
        """Peak operations per second of matrix products in `dtype`: a 32-bit or 16-bit type, "int8"
        or "fp8". For 8 bits at least that of bf16, in which they can be computed, too."""
        if dtype == "float32":
            return self.peak_flops_fp32
        eight_bits = {"int8": self.peak_ops_int8, "fp8": self.peak_flops_fp8}
        return max(self.peak_flops, eight_bits.get(dtype, 0.0))

    def ridge(self, dtype: str = "bfloat16") -> float:
        """Arithmetic intensity (operations per byte) above which a step is compute-bound (Williams
        et al., 2009)."""
        return self.rate(dtype) / self.bandwidth


def _datasheet(
    *rows: tuple[str, str, float, float, float, float, float, float, str],
) -> Mapping[str, Hardware]:
    """Rows of (key, name, GB, GB/s, TFLOP/s in bf16 and float32, TOP/s in int8, TFLOP/s in FP8,
    source)."""
    return MappingProxyType(
        {
            key: Hardware(name, int(gb * 1e9), rate * 1e9, bf16 * 1e12, LAUNCH, source,
                          fp32 * 1e12, int8 * 1e12, fp8 * 1e12)
            for key, name, gb, rate, bf16, fp32, int8, fp8, source in rows
        }
    )  # fmt: skip


# A typical value, not from datasheets: of one kernel in eager PyTorch on GPUs (about 1.5 us in a
# CUDA graph), and of one small PyTorch operation on laptops.
LAUNCH = 5 * 1e-6  # seconds
# Nominal figures in decimal units, dense rates (the vendors' sparse figures are twice as large).
# The float32 rate is that of the vector units: by default PyTorch does not use TF32 tensor cores.
# Rates in 8 bits are 0 where they are not published; the A100 has no FP8.
DATASHEET: Mapping[str, Hardware] = _datasheet(
    ("a100-sxm", "NVIDIA A100 SXM 80GB", 80, 2039, 312, 19.5, 624, 0,
     "NVIDIA A100 datasheet, 2021"),
    ("h100-sxm", "NVIDIA H100 SXM", 80, 3350, 989, 67, 1979, 1979, "NVIDIA H100 datasheet, 2023"),
    ("h200", "NVIDIA H200 SXM", 141, 4800, 989, 67, 1979, 1979, "NVIDIA H200 datasheet, 2024"),
    ("b200", "NVIDIA B200", 180, 8000, 2250, 80, 4500, 4500,
     "NVIDIA HGX B200 datasheet, 2024; 192 GB are on the package, about 180 GB usable"),
    ("mi300x", "AMD Instinct MI300X", 192, 5300, 1307, 163.4, 2614.9, 2614.9,
     "AMD MI300X datasheet, 2023"),
    ("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", 16, 896, 87.9, 43.9, 0, 0,
     "NVIDIA Blackwell RTX whitepaper, 2025; bf16 with float32 accumulation"),
    ("apple-m1", "Apple M1", 16, 68.25, 2.6, 2.6, 0, 0,
     "Apple, 2020: two-channel LPDDR4X-4266; float32 rate of the GPU, no bf16 rate published"),
    ("apple-m2", "Apple M2", 24, 100, 3.6, 3.6, 0, 0,
     "Apple, 2022: float32 rate of the GPU, no bf16 rate published"),
    ("apple-m1-max", "Apple M1 Max", 64, 400, 10.4, 10.4, 0, 0,
     "Apple, 2021: float32 rate of the GPU, no bf16 rate published"),
    ("laptop-ddr5", "x86 laptop, 8 cores, two-channel DDR5-5600", 16, 89.6, 0.9, 0.9, 0, 0,
     "arithmetic: 2 x 8 bytes x 5.6 GT/s; 8 cores x 32 float32 operations x 3.5 GHz (AVX2)"),
)  # fmt: skip


class ImpossibleMeasurementError(MinillmError, ValueError):
    """A measurement above what the hardware can do: some part of it is wrong."""


@dataclass(frozen=True)
class Achieved:
    """What a measurement reached: bytes/s, operations/s, and their shares of the ceilings."""

    bandwidth: float
    flops_per_second: float
    bandwidth_fraction: float
    flops_fraction: float


def achieved(
    flops: float, num_bytes: float, seconds: float, hardware: Hardware, dtype: str = "bfloat16"
) -> Achieved:
    """Divide a measurement by the ceilings of `hardware`."""
    if not seconds > 0:
        raise ImpossibleMeasurementError(f"A measurement took {seconds} s; it must be positive.")
    return Achieved(
        bandwidth=num_bytes / seconds,
        flops_per_second=flops / seconds,
        bandwidth_fraction=num_bytes / seconds / hardware.bandwidth,
        flops_fraction=flops / seconds / hardware.rate(dtype),
    )


def check_physical(
    flops: float,
    num_bytes: float,
    seconds: float,
    hardware: Hardware,
    dtype: str = "bfloat16",
    slack: float = 0.0,
) -> Achieved:
    """Return `achieved(...)`, or raise `ImpossibleMeasurementError` when it is above a ceiling.

    Above both, the error names the one that is exceeded more. A datasheet rate is a hard limit. A
    measured ceiling is what one run reached, on a shared machine perhaps in a bad moment, so give
    it some `slack` (0.2 accepts 20 percent more).
    """
    result = achieved(flops, num_bytes, seconds, hardware, dtype)
    fraction, what, rate = max(
        (result.bandwidth_fraction, "bytes", f"{result.bandwidth / 1e9:.4g} GB/s"),
        (result.flops_fraction, "operations", f"{result.flops_per_second / 1e12:.4g} TFLOP/s"),
    )
    if fraction > 1 + slack:
        raise ImpossibleMeasurementError(
            f"The {what} of this measurement need {rate}, {fraction:.2f} times what "
            f"{hardware.name} can do; check the timer (is the device synchronised?), caches "
            f"and reused results, and what was counted."
        )
    return result
