"""The wheel: everything a user needs is in it, and it works away from this checkout.

It is built from a copy, because setuptools leaves a build/ folder whose stale files would end up in
the next wheel.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import minillm
import minillm_kernels

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "minillm": ROOT / "minillm",
    "minillm_kernels": ROOT / "kernels/minillm_kernels",
    "minillm_exercises": ROOT / "exercises/minillm_exercises",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
INSTALL = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install",
           "--no-deps", "--no-index", "--no-compile"]  # fmt: skip


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, show what it said if it fails, and return its standard output."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without network by the pinned setuptools."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("minillm", "kernels", "exercises"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what pip installs from the wheel alone."""
    target = tmp_path_factory.mktemp("installed")
    run(*INSTALL, "--target", target, wheel, cwd=target)
    return target


def belongs_in_wheel(path: Path) -> bool:
    """Code, typing markers, web pages and embedded models do; notes for the repository do not."""
    return path.is_file() and (
        path.suffix in (".py", ".c", ".h", ".html", ".css", ".js")
        or path.name == "py.typed"
        or "assets" in path.parts
    )


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_both_packages(wheel: Path) -> None:
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if belongs_in_wheel(path) and "__pycache__" not in path.parts
    }
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert held == expected
    assert {"minillm/py.typed", "minillm_kernels/py.typed"} <= held


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = {PurePosixPath(n).name: n for n in archive.namelist() if ".dist-info/" in n}
    assert archive.read(info["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert b"minillm = minillm.cli:main" in archive.read(info["entry_points.txt"])
    metadata = archive.read(info["METADATA"]).decode()
    assert "Name: minillm-course\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert re.search(r"Requires-Dist: triton.*; sys_platform == .linux.\n", metadata)


GENERATE = """
import minillm, minillm_kernels
from minillm import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
(output,) = LLM("tiny").generate("def f(", params, use_tqdm=False)
print(minillm.__file__, minillm_kernels.__file__, len(output.outputs[0].token_ids), sep="\\n")
"""


@pytest.mark.slow
def test_an_installed_wheel_generates(installed: Path, tmp_path: Path) -> None:
    """From another folder, with the embedded weights that the wheel brought along."""
    said = run(sys.executable, "-c", GENERATE, cwd=tmp_path, PYTHONPATH=str(installed))
    engine, kernels, tokens = said.split()
    assert Path(engine).is_relative_to(installed)
    assert Path(kernels).is_relative_to(installed)
    assert tokens == "4"


def test_the_installed_command_starts(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "bin" / "minillm", "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "generate" in said


def test_the_environment_uses_this_checkout() -> None:
    """A moved or copied checkout keeps an environment that imports the old one: make clean."""
    for package in (minillm, minillm_kernels):
        assert Path(package.__file__ or "").parent == PACKAGES[package.__name__]


def normalised(requirement: str) -> str:
    """The name in a requirement as package indexes compare it: huggingface_hub>=1 and its kin."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def test_every_direct_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        wanted += [item for item in extra if not item.startswith(project["name"])]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {normalised(item) for item in wanted} <= {normalised(name) for name in pins}
    assert pins["torch"] == "2.13.0"
