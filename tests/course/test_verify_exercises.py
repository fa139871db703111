"""Every exercise of the course: its grader tells right from wrong.

Each failure lists what to mend, sentence by sentence; ``python -m minillm_exercises verify e03.1``
says the same.
"""

import pytest

from minillm_exercises.manifest import load_manifest
from minillm_exercises.verify import verify


@pytest.mark.parametrize("exercise_id", load_manifest())
def test_the_grader_tells_right_from_wrong(exercise_id: str) -> None:
    problems = verify(ids=[exercise_id])
    assert not problems, "\n" + "\n".join(map(str, problems))


def test_there_are_exercises() -> None:
    assert len(load_manifest()) >= 2
