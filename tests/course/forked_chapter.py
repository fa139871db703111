"""Runs the cells of a chapter in a fork of a process that has torch and matplotlib loaded.

A kernel of Jupyter would import them for each run, which takes most of the time of a short one.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from notebook_chapter import chapters

PRELOAD = ("torch", "matplotlib.pyplot", "IPython", "ipywidgets", "minillm.llm",
           "minillm_exercises.notebook", "forked_chapter")  # fmt: skip
SECONDS = 300  # for a cell


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def run_cells(sources: list[str], folder: Path, **extra: str) -> Iterator[tuple[int, str, str]]:
    """Run cells from top to bottom; yields index, printed text and error ("" if none) of each. The
    process ends when the caller stops asking.

    Raises:
        TimeoutError: a cell takes too long.
        EOFError: the process died.
    """
    (folder / "cwd").mkdir(exist_ok=True)
    chapters.lend_libraries(folder)
    environment = chapters.environment(folder, MPLBACKEND="agg", **extra)
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(
        target=_work, args=(sources, folder / "cwd", environment, sender), daemon=True
    )
    process.start()
    sender.close()
    try:
        for _ in sources:
            if not receiver.poll(SECONDS):
                raise TimeoutError(f"a cell took more than {SECONDS} s")
            yield receiver.recv()
    finally:
        process.kill()
        process.join()


def _work(
    sources: list[str], folder: Path, environment: dict[str, str], sender: Connection
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    sys.displayhook = lambda value: None  # as in a page: values are no printed text
    for index, source in enumerate(sources):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            result = shell.run_cell(source, silent=True)
        error = result.error_before_exec or result.error_in_exec
        text = "" if error is None else "".join(traceback.format_exception_only(error)).strip()
        sender.send((index, printed.getvalue(), text))
