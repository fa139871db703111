"""Where the chapters are, what one holds, and how it is run away from everything else.

The tests, `execute.py`, `lab.py` and `bundle.py` all read chapters through this module, so that
they agree on what a fact is and on what a clean run is.
"""

import ast
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent
NAME = re.compile(r"\d\d[a-z]?_\w+")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FACT = re.compile(r"(?P<name>[^:\n]+): (?P<value>.+)")
# A number with its unit, or alone; not the first of several ("118 and 69", "1.0 2.1").
NUMBER = re.compile(r"[-+]?\d(?:[\d,]*\d)?(\.\d+)?(/\d+)?(?=$| (?!(and |x )?\d))")

Notebook = dict[str, Any]


class ChapterError(Exception):
    """A chapter that cannot be used as it is; the message says which one and what to repair."""


def chapter_paths(folder: Path = NOTEBOOKS, wanted: tuple[str, ...] = ()) -> list[Path]:
    """The chapters' files in order; `wanted` keeps those of the given numbers or names ("03").

    Raises:
        ChapterError: one of `wanted` is no chapter.
    """
    paths = [path for path in sorted(folder.glob("*.ipynb")) if NAME.fullmatch(path.stem)]
    if not wanted:
        return paths
    chosen = []
    for name in wanted:
        stem = Path(name).stem
        found = [path for path in paths if stem in (path.stem, number(path))]
        if not found:
            known = ", ".join(path.stem for path in paths) or "none yet"
            raise ChapterError(f"There is no chapter {name!r}. The chapters are: {known}.")
        chosen += found
    return chosen


def number(path: Path) -> str:
    """What the chapter is called by: "03", or "01b" between 01 and 02."""
    return path.stem.partition("_")[0]


def read_notebook(path: Path) -> Notebook:
    """The notebook's JSON, its sources and texts as single strings.

    Raises:
        ChapterError: the file is no notebook.
    """
    import nbformat
    from nbformat.reader import NotJSONError

    try:
        return json.loads(json.dumps(nbformat.read(path, as_version=4)))
    except (NotJSONError, AttributeError, KeyError, ValueError) as error:
        raise ChapterError(f"{path.name} is no notebook: {str(error)[:200]}") from None


def write_notebook(path: Path, notebook: Notebook) -> None:
    """Write the notebook in Jupyter's own form, so that saving it there changes nothing."""
    import nbformat

    write_text(path, nbformat.writes(nbformat.from_dict(notebook), version=4) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file's text at once: an interruption leaves the old file, never half a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def tags(cell: Mapping[str, Any]) -> list[str]:
    """The cell's tags."""
    return list(cell.get("metadata", {}).get("tags", ()))


def code_cells(notebook: Notebook) -> Iterator[tuple[int, dict[str, Any]]]:
    """Position and cell of all code cells."""
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield index, cell


def is_fact_cell(cell: Mapping[str, Any]) -> bool:
    """Whether the tests compare this cell's output with the committed one."""
    return "nbval-check-output" in tags(cell)


def stdout(outputs: list[dict[str, Any]]) -> str:
    """What a cell printed."""
    found = [o for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout"]
    return "".join(output["text"] for output in found)


def parse_facts(text: str) -> dict[str, str]:
    """Names and values (with their units) of the lines ``name: value unit`` that fact() prints."""
    lines = [FACT.fullmatch(line) for line in text.splitlines()]
    return {match["name"]: match["value"] for match in lines if match}


def facts(notebook: Notebook) -> dict[str, str]:
    """The committed facts of a chapter: name to value, without the unit."""
    found: dict[str, str] = {}
    for _, cell in code_cells(notebook):
        if is_fact_cell(cell):
            found |= parse_facts(stdout(cell.get("outputs", [])))
    return {name: bare(value) for name, value in found.items()}


def bare(value: str) -> str:
    """The number without its unit ("8,256 positions" is "8,256"); other values as they are, also
    several numbers in one ("118 and 69"), so that prose cannot be bound to the first by mistake."""
    match = NUMBER.match(value)
    return match[0] if match else value


def parsed(cell: Mapping[str, Any]) -> ast.Module | None:
    """The code cell's syntax tree, or None where it is no Python (a magic, for instance)."""
    try:
        return ast.parse(cell["source"])
    except SyntaxError:
        return None


def environment(folder: Path, threads: int | None = None, **extra: str) -> dict[str, str]:
    """The environment of a kernel whose caches, settings and learner's folder are in `folder`.

    Nothing of the person who runs it gets in: no start-up file, no style file, no predictions.
    Only matplotlib's list of fonts is shared, and what `lend_libraries` copies, because making them
    takes seconds. Without `threads`, OMP_NUM_THREADS stays as it is.
    """
    import matplotlib

    personal = ("PYTHONSTARTUP", "MPLBACKEND", "MINILLM_RESULTS")
    env = {name: value for name, value in os.environ.items() if name not in personal}
    env |= calm_threads() | {
        "MINILLM_WORK": str(folder / "work"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": matplotlib.get_cachedir(),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(threads)
    return env | extra


def lend_libraries(folder: Path) -> None:
    """Copy the C libraries that an engine built here before into the cache of `environment`: each
    takes seconds to build, and is named by all that it is made from, so none is ever out of date.
    With MINILLM_QUICK the rates of this machine, too: a chapter's own would be thrown away.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "minillm"
    own = folder / "cache" / "minillm"
    own.mkdir(parents=True, exist_ok=True)
    quick = [usual / "hardware.json"] if os.environ.get("MINILLM_QUICK") else []
    for file in (*usual.glob("*.so"), *filter(Path.exists, quick)):
        shutil.copyfile(file, own / file.name)


def calm_threads() -> dict[str, str]:
    """Let waiting threads sleep soon, as the `minillm` command does: spinning ones make a small
    model many times slower as soon as another program wants a core. What is set stays."""
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000")}


def build_font_list() -> None:
    """Make matplotlib's list of fonts once, before several kernels would each make it."""
    import matplotlib

    if not list(Path(matplotlib.get_cachedir()).glob("fontlist-*.json")):
        import matplotlib.font_manager


class _Enough(Exception):
    """The run has seen what it was for."""


@dataclass(frozen=True)
class Run:
    """An executed chapter: the notebook with its new outputs, and seconds per cell position."""

    notebook: Notebook
    seconds: dict[int, float]


def run(
    notebook: Notebook,
    folder: Path,
    *,
    before: str = "",
    timeout: float = 300,
    on_cell: Callable[[int], None] = lambda index: None,
    until: Callable[[Notebook], bool] | None = None,
    **extra: str,
) -> Run:
    """Execute a chapter in a fresh kernel, in the empty folder `folder`, as a reader would: from
    top to bottom, once. `before` is code that runs ahead of its first cell, `extra` goes into
    the kernel's environment, `on_cell` hears the position of each cell before it runs. With
    `until`, cells that raise do not end the run, and it ends after the first cell of whose
    executed source and outputs `until` is true.

    Raises:
        ChapterError: a cell raised, took longer than `timeout` seconds or killed the kernel; the
            message holds its source and the error.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    shift = int(bool(before))
    if before:
        copy.cells.insert(0, nbformat.v4.new_code_cell(before))
    started: dict[int, float] = {}
    seconds: dict[int, float] = {}

    def start(cell: Any, cell_index: int) -> None:
        started[cell_index - shift] = time.perf_counter()
        on_cell(cell_index - shift)

    def finish(cell: Any, cell_index: int, execute_reply: Any) -> None:
        seconds[cell_index - shift] = time.perf_counter() - started[cell_index - shift]
        if until is not None and until(cell):
            raise _Enough

    client = NotebookClient(
        copy,
        timeout=timeout,
        kernel_name="python3",
        allow_errors=until is not None,
        record_timing=False,
        store_widget_state=False,
        on_cell_execute=start,
        on_cell_executed=finish,
    )
    lend_libraries(folder)
    try:
        with Path(os.devnull).open("w") as nowhere:  # the kernel program's own remarks
            client.execute(cwd=str(folder), env=environment(folder, **extra), stderr=nowhere)
    except _Enough:
        pass
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        position = max(started)
        source = copy.cells[position + shift].source
        raise ChapterError(_what_failed(position, source, error)) from None
    plain = json.loads(json.dumps(copy))
    del plain["cells"][:shift]
    return Run(plain, seconds)


def _what_failed(position: int, source: str, error: Exception) -> str:
    """The failing cell's source, and the last line of the error with where it was."""
    name = getattr(error, "ename", type(error).__name__)
    detail = getattr(error, "evalue", str(error).strip().split("\n")[-1])
    trace = COLOURS.sub("", getattr(error, "traceback", "")).strip().splitlines()
    tail = "\n".join(f"    {line}" for line in trace[-14:])
    indented = "\n".join(f"    {line}" for line in source.splitlines())
    return f"Cell {position} failed:\n{indented}\n{tail}\n{name}: {detail}"


def script_errors(main: Callable[[], int]) -> int:
    """Run a script's `main`: a chapter's error is its message and a status, not a traceback."""
    try:
        return main()
    except ChapterError as error:
        sys.stderr.write(f"{error}\n")
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; nothing was written for the chapter that was running.\n")
        return 130
    return 1
