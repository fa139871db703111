"""`python -m minillm_kernels.check`: are the compiled kernels right on this GPU?

Each family runs in a process of its own, all of them at once: first every case against float64 and
bit for bit in the batch-invariant mode, with random cases until the time is over; then the cases
again under compute-sanitizer, which sees every access outside of a tensor; then the engine's own
tests on the GPU, if this is the repository.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from minillm_kernels.check.suite import Outcome, run_family
from minillm_kernels.families import CHECKED, UnknownFamilyError, chosen

EXAMPLES = """\
examples:
  python -m minillm_kernels.check                       everything, within 8 minutes
  python -m minillm_kernels.check paged_attention mla   two families
  python -m minillm_kernels.check --no-engine --no-sanitizer --seconds 300
"""
# Seconds that each part has at most, eight minutes together. A family mostly compiles.
FAMILIES_LIMIT, SANITIZER_LIMIT, ENGINE_LIMIT = 180, 140, 150
SANITIZER_ERROR = 86
ROOT = Path(__file__).resolve().parents[3]
# What has to stay equal whatever the engine does; parts that need no other GPU test's time.
ENGINE_TESTS = (
    "tests/kernels/test_cuda_engine.py",
    "tests/matrix/test_cells.py",
    "tests/engine/test_deterministic.py",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 if something is wrong, 2 if nothing could run."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm_kernels.check",
        description="Check the compiled kernels on a CUDA GPU against float64.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", nargs="*", help="kernel families (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N",
                        help="time for each family's random cases (60)")  # fmt: skip
    parser.add_argument("--no-sanitizer", action="store_true", help="without compute-sanitizer")
    parser.add_argument("--no-engine", action="store_true", help="without the engine's tests")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        families = chosen(args.family, CHECKED)
    except UnknownFamilyError as error:
        return say(str(error), code=2)
    reason = why_not()
    if reason:
        return say(reason, code=2)
    if args.worker:
        outcome = run_family(families[0], "cuda", args.seconds)
        return say(outcome.to_json(), code=int(bool(outcome.failures)))
    wrong = check_families(families, args.seconds)
    if not args.no_sanitizer:
        wrong += sanitize(families)
    if not args.no_engine:
        wrong += check_engine()
    say("everything agrees" if not wrong else f"wrong: {', '.join(wrong)}")
    return int(bool(wrong))


def why_not() -> str:
    """Why nothing can be checked here; empty if it can."""
    import torch

    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton); there is nothing to check."
    if not torch.cuda.is_available():
        return (
            "torch sees no CUDA GPU here. Without one the same cases run interpreted: "
            "python -m pytest tests/kernels"
        )
    found = torch.cuda.get_device_capability()
    if found < (8, 0):
        return (
            f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}; the "
            "kernels need 8.0 or newer, and minillm uses plain torch there."
        )
    return ""


def say(text: str, code: int = 0) -> int:
    """One line, at once; returns the exit code that was given."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return code


def worker(family: str, seconds: float, *prefix: str) -> subprocess.Popen[str]:
    """A process that checks one family."""
    command = [sys.executable, "-m", "minillm_kernels.check", "--worker", "--seconds", str(seconds)]
    return subprocess.Popen(
        [*prefix, *command, family],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if prefix else {}),
    )


def finish(process: "subprocess.Popen[str]", deadline: float) -> tuple[int, str]:
    """Exit code and output; 124 for one that was not done in time."""
    try:
        said, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        process.kill()
        return 124, process.communicate()[0]
    return process.returncode, said


def check_families(families: Sequence[str], seconds: float) -> list[str]:
    """Every family against float64, side by side; returns those that are wrong."""
    say(f"{'family':<18} {'cases':>6} {'bitwise':>8} {'random':>7} {'time':>7}")
    deadline = time.monotonic() + max(seconds, FAMILIES_LIMIT)
    running = {family: worker(family, seconds) for family in families}
    wrong = []
    for family, process in running.items():
        code, said = finish(process, deadline)
        outcome = outcome_in(said)
        if outcome is None:
            reason = "was not done in time" if code == 124 else f"died with exit code {code}"
            say(f"{family:<18} {reason}\n{tail(said)}")
            wrong.append(family)
            continue
        say(
            f"{family:<18} {outcome.num_cases:>6} {outcome.num_invariant:>8} "
            f"{outcome.num_random:>7} {outcome.seconds:>5.0f} s  "
            + ("ok" if not outcome.failures else f"{len(outcome.failures)} WRONG")
        )
        for failure in outcome.failures[:5]:
            say(f"    {failure}")
        wrong += [family] * bool(outcome.failures)
    return wrong


def outcome_in(said: str) -> Outcome | None:
    """The last line that is one."""
    for line in reversed(said.splitlines()):
        if line.startswith('{"family"'):
            return Outcome.from_json(line)
    return None


def tail(said: str, lines: int = 12) -> str:
    """The end of a process's output, indented."""
    return "\n".join(f"    {line}" for line in said.splitlines()[-lines:])


def sanitize(families: Sequence[str]) -> list[str]:
    """The cases again under compute-sanitizer's memcheck; returns the families it minds."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        say("compute-sanitizer is not on the PATH: this part was left out")
        return []
    options = ("--tool", "memcheck", "--error-exitcode", str(SANITIZER_ERROR))
    deadline = time.monotonic() + SANITIZER_LIMIT
    running = {family: worker(family, 0, tool, *options) for family in families}
    wrong = []
    for family, process in running.items():
        code, said = finish(process, deadline)
        verdict = {0: "clean", 124: "not done in time", SANITIZER_ERROR: "ERRORS"}.get(
            code, f"exit code {code}"
        )
        say(f"{family:<18} compute-sanitizer: {verdict}")
        if code:
            say(tail(said))
            wrong += [f"{family} (sanitizer)"]
    return wrong


def check_engine() -> list[str]:
    """The engine's equality tests, which take the GPU where there is one."""
    if not (ROOT / "tests/engine").is_dir() or find_spec("pytest") is None:
        say("the engine's tests are in minillm's repository (and need pytest): left out")
        return []
    say(f"the engine on the GPU: {', '.join(ENGINE_TESTS)}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *ENGINE_TESTS]
    parallel = ["-n", "4", "--dist", "loadgroup"] if find_spec("xdist") else []
    process = subprocess.Popen(
        [*command, *parallel], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    code, said = finish(process, time.monotonic() + ENGINE_LIMIT)
    say(tail(said, 3 if code == 0 else 30))
    return [] if code == 0 else ["the engine" if code != 124 else "the engine (not done in time)"]


if __name__ == "__main__":
    sys.exit(main())
