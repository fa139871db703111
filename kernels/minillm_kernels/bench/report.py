"""The table that a benchmark prints, and its JSON."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from minillm_kernels.bench.ceilings import Ceilings
from minillm_kernels.bench.results import Peer, Result, Timing
from minillm_kernels.bench.supervisor import Run
from minillm_kernels.families import FAMILIES

Row = dict[str, Any]
HEADER = ("", "time", "spread", "achieved", "of ceiling", "ratio", "target", "reached")
SCHEMA = 1


# ---- numbers ----------------------------------------------------------------------------------


def row(result: Result, ceilings: Ceilings) -> Row:
    """A result with rates, its share of the measured ceiling, and whether targets were reached."""
    share = _share(result, result.timing, ceilings)
    time = result.timing.seconds * 1e6 if result.timing else None
    if result.bound == "latency":
        reached = None if None in (time, result.target) else time <= result.target  # type: ignore[operator]
    else:
        reached = None if None in (share, result.target) else share >= result.target  # type: ignore[operator]
    return {
        "family": result.family,
        "name": result.name,
        "bound": result.bound,
        "num_bytes": result.num_bytes,
        "num_flops": result.num_flops,
        "num_sets": result.num_sets,
        **_rates(result, result.timing),
        "share": share,
        "target": result.target,
        "reached": reached,
        "peers": [_peer(result, peer, ceilings) for peer in result.peers],
        "error": result.error,
        "left_out": result.left_out,
        "notes": list(result.notes),
    }


def _rates(result: Result, timing: Timing | None) -> Row:
    if timing is None:
        empty = ("time_us", "spread", "repeats", "calls", "how", "gb_per_s", "tflop_per_s")
        return dict.fromkeys(empty)
    return {
        "time_us": timing.seconds * 1e6,
        "spread": timing.spread,
        "repeats": timing.repeats,
        "calls": timing.calls,
        "how": timing.how,
        "gb_per_s": result.num_bytes / timing.seconds / 1e9,
        "tflop_per_s": result.num_flops / timing.seconds / 1e12,
    }


def _share(result: Result, timing: Timing | None, ceilings: Ceilings) -> float | None:
    limits = {"copy": (result.num_bytes, ceilings.copy)}
    limits["matmul"] = (result.num_flops, ceilings.matmul)
    work, ceiling = limits.get(result.bound, (0, None))
    return work / timing.seconds / ceiling if timing and ceiling else None


def _peer(result: Result, peer: Peer, ceilings: Ceilings) -> Row:
    ratio = reached = None
    if peer.timing and result.timing:
        ratio = peer.timing.seconds / result.timing.seconds
        reached = None if peer.target is None else ratio >= peer.target
    return {
        "name": peer.name,
        **_rates(result, peer.timing),
        "share": _share(result, peer.timing, ceilings),
        "ratio": ratio,
        "target": peer.target,
        "reached": reached,
        "error": peer.error,
    }


def verdicts(rows: Sequence[Row]) -> Iterator[Row]:
    """Every target that was set: what was wanted, what was got, and whether that is enough.

    `reached` is None where it could not be judged, and `why` then says why not.
    """
    for each in rows:
        place = {"family": each["family"], "name": each["name"]}
        why = each["error"] or each["left_out"]
        if each["target"] is not None:
            latency = each["bound"] == "latency"
            what = "microseconds" if latency else f"share of the {each['bound']} ceiling"
            got = each["time_us"] if latency else each["share"]
            missing = why or "the ceiling was not measured"
            yield place | _verdict(what, each["target"], got, each["reached"], missing)
        for peer in each["peers"]:
            if peer["target"] is not None:
                what = f"times as fast as {peer['name']}"
                missing = peer["error"] or why or "not measured"
                yield place | _verdict(
                    what, peer["target"], peer["ratio"], peer["reached"], missing
                )


def _verdict(what: str, wanted: float, got: float | None, reached: bool | None, why: str) -> Row:
    verdict = {"what": what, "wanted": wanted, "got": got, "reached": reached}
    return verdict if reached is not None else verdict | {"why": why}


def as_json(run: Run, today: date, quick: bool) -> Row:
    """Everything, for `notebooks/results/`."""
    ceilings = Ceilings.of(run.ceilings)
    families = list(dict.fromkeys(FAMILIES + tuple(result.family for result in run.results)))
    ordered = sorted(run.results, key=lambda result: families.index(result.family))
    rows = [row(result, ceilings) for result in ordered]
    judged = list(verdicts(rows))
    return {
        "benchmark": "minillm_kernels.bench",
        "schema": SCHEMA,
        "date": today.isoformat(),
        "quick": quick,
        "gpu": dict(run.gpu),
        "ceilings": _ceilings(run.ceilings),
        "ceilings_at_end": _ceilings(run.ceilings_at_end),
        "rows": rows,
        "misses": [verdict for verdict in judged if verdict["reached"] is False],
        "not_judged": [verdict for verdict in judged if verdict["reached"] is None],
        "targets": len(judged),
        "stopped": run.stopped,
    }


def _ceilings(results: Sequence[Result]) -> Row:
    found = Ceilings.of(results)
    return {
        "copy_gb_per_s": found.copy and found.copy / 1e9,
        "matmul_tflop_per_s": found.matmul and found.matmul / 1e12,
        "rows": [row(result, found) for result in results],
    }


def slug(name: str) -> str:
    """A GPU's name as a file name: NVIDIA H200 becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def write(report: Row, file: Path) -> None:
    """Replace the file atomically. Raises OSError if that fails."""
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)  # mkstemp lets only the owner read
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


# ---- text -------------------------------------------------------------------------------------


def as_text(report: Row) -> str:
    """Header, one table, and what was missed or left out."""
    parts = [_machine(report), _table(report["rows"]), _closing(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(report: Row) -> str:
    gpu, first, last = report["gpu"], report["ceilings"], report["ceilings_at_end"]
    lines = []
    if gpu:
        lines.append(
            f"{gpu['name']}: compute capability {gpu['compute_capability']}, "
            f"{gpu['multiprocessors']} multiprocessors, {gpu['memory_bytes'] / 1e9:.0f} GB, "
            f"L2 cache of {gpu['l2_cache_bytes'] / 1e6:.0f} MB"
        )
        lines.append(f"driver {gpu['driver']}, torch {gpu['torch']}, Triton {gpu['triton']}")
    lines.append(f"ceilings, measured before:  {_limits(first)}")
    if last["rows"]:
        lines.append(f"and again at the end:       {_limits(last)}")
    return "\n".join(lines)


def _limits(ceilings: Row) -> str:
    copy, matmul = ceilings["copy_gb_per_s"], ceilings["matmul_tflop_per_s"]
    copied = f"{copy:,.0f} GB/s" if copy else "not measured"
    multiplied = f"{matmul:,.0f} TFLOP/s" if matmul else "not measured"
    return f"copy {copied} (read + written), bf16 matmul {multiplied}"


def _table(rows: Sequence[Row]) -> str:
    """A line per measurement, below it one per peer, with the same columns."""
    cells: list[tuple[str, ...] | str] = [HEADER]
    family = None
    for each in rows:
        if each["family"] != family:
            family = each["family"]
            cells.append(f"\n{family}")
        cells.append(_cells(each, f"  {each['name']}"))
        why = each["error"] or each["left_out"]
        if why:
            cells.append(f"      {'failed' if each['error'] else 'left out'}: {why}")
        cells += [f"      note: {note}" for note in each["notes"]]
        for peer in each["peers"]:
            cells.append(_cells(peer, f"    against {peer['name']}", each["bound"]))
            if peer["error"]:
                cells.append(f"      failed: {peer['error']}")
    lines = [line for line in cells if isinstance(line, tuple)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(line if isinstance(line, str) else _aligned(line, widths) for line in cells)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join((first, *rest)).rstrip()


def _cells(each: Mapping[str, Any], name: str, bound: str | None = None) -> tuple[str, ...]:
    bound = bound or each["bound"]
    if each["time_us"] is None:
        return (name, *[""] * (len(HEADER) - 3), _target(each, bound), "")
    achieved = f"{each['tflop_per_s']:,.1f} TFLOP/s" if bound == "matmul" else ""
    achieved = f"{each['gb_per_s']:,.0f} GB/s" if bound == "copy" else achieved
    ratio = each.get("ratio")
    return (
        name,
        duration(each["time_us"]) + ("*" if each["how"] == "launches" else ""),
        f"{each['spread']:.1%}",
        achieved,
        "" if each["share"] is None else f"{each['share']:.1%}",
        "" if ratio is None else f"{ratio:.2f}x",
        _target(each, bound),
        {True: "yes", False: "NO", None: ""}[each["reached"]],
    )


def _target(each: Mapping[str, Any], bound: str) -> str:
    target = each["target"]
    if target is None:
        return ""
    if "ratio" in each:
        return f"{target:.2f}x"
    return duration(target) if bound == "latency" else f"{target:.0%}"


def duration(microseconds: float) -> str:
    """Three digits and a unit."""
    scale, unit = (1.0, "us") if microseconds < 999.5 else (1e3, "ms")
    if microseconds >= 999.5e3:
        scale, unit = 1e6, "s"
    value = microseconds / scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def _closing(report: Row) -> str:
    rows, misses, unjudged = report["rows"], report["misses"], report["not_judged"]
    timed = [part for each in rows for part in (each, *each["peers"])]
    lines = []
    if any(part["how"] == "launches" for part in timed):
        lines.append("* launched one by one, because a CUDA graph of it could not be captured")
    lines.append(
        "ratio: a peer's time over ours, so that above 1 ours is faster; spread: distance of the "
        "quartiles"
    )
    judged = report["targets"] - len(unjudged)
    rest = f"; {len(unjudged)} could not be judged" if unjudged else ""
    lines.append(f"{judged - len(misses)} of {judged} targets reached{rest}.")
    lines += [f"  missed: {_line(verdict)}, got {verdict['got']:.3g}" for verdict in misses]
    lines += [f"  not judged: {_line(verdict)}: {verdict['why']}" for verdict in unjudged]
    failed = [each for each in rows if each["error"]]
    left = [each for each in rows if each["left_out"]]
    if failed:
        lines.append(f"{len(failed)} of {len(rows)} measurements failed.")
    if left:
        why = left[-1]["left_out"]
        lines.append(f"{len(left)} of {len(rows)} measurements were left out: {why}.")
    return "\n".join(lines)


def _line(verdict: Row) -> str:
    place = f"{verdict['family']}, {verdict['name']}"
    return f"{place}: {verdict['what']}, wanted {verdict['wanted']:.3g}"
