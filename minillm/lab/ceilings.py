"""Measures the peak rates of this machine, once (about two seconds), and caches them."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.lab.hardware import Hardware
from minillm.plan import machine

if TYPE_CHECKING:
    import torch


MEASURED, DISTURBED = "measured", "measured while other programs ran"


def measure(refresh: bool = False, device: str = "cpu") -> Hardware:
    """Measure the peak rates of this machine, or return the best that were measured before.

    They are cached per processor, torch version, number of threads and container quota in
    ``$XDG_CACHE_HOME/minillm`` (``~/.cache/minillm``). If the cache cannot be read or written, the
    rates are measured again. With `refresh` they are measured again and the new rates are
    returned, because the rates of a shared machine change. If other programs used the processors
    during a measurement, `source` says so and the next call measures again; the cache keeps the
    best of all. The CUDA branch has not been run on a GPU yet.
    """
    import torch

    threads, cpus = torch.get_num_threads(), machine.cpu_count()
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else machine.cpu_name()
    key = f"{name}, torch {torch.__version__}, {threads} threads, {cpus} processors, with int8"
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
    """The higher of each rate."""
    return replace(
        new,
        bandwidth=max(old.bandwidth, new.bandwidth),
        peak_flops=max(old.peak_flops, new.peak_flops),
        peak_flops_fp32=max(old.peak_flops_fp32, new.peak_flops_fp32),
        peak_ops_int8=max(old.peak_ops_int8, new.peak_ops_int8),
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
    """Seconds of the fastest run within `budget` seconds, after one warm-up run."""
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
        peak_ops_int8=_int8_rate(1024, device, budget),
    )


def _cpu_read_bandwidth(num_bytes: int, dtype: "torch.dtype", budget: float) -> float:
    """Bytes/s of the fastest way to read a buffer: sums, or oneDNN's product of one row with a
    packed weight."""
    import torch

    width = 4096
    buffer = torch.ones(max(1, num_bytes // (4 * width)), width)
    runs: list[Callable[[], object]] = [buffer.sum, buffer.view(torch.int64).sum]
    runs += _packed_product(torch.ones(1, width, dtype=dtype), buffer.view(dtype).view(-1, width))
    return max(buffer.nbytes / _best(run, budget) for run in runs)


def _packed_product(x: "torch.Tensor", weight: "torch.Tensor") -> list[Callable[[], object]]:
    """The product with a weight in oneDNN's packed layout; empty if torch does not have these
    private operations (inductor uses them) or they do not support the dtype."""
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


def _int8_rate(n: int, device: str, budget: float) -> float:
    """Operations/s of products of square int8 matrices: torch's on a GPU; on a CPU this engine's,
    which rounds activations to 8 bits, because torch's is slow without VNNI. 0 without one. (The
    right matrix of torch's is transposed, the layout that cuBLAS takes.)"""
    import torch

    runs: list[Callable[[], object]]
    if device.startswith("cuda"):
        matrix = torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device)
        runs = [partial(_synchronised, partial(torch._int_mm, matrix, matrix.T), device, 1)]
    else:
        runs = _our_int8(n)
    try:
        return max((2 * n**3 / _best(run, budget / len(runs)) for run in runs), default=0.0)
    except RuntimeError:  # a GPU that has no such product
        return 0.0


def _our_int8(n: int) -> list[Callable[[], object]]:
    """The int8 product of minillm's C functions, on processors that support it."""
    import torch

    from minillm.ops import cpu
    from minillm.ops.cpu_quantized import packed_matrix, quantized_linear

    if not cpu.panels_are_fast(torch.bfloat16):
        return []
    codes, scales = torch.full((n, n), 200, dtype=torch.uint8), torch.ones(n, 1)
    matrix, x = packed_matrix(codes, 8, scales, None, None), torch.randn(n, n).bfloat16()
    return [lambda: quantized_linear(x, matrix, None, n)]


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
        peak_ops_int8=_int8_rate(8192, device, budget),
    )
