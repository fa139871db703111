"""notebooks/conftest.py on planted notebooks: each kind of fault fails and says what to repair."""

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
from notebook_chapter import forked
from toy_notebooks import FACT_TAGS, code, copy_machinery, fact, write

ALONE = """\
import os
print("files:", len(os.listdir()))
print("own:", len({os.environ[name] for name in ("MINILLM_WORK", "XDG_CACHE_HOME", "IPYTHONDIR")}))
print("learner:", os.path.exists(os.environ["MINILLM_WORK"]))
print("processors:", os.environ["OMP_NUM_THREADS"] != "")
"""
PLANTED = {
    "10_good": [
        code(ALONE, *FACT_TAGS, says="files: 0\nown: 3\nlearner: False\nprocessors: True\n"),
        code("open('left behind', 'w').write('x'); 1 / 0", "raises-exception"),
        fact("count", 3),
    ],
    "11_magic": [fact("count", 3), code("%notmagic"), fact("other", 4)],
    "12_changed": [
        code(
            "print('kept: 1 token\\ncount: 3 tokens')",
            *FACT_TAGS,
            says="kept: 1 token\ncount: 4 tokens\n",
        ),
        fact("other", 4),
    ],
    "13_dies": [
        code("width = 3\nraise ValueError('no cache here')"),
        code("width + 1"),
        fact("x", 1),
    ],
    "14_exits": [
        code("import os, sys\nsys.stderr.write('last words')\nsys.stderr.flush()\nos._exit(3)"),
        fact("x", 1),
    ],
    "15_never_raises": [code("x = 1", "raises-exception"), fact("x", 1)],
}

pytestmark = pytest.mark.slow  # each test starts pytest, and that a kernel for each notebook


@dataclass(frozen=True)
class Outcome:
    """One notebook's cells under pytest: which passed, which were skipped, what failed said."""

    passed: int
    skipped: int
    failures: tuple[str, ...]


def run_pytest(folder: Path, *options: str, **env: str) -> tuple[str, dict[str, Outcome]]:
    """What pytest says of the notebooks in `folder`, and the outcome of each."""
    copy_machinery(folder)
    report = folder / "report.xml"
    modes = ["--nbval-lax", "--nbval-current-env", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *modes, *options, f"--junitxml={report}", folder],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    text = done.stdout + done.stderr
    assert report.exists(), text
    found: dict[str, list[ET.Element]] = {}
    for case in ET.parse(report).iter("testcase"):
        name = re.search(r"\d\d[a-z]?_\w+", case.get("classname", "") + case.get("file", ""))
        assert name, ET.tostring(case)
        found.setdefault(name[0], []).append(case)
    outcomes = {}
    for name, cases in found.items():
        failures = tuple(failure.text or "" for case in cases for failure in case.iter("failure"))
        skipped = sum(case.find("skipped") is not None for case in cases)
        errors = [error.text or "" for case in cases for error in case.iter("error")]
        assert not errors, errors
        outcomes[name] = Outcome(len(cases) - skipped - len(failures), skipped, failures)
    return text, outcomes


# Notebook: cells that passed, cells that were skipped, and what its one failure says.
EXPECTED = {
    "10_good": (3, 0, []),
    "11_magic": (
        1,
        1,
        [
            "11_magic.ipynb cell [2] '%notmagic' stopped the chapter",
            "Line magic function `%notmagic` not found",
            "plain Python: remove the line",
        ],
    ),
    "12_changed": (  # the rest of the chapter still counts
        1,
        0,
        [
            "A fact changed in 12_changed.ipynb cell [1]",
            "count: committed 4 tokens, now 3 tokens",
            "If the change is right: python notebooks/execute.py 12",
        ],
    ),
    "13_dies": (  # one failure, not a cascade
        0,
        2,
        [
            "raise ValueError('no cache here')",
            "ValueError: no cache here",
            "The 2 cells after it were not run",
        ],
    ),
    "14_exits": (0, 1, ["the kernel died with status 3", "last words"]),
    "15_never_raises": (0, 1, ["tagged raises-exception, and it raised nothing"]),
}


@pytest.mark.parametrize("provisioner", ["local-provisioner", forked.NAME])
def test_each_kind_of_fault_fails_and_says_what_to_repair(tmp_path, provisioner):
    """All planted notebooks in one run on two workers, as `make test` does it: a test of its own
    for each would start pytest six times."""
    for stem, cells in PLANTED.items():
        write(tmp_path, stem, *cells)
    chosen = {"JUPYTER_DEFAULT_PROVISIONER_NAME": provisioner}
    text, outcomes = run_pytest(tmp_path, "-n", "2", "--dist", "loadfile", **chosen)
    found = {stem: (outcome.passed, outcome.skipped) for stem, outcome in outcomes.items()}
    assert found == {stem: (passed, skipped) for stem, (passed, skipped, _) in EXPECTED.items()}
    for stem, (_, _, says) in EXPECTED.items():
        failures = outcomes[stem].failures
        assert len(failures) == bool(says), (stem, failures)
        for line in says:
            assert line in failures[0], (stem, failures[0])
    listed = outcomes["12_changed"].failures[0]
    assert "kept: committed" not in listed  # only what changed is listed
    assert re.search(r"^10_good.ipynb: \d+\.\d s$", text, re.MULTILINE)


def test_an_endless_cell_ends_without_workers_too(tmp_path):
    write(tmp_path, "20_endless", code("while True:\n    pass"), fact("x", 1))
    _, outcomes = run_pytest(tmp_path, "--nbval-cell-timeout", "1")
    assert (outcomes["20_endless"].passed, outcomes["20_endless"].skipped) == (0, 1)
    assert "Timeout of 1 seconds exceeded" in outcomes["20_endless"].failures[0]


STARTS_A_KERNEL = """\
import os, sys
import chapters, forked, nbval.kernel
from pathlib import Path
from jupyter_client.provisioning import KernelProvisionerFactory

if __name__ == "__main__":  # not where the fork reads it again
    forked.register()
    KernelProvisionerFactory.instance().default_provisioner_name = forked.NAME
    name, folder = nbval.kernel.CURRENT_ENV_KERNEL_NAME, sys.argv[1]
    env = chapters.environment(Path(folder), 1)
    manager, _ = nbval.kernel.start_new_kernel(kernel_name=name, cwd=folder, env=env)
    print(manager.provisioner.pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_forked_kernel_ends_with_the_process_that_started_it(tmp_path):
    copy_machinery(tmp_path)
    (tmp_path / "start.py").write_text(STARTS_A_KERNEL)
    words = [sys.executable, tmp_path / "start.py", tmp_path]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    kernel, end = Path("/proc", done.stdout.strip()), time.monotonic() + 60
    assert done.stdout
    while kernel.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not kernel.exists()
