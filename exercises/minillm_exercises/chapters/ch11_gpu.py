"""Chapter 11: what is known of a GPU's speed, and where it comes from.

Times are measured here where there is a GPU. Where there is none they are those that somebody's
benchmark left in `notebooks/results`, and without either only the bound is shown.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minillm.lab.hardware import DATASHEET, Hardware
from minillm_exercises.chapters.ch11 import DEVICE, Batch, batch
from minillm_exercises.chapters.common import show_table
from minillm_exercises.notebook import say

H200 = DATASHEET["h200"]
OWN = "chapter"  # the family of the chapter's own kernels
LONGEST = ((32_768,), 32, 8, 128, 64, torch.bfloat16)  # one text of Llama-3.1-8B, for `batch`
SECONDS = 10  # of a live benchmark
RESULTS = Path(__file__).resolve().parents[3] / "notebooks" / "results"
BENCHMARK = "minillm.lab.gpu"
CASES = (  # of the benchmark: what the chapter speaks of
    ("paged_attention", "decode 1 x 32k, pages of 64"),
    ("paged_attention", "decode 64 x 4k, pages of 64"),
    ("paged_attention", "decode 64 x 4k, heads as rows"),
    ("mla", "decode 64 x 8k, 16 heads"),
)


@dataclass(frozen=True)
class Case:
    """A call: the bytes that it has to move at least, and a time if there is one."""

    family: str
    name: str
    num_bytes: int
    microseconds: float | None = None

    def bound(self, gpu: Hardware) -> float:
        """Microseconds below which no GPU of this bandwidth can be done."""
        return self.num_bytes / gpu.bandwidth * 1e6


@dataclass(frozen=True)
class Evidence:
    """Where times come from, in words; the datasheet of the bounds; the calls."""

    source: str
    gpu: Hardware
    cases: tuple[Case, ...]

    @property
    def timed(self) -> bool:
        """Whether any call has a time."""
        return any(case.microseconds for case in self.cases)

    def rows(self) -> list[Sequence[str]]:
        """For a table: what, bytes, bound, time, and the share of the bandwidth that it reached."""
        found: list[Sequence[str]] = []
        for case in self.cases:
            bound, time = case.bound(self.gpu), case.microseconds
            who = "ours" if case.family == OWN else f"engine, {case.family}"
            reached = (f"{time:,.0f}", f"{bound / time:.0%}") if time else ("not measured", "")
            found.append(
                (f"{case.name} ({who})", f"{case.num_bytes / 1e6:,.0f}", f"{bound:,.0f}", *reached)
            )
        return found


def datasheet_of(name: str) -> Hardware | None:
    """The datasheet of a GPU by the name that its driver gives ("NVIDIA H200"), if it is known."""
    if "PCIe" in name:  # slower than the SXM cards, which are those of the table
        return None

    def words(text: str) -> set[str]:
        return set(text.lower().replace("-", " ").split()) - {"geforce", "sxm", "80gb"}

    known = [gpu for gpu in DATASHEET.values() if words(gpu.name) <= words(name)]
    return max(known, key=lambda gpu: len(words(gpu.name)), default=None)


def show_evidence(found: Evidence) -> None:
    """Say where the times come from, and show the table; without times, say what one would see."""
    if not found.timed:
        first = found.cases[0]
        say(
            f"{found.source}. On a GPU this cell measures {len(found.cases)} calls and divides "
            f"each bound by the time; the bound of the first is {first.bound(found.gpu):,.0f} us "
            f"({first.num_bytes / 1e6:,.0f} MB at the {found.gpu.bandwidth / 1e9:,.0f} GB/s of an "
            f"{found.gpu.name})."
        )
        return
    say(f"Times: {found.source}. Bounds: {found.gpu.name}, {found.gpu.bandwidth / 1e9:,.0f} GB/s.")
    show_table(["call", "MB at least", "bound (us)", "time (us)", "of the bandwidth"], found.rows())


def recorded(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The report of the kernels' benchmark with the latest date in a folder; None without any."""
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        if isinstance(report, dict) and report.get("benchmark") == BENCHMARK:
            found.append(report)
    return max(found, key=lambda report: str(report["date"]), default=None)


def measured_here(own: Mapping[str, Callable[[Batch], object]]) -> dict[str, Any] | None:
    """A short benchmark of `CASES` and of the chapter's `own` kernels on this machine's GPU: its
    name and the times. None where none can be measured, and while chapters are only tested."""
    if os.environ.get("MINILLM_QUICK") or DEVICE != "cuda":
        return None
    from minillm_kernels.bench.gpu import Gpu, NoGpuError

    try:
        gpu = Gpu()
    except NoGpuError:
        return None
    return {"gpu": gpu.facts(), "rows": timed(own, gpu)}


def timed(own: Mapping[str, Callable[[Batch], object]], stopwatch: Any) -> list[dict[str, Any]]:
    """Time the benchmark's calls, and `own` kernels on the longest of them, for ten seconds."""
    from minillm_kernels.bench.case import Measurement
    from minillm_kernels.bench.measure import Effort, described, measure

    given = batch(*LONGEST)
    mine = [
        Measurement(OWN, name, _call(run, given), given.cache_bytes) for name, run in own.items()
    ]
    calls = [*mine, *(replace(found, peers={}) for found in _measurements())]
    rows = []
    for call in calls:
        row: dict[str, Any] = {"family": call.family, "name": call.name, "time_us": None}
        try:
            row |= measure(call, stopwatch, Effort(seconds=SECONDS / len(calls)))
        except Exception as error:
            row["error"] = described(error)
        rows.append(row)
    return rows


def _call(run: Callable[[Batch], object], given: Batch) -> Callable[[int], object]:
    return lambda number: run(given)


def evidence(
    own: Sequence[str], live: Mapping[str, Any] | None, report: Mapping[str, Any] | None
) -> Evidence:
    """The chapter's `own` kernels and the calls of `CASES`, with times from here, else from a
    report, else with none."""
    known = live or report
    gpu, source = H200, "No GPU is here, and no benchmark of one has been recorded"
    times: Mapping[tuple[str, str], float | None] = {}
    if known:
        times = {(row["family"], row["name"]): row["time_us"] for row in known["rows"]}
        gpu = datasheet_of(known["gpu"]["name"]) or gpu
        when = f"recorded on {known['date']}" if known is report else "measured now"
        source = f"{when}, {known['gpu']['name']}"
    sizes = {(OWN, name): _longest_bytes() for name in own}
    sizes |= {(found.family, found.name): found.num_bytes for found in _measurements()}
    return Evidence(source, gpu, tuple(Case(*key, sizes[key], times.get(key)) for key in sizes))


def _longest_bytes() -> int:
    (length,), _, kv_heads, dim, _, dtype = LONGEST
    return 2 * length * kv_heads * dim * dtype.itemsize


def _measurements() -> list[Any]:
    """The benchmark's measurements of `CASES`; their tensors are made when they are run."""
    from minillm_kernels.bench import mla, paged_attention

    found = {
        (family, size.name): (module.measurement, size)
        for family, module in (("paged_attention", paged_attention), ("mla", mla))
        for size in module.SIZES
    }
    return [make(size, "cuda") for make, size in (found[case] for case in CASES)]
