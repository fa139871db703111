"""Measurements beside other programs say so, and are not published."""

import os
from types import SimpleNamespace

import pytest
from notebook_chapter import chapters, execute

from minillm_exercises import disturbance, measure, record
from minillm_exercises.disturbance import Meter


def machine(root, busy, ours):
    """A /proc with so many ticks of all processors; a third of ours is each a child's, and an ended
    child's."""
    (root / "stat").write_text(f"cpu  {busy} 0 0 900 0 0 0 0\n")
    for pid, parent, own, ended in ((os.getpid(), 1, ours // 3, ours // 3),
                                    (999_999, os.getpid(), ours // 3, 0),
                                    (999_998, 1, 10_000 + busy, 0)):  # fmt: skip
        folder = root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), str(pid), *["0"] * 8, str(own), "0", str(ended), "0"]
        (folder / "stat").write_text(f"{pid} (python 3) {' '.join(fields)}")


@pytest.mark.parametrize(("busy", "ours", "share"), [(160, 60, 0.5), (150, 150, 0.0), (0, 0, 0.0)])
def test_the_meter_counts_other_programs_only(tmp_path, monkeypatch, busy, ours, share):
    now = [10.0]
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(disturbance.os, "sysconf", lambda name: 100)
    machine(tmp_path, 1000, 600)
    meter = Meter(tmp_path)
    machine(tmp_path, 1000 + busy, 600 + ours)
    now[0] += 0.4
    assert meter.read() == 0.0  # too short
    now[0] += 0.6
    assert meter.read() == pytest.approx(share)


def test_a_measurement_beside_other_programs_says_so_once_per_cell(monkeypatch, capsys):
    monkeypatch.delenv("MINILLM_QUICK", raising=False)
    share, cells = [0.4], iter([None, None, 7, 7, 8, 8])  # None: a script
    monkeypatch.setattr(disturbance, "cell_number", lambda: next(cells))
    meter = SimpleNamespace(read=lambda: share[0])
    monkeypatch.setattr(disturbance, "meter", lambda: meter)
    for most in (2, 1, 1):
        measure(lambda: None)
        record("step", 1.5, "ms")
        said = capsys.readouterr().out
        assert said.count("Other programs took 40% of this machine: do not trust") == most
    share[0], cells = 0.1, iter([9])
    measure(lambda: None)
    assert "Other" not in capsys.readouterr().out


def test_disturbed_numbers_are_not_published():
    values = {"a": {"value": 1.0, "others": 0.05}, "b": {"value": 1.0, "others": 0.35}}
    with pytest.raises(chapters.ChapterError, match="took 35% of this machine while 'b'"):
        execute.undisturbed("90_toy.ipynb", values)
    assert execute.undisturbed("90", {"a": {"value": 1.0, "others": 0.05}}) == {"a": {"value": 1.0}}
