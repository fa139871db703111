"""Stage "facts": the machine, and the ceilings that every share is of."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from minillm.lab.gpu.worker import Case, Context

QUERY = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,memory.total,memory.used"


def cases(context: Context) -> list[Case]:
    """What is here, and how fast it copies, reads and multiplies."""
    return [
        Case("machine", lambda: machine(context.dry)),
        Case("ceilings", lambda: ceilings(context.dry)),
    ]


def machine(dry: bool) -> dict[str, Any]:
    """Versions and tools; with a GPU its own facts. Raises NoGpuError if kernels cannot run."""
    import torch

    from minillm_kernels.launch import triton

    line = smi()
    facts: dict[str, Any] = {
        "python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__,
        "processors": os.cpu_count(), "gcc": shutil.which("gcc") or shutil.which("cc"),
        "python_h": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "compute_sanitizer": shutil.which("compute-sanitizer"), "nvidia_smi": line,
        "driver": dict(zip(QUERY.split(","), (line or "").split(", "), strict=False)).get(
            "driver_version"
        ),
    }  # fmt: skip
    if not dry:
        from minillm_kernels.bench.gpu import Gpu

        facts |= Gpu().facts()
    return {"machine": facts}


def smi() -> str | None:
    """The line that nvidia-smi prints for `QUERY`, if it is there."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def ceilings(dry: bool) -> dict[str, Any]:
    """The best rate of each kind, in GB/s and TFLOP/s."""
    from minillm_kernels.bench.ceilings import ceilings as limits

    if dry:
        for limit in limits(tiny=True):
            limit.run(0)
        return {}
    from minillm_kernels.bench.gpu import Gpu
    from minillm_kernels.bench.measure import Effort, measure

    gpu, rows = Gpu(), []
    for limit in limits():
        rows.append(measure(limit, gpu, Effort(least=5, most=40, seconds=2.0)))
    figures = {}
    for row in rows:
        fastest = min(t for t in (row["time_us"], *(p["time_us"] for p in row["peers"])) if t)
        work, unit = (row["num_flops"], "TFLOP/s") if row["bound"] == "matmul" else (
            row["num_bytes"], "GB/s")  # fmt: skip
        figures[f"{row['bound']} {unit}"] = work / fastest / (1e6 if unit == "TFLOP/s" else 1e3)
    return {"figures": figures, "rows": rows}
