"""The cell of INSTRUCTOR.md that starts chapters 00 to 09 on a hosted notebook."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from notebook_chapter import chapters

ROOT = Path(__file__).resolve().parents[2]
PIP = {
    "DRY_RUN": "1",
    "NO_DEPS": "1",
    "NO_INDEX": "1",
    "NO_BUILD_ISOLATION": "0",
}  # 0: pip turns it round


def cell() -> str:
    """The code, with this checkout as the repository."""
    (found,) = re.findall(
        r"```python\n( *REPOSITORY = .*?)```",
        (ROOT / "INSTRUCTOR.md").read_text("utf-8"),
        re.DOTALL,
    )
    code = textwrap.dedent(found)
    return re.sub(r'"https://host/[^"]*"', repr(ROOT.as_uri()), code, count=1)


@pytest.mark.slow
def test_the_cell_of_a_hosted_notebook_brings_the_chapters_what_they_import(tmp_path):
    """As a hosted kernel runs it: in an empty folder, without the paths of this checkout. pip gets
    the same command, and installs nothing: what it would download is here already."""
    setups = []
    for path in chapters.chapter_paths():
        if chapters.number(path) < "10":
            code = (c["source"] for _, c in chapters.code_cells(chapters.read_notebook(path)))
            imports = (line for cell in code for line in cell.splitlines())
            setups += [line for line in imports if re.match(r"(from minillm\S* )?import ", line)]
    where = """
import minillm, minillm_kernels, minillm_exercises
from minillm_exercises.manifest import exercises_root
for module in (minillm, minillm_kernels, minillm_exercises):
    assert os.path.abspath("minillm-course") in module.__file__, module.__file__
assert exercises_root().is_relative_to(os.path.abspath("minillm-course"))
"""
    program = "\n".join([cell(), cell(), where, *setups])  # run twice, as people do
    assert len(setups) > 40
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {f"PIP_{name}": value for name, value in PIP.items()}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
