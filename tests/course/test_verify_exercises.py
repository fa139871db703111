"""Every exercise of the course: its grader tells right from wrong, and its solution is right.

Each failure lists what to repair, sentence by sentence; `python -m minillm_exercises verify e03.1`
says the same.
"""

import os
import random
import runpy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.reply import Reply
from minillm_exercises.manifest import load_manifest
from minillm_exercises.verify import verify
from tests.pairs import one_in

EXERCISES = list(load_manifest())


@pytest.mark.parametrize("exercise_id", one_in(6, EXERCISES))
def test_the_grader_tells_right_from_wrong(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id], thorough=False)
    assert not problems, "\n" + "\n".join(map(str, problems))


@pytest.mark.mutation
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_grader_names_every_mistake_and_notices_mechanical_mutants(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id])
    assert not problems, "\n" + "\n".join(map(str, problems))


def test_there_are_exercises() -> None:
    assert len(load_manifest()) >= 2


def solution(exercise_id: str) -> Any:
    """Our solution of an exercise, to be called."""
    answers = load_manifest()[exercise_id].answers
    return SimpleNamespace(**runpy.run_path(str(answers / "solution.py")))


def test_the_percentile_is_numpys() -> None:
    ours, draw = solution("e22.1"), random.Random(22)
    for _ in range(200):
        values = [draw.expovariate(1.0) for _ in range(draw.randint(1, 40))]
        percent = draw.choice([0, 1, 25, 50, 90, 95, 99, 99.9, 100])
        assert ours.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_measures_are_those_of_our_load_generator() -> None:
    """The exercise's two times per token mean what `minillm.lab` reports under these names."""
    chunks = [(1.5, 1), (2.0, 1), (3.5, 1)]
    request = SimpleNamespace(due=1.0, sent=1.25, chunks=chunks, end=4.0, outcome="ok")
    times = [time for time, _ in chunks]
    reply = Reply(0, 0, 1.0, 1.25, 4.0, frames=times, texts=times, output_tokens=3)
    ours = solution("e22.1").measures(request)
    vllm = measures.vllm(reply)
    assert ours["ttft"] == vllm["ttft"]
    assert ours["e2e"] == vllm["e2el"]
    assert ours["tpot_vllm"] == vllm["tpot"]
    assert ours["tpot_guidellm"] == (3.5 - 1.0) / 3  # guidellm: from the start, over all tokens


COMPILED = """
import sys, types, torch
from importlib.machinery import SourceFileLoader
from minillm_kernels.offline import compile_for

def load(path):
    module = types.ModuleType("solution")
    module.__file__ = path
    SourceFileLoader("solution", path).exec_module(module)
    return module

def run():
    softmax, decode = (load(path) for path in sys.argv[1:])
    ones = torch.ones(3, dtype=torch.int32)
    softmax.softmax(torch.zeros(3, 300, dtype=torch.bfloat16), ones, 0.7, torch.zeros(3, 300))
    q, cache, tables = torch.zeros(3, 6, 32), torch.zeros(9, 8, 2, 32), ones[:, None].repeat(1, 5)
    decode.paged_decode(q, cache, cache, tables, ones, 0.25, 3, torch.zeros_like(q))

for found in compile_for(80, run):
    print(found.kernel, found.spills, found.fits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["solution", "alternate"])
def test_solutions_become_machine_code_without_spills(kind: str) -> None:
    """What the checks ask of the compiler is its first pass; here it is all of it."""
    pytest.importorskip("triton")
    answers = [load_manifest()[key].answers / f"{kind}.py" for key in ("e11.1", "e11.2")]
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, *map(str, answers)], capture_output=True, text=True,
        check=False, env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert all(line.endswith(" False True") for line in lines), lines
