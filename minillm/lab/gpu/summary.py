"""The tables of a run: summary.json, summary.md, and what is printed at the end."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

Record = Mapping[str, Any]
BENCHMARK, SCHEMA, PRINTED = "minillm.lab.gpu", 1, 80
BAD = ("failed", "error", "crashed", "hung", "timeout")


def summary(
    records: Sequence[Record],
    before: Sequence[Record] = (),
    seconds: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Everything of a run as plain data; `before` are the records of an earlier one.

    "rows" are those of `minillm_kernels.bench.measure`, with their share of the ceiling.
    """
    ceilings = ceilings_of(records)
    machine = machine_of(records)
    done = [dict(record) for record in records if "status" in record]
    for record in done:
        figures = record.get("figures")
        if figures and ceilings and record["stage"] == "decode":
            for kind in ("read", "copy"):
                figures |= {f"of {kind}": figures["GB/s"] / ceilings[f"{kind} GB/s"]}
    kernels = [record | {"share": share(record, ceilings)} for record in done
               if record["stage"] == "kernels" and record.get("time_us")]  # fmt: skip
    return {
        "benchmark": BENCHMARK, "schema": SCHEMA, "date": date.today().isoformat(),
        "gpu": machine, "ceilings": ceilings,
        "stages": {
            stage: {"cases": dict(Counter(e["status"] for e in done if e["stage"] == stage)),
                    "seconds": seconds.get(stage)}
            for stage in dict.fromkeys(record["stage"] for record in done)
        },
        "wrong": [record for record in done if record["status"] in BAD],
        "found": [record for record in done if record.get("figures")],
        "rows": kernels,
        "compared": compared(done, before, machine),
    }  # fmt: skip


def machine_of(records: Iterable[Record]) -> dict[str, Any]:
    """The facts of the machine."""
    return next((dict(record["machine"]) for record in records if record.get("machine")), {})


def ceilings_of(records: Iterable[Record]) -> dict[str, float]:
    """The measured ceilings, by kind."""
    return next((dict(record["figures"]) for record in records
                 if record["stage"] == "facts" and record.get("figures")), {})  # fmt: skip


def share(row: Record, ceilings: Mapping[str, float]) -> float | None:
    """What a measurement reached of the ceiling that bounds it; None for latencies."""
    kind = {"copy": ("gb_per_s", "copy GB/s"), "matmul": ("tflop_per_s", "matmul TFLOP/s")}
    rate, ceiling = kind.get(row["bound"], ("", ""))
    return row[rate] / ceilings[ceiling] if ceiling in ceilings else None


def compared(
    now: Sequence[Record], before: Sequence[Record], machine: Record
) -> list[dict[str, Any]]:
    """Figures that an earlier run has, too: old, new, and new over old. On another card there are
    none but the names of both."""
    old_machine = machine_of(before)
    if before and old_machine.get("name") != machine.get("name"):
        return [
            {"case": "cards differ", "old": old_machine.get("name"), "new": machine.get("name")}
        ]
    old = {key(record): record["figures"] for record in before if record.get("figures")}
    return [
        {"case": ", ".join(key(one)), "figure": name, "old": old[key(one)][name], "new": value,
         "ratio": value / old[key(one)][name]}
        for one in now if one.get("figures") and key(one) in old
        for name, value in one["figures"].items() if old[key(one)].get(name)
    ]  # fmt: skip


def key(record: Record) -> tuple[str, str, str]:
    """What a record is of."""
    return record["stage"], record["task"], record.get("case", "")


def lines(data: Mapping[str, Any]) -> list[str]:
    """The summary as lines of text, the most important first."""
    gpu = data["gpu"]
    machine = f"{gpu.get('name', 'no GPU')}, torch {gpu.get('torch')}, Triton {gpu.get('triton')}"
    machine += f", driver {gpu['driver']}" if gpu.get("driver") else ""
    told = ["; ".join(filter(None, (machine, figures(data["ceilings"]))))]
    for stage, row in data["stages"].items():
        counts = ", ".join(f"{count} {status}" for status, count in row["cases"].items())
        took = f" in {row['seconds']:.0f} s" if row["seconds"] else ""
        told.append(f"{stage:<9} {counts}{took}")
    told += [f"WRONG {', '.join(key(e))}: {e['status']}: {str(e.get('error'))[:160]}"
             for e in data["wrong"][:25]]  # fmt: skip
    for row in data["compared"]:
        text = f"{row['case']}: {row.get('figure', '')} {row['old']} -> {row['new']}"
        if "ratio" in row:
            text = (f"{row['case']}, {row['figure']}: {row['old']:.4g} -> {row['new']:.4g}, "
                    f"x {row['ratio']:.3f}")  # fmt: skip
        told.append(text)
    told += [f"{', '.join(key(e))}: {figures(e['figures'])}" for e in data["found"]
             if e["stage"] not in ("facts", "kernels")]  # fmt: skip
    told += [kernel_line(row) for row in data["rows"]]
    return told


def figures(values: Mapping[str, float]) -> str:
    """Numbers with their names: shares in percent."""
    return ", ".join(
        f"{value:.0%} {name}" if name.startswith("of ") else f"{value:,.4g} {name}"
        for name, value in values.items()
    )


def kernel_line(row: Record) -> str:
    """A measurement: time, share of the ceiling, and its peers' times over ours."""
    reached = f", {row['share']:.0%} of {row['bound']}" if row["share"] else ""
    peers = "".join(f"; {peer['name']} x {peer['ratio']:.2f}" for peer in row["peers"]
                    if peer["ratio"])  # fmt: skip
    return f"{row['family']}, {row['name']}: {row['time_us']:.1f} us{reached}{peers}"


def markdown(data: Mapping[str, Any]) -> str:
    """summary.md: all lines, and the kernels of each profile."""
    told = [f"- {line}" for line in lines(data)]
    for row in data["found"]:
        if row.get("kernels"):
            told += ["", f"{', '.join(key(row))}:", "", "| kernel | calls | us | share |",
                     "|---|---|---|---|"]  # fmt: skip
            told += [f"| {k['kernel']} | {k['calls']:g} | {k['us']:.2f} | {k['share']:.1%} |"
                     for k in row["kernels"]]  # fmt: skip
    return "\n".join((f"# {data['date']}", "", *told)) + "\n"


def printed(data: Mapping[str, Any]) -> str:
    """What the command prints last: at most `PRINTED` lines."""
    told = lines(data)
    more = [f"... and {len(told) - PRINTED + 1} more lines in summary.md"]
    return "\n".join(told if len(told) <= PRINTED else told[: PRINTED - 1] + more) + "\n"


def as_json(data: Mapping[str, Any]) -> str:
    """summary.json."""
    return json.dumps(data, indent=1) + "\n"
