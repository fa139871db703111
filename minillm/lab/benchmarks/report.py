"""The first fields of a benchmark's JSON data."""

import platform
from typing import Any

from minillm.plan.machine import cpu_name


def about_machine(benchmark: str) -> dict[str, Any]:
    """The benchmark, the machine and Python."""
    return {"benchmark": benchmark, "machine": cpu_name(), "python": platform.python_version()}
