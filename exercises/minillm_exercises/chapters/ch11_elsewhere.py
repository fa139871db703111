"""Chapter 11: the notebook's own kernels, counted in an interpreted process.

Counting accesses needs an interpreted process. A notebook on a GPU is none, so another Python
process does it there, which gets the source of the notebook's functions.
"""

import ast
import inspect
import json
import linecache
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minillm_exercises.chapters.ch11_traffic import Traffic, counting
from minillm_exercises.errors import ExerciseError
from minillm_kernels.launch import INTERPRETED

SECONDS = 120  # that another process may take
MARK = "minillm answers: "  # before the line of JSON that it writes


def count(function: Callable[..., object], *arguments: Any) -> Traffic:
    """The traffic of ``function(*arguments)``: here where kernels are interpreted, and otherwise
    in a process where they are. Arguments are tensors, or dataclasses of them.

    Raises:
        ExerciseError: the other process failed.
    """
    if INTERPRETED:
        with counting() as found:
            result = function(*_on_cpu(arguments))
        found.result = result if isinstance(result, torch.Tensor) else None
        return found
    return Traffic.from_json(elsewhere(function, arguments))


def elsewhere(function: Callable[..., object], given: Any) -> Any:
    """The JSON with which an interpreted process answers.

    Raises:
        ExerciseError: it failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="minillm-kernels-") as name:
        script, pickled = Path(name, "kernels.py"), Path(name, "given.pickle")
        pickled.write_bytes(pickle.dumps(_on_cpu(given)))
        script.write_text(
            f"{source_of(function)}\n\nif __name__ == '__main__':\n"
            f"    from minillm_exercises.chapters import ch11_elsewhere\n"
            f"    ch11_elsewhere.answer({function.__name__}, {str(pickled)!r})\n",
            encoding="utf-8",
        )
        env = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, str(script)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ExerciseError(f"The process that should count failed: {error}") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise ExerciseError(f"The process that should count failed: {last[:300]}")


def answer(function: Callable[..., object], pickled: str) -> None:
    """In the other process: count, and write the result as a line of JSON."""
    given = pickle.loads(Path(pickled).read_bytes())
    result = count(function, *given).to_json()
    sys.stdout.write(f"\n{MARK}{json.dumps(result)}\n")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(map(_on_cpu, value))
    if is_dataclass(value) and not isinstance(value, type):
        moved = {each.name: _on_cpu(getattr(value, each.name)) for each in fields(value)}
        return replace(value, **moved)
    return value


def source_of(function: Any) -> str:
    """A module that defines `function` and all it needs: functions, kernels and constants of the
    same notebook by their source, everything else by an import.

    Raises:
        ExerciseError: it needs something that is none of these, such as a tensor.
    """
    plain = getattr(function, "fn", function)
    if plain.__module__ in sys.modules and plain.__module__.startswith("minillm"):
        return f"from {plain.__module__} import {plain.__name__}"
    lines = {"torch": "import torch"}
    _collect(function, lines)
    return "\n".join(lines.values())


def _collect(function: Any, lines: dict[str, str]) -> None:
    plain = getattr(function, "fn", function)  # of a kernel
    source = textwrap.dedent(inspect.getsource(plain))
    lines[plain.__name__] = ""  # a function may call itself
    for name in sorted(_names(source) - set(plain.__code__.co_varnames)):
        if name in lines or name not in plain.__globals__:
            continue
        value = plain.__globals__[name]
        inner = getattr(value, "fn", value)
        home = getattr(inner, "__module__", None)
        if isinstance(value, ModuleType):
            lines[name] = f"import {value.__name__} as {name}"
        elif hasattr(inner, "__code__") and home == plain.__module__:
            _collect(value, lines)
        elif callable(inner) and home is not None:
            lines[name] = f"from {home} import {inner.__name__} as {name}"
        elif isinstance(value, bool | int | float | str | tuple | torch.dtype):
            lines[name] = f"{name} = {value!r}"
        else:
            raise ExerciseError(
                f"{plain.__name__} uses {name}, a {type(value).__name__}: hand it over as an "
                f"argument, so that another process can get it."
            )
    del lines[plain.__name__]  # what it needs comes first
    lines[plain.__name__] = source


def _names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def changed(kernel: Any, old: str, new: str) -> Any:
    """The kernel with a part of its source replaced: a mistake, made on purpose.

    Raises:
        ExerciseError: `old` does not stand in the source exactly once.
    """
    plain = kernel.fn
    source = textwrap.dedent(inspect.getsource(plain))
    if source.count(old) != 1:
        raise ExerciseError(f"{old!r} stands {source.count(old)} times in {plain.__name__}, not 1.")
    source = source.replace(old, new)
    name = f"<{plain.__name__} with {new!r}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = plain.__globals__ | {}
    exec(compile(source, name, "exec"), space)
    return space[plain.__name__]
