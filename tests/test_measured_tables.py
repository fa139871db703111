"""The measured tables of notebooks/results/README.md say what the recorded runs say."""

import json
import re
from pathlib import Path

import pytest

from minillm.cli.terminal import digits
from minillm.lab.comparison import table

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "notebooks" / "results"
ENGINES = ("minillm", "openvino", "vllm")  # in the order of the columns
CASE = re.compile(
    r"\| (?P<model>\S+), (?P<what>decode|prefill), (?:batch (?P<batch>\d+), context |"
    r"(?P<prompts>\d+) x )(?P<context>[\d,]+) \|(?P<cells>.*)\|$"
)
FILES = {
    ("135M", "decode"): ["smollm2-135m-decode"],
    ("135M", "prefill"): ["smollm2-135m-prefill"],
    ("0.6B", "decode"): ["qwen3-0.6b-decode"],
    ("0.6B", "prefill"): ["qwen3-0.6b-prefill-128", "qwen3-0.6b-prefill-2048"],
}
TEXT = (RESULTS / "README.md").read_text("utf-8")
SECTION = "## Speed by processor class"
LINES = TEXT.partition(SECTION)[0].splitlines()
CASES = [match for line in LINES if (match := CASE.match(line))]


def recorded(name: str) -> list[dict]:
    """The results of one recorded comparison."""
    path = RESULTS / "bench" / f"{name}-xeon-amx.json"
    return json.loads(path.read_text("utf-8"))["results"]


def cells_of(row: str) -> list[str]:
    """The cells of a row behind its first: three engines, ratio, target."""
    return [cell.strip() for cell in row.split("|")]


def ratio_of(medians: dict[str, float]) -> float:
    """minillm over the best peer."""
    return medians["minillm"] / max(medians[name] for name in medians if name != "minillm")


def check(cells: list[str], medians: dict[str, float]) -> None:
    """Each cell is the recorded median, rounded; a missing engine has an empty cell."""
    shown = [f"{medians[name]:,.0f}" if name in medians else "" for name in ENGINES]
    assert cells[:3] == shown
    assert cells[3] == f"{ratio_of(medians):.2f}"
    assert float(cells[3]) >= float(cells[4]), "a target that was not reached has to be said"


def test_all_cases_are_found():
    assert len(CASES) == 14


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].split("|")[1].strip())
def test_a_case_is_what_was_recorded(case):
    size = int(case["batch"] or case["prompts"]), int(case["context"].replace(",", ""))
    medians = {
        result["engine"]: result["tokens_per_second"]["median"]
        for name in FILES[case["model"], case["what"]]
        for result in recorded(name)
        if (result["batch"], result["context"]) == size
    }
    check(cells_of(case["cells"]), medians)


def test_mixed_requests_are_what_was_recorded():
    (row,) = (line for line in LINES if line.startswith("| 135M, 64 requests"))
    results = recorded("smollm2-135m-offline")
    medians = {result["engine"]: result["tokens_per_second"]["median"] for result in results}
    check(cells_of(row)[2:], medians)


def test_the_start_is_what_was_recorded():
    (row,) = (line for line in LINES if line.startswith("| 135M, process start"))
    results = recorded("smollm2-135m-startup")
    seconds = {result["engine"]: result["seconds"]["median"] for result in results}
    shown = [float(cell.removesuffix(" s")) for cell in cells_of(row)[2:5]]
    assert shown == [
        pytest.approx(seconds[name], abs=0.05 if seconds[name] < 100 else 0.5) for name in ENGINES
    ]
    assert f"{seconds['vllm'] / seconds['minillm']:.0f} times" in row


def test_the_readme_gives_the_range_of_the_table():
    ratios = [cells_of(case["cells"])[3] for case in CASES]
    ratios += [cells_of(line)[5] for line in LINES if line.startswith("| 135M, 64 requests")]
    text = " ".join(README.read_text("utf-8").split())
    assert f"{min(ratios)} to {max(ratios)} times as fast as the best peer" in text
    assert f"in the {len(ratios)} cases" in text


def test_the_readme_is_short():
    assert README.read_text("utf-8").count("\n") < 200


# ---- tables by processor class ------------------------------------------------------------------


def test_the_tables_by_class_have_the_recorded_speeds():
    """Each row of a class has the medians of one recorded comparison, and its files are linked."""
    tables = TEXT.partition(SECTION)[2].partition("\n## ")[0]
    found = {path: json.loads(path.read_text("utf-8")) for path in (RESULTS / "bench").iterdir()}
    kinds = ("decode", "prefill", "offline")
    found = {p: one for p, one in found.items() if one["benchmark"] in kinds and "processor" in one}
    assert len(found) > 5
    for path, one in found.items():
        assert f"(bench/{path.name})" in tables
        cases: dict[tuple, dict[str, str]] = {}
        for result in one["results"]:
            case = cases.setdefault((result.get("batch"), result.get("context")), {})
            case[result["engine"]] = digits(result["tokens_per_second"]["median"])
        for speeds in cases.values():
            assert any(set(speeds.values()) <= set(row.split(" | ")) for row in tables.splitlines())


# ---- quantised weights --------------------------------------------------------------------------

STUDY = RESULTS / "quantisation" / "tiny.json"


def test_the_tables_of_quantised_weights_are_those_of_the_recorded_study():
    """Each row of the study is a line of the page, and it reached its targets."""
    study = json.loads(STUDY.read_text("utf-8"))
    rows = {part: {row["name"]: row for row in found["results"]} for part, found in study.items()}
    places = [table.QUALITY.index(name) for name in ("MB memory", "KL run")]
    lines = [[cell for place, cell in enumerate(table.quality_cells(row)) if place not in places]
             for found in rows.values() for row in found.values()]  # fmt: skip
    assert len(lines) > 50
    for cells in lines:
        assert f"| {' | '.join(cells)} |" in TEXT
    assert STUDY.with_suffix(".png").is_file()
    plain, seeded, planted = (rows[part] for part in ("plain", "seeded", "planted"))
    assert table.average(seeded["gptq:4:128"], "kl") <= 0.025
    assert abs(table.average(plain["int8:head16"], "bits_per_byte_change")) <= 0.0003
    gain = table.average(planted["awq:4:128"], "kl") / table.average(planted["rtn:4:128"], "kl")
    assert gain < 0.5
