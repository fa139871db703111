"""`python -m minillm.lab.gpu` without a GPU: which stages, which tables, which exit code."""

import json
import subprocess
from pathlib import Path

import pytest

from minillm.errors import ConfigError
from minillm.lab.gpu import __main__ as command
from minillm.lab.gpu import pack as packing
from minillm.lab.gpu import stages as plan
from minillm.lab.gpu import summary
from minillm.lab.gpu.stages import NAMES, STAGES, within

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"name": "NVIDIA H100", "torch": "2.11", "triton": "3.6", "driver": "580"}
CEILINGS = {"read GB/s": 3000.0, "copy GB/s": 2500.0, "matmul TFLOP/s": 800.0}


def records(rate=1500.0, name="NVIDIA H100", **smoke):
    """A short run: facts, two cases of smoke, one decode, one kernel."""
    row = {"family": "gemv", "name": "8B down", "bound": "copy", "time_us": 50.0,
           "gb_per_s": 2000.0, "peers": [{"name": "torch", "ratio": 1.25}]}  # fmt: skip
    facts = {"stage": "facts", "task": "machine"}
    return [
        facts | {"plan": ["machine", "ceilings"]},
        facts | {"case": "machine", "status": "passed", "machine": MACHINE | {"name": name}},
        facts | {"case": "ceilings", "status": "passed", "figures": CEILINGS},
        {"stage": "smoke", "task": "gemv", "case": "one", "status": "passed"},
        {"stage": "smoke", "task": "mla", "case": "two", "status": "passed"} | smoke,
        {"stage": "decode", "task": "decode qwen3-0.6b", "case": "1 x 512", "status": "passed",
         "figures": {"ms": 1.0, "GB/s": rate}},
        {"stage": "kernels", "task": "gemv", "case": "8B down", "status": "passed", **row,
         "figures": {"us": 50.0}},
    ]  # fmt: skip


def test_a_lease_of_nine_minutes_has_every_stage():
    assert [stage.name for stage in within(STAGES, 540)] == list(NAMES)
    assert set(NAMES) == {*plan.GIVING, "facts"}


@pytest.mark.parametrize("seconds", [60, 90, 240, 300, 420, 500, 540, 3600])
def test_the_caps_fit_into_the_time_and_nothing_is_hopeless(seconds):
    kept = within(STAGES, seconds)
    assert sum(stage.cap for stage in kept if not stage.beside) <= seconds
    assert all(stage.cap >= stage.least for stage in kept)
    assert "facts" in {stage.name for stage in kept}


def test_only_names_stages_and_facts_come_along():
    assert [stage.name for stage in plan.chosen(["nano", "decode"])] == ["facts", "decode", "nano"]
    with pytest.raises(ConfigError, match=r"no stage 'nanno'.* Did you mean 'nano'"):
        plan.chosen(["nanno"])


def test_again_runs_what_did_not_pass_and_what_changed():
    before = records(status="hung")
    kept, only = plan.again(STAGES, before, ["sampling"])
    tasks = {stage.name: stage.tasks for stage in kept}
    assert (tasks["smoke"], tasks["kernels"]) == (("sampling", "mla"), ("sampling",))
    assert only == {("smoke", "mla"): ["two"]}
    assert set(tasks) == {"facts", "smoke", "engine", "decode", "nano", "kernels"}
    with pytest.raises(ConfigError, match=r"no family 'samplin'.* Did you mean 'sampling'"):
        plan.again(STAGES, before, ["samplin"])


def test_shares_are_of_what_was_measured():
    found = summary.summary(records())
    assert found["rows"][0]["share"] == 0.8
    decode = {row["stage"]: row["figures"] for row in found["found"]}["decode"]
    assert decode == {"ms": 1.0, "GB/s": 1500.0, "of read": 0.5, "of copy": 0.6}
    told = summary.printed(found)
    assert "decode, decode qwen3-0.6b, 1 x 512: 1 ms, 1,500 GB/s, 50% of read, 60% of copy" in told
    assert "gemv, 8B down: 50.0 us, 80% of copy; torch x 1.25" in told
    assert not found["wrong"]
    assert "driver 580; 3,000 read GB/s" in told
    del found["gpu"]["driver"]  # as where there is no nvidia-smi
    assert "Triton 3.6; 3,000 read GB/s" in summary.printed(found)
    bare = summary.printed(summary.summary(records()[:2] + records()[3:]))
    assert (bare.count("of read"), bare.count("driver 580\n")) == (0, 1)


def test_old_and_new_stand_side_by_side():
    found = summary.summary(records(rate=1800.0), records())
    (rate,) = [each for each in found["compared"] if each["figure"] == "GB/s"]
    assert (rate["old"], rate["new"], rate["ratio"]) == (1500.0, 1800.0, 1.2)
    other = summary.summary(records(rate=1800.0), records(name="NVIDIA H200"))["compared"]
    assert other == [{"case": "cards differ", "old": "NVIDIA H200", "new": "NVIDIA H100"}]


def test_the_table_on_the_screen_has_at_most_80_lines():
    many = records()
    many += [dict(many[3], case=str(i), status="failed", error="no") for i in range(90)]
    many += [dict(many[5], case=str(i)) for i in range(90)]
    text = summary.printed(summary.summary(many))
    assert text.count("\n") == 80
    assert "more lines in summary.md" in text.splitlines()[-1]
    assert summary.markdown(summary.summary(many)).count("\n") > 80
    json.loads(summary.as_json(summary.summary(many)))


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--only", "nano,smok"], "--only has no stage 'smok'"),
    (["--seconds", "3"], "--seconds is 3; it must be from 30 to 86400"),
    (["--seconds", "nan"], "--seconds is nan; it must be"),
    (["--changed", "mla"], "--changed needs --again FILE"),
    (["--again", "not-there.jsonl"], "No such file or directory: 'not-there.jsonl'"),
    (["--pack", str(ROOT / "minillm")], "there is something already; name a new folder"),
])  # fmt: skip
def test_what_cannot_run_is_one_sentence_and_exit_code_2(arguments, sentence, capsys, tmp_path):
    assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_list_needs_no_gpu(capsys):
    assert command.main(["--list", "--only", "decode"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "decode       95 s  decode qwen3-0.6b, decode llama-3.1-8b"
    )


@pytest.mark.slow
def test_without_a_gpu_the_first_stage_says_so(capsys, tmp_path):
    """The real worker, and a summary all the same."""
    assert command.main(["--out", str(tmp_path), "--only", "smoke"]) == 2
    assert "NoGpuError: The benchmark needs an NVIDIA GPU" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.jsonl", "log.txt", "summary.json", "summary.md"
    }  # fmt: skip


def test_a_stage_has_the_time_that_earlier_ones_left_and_facts_may_take_more(tmp_path, monkeypatch):
    """torch from a cold disk takes longer than facts has, and a run without facts is none."""
    ends = {}
    monkeypatch.setattr(command.Run, "_can_go_on", lambda self: True)
    monkeypatch.setattr(command.Parent, "run", lambda self, stage, end=None: ends.update(
        {stage.name: end and round(end - self.results.began)}))  # fmt: skip
    assert command.main(["--out", str(tmp_path)]) == 0
    caps = {stage.name: stage.cap for stage in within(STAGES, 540)}
    assert ends["facts"] == caps["facts"] + 40
    assert ends["smoke"] == caps["facts"] + caps["smoke"]
    assert ends["engine"] == ends["smoke"] + caps["engine"]
    assert ends["rest"] == 540
    assert ends["warm"] is None


def test_a_missing_package_costs_only_the_stages_that_need_it(tmp_path, monkeypatch, capsys):
    """And is said in the first second."""
    absent = {"msgspec"}
    monkeypatch.setattr(plan, "find_spec", lambda name: None if name in absent else name)
    monkeypatch.setattr(command.Run, "_can_go_on", lambda self: True)
    ran = []
    monkeypatch.setattr(command.Parent, "run", lambda self, stage, end=None: ran.append(stage.name))
    assert command.main(["--out", str(tmp_path)]) == 1
    assert ran == ["facts", "smoke", "kernels", "memcheck", "rest"]
    told = capsys.readouterr()
    assert told.err.startswith("[   0 s] msgspec not installed for ")
    assert "so warm, engine, decode, nano, profile are left out" in told.err
    assert "WRONG facts, packages, : error: msgspec not installed" in told.out
    absent.add("triton")
    assert command.main(["--out", str(tmp_path / "other")]) == 2
    assert "triton not installed for " in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_pack_copies_tracked_files_up_to_a_size(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path / "a")], check=True)
    for name in ("minillm/one.py", "kernels/two.py", "tests/not.py", "minillm/untracked.py"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text("x" * 100)
    names = ["minillm/one.py", "kernels/two.py", "tests/not.py"]
    subprocess.run(["git", "-C", str(tmp_path / "a"), "add", *names], check=True)
    assert packing.pack(tmp_path / "b", tmp_path / "a") == 200
    copied = {p.relative_to(tmp_path / "b").as_posix() for p in (tmp_path / "b").rglob("*.py")}
    assert copied == {"minillm/one.py", "kernels/two.py"}
    with pytest.raises(ConfigError, match="there is something already"):
        packing.pack(tmp_path / "b", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"are 0\.0 MiB; at most 0 MiB are packed"):
        packing.pack(tmp_path / "c", tmp_path / "a", most=199)
    with pytest.raises(ConfigError, match="needs a checkout with git"):
        packing.pack(tmp_path / "c", tmp_path)


def test_what_a_run_needs_is_small_enough(tmp_path):
    assert packing.pack(tmp_path / "there") <= 25 << 20
