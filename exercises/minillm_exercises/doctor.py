"""Whether this machine can do the course: packages, torch, Triton, Jupyter, folders.

torch and Triton are tried in processes of their own: a broken installation can end a process
without a word, and that is what `doctor` is there to say.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minillm_exercises.manifest import exercises_root
from minillm_exercises.session import Session, unavailable
from minillm_exercises.workspace import shown_path

PATIENCE = 120.0  # seconds for a process that imports torch, on a slow disk too
OLDEST = (3, 11)
COURSE = (
    "torch", "numpy", "msgspec", "safetensors", "tokenizers", "jinja2", "rich", "matplotlib",
    "ipykernel", "ipywidgets", "jupyterlab", "aiohttp", "fastapi", "uvicorn", "llguidance",
)  # fmt: skip
INSTALL = "pip install -c constraints.txt -e '.[course]' (or make lab, which does it)"
TRITON_TOLERANCE = 1e-6
TORCH_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
x = torch.ones(8, 8)
right = all(bool((y @ y == 8).all()) for y in (x, x.bfloat16()))
device = torch.cuda.get_device_name() if cuda else "cpu"
print(json.dumps({"version": torch.__version__, "right": right,
    "threads": torch.get_num_threads(), "cuda": cuda, "device": device}))
"""
TRITON_ERROR = """
from minillm_exercises.triton_selftest import largest_error
print(largest_error())
"""

Level = Literal["ok", "note", "problem"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `remedy` says what to do unless all is well."""

    level: Level
    about: str
    said: str
    remedy: str = ""


def examine(session: Session, run: Run = subprocess.run) -> Iterator[Finding]:
    """Everything `doctor` looks at, one finding after the other, because some take seconds."""
    yield python_version(sys.version_info[:3])
    yield from packages()
    yield from torch_works(run)
    yield triton_works(run)
    yield writable(session.workspace.root)
    yield from exercises(session)


def python_version(version: tuple[int, ...]) -> Finding:
    """Whether Python is new enough."""
    text = ".".join(map(str, version))
    if version[:2] < OLDEST:
        remedy = f"make a new environment with Python {OLDEST[0]}.{OLDEST[1]} or newer"
        return Finding("problem", "python", f"{text} is too old", remedy)
    return Finding("ok", "python", f"{text}, {sys.executable}")


def packages(constraints: Path | None = None, have: Any = None) -> Iterator[Finding]:
    """The course's packages against constraints.txt, if that is there; `have` gives the version
    of an installed package or raises PackageNotFoundError."""
    have = have or importlib.metadata.version
    path = constraints or exercises_root().parent / "constraints.txt"
    pins = _pins(path)
    wrong, missing = [], []
    for name in COURSE:
        try:
            version = have(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if name in pins and version.partition("+")[0] != pins[name]:
            wrong.append(f"{name} {version} (tested: {pins[name]})")
    if missing:
        yield Finding("problem", "packages", f"not installed: {', '.join(missing)}", INSTALL)
    if wrong:
        remedy = f"if something behaves oddly: {INSTALL}"
        yield Finding("note", "packages", f"other versions: {', '.join(wrong)}", remedy)
    if not missing and not wrong:
        said = "as tested" if pins else "installed (no constraints.txt here to compare with)"
        yield Finding("ok", "packages", said)


def _pins(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split("#")[0].partition("==") for line in lines)
    return {name.strip().lower(): pin.strip() for name, equals, pin in pairs if equals}


def torch_works(run: Run = subprocess.run) -> Iterator[Finding]:
    """Whether torch loads and multiplies, also in bf16, and with how many threads."""
    facts = torch_facts(run)
    if "error" in facts:
        yield Finding("problem", "torch", f"does not load: {facts['error']}", INSTALL)
        return
    if not facts["right"]:
        yield Finding("problem", "torch", "multiplies wrongly", f"install it again: {INSTALL}")
    else:
        device = facts["device"]
        yield Finding("ok", "torch", f"{facts['version']} on {device}")
    yield _threads(int(facts["threads"]))


def _threads(used: int) -> Finding:
    from minillm.plan.machine import cpu_count

    have = cpu_count()
    if used > have:
        remedy = f"set OMP_NUM_THREADS={have}: threads without a processor wait for each other"
        return Finding("note", "threads", f"{used} for {have} processors", remedy)
    return Finding("ok", "threads", f"{used} of {have} processors")


def torch_facts(run: Run = subprocess.run) -> Mapping[str, Any]:
    """What a fresh process finds out about torch; "error" if it does not get that far."""
    done = _python(run, TORCH_FACTS)
    try:
        facts = json.loads(done.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": _last_line(done) or "the process ended without a word"}
    return facts if isinstance(facts, dict) else {"error": done[:200]}


def triton_works(run: Run = subprocess.run) -> Finding:
    """Whether interpreted Triton returns what torch returns."""
    if importlib.util.find_spec("triton") is None:
        remedy = "Triton is for Linux: use WSL, or skip its chapters"
        return Finding("note", "triton", "not installed", remedy)
    said = _python(run, TRITON_ERROR, TRITON_INTERPRET="1")
    try:
        error = float(_last_line(said))
    except ValueError:
        return Finding("problem", "triton", f"the interpreter fails: {_last_line(said)}", INSTALL)
    if not error <= TRITON_TOLERANCE:  # also a NaN
        said = f"the interpreter returns wrong values (off by {error:.3g})"
        return Finding("problem", "triton", said, f"numpy or triton do not fit: {INSTALL}")
    version = importlib.metadata.version("triton")
    return Finding("ok", "triton", f"{version}, interpreted values are those of torch")


def _python(run: Run, code: str, **environment: str) -> str:
    """What a fresh interpreter prints; its last error line if it fails."""
    try:
        done = run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE,
            env={**os.environ, **environment},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode:
        return _last_line(done.stderr) or f"the process ended with code {done.returncode}"
    return str(done.stdout)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""


def writable(root: Path) -> Finding:
    """Whether the learner's folder can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        said = f"{shown_path(root)} cannot be written: {error.strerror or error}"
        remedy = "give it write permission, or set MINILLM_WORK to another folder"
        return Finding("problem", "your files", said, remedy)
    return Finding("ok", "your files", shown_path(root))


def exercises(session: Session) -> Iterator[Finding]:
    """How many exercises can be done here, and what the others lack."""
    missing = {e.id: why for e in session.manifest.values() if (why := unavailable(e))}
    able = len(session.manifest) - len(missing)
    yield Finding("ok", "exercises", f"{able} of {len(session.manifest)} can be done here")
    for exercise_id, why in missing.items():
        remedy = "get the course's files again" if "missing" in why else "use a machine that has it"
        yield Finding("note", exercise_id, f"not here: {why}", remedy)
