"""The process of one task: says its cases, runs them, and says what came of each."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

Found = dict[str, Any] | None
SPARE = 1.0  # seconds left below which no case is begun


@dataclass(frozen=True)
class Case:
    """Something to be tried: raises AssertionError if it is wrong.

    It returns what it found: "figures" are numbers by name, for the table. `patience` are seconds
    in which it need not say a word.
    """

    name: str
    run: Callable[[], Found]
    patience: float = 0.0


@dataclass(frozen=True)
class Context:
    """What a stage's module needs to know: `dry` compiles and runs nothing, on a CPU; `end` is the
    worker's own `time.monotonic()` by which it should be done; `out` is for large files."""

    stage: str
    task: str
    dry: bool = False
    end: float = 0.0
    start: int = 0
    out: Path = field(default_factory=Path)

    @property
    def device(self) -> str:
        """Where tensors are."""
        return "cpu" if self.dry else "cuda"


def main(arguments: Sequence[str]) -> None:
    """Do the job in `arguments`: events go to standard output, everything else to the errors."""
    job = json.loads(arguments[0])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print

    def say(event: str, **more: Any) -> None:
        lines.write(json.dumps({"event": event, **more}) + "\n")
        lines.flush()

    stage, dry = job["stage"], job["dry"] or job["module"] == "warm"
    end = time.monotonic() + job["seconds"]
    context = Context(stage, job["task"], dry, end, job["start"], Path(job["out"]))
    module = import_module(f"minillm.lab.gpu.{job['module']}")
    emulated: Any = nullcontext()
    if dry:
        from minillm.lab.gpu.emulate import emulated as emulate

        emulated = emulate()
    with emulated as kernels:
        only = job["only"]
        cases = [each for each in module.cases(context) if only is None or each.name in only]
        say("plan", names=[case.name for case in cases])
        for index, case in enumerate(cases):
            if index >= context.start:
                if time.monotonic() > end - SPARE:
                    break  # what is left would be cut off
                say("begin", index=index, patience=case.patience)
                status, figures = tried(case, kernels)
                say("done", status=status, found=figures)
                if "CUDA error" in figures.get("error", ""):
                    return  # every later call would fail: a new worker goes on
    say("end")


def _end_with_parent() -> None:
    """The parent never writes: its end of the pipe closes when it dies, however it does."""
    os.read(0, 1)
    os._exit(1)


def tried(case: Case, kernels: list | None) -> tuple[str, dict[str, Any]]:
    """Status and findings of a case. In a dry run `kernels` grows with every launch."""
    before = len(kernels or ())
    try:
        figures = dict(case.run() or {})
    except AssertionError as error:
        return "failed", {"error": described(error)}
    except Exception as error:
        return "error", {"error": described(error)}
    if kernels is not None:
        figures["launches"] = len(kernels) - before
        kernels.clear()
    return "passed", figures


def described(error: BaseException) -> str:
    """Type and message of the first cause, and where it was raised. Of a long message the end
    stays: Triton's begins with the source."""
    while error.__cause__ is not None:
        error = error.__cause__
    trace, where = error.__traceback__, ""
    while trace is not None:
        where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else f"{text[:100]} ... {text[-300:]}"
    return f"{type(error).__name__}: {text} ({where})"


if __name__ == "__main__":
    main(sys.argv[1:])
