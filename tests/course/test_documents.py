"""What the pages for readers say stays true: links, commands, tables, examples."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm_exercises.cli.parser import build_parser
from minillm_exercises.gradebook import grade_class
from minillm_exercises.limits import DEFAULT
from minillm_exercises.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "INSTRUCTOR.md"
GLOSSARY = ROOT / "notebooks" / "GLOSSARY.md"
SELFTEST = ROOT / "notebooks" / "SELFTEST.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "minillm").glob("*.md")), ROOT / "notebooks" / "results" / "README.md", GUIDE,
    GLOSSARY, SELFTEST, ROOT / "exercises" / "AGENTS.md",
    *sorted((ROOT / "exercises").glob("e[0-9]*/README.md")),
]  # fmt: skip
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
COMMAND = re.compile(r"python -m minillm_exercises ((?!\.\.\.)[a-z][^`\n]*)")


MANIFEST = load_manifest()

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings."""
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for file, anchor in LINK.findall(text_of(page)):
        target = page.parent / file if file else page
        if not target.exists():
            yield f"{file} is not there"
        elif anchor and anchor not in anchors(text_of(target)):
            yield f"{file}#{anchor} is no heading"


@pages
def test_links_lead_somewhere(page):
    assert not list(broken_links(page))


CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_links_into_the_engine(chapter):
    files = re.findall(r"\]\(\.\./(minillm/[\w./]+)\)", text_of(chapter))
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def commands(text: str) -> list[str]:
    """The course's commands that a page tells somebody to type, for python and for a container."""
    joined = text.replace("\\\n", " ")
    inside = re.findall(r"minillm-grader ([a-z][^\n]*)", joined.replace("minillm-grader --", ""))
    return [*COMMAND.findall(joined), *inside]


@pages
def test_commands_exist_with_these_options(page):
    for command in commands(text_of(page)):
        words = shlex.split(command.split(">")[0].split("#")[0])
        try:
            build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name} says `{command}`, which the parser refuses")


@pages
def test_make_has_these_targets(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text_of(page))) <= targets


def tables():
    """exercises/instructor_tables.py as a module."""
    path = ROOT / "exercises" / "instructor_tables.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_guide_has_every_plan_and_the_errors_are_complete(capsys):
    made, remedy = tables(), "run: python exercises/instructor_tables.py --write"
    assert made.main(["--errors"]) == 0
    page = capsys.readouterr().out
    messages = [m.teaches for e in MANIFEST.values() for m in e.mutants]
    assert messages
    assert all(messages)
    assert not [message for message in messages if message not in page]
    assert made.filled(text_of(GUIDE)) == text_of(GUIDE), remedy


def test_the_hidden_check_of_the_guide_works(tmp_path):
    *_, block = re.findall(r"^```python\n(.*?)```", text_of(GUIDE), re.DOTALL | re.MULTILINE)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test_e01_1.py").write_text(block)
    exercise = MANIFEST["e01.1"]
    right = (exercise.answers / "solution.py").read_text("utf-8")
    answers = {"right": right, "wrong": exercise.mutants[0].source}
    for student, answer in answers.items():
        place = tmp_path / "submissions" / student / exercise.folder.name
        place.mkdir(parents=True)
        (place / "e01_1.py").write_text(answer)
    results = grade_class(
        tmp_path / "submissions", {"e01.1": exercise}, tmp_path / "hidden", seed=20
    )
    got = {r.student: (r.public.status, r.hidden.status, r.hidden.earned) for r in results}
    assert got == {"right": ("pass", "pass", 3), "wrong": ("fail", "fail", 0)}


def test_selftest_answers_are_right():
    import math

    import torch

    text = text_of(SELFTEST)
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    said = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True)
    assert said.stdout == "18\n"
    space = {"torch": torch}
    exec(second, space)
    assert space["x"].tolist() == [1, 1, 0]
    x, w = torch.zeros(5, 3, 8), torch.zeros(8, 4)
    shapes = (x @ w).shape, x.sum(dim=1).shape, (torch.zeros(5, 1, 4) + torch.zeros(3, 1)).shape
    assert "; ".join(str(tuple(shape)) for shape in shapes) + "," in text
    odds = torch.tensor([0.0, math.log(3)]).softmax(0).tolist()
    assert odds == pytest.approx([1 / 4, 3 / 4])
    assert (sum(range(129)), sum(range(129)) / 128) == (8256, 64.5)


def test_dockerfile_copies_what_exists_and_fits_the_project():
    dockerfile = text_of(ROOT / ".devcontainer" / "Dockerfile")
    ignored = text_of(ROOT / ".devcontainer" / "Dockerfile.dockerignore").split()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE)]
    assert copied
    for source in [name for names in copied for name in names]:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} is not sent to docker build"
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    oldest = tuple(map(int, re.findall(r"\d+", project["requires-python"])))
    versions = re.findall(r"^FROM python:(\d+)\.(\d+)", dockerfile, re.MULTILINE)
    assert [oldest <= (int(a), int(b)) for a, b in versions] == [True, True]
    assert all(extra in project["optional-dependencies"] for extra in ("course",))


def test_the_guide_states_the_limits_that_hold():
    text = " ".join(text_of(GUIDE).split())
    gib = DEFAULT.memory // 2**30
    cpu = f"{DEFAULT.cpu:.0f} seconds of processor time per check"
    assert f"{cpu} ({DEFAULT.wall:.0f} on the clock, if it waits" in text
    assert f"{gib} GiB of memory above what" in text
    assert f"{cpu}, or {DEFAULT.wall:.0f} of waiting" in text


def test_container_lines_fit_the_dockerfile():
    text = text_of(GUIDE)
    dockerfile = text_of(ROOT / ".devcontainer" / "Dockerfile")
    [build] = re.findall(r"docker build --target (\w+) --tag (\S+) --file (\S+) \.", text)
    stage, tag, file = build
    assert (ROOT / file).is_file()
    assert f"AS {stage}\n" in dockerfile
    [run] = re.findall(r"docker run (.+?)\ndone", text, re.DOTALL)
    assert tag in run
    scratch = re.search(r"TMPDIR=(\S+)", dockerfile)[1]
    for needed in ("--network none", "--read-only", f"--tmpfs {scratch}", "--memory ", "--pids"):
        assert needed in run
    assert 'ENTRYPOINT ["python", "-m", "minillm_exercises"]' in dockerfile
