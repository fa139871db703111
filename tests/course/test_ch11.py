"""Chapter 11: counted accesses, the other process, bounds, and where times come from.

This process does not interpret kernels, as a GPU machine's does not: `count` goes the way that it
goes there. That an interpreted process counts the same, a test asks one.
"""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from minillm.lab.hardware import DATASHEET
from minillm_exercises.chapters import ch11, ch11_gpu, ch11_ladder
from minillm_exercises.chapters.ch11_elsewhere import changed, count, source_of
from minillm_exercises.chapters.ch11_traffic import Traffic
from minillm_exercises.errors import ExerciseError
from minillm_kernels import offline
from minillm_kernels.launch import tl, triton
from minillm_kernels.paged_attention import paged_attention

SHIFT = 3
MASK = ", mask=inside, other=0.0"


@triton.jit
def _shifted(x, out, width, shift, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(x + row * width + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, numbers + shift, mask=inside)


def shifted(x, kernel=_shifted):
    out, width = torch.empty_like(x), x.shape[1]
    kernel[(len(x),)](x, out, width, SHIFT, BLOCK=triton.next_power_of_2(width))
    return out


def careless(x):
    return shifted(x, changed(_shifted, MASK, ""))


@pytest.fixture(scope="module")
def x():
    return torch.arange(39.0).reshape(3, 13)


@pytest.fixture
def said(monkeypatch):
    """Lines and tables that would be displayed."""
    seen = []
    monkeypatch.setattr(ch11_gpu, "say", seen.append)
    monkeypatch.setattr(ch11_gpu, "show_table", lambda head, rows: seen.append((head, rows)))
    return seen


# ---- counting --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_access_is_counted_by_tensor_and_program(x):
    found = count(shifted, x)
    assert found.read == {"x": 4 * 39}
    assert found.written == {"out": 4 * 39}
    assert found.moved() == 8 * 39
    assert found.programs == {"_shifted": 3}
    assert (found.outside, found.complaint) == (0, "")
    assert torch.equal(found.result, x + SHIFT)


@pytest.mark.slow
def test_an_interpreted_process_counts_the_same(x, tmp_path):
    script = tmp_path / "here.py"
    script.write_text(
        source_of(careless) + "\nimport json\nfrom minillm_exercises.chapters import "
        "ch11_elsewhere\nx = torch.arange(39.0).reshape(3, 13)\nch11_elsewhere.elsewhere = None\n"
        "print(json.dumps(ch11_elsewhere.count(careless, x).to_json()))\n"
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    here, there = Traffic.from_json(json.loads(done.stdout)), count(careless, x)
    assert here.to_json() == there.to_json()


# ---- the ladder of small kernels -------------------------------------------------------------


class Launched:
    """A kernel as Triton makes them: ``kernel[grid](*arguments)`` calls `body` with the grid."""

    def __init__(self, body):
        self.body = body

    def __getitem__(self, grid):
        return lambda *arguments, **sizes: self.body(grid, *arguments, **sizes)


def test_a_rung_runs_compiled_where_kernels_are(monkeypatch):
    """As on a GPU: nothing is counted there, and the output is NaN before the launch."""
    seen = []

    def double(grid, x, out, TILE):
        seen.append((grid, TILE, bool(out.isnan().all())))
        out.copy_(2 * x)

    x = torch.arange(4.0)
    monkeypatch.setattr(ch11_ladder, "counting", None)
    found = ch11_ladder.run(Launched(double), 2, x, shape=(4,), TILE=2)
    assert torch.equal(found, 2 * x)
    assert seen == [((2,), 2, True)]


def test_a_rung_that_writes_nothing_is_not_written_yet():
    def nothing(grid, x, out):
        return None

    assert ch11_ladder.run(Launched(nothing), 1, torch.ones(3), shape=(3,)) is None


LADDER = """
import torch
from minillm_exercises.chapters import ch11_ladder
from minillm_kernels.launch import tl, triton


@triton.jit
def unmasked(x, length, out, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at, mask=at < length), mask=at < {limit})


@triton.jit
def blank(x, length, out, TILE: tl.constexpr):
    ...  # your turn


x = torch.arange(10.0)
print(ch11_ladder.run(unmasked, 3, x, 10, shape=(10,), TILE=4).tolist() == x.tolist())
print(ch11_ladder.run(blank, 3, x, 10, shape=(10,), TILE=4))
"""


@pytest.mark.parametrize(("limit", "lines"), [
    pytest.param("length", ["True", "None"], marks=pytest.mark.slow),
    ("99", ["2 accesses out of bounds. The first: unmasked at program (2, 0, 0) writes 0 bytes "
            "behind the end of out.", "True", "None"]),
])  # fmt: skip
def test_an_interpreted_rung_names_an_access_out_of_bounds(limit, lines, tmp_path):
    script = tmp_path / "rung.py"
    script.write_text(LADDER.replace("{limit}", limit))
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.splitlines() == lines


@triton.jit
def _blank(x, out, TILE: tl.constexpr): ...  # your turn


def blank(x):
    _blank[(1,)](x, torch.empty_like(x), TILE=4)


# ---- the other process -----------------------------------------------------------------------


def broken(x):
    raise ValueError(f"there are {len(x)} rows")


@pytest.mark.slow
def test_what_fails_in_the_other_process_is_said_here(x):
    with pytest.raises(ExerciseError, match="should count failed: ValueError: there are 3 rows"):
        count(broken, x)


def test_a_function_that_uses_a_tensor_of_the_notebook_is_refused(monkeypatch):
    monkeypatch.setitem(globals(), "SHIFT", torch.ones(1))
    with pytest.raises(ExerciseError, match="shifted uses SHIFT, a Tensor"):
        source_of(shifted)


def test_the_source_of_a_function_holds_all_that_it_needs():
    text = source_of(careless)
    assert text.index("def _shifted") < text.index("def shifted") < text.index("def careless")
    assert "SHIFT = 3" in text
    assert "import triton.language as tl" in text
    assert "def source_of" not in text
    assert source_of(paged_attention) == (
        "from minillm_kernels.paged_attention import paged_attention"
    )


needs_tools = pytest.mark.skipif(
    not (offline.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists(),
    reason="this build of Triton carries no cuobjdump",
)


@pytest.mark.slow
@needs_tools
def test_a_rung_that_is_still_open_compiles():
    """A learner's copy has dots for a body; on a GPU they must not stop the chapter."""
    (found,) = offline.compile_for(90, lambda: blank(torch.ones(4)))
    assert found.kernel == "_blank"


# ---- what a GPU did --------------------------------------------------------------------------

REPORT = {
    "benchmark": "minillm.lab.gpu",
    "date": "2030-01-02",
    "gpu": {"name": "NVIDIA H100 80GB HBM3"},
    "rows": [
        {"family": "paged_attention", "name": "decode 1 x 32k, pages of 64", "time_us": 80.0},
        {"family": "mla", "name": "decode 64 x 8k, 16 heads", "time_us": None},
    ],
}


def test_the_latest_report_is_found_and_other_files_are_none(tmp_path):
    assert ch11_gpu.recorded(tmp_path) is None
    (tmp_path / "11_triton_kernels.json").write_text('{"chapter": "11", "date": "2040-01-01"}')
    (tmp_path / "list.json").write_text("[1]")
    assert ch11_gpu.recorded(tmp_path) is None
    (tmp_path / "a.json").write_text(json.dumps(REPORT))
    (tmp_path / "b.json").write_text(json.dumps(REPORT | {"date": "2029-12-31"}))
    assert ch11_gpu.recorded(tmp_path) == REPORT


def test_without_a_gpu_and_a_report_there_are_bounds_and_no_times(said):
    found = ch11_gpu.evidence(["ours"], None, None)
    assert found.gpu is DATASHEET["h200"]
    assert "no benchmark of one has been recorded" in found.source
    assert not found.timed
    assert found.cases[0].num_bytes == 2 * 32_768 * 8 * 128 * 2
    assert found.cases[0].bound(found.gpu) == pytest.approx(134_217_728 / 4.8e12 * 1e6)
    ch11_gpu.show_evidence(found)
    (line,) = said  # and no table of what was not measured
    assert line.startswith("No GPU is here")
    assert "5 calls" in line
    assert "28 us (134 MB at the 4,800 GB/s of an NVIDIA H200 SXM)" in line


def test_a_report_gives_times_and_the_bounds_of_its_own_gpu(said):
    found = ch11_gpu.evidence(["ours"], None, REPORT)
    assert found.gpu is DATASHEET["h100-sxm"]
    assert found.source == "recorded on 2030-01-02, NVIDIA H100 80GB HBM3"
    assert found.timed
    times = {case.name: case.microseconds for case in found.cases}
    assert times["decode 1 x 32k, pages of 64"] == 80
    assert times["ours"] is times["decode 64 x 8k, 16 heads"] is None
    ch11_gpu.show_evidence(found)
    (row,) = [row for row in said[1][1] if row[3] == "80"]
    assert row[1:] == ("134", "40", "80", "50%")


@pytest.mark.parametrize(("name", "key"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA B200", "b200"),
    ("NVIDIA A100-SXM4-80GB", "a100-sxm"), ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
])  # fmt: skip
def test_a_driver_s_name_finds_the_datasheet(name, key):
    assert ch11_gpu.datasheet_of(name) is DATASHEET[key]


class FakeGpu:
    """Takes 25 microseconds for the chapter's kernels, which it runs; cannot run the engine's."""

    cache_bytes = 50_000_000

    def ready(self, call, num_sets):
        if num_sets > 1:
            raise RuntimeError("no memory")
        call(0)
        return SimpleNamespace(calls=1, how="graph", seconds=lambda: 25e-6, close=lambda: None)


def test_the_chapter_s_kernels_are_timed_beside_the_engine_s(monkeypatch):
    monkeypatch.setattr(ch11_gpu, "LONGEST", ((32,), 4, 2, 16, 16, torch.float32))
    seen = []
    rows = ch11_gpu.timed({"ours": seen.append}, FakeGpu())
    assert (rows[0]["family"], rows[0]["name"]) == (ch11_gpu.OWN, "ours")
    assert rows[0]["time_us"] == pytest.approx(25)
    assert [row["error"] for row in rows[1:]] == ["RuntimeError: no memory"] * 4
    assert [given.lengths.tolist() for given in seen] == [[32]]
    assert {(row["family"], row["name"]) for row in rows[1:]} == set(ch11_gpu.CASES)


def test_what_belongs_to_nobody_is_poison():
    b = ch11.batch((20, 32), heads=4, kv_heads=2, dim=16, page=16)
    assert (b.texts, b.heads, b.kv_heads, b.dim, b.group) == (2, 4, 2, 16, 2)
    last = b.k[b.tables[0, 1]]
    assert last[:, :4].isfinite().all()
    assert last[:, 4:].isnan().all()
    assert b.tables[0, 2] >= len(b.k)
    assert torch.equal(ch11.batch((20,)).q, ch11.batch((20,)).q)


def test_nan_and_other_numbers_are_not_close():
    one = torch.ones(3)
    assert ch11.close(one, one.double())
    assert not ch11.close(one * 1.001, one.double())
    assert not ch11.close(one * math.nan, one.double())


def by_engine(b):
    return paged_attention(b.q, b.k, b.v, b.starts, b.lengths, b.tables, b.scale, max_query_len=1)


@pytest.mark.slow
def test_places_say_which_program_read_which_page():
    b = ch11.batch((40, 16), heads=4, kv_heads=2, dim=16, page=16)
    found = count(by_engine, b)
    assert found.read["k_cache"] + found.read["v_cache"] == b.cache_bytes == 2 * 56 * 2 * 16 * 4
    for text, page in ((0, 0), (0, 1), (0, 2), (1, 0)):
        for head in (0, 1):
            place = int(b.tables[text, page]) * 2 + head
            (who,) = found.readers("k_cache", place)
            assert who[:2] == (text, head)
    assert ch11.close(found.result, b.oracle())
