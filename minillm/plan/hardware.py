"""What a machine can do at most: datasheet figures, measured ceilings, memory and processors.

A throughput means something only beside its ceiling: `measure()` finds the ceilings of the
machine at hand once (about two seconds) and caches them, `achieved()` divides by them, and
`check_physical()` refuses a measurement that no machine can have produced.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from minillm.plan import machine
from minillm.errors import ConfigError, MinillmError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hardware:
    """The ceilings of one device.

    `bandwidth` is of main memory (bytes/s, decimal), `peak_flops` of dense bf16 matrix products
    and `peak_flops_fp32` of float32 ones (operations/s, a multiply-add being two), `overhead` the
    seconds that one small operation takes.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: float
    overhead: float
    source: str
    peak_flops_fp32: float

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "bandwidth", "peak_flops", "overhead", "peak_flops_fp32"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{field} of {self.name} is {value}; it must be positive.")

    def rate(self, dtype: str) -> float:
        """Peak operations per second of matrix products in `dtype`."""
        return self.peak_flops_fp32 if dtype == "float32" else self.peak_flops

    def ridge(self, dtype: str = "bfloat16") -> float:
        """Operations per byte above which a step is bound by operations (Williams et al., 2009)."""
        return self.rate(dtype) / self.bandwidth


def _datasheet(
    *rows: tuple[str, str, float, float, float, float, float, str],
) -> Mapping[str, Hardware]:
    """Rows of (key, name, GB, GB/s, bf16 and float32 TFLOP/s, microseconds per launch, source)."""
    return MappingProxyType(
        {
            key: Hardware(
                name, int(gb * 1e9), rate * 1e9, bf16 * 1e12, launch * 1e-6, source, fp32 * 1e12
            )
            for key, name, gb, rate, bf16, fp32, launch, source in rows
        }
    )


# Nominal figures in decimal units, dense rates (the vendors' sparse figures are twice as large).
# The float32 rate is that of the vector units: PyTorch uses TF32 tensor cores only when asked to.
# Launch times are of one kernel from eager PyTorch; a captured graph needs about 1.5 us instead.
# For the laptops they are of one small PyTorch operation. Both are typical values, not datasheet.
DATASHEET: Mapping[str, Hardware] = _datasheet(
    ("a100-sxm", "NVIDIA A100 SXM 80GB", 80, 2039, 312, 19.5, 5, "NVIDIA A100 datasheet, 2021"),
    ("h100-sxm", "NVIDIA H100 SXM", 80, 3350, 989, 67, 5, "NVIDIA H100 datasheet, 2023"),
    ("h200", "NVIDIA H200 SXM", 141, 4800, 989, 67, 5, "NVIDIA H200 datasheet, 2024"),
    (
        "b200",
        "NVIDIA B200",
        180,
        8000,
        2250,
        80,
        5,
        "NVIDIA HGX B200 datasheet, 2024; 192 GB are on the package, about 180 GB usable",
    ),
    ("mi300x", "AMD Instinct MI300X", 192, 5300, 1307, 163.4, 5, "AMD MI300X datasheet, 2023"),
    (
        "rtx-5070-ti",
        "NVIDIA GeForce RTX 5070 Ti",
        16,
        896,
        87.9,
        43.9,
        5,
        "NVIDIA Blackwell RTX whitepaper, 2025; bf16 with float32 accumulation",
    ),
    (
        "apple-m1",
        "Apple M1",
        16,
        68.25,
        2.6,
        2.6,
        5,
        "Apple, 2020: two-channel LPDDR4X-4266; float32 rate of the GPU, no bf16 rate published",
    ),
    (
        "apple-m2",
        "Apple M2",
        24,
        100,
        3.6,
        3.6,
        5,
        "Apple, 2022: float32 rate of the GPU, no bf16 rate published",
    ),
    (
        "apple-m1-max",
        "Apple M1 Max",
        64,
        400,
        10.4,
        10.4,
        5,
        "Apple, 2021: float32 rate of the GPU, no bf16 rate published",
    ),
    (
        "laptop-ddr5",
        "x86 laptop, 8 cores, two-channel DDR5-5600",
        16,
        89.6,
        0.9,
        0.9,
        5,
        "arithmetic: 2 x 8 bytes x 5.6 GT/s; 8 cores x 32 float32 operations x 3.5 GHz (AVX2)",
    ),
)


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

    A datasheet rate is a hard limit. A measured ceiling is what one run reached, on a shared
    machine perhaps in a bad moment, so give it some `slack` (0.2 accepts 20 percent more).
    """
    result = achieved(flops, num_bytes, seconds, hardware, dtype)
    for what, fraction, rate, unit in (
        ("bytes", result.bandwidth_fraction, result.bandwidth / 1e9, "GB/s"),
        ("operations", result.flops_fraction, result.flops_per_second / 1e12, "TFLOP/s"),
    ):
        if fraction > 1 + slack:
            raise ImpossibleMeasurementError(
                f"The {what} of this measurement need {rate:.4g} {unit}, {fraction:.2f} times what "
                f"{hardware.name} can do; check the timer (is the device synchronised?), caches "
                f"and reused results, and what was counted."
            )
    return result


MEASURED, DISTURBED = "measured", "measured while other programs ran"


def measure(refresh: bool = False, device: str = "cpu") -> Hardware:
    """Measure the ceilings of this machine, or return the best that was measured before.

    Cached per processor, torch version, number of threads and container quota in
    ``$XDG_CACHE_HOME/minillm`` (``~/.cache/minillm``); a cache that cannot be read or written
    costs a new measurement, never an error. `refresh` measures again and returns that: on a
    shared host what is reachable moves, and a result of this minute wants a ceiling of this
    minute. A measurement during which other programs held the processors says so in `source`
    and is no ceiling: the next call measures again, and the cache keeps the best of all.
    The CUDA branch has not been run on a GPU yet.
    """
    import torch

    threads, cpus = torch.get_num_threads(), machine.cpu_count()
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else machine.cpu_name()
    key = f"{name}, torch {torch.__version__}, {threads} threads, {cpus} processors"
    path = _cache_path()
    known = _read_cache(path)
    if key in known and known[key].source == MEASURED and not refresh:
        return known[key]
    probe = _measure_cuda if device.startswith("cuda") else _measure_cpu
    start, waited = time.perf_counter(), machine.seconds_waited()
    with torch.inference_mode():
        hardware = probe(name, device)
    if machine.seconds_waited() - waited > 0.2 * (time.perf_counter() - start):
        hardware = replace(hardware, source=DISTURBED)
    best = _best_of(known.get(key, hardware), hardware)
    _write_cache(path, known | {key: best})
    return hardware if refresh else best


def _best_of(old: Hardware, new: Hardware) -> Hardware:
    """The higher of each ceiling."""
    return replace(
        new,
        bandwidth=max(old.bandwidth, new.bandwidth),
        peak_flops=max(old.peak_flops, new.peak_flops),
        peak_flops_fp32=max(old.peak_flops_fp32, new.peak_flops_fp32),
        overhead=min(old.overhead, new.overhead),
        source=MEASURED if MEASURED in (old.source, new.source) else DISTURBED,
    )


def _cache_path() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "minillm" / "hardware.json"
    except RuntimeError:  # this user has no home folder
        return None


def _read_cache(path: Path | None) -> dict[str, Hardware]:
    try:
        entries = json.loads(path.read_text()) if path else {}
        return {key: Hardware(**entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_cache(path: Path | None, entries: Mapping[str, Hardware]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")  # two processes may finish at once
        part.write_text(json.dumps({key: asdict(entry) for key, entry in entries.items()}))
        part.replace(path)
    except OSError:
        return


def _best(run: Callable[[], object], budget: float) -> float:
    """Seconds of the fastest of the runs that fit into `budget` seconds, after one to warm up:
    what slows a run down is never the hardware's limit."""
    run()
    best, end = math.inf, time.perf_counter() + budget
    while best == math.inf or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def _measure_cpu(name: str, device: str, budget: float = 0.25) -> Hardware:
    import torch

    cache = machine.last_level_cache_bytes()
    num_bytes = min(max(4 * cache, 2**27), 2**30, machine.available_memory_bytes() // 8)
    fast = torch.bfloat16 if machine.cpu_has_bf16() else torch.float32
    small = torch.ones(1024)
    return Hardware(
        name=name,
        memory_bytes=machine.total_memory_bytes(),
        bandwidth=_cpu_read_bandwidth(num_bytes, fast, budget),
        peak_flops=_matrix_rate(fast, (512, 1024), device, budget),
        peak_flops_fp32=_matrix_rate(torch.float32, (512, 1024), device, budget),
        overhead=_best(lambda: [torch.add(small, small) for _ in range(200)], budget / 4) / 200,
        source=MEASURED,
    )


def _cpu_read_bandwidth(num_bytes: int, dtype: "torch.dtype", budget: float) -> float:
    """Bytes/s of the fastest way to read a buffer: plain sums, whose speed depends on how well
    the reduction was compiled, or oneDNN's product of one row with a packed weight."""
    import torch

    width = 4096
    buffer = torch.ones(max(1, num_bytes // (4 * width)), width)
    runs: list[Callable[[], object]] = [buffer.sum, buffer.view(torch.int64).sum]
    runs += _packed_product(torch.ones(1, width, dtype=dtype), buffer.view(dtype).view(-1, width))
    return max(buffer.nbytes / _best(run, budget) for run in runs)


def _packed_product(x: "torch.Tensor", weight: "torch.Tensor") -> list[Callable[[], object]]:
    """The product with a weight in oneDNN's own layout, or nothing where these private
    operations, which inductor uses, do not exist or do not take this type."""
    import torch

    onednn = torch.ops.mkldnn
    try:
        packed = onednn._reorder_linear_weight(weight, len(x))
        onednn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return []
    return [lambda: onednn._linear_pointwise(x, packed, None, "none", [], "")]


def _matrix_rate(dtype: "torch.dtype", sizes: tuple[int, ...], device: str, budget: float) -> float:
    """Operations/s of the fastest product of square matrices, plain or packed."""
    import torch

    rates = []
    for n in sizes:
        matrix = torch.randn(n, n, device=device).to(dtype)
        runs: list[Callable[[], object]] = [partial(torch.mm, matrix, matrix)]
        if matrix.is_cuda:
            runs = [partial(_synchronised, runs[0], device, 1)]
        else:
            runs += _packed_product(matrix, matrix)
        rates += [2 * n**3 / _best(run, budget / len(sizes) / len(runs)) for run in runs]
    return max(rates)


def _synchronised(step: Callable[[], object], device: str, repeats: int) -> None:
    import torch

    for _ in range(repeats):
        step()
    torch.cuda.synchronize(device)


def _measure_cuda(name: str, device: str, budget: float = 0.25) -> Hardware:
    import torch

    memory = torch.cuda.get_device_properties(device).total_memory
    source = torch.ones(min(2**30, memory // 8), dtype=torch.uint8, device=device)
    target, small = torch.empty_like(source), torch.ones(1024, device=device)
    copy = partial(_synchronised, partial(target.copy_, source), device, 4)
    launch = partial(_synchronised, partial(torch.add, small, small), device, 1000)
    return Hardware(
        name=name,
        memory_bytes=memory,
        bandwidth=2 * source.nbytes * 4 / _best(copy, budget),
        peak_flops=_matrix_rate(torch.bfloat16, (4096, 8192), device, budget),
        peak_flops_fp32=_matrix_rate(torch.float32, (4096,), device, budget),
        overhead=_best(launch, budget) / 1000,
        source=MEASURED,
    )
