"""`python -m minillm_kernels.check` without a GPU: what it does with what its workers say."""

import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest

from minillm_kernels.check import __main__ as command
from minillm_kernels.check import suite
from minillm_kernels.check.case import Mismatch
from minillm_kernels.check.suite import Outcome, run_family


def family(verify, cases=(1, 2, 3), **more):
    """A family's check module, made up."""
    return SimpleNamespace(
        CASES=cases, verify=verify, random_case=lambda rng: rng.randrange(100, 200), **more
    )


def seconds():
    """A clock that is one second later whenever it is read."""
    ticks = count()
    return lambda: float(next(ticks))


def test_all_cases_then_random_ones_until_the_time_is_over(monkeypatch):
    tried, bitwise = [], []
    module = family(
        lambda case, device: tried.append((case, device)),
        verify_invariant=lambda case, device: bitwise.append(case),
    )
    monkeypatch.setattr(suite, "checks", lambda name: module)
    outcome = run_family("mla", "cuda", seconds=10, clock=seconds())
    assert tried[:3] == [(1, "cuda"), (2, "cuda"), (3, "cuda")]
    assert bitwise == [1, 2, 3]
    assert outcome.num_cases == outcome.num_invariant == 3
    assert outcome.num_random == len(tried) - 3 > 3
    assert not outcome.failures
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_without_time_there_are_still_a_few_random_cases(monkeypatch):
    monkeypatch.setattr(suite, "checks", lambda name: family(lambda case, device: None))
    outcome = run_family("mla", "cuda", seconds=0, clock=seconds())
    assert (outcome.num_random, outcome.num_invariant) == (3, 0)


def test_a_failing_case_does_not_hide_the_next(monkeypatch):
    def verify(case, device):
        if case != 2:
            raise Mismatch(f"case {case} is wrong")

    monkeypatch.setattr(suite, "checks", lambda name: family(verify))
    outcome = run_family("mla", "cuda", seconds=0)
    assert outcome.failures == ("1: Mismatch: case 1 is wrong", "3: Mismatch: case 3 is wrong")
    assert outcome.num_random == 0


def test_after_a_lost_gpu_nothing_more_is_tried(monkeypatch):
    tried = []

    def verify(case, device):
        tried.append(case)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(suite, "checks", lambda name: family(verify))
    assert len(run_family("mla", "cuda", seconds=0).failures) == 1
    assert tried == [1]


def script(monkeypatch, code: str) -> None:
    """Workers run this Python code instead."""

    def worker(family, seconds, *prefix):
        return subprocess.Popen([sys.executable, "-c", code.replace("FAMILY", family)],
                                stdout=subprocess.PIPE, text=True)  # fmt: skip

    monkeypatch.setattr(command, "worker", worker)


SAYS = "print('noise'); print('''%s'''.replace('NAME', 'FAMILY'))"


def test_a_table_of_families(monkeypatch, capsys):
    good = Outcome("NAME", 30, 4, 7, (), 12.0)
    script(monkeypatch, SAYS % good.to_json())
    assert command.check_families(("mla", "moe"), 0) == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["family", "cases", "bitwise", "random", "time"]
    assert [line.split() for line in lines[1:]] == [
        [name, "30", "4", "7", "12", "s", "ok"] for name in ("mla", "moe")
    ]


def test_wrong_and_dead_families_are_named(monkeypatch, capsys):
    bad = Outcome("NAME", 30, 4, 0, ("Case(7): Mismatch: out at [0] is 1, not 2",), 12.0)
    script(monkeypatch, SAYS % bad.to_json() + "; raise SystemExit(1)")
    assert command.check_families(("mla",), 0) == ["mla"]
    assert "1 WRONG\n    Case(7): Mismatch: out at [0]" in capsys.readouterr().out
    script(monkeypatch, "import os; print('last words', flush=True); os._exit(139)")
    assert command.check_families(("mla",), 0) == ["mla"]
    assert "died with exit code 139\n    last words" in capsys.readouterr().out


def test_a_family_that_hangs_is_stopped(monkeypatch, capsys):
    monkeypatch.setattr(command, "FAMILIES_LIMIT", 0)
    script(monkeypatch, "import time; time.sleep(60)")
    assert command.check_families(("mla",), 0) == ["mla"]
    assert "was not done in time" in capsys.readouterr().out


def test_the_sanitizer_s_verdict_counts(monkeypatch, capsys):
    monkeypatch.setattr(command.shutil, "which", lambda name: "tool")
    script(monkeypatch, "print('Invalid __global__ read'); raise SystemExit(86)")
    assert command.sanitize(("mla",)) == ["mla (sanitizer)"]
    assert "ERRORS\n    Invalid __global__ read" in capsys.readouterr().out
    script(monkeypatch, "pass")
    assert command.sanitize(("mla",)) == []
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    assert command.sanitize(("mla",)) == []
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "torch sees no CUDA GPU here"),
        (["mal"], "There is no kernel family 'mal'; the families are flash_attention"),
    ],
)
def test_what_cannot_run_says_why(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(command, "why_not", lambda: "torch sees no CUDA GPU here.")
    assert command.main(arguments) == 2
    assert sentence in capsys.readouterr().out


def test_an_old_gpu_is_told_what_it_lacks(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert command.why_not().startswith("Tesla T4 has compute capability 7.5; the kernels need")
