"""The stages of a run: their order, tasks and time limits."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from minillm.errors import ConfigError, did_you_mean

FAMILIES = (
    "gemv", "fused", "sampling", "quantized", "moe", "mla", "paged_attention", "int8_pages",
)  # fmt: skip
MODELS = ("qwen3-0.6b", "llama-3.1-8b", "deepseek-v2-lite", "qwen3-30b-a3b")
DRY = 12  # a dry run has so many times as long: it compiles everything on a few processors


@dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
        module: of `minillm.lab.gpu`, with `cases(task, context)`.
        tasks: one worker process each, `parallel` of them at once.
        cap: seconds at most; with less than `least` the stage is left out.
        silence: seconds without a word after which a worker is ended.
        prefix: put before the worker's command.
        beside: runs beside the stages that follow, for `cap` seconds at most.
        grace: seconds that it may take from the stages behind it.
    """

    name: str
    module: str
    tasks: tuple[str, ...]
    cap: float
    least: float
    parallel: int = 1
    silence: float = 25.0
    prefix: tuple[str, ...] = ()
    beside: bool = False
    grace: float = 0.0


# Without torch's cache each tensor is an allocation, so that an access behind its end is seen.
SANITIZER = (
    "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--tool", "memcheck",
    "--error-exitcode", "86",
)  # fmt: skip
CHECKED = (*FAMILIES, "flash_attention")
WARM = (*(f"engine {model}" for model in MODELS), "decode qwen3-0.6b", "decode llama-3.1-8b")
STAGES = (
    Stage("facts", "facts", ("machine",), 20, 20, silence=60, grace=40),  # torch from a cold disk
    Stage("warm", "warm", WARM, 60, 10, parallel=6, silence=60, beside=True),
    Stage("smoke", "families", CHECKED, 95, 20, parallel=9),
    Stage("engine", "engine", ("tiny", "launches", *MODELS), 80, 20, parallel=3),
    Stage("decode", "speed", ("decode qwen3-0.6b", "decode llama-3.1-8b"), 95, 30, silence=60),
    Stage("nano", "speed", ("nano",), 45, 30, silence=45),
    Stage("profile", "speed", ("profile qwen3-0.6b", "profile llama-3.1-8b"), 35, 20, silence=35),
    Stage("kernels", "families", FAMILIES, 115, 20),
    Stage("memcheck", "families", ("gemv", "paged_attention", "fused", "sampling"), 40, 30,
          parallel=6, silence=40, prefix=SANITIZER),
    Stage("rest", "families", CHECKED, 15, 10, parallel=4),
)  # fmt: skip
NAMES = tuple(stage.name for stage in STAGES)
PACKAGES = ("torch", "triton", "numpy")  # of every stage
ENGINE = ("msgspec", "safetensors", "tokenizers", "jinja2", "tqdm")
ENGINES = ("warm", "engine", "speed")  # modules that open one
# Who gives time, first to last, if there is less than all want.
GIVING = ("rest", "memcheck", "kernels", "profile", "decode", "nano", "warm", "engine", "smoke")
ALWAYS_AGAIN = ("facts", "engine", "decode", "nano")  # of `--again`


def chosen(names: Sequence[str], stages: Sequence[Stage] = STAGES) -> tuple[Stage, ...]:
    """The named stages, and facts, which the others need; all if none is named."""
    known = [stage.name for stage in stages]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--only has no stage {name!r}; the stages are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
    return tuple(each for each in stages if not names or each.name in (*names, "facts"))


def lacking(stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], str]:
    """The stages that can run with the packages that are installed, and a sentence about others.
    ConfigError if none can."""
    if none := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"{', '.join(none)} not installed for {sys.executable}; name another Python."
        )
    absent = [name for name in ENGINE if find_spec(name) is None]
    left_out = [stage.name for stage in stages if stage.module in ENGINES and absent]
    if not left_out:
        return tuple(stages), ""
    why = (
        f"{', '.join(absent)} not installed for {sys.executable}, so {', '.join(left_out)} are "
        "left out; carry the wheels, and install them into a folder of PYTHONPATH."
    )
    return tuple(stage for stage in stages if stage.name not in left_out), why


def within(stages: Sequence[Stage], seconds: float) -> tuple[Stage, ...]:
    """The stages with caps that sum up to at most `seconds`: the last ones of `GIVING` keep theirs.

    A stage gives down to its `least`, the first ones all. Time that is left over goes to "rest", if
    it runs.
    """
    caps = {stage.name: stage.cap for stage in stages if not stage.beside}
    least = {stage.name: stage.least for stage in stages}
    for down in (True, False):  # first down to the least, then all of it
        for name in GIVING:
            excess = sum(caps.values()) - seconds
            if excess > 0 and name in caps:
                keeps = least[name] if down and name not in GIVING[:2] else 0.0
                caps[name] = max(caps[name] - excess, keeps) if keeps else 0.0
    if caps.get("rest"):
        caps["rest"] += max(seconds - sum(caps.values()), 0.0)
    kept = [replace(each, cap=caps.get(each.name, each.cap)) for each in stages]
    return tuple(each for each in kept if each.cap > 0)


def dry(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages of a dry run: a few processes, without the one that is a dry run by itself and
    without tools that need a GPU."""
    return tuple(
        replace(
            each, cap=each.cap * DRY, silence=each.silence * DRY, prefix=(),
            parallel=min(each.parallel, os.cpu_count() or 1),
        )
        for each in stages if not each.beside
    )  # fmt: skip


def again(
    stages: Sequence[Stage], records: Sequence[Mapping], changed: Sequence[str]
) -> tuple[tuple[Stage, ...], dict[tuple[str, str], list[str]]]:
    """What to run after repairs: of a family that is not in `changed` only the cases that did not
    pass in `records`; the engine and its speed always.

    Returns the stages with the tasks that are left, and the cases of (stage, task) that are not
    run whole.
    """
    for family in changed:
        if family not in CHECKED:
            raise ConfigError(
                f"--changed has no family {family!r}; the families are {', '.join(CHECKED)}."
                f"{did_you_mean(family, CHECKED)}"
            )
    open_cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.get("status") not in (None, "passed") and record["stage"] in ("smoke", "kernels"):
            open_cases.setdefault((record["stage"], record["task"]), []).append(record["case"])
    kept = []
    for stage in stages:
        tasks = stage.tasks
        if stage.name in ("smoke", "kernels"):
            tasks = tuple(t for t in tasks if t in changed or (stage.name, t) in open_cases)
        elif stage.name not in ALWAYS_AGAIN:
            tasks = ()
        if tasks:
            kept.append(replace(stage, tasks=tasks))
    only = {key: cases for key, cases in open_cases.items() if key[1] not in changed}
    return tuple(kept), only
