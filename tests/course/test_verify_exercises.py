"""Every exercise of the course: its grader tells right from wrong.

Each failure lists what to repair, sentence by sentence; `python -m minillm_exercises verify e03.1`
says the same.
"""

import pytest

from minillm_exercises.manifest import load_manifest
from minillm_exercises.verify import verify

EXERCISES = list(load_manifest())


@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_grader_tells_right_from_wrong(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id], repeat=False, thorough=False)
    assert not problems, "\n" + "\n".join(map(str, problems))


@pytest.mark.mutation
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_the_grader_notices_mechanical_mutants(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id], repeat=False)
    assert not problems, "\n" + "\n".join(map(str, problems))


@pytest.mark.slow
@pytest.mark.parametrize("exercise_id", EXERCISES)
def test_mistakes_have_the_same_results_twice(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id])
    assert not problems, "\n" + "\n".join(map(str, problems))


def test_there_are_exercises() -> None:
    assert len(load_manifest()) >= 2
