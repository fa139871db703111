"""The parent of a GPU run, with workers that crash, hang, print without end and fill the disk."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.lab.gpu import parent as parent_module
from minillm.lab.gpu.parent import LOG_BYTES, Parent, Results, read
from minillm.lab.gpu.stages import Stage
from minillm.lab.gpu.worker import described

ROOT = Path(__file__).resolve().parents[3]
# Says what a worker says of three cases; the second goes wrong in the way of the task.
WORKER = """
import json, os, subprocess, sys, time
task, start = sys.argv[1], int(sys.argv[2])
def say(**event):
    print(json.dumps(event), flush=True)
if task == "silent": time.sleep(60)
if task == "dead": sys.exit("no GPU is here")
print("a library says hello", flush=True)
say(event="plan", names=["a", "b", "c"])
for index in range(start, 3):
    say(event="begin", index=index, patience=0)
    if index == 1:
        if task == "crash": print("segmentation fault", file=sys.stderr, flush=True); os.abort()
        if task == "hang": time.sleep(60)
        if task == "children":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open(sys.argv[3], "w").write(str(child.pid)); time.sleep(60)
        while task == "print": print("x" * 1000)
        while task == "print errors": print("x" * 100_000, file=sys.stderr)
        if task == "line": print("x" * (3 << 20), flush=True); time.sleep(60)
        if task == "no number":
            say(event="done", status="failed", found={"error": "1 is not 2"})
            continue
    say(event="done", status="passed", found={"figures": {"number": index}})
say(event="end")
"""


def run(tmp_path, *tasks, **changes):
    """The records of a stage with these tasks."""
    options = {"cap": 20.0, "least": 1.0, "silence": 0.5} | changes
    stage = Stage("smoke", "", tasks, **options)
    results, said = Results(tmp_path / "out"), []

    def worker(stage, task, start, seconds):
        return [sys.executable, "-c", WORKER, task, str(start), str(tmp_path / "child")]

    began = time.monotonic()
    Parent(results, worker, said.append).run(stage)
    assert time.monotonic() - began < 15
    on_disk = read(tmp_path / "out" / "results.jsonl")
    assert on_disk == results.records or results.lost
    return [each for each in results.records if "status" in each], said


@pytest.mark.parametrize(("task", "status", "words"), [
    ("good", "passed", ""), ("no number", "failed", "1 is not 2"),
    ("crash", "crashed", "the worker ended with code -6: segmentation fault"),
    ("hang", "hung", "no word for 0.5 s, so the worker was ended"), ("children", "hung", "no word"),
    ("print", "hung", "no word"), ("print errors", "hung", "no word"), ("line", "hung", "no word"),
])  # fmt: skip
def test_a_case_that_goes_wrong_costs_no_other(task, status, words, tmp_path):
    """A new worker goes on behind it."""
    found, said = run(tmp_path, task)
    assert [(each["case"], each["status"]) for each in found] == [
        ("a", "passed"), ("b", status), ("c", "passed")
    ]  # fmt: skip
    assert words in found[1].get("error", "")
    assert found[2]["figures"] == {"number": 2}
    assert len(said) == (status != "passed")
    assert (tmp_path / "out" / "log.txt").stat().st_size < LOG_BYTES + 2000
    if task == "children":  # the whole group is killed
        time.sleep(0.1)
        state = Path("/proc", (tmp_path / "child").read_text(), "stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_worker_that_never_begins_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parent_module, "START", 0.5)
    (dead,), _ = run(tmp_path, "dead")
    assert (dead["case"], dead["status"]) == ("", "crashed")
    assert dead["error"] == "the worker ended with code 1: no GPU is here"
    (silent,), _ = run(tmp_path, "silent")
    assert silent["status"] == "hung"


def test_a_stage_ends_at_its_cap_and_says_what_it_did_not_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(parent_module, "BEHIND", 0.1)
    found, _ = run(tmp_path, "hang", cap=1.0, silence=30.0)
    assert [each["status"] for each in found] == ["passed", "timeout", "not reached"]


def test_a_command_that_is_not_there_is_an_error(tmp_path):
    found, _ = run(tmp_path, "good", prefix=("compute-sanitizer-that-is-not-there",))
    assert [each["status"] for each in found] == ["error"]
    assert "cannot be started" in found[0]["error"]


def test_tasks_one_after_another_have_equal_shares_of_the_time(tmp_path, monkeypatch):
    """A slow family leaves the others their time."""
    monkeypatch.setattr(parent_module, "BEHIND", 0.1)
    records, _ = run(tmp_path, "hang", "good", cap=4.0, silence=30.0)
    found = [(each["task"], each["status"]) for each in records]
    cut = [("hang", "passed"), ("hang", "timeout"), ("hang", "not reached")]
    assert found == cut + [("good", "passed")] * 3


def test_what_the_program_before_a_worker_found_is_not_lost(tmp_path):
    """compute-sanitizer says it by its exit code, when the worker has ended."""
    program = "import subprocess, sys; subprocess.run(sys.argv[1:]); print('12 errors'); exit({})"
    for code, more in ((86, [("", "failed")]), (0, [])):
        prefix = (sys.executable, "-c", program.format(code))
        found, said = run(tmp_path / str(code), "good", prefix=prefix)
        cases = [(each["case"], each["status"]) for each in found]
        assert cases == [("a", "passed"), ("b", "passed"), ("c", "passed"), *more]
        assert len(said) == len(more)
        assert b"12 errors" in (tmp_path / str(code) / "out" / "log.txt").read_bytes()


def test_a_worker_begins_nothing_that_would_be_cut_off(tmp_path):
    job = {"stage": "facts", "module": "facts", "task": "machine", "start": 0, "seconds": 0.5,
           "dry": False, "out": str(tmp_path), "only": None}  # fmt: skip
    command = [sys.executable, "-m", "minillm.lab.gpu.worker", json.dumps(job)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        events = [json.loads(line)["event"] for line in process.stdout]
    assert events == ["plan", "end"]


def test_an_error_says_its_first_cause_and_the_end_of_a_long_message():
    try:
        try:
            raise TypeError("x" * 900 + " cannot convert None")
        except TypeError as error:
            raise RuntimeError("at 44:12: table = ...") from error
    except RuntimeError as error:
        text = described(error)
    assert text.startswith("TypeError: xxx")
    assert "x cannot convert None (test_gpu_parent.py:" in text
    assert len(text) < 500


DRIVER = """
import sys
from minillm.lab.gpu import __main__ as command, stages as plan
from minillm.lab.gpu.stages import Stage
task, worker = sys.argv[1], sys.argv[2]
first = Stage("facts", "", ("machine",), 20, 5)
plan.STAGES = (first, Stage("smoke", "", (task,), 20, 5, silence=30))
plan.chosen.__defaults__ = (plan.STAGES,)
def told(self, stage, task, start, seconds):
    return [sys.executable, "-c", worker, task, str(start), sys.argv[3] + "/child"]
command.Run.command = told
command.Run._can_go_on = lambda self: True
assert "torch" not in sys.modules
raise SystemExit(command.main(["--out", sys.argv[3], "--seconds", "60"]))
"""


def start(tmp_path, task, **options):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, task, WORKER, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def wait_for(file: Path, text: str) -> None:
    for _ in range(200):
        if file.exists() and text in file.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came")


def test_what_was_found_survives_the_sudden_death_of_the_parent(tmp_path):
    process = start(tmp_path, "hang")
    wait_for(tmp_path / "results.jsonl", '"smoke", "task": "hang", "case": "a"')
    process.kill()
    process.communicate()
    found = [each for each in read(tmp_path / "results.jsonl") if each["stage"] == "smoke"]
    assert found[0]["plan"] == ["a", "b", "c"]
    assert (found[1]["case"], found[1]["status"]) == ("a", "passed")
    written = json.loads((tmp_path / "summary.json").read_text())  # after the first stage
    assert written["stages"]["facts"]["cases"] == {"passed": 3}
    # A line that was cut off is left out.
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"stage": "smo')
    assert len(read(tmp_path / "results.jsonl")) == len(found) + 4


def test_sigterm_writes_the_summary_and_ends_the_workers(tmp_path):
    process = start(tmp_path, "children")
    wait_for(tmp_path / "results.jsonl", '"smoke", "task": "children", "case": "a"')
    wait_for(tmp_path / "child", "")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "1 stopped" in out
    assert json.loads((tmp_path / "summary.json").read_text())["stages"]["smoke"]["cases"] == {
        "passed": 1, "stopped": 1, "not reached": 1
    }  # fmt: skip


def test_a_full_disk_loses_no_result(tmp_path):
    """The limit of a file's size stands in for the disk."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))  # noqa: E731
    process = start(tmp_path, "good", preexec_fn=limit)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "A file could not be written: results.jsonl" in out
    assert "smoke     3 passed" in out
    assert not list(tmp_path.glob(".*.part"))
