"""Makes nbval honest about the chapters: ``pytest --nbval-lax --nbval-current-env notebooks/``.

nbval runs every cell as one test and compares the outputs of fact cells. By itself it passes a
cell that IPython refused (a mistyped magic), a `raises-exception` cell that raised nothing, and a
fact cell without a committed output; it goes on after a cell that died, so that one cause shows as
twenty failures; and it waits out the time limit of a kernel that is gone. The classes here take
the place of its own, each chapter in an empty folder with caches of its own, and a failure says
which fact changed and what to do.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from queue import Empty
from typing import Any

import nbval.kernel
import nbval.plugin
import pytest

import chapters
import forked
from minillm.plan.machine import cpu_count

TESTED = "0.11."
DIFFER = "Cell outputs differ"  # nbval's words where a cell ran and said something else
UNCHANGED = """\
If the change is right: python notebooks/execute.py {number}, then read the sentences that quote it.
If it is not, the code changed its behaviour: repair the code and keep the committed fact."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an nbval that this file was not written for."""
    version = metadata.version("nbval")
    if not version.startswith(TESTED):
        raise pytest.UsageError(
            f"notebooks/conftest.py edits private parts of nbval {TESTED}*, and nbval {version} is "
            f"installed: pip install -c constraints.txt nbval, or port the file and change TESTED."
        )
    forked.register()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Any:
    """Put a `ChapterFile` where nbval collected a notebook."""
    return [
        ChapterFile.from_parent(parent, path=file_path)
        if isinstance(found, nbval.plugin.IPyNbFile)
        else found
        for found in (yield)
    ]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the workers start: one list of fonts for all kernels."""
    if not hasattr(session.config, "workerinput"):
        chapters.build_font_list()


class Dead(Exception):
    """The kernel process ended while a cell ran."""


class ChapterKernel(nbval.kernel.RunningKernel):
    """A kernel in a folder of its own that notices when it dies and keeps each cell's reply."""

    def __init__(self, folder: Path, threads: int, timeout: float, **more: str) -> None:
        (folder / "cwd").mkdir()
        chapters.lend_libraries(folder)
        self.said = folder / "stderr.txt"
        self.last_reply: dict[str, Any] = {}
        with self.said.open("w") as stderr:
            self.km, self.kc = nbval.kernel.start_new_kernel(
                startup_timeout=timeout,
                kernel_name=nbval.kernel.CURRENT_ENV_KERNEL_NAME,
                stderr=stderr,
                cwd=str(folder / "cwd"),
                env=chapters.environment(folder, threads, **more),
            )
        self._ensure_iopub_up()

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> str:
        """Send a cell as Jupyter does: with history, without which `;` does not silence it."""
        return self.kc.execute(
            cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
        )

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """Wait for the reply and keep it; nbval drops it, and with it the errors of magics.

        Raises:
            Empty: `timeout` seconds passed.
            Dead: the process ended.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = self.get_message(stream="shell", timeout=1)
            except Empty:
                if not self.km.is_alive():
                    raise Dead(self.obituary()) from None
                if end is not None and time.monotonic() > end:
                    raise
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.last_reply = message["content"]
                return

    def obituary(self) -> str:
        """How the process ended, with its last words."""
        process = getattr(self.km.provisioner, "process", None)
        status = process.poll() if process else None
        cause = {-9: "killed: probably out of memory", 0: "it called exit"}.get(status, "a crash")
        lines = self.said.read_text(errors="replace").splitlines()
        words = [line for line in lines if line.strip() and "[IPKernelApp]" not in line][-8:]
        return "\n".join([f"the kernel died with status {status} ({cause})", *words])


class ChapterFile(nbval.plugin.IPyNbFile):
    """A chapter; `dead` is the cell that stopped it."""

    dead: str = ""
    folder: Path | None = None

    def collect(self) -> Iterator["ChapterCell"]:
        """The code cells in order."""
        for item in super().collect():
            yield ChapterCell.from_parent(
                self, name=item.name, cell_num=item.cell_num, cell=item.cell, options=item.options
            )

    def setup(self) -> None:
        """Start the chapter's kernel, with its share of the processors."""
        workers = getattr(self.config, "workerinput", {}).get("workercount", 1)
        self.folder = Path(tempfile.mkdtemp(prefix="minillm-chapter-"))
        self.kernel = ChapterKernel(
            self.folder,
            max(1, cpu_count() // workers),
            self.config.option.nbval_kernel_startup_timeout,
            MINILLM_CHAPTER=chapters.number(self.path),
        )
        self.setup_sanitize_files()

    def teardown(self) -> None:
        """Stop the kernel and remove its folder."""
        if self.kernel is not None and hasattr(self.kernel, "km"):
            self.kernel.stop()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class ChapterCell(nbval.plugin.IPyNbCell):
    """A cell whose success means that it ran, raised what it should and said what is committed."""

    def setup(self) -> None:
        """A cell after a dead one is not run: whatever it did would only hide the cause."""
        if self.parent.dead:
            pytest.skip(f"{self.path.name} stopped at {self.parent.dead}")

    def runtest(self) -> None:
        """Run the cell, and look at what nbval overlooks."""
        self.parent.kernel.last_reply = {}
        try:
            super().runtest()
            self.look_at_reply()
        except nbval.plugin.NbCellError as error:
            if str(error) != DIFFER:
                self.parent.dead = self.title()
            raise
        except Dead as error:
            self.parent.dead = self.title()
            self.raise_cell_error(str(error))

    def look_at_reply(self) -> None:
        """IPython can refuse a cell without raising, and a tag can promise what does not happen."""
        reply = self.parent.kernel.last_reply
        expected = self.options["check_exception"]
        if reply.get("status") == "error" and not expected:
            self.raise_cell_error(
                f"IPython refused this cell without raising: {reply.get('ename')}: "
                f"{reply.get('evalue')} Chapters are plain Python: remove the line."
            )
        if reply.get("status") == "ok" and expected:
            self.raise_cell_error(
                "This cell is tagged raises-exception, and it raised nothing: remove the tag, or "
                "repair the code that should have raised."
            )

    def title(self) -> str:
        """The cell as a reader finds it: its number in brackets and its first line."""
        first = next((line for line in self.cell.source.splitlines() if line.strip()), "")
        return f"cell [{self.cell_num + 1}] {first.strip()[:60]!r}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        """What to repair; nbval's own report only if there is nothing better."""
        error = excinfo.value
        where = f"{self.path.name} {self.title()}"
        if not isinstance(error, nbval.plugin.NbCellError):
            return f"{where}: {type(error).__name__}: {error}"
        if str(error) == DIFFER:
            advice = UNCHANGED.format(number=self.path.stem.partition("_")[0])
            return "\n".join([f"A fact changed in {where}", *self.changed(), advice])
        trace = chapters.COLOURS.sub("", error.inner_traceback or "").strip().splitlines()
        rest = len(self.parent.nb.cells) - self.parent.nb.cells.index(self.cell) - 1
        return "\n".join(
            [
                f"{where} stopped the chapter: {error}",
                *(f"    {line}" for line in self.cell.source.splitlines()),
                *trace[-14:],
                f"The {rest} cells after it were not run.",
            ]
        )

    def changed(self) -> Iterator[str]:
        """One line per fact that is not as committed, else both outputs whole."""
        texts = [chapters.stdout(each) for each in (self.cell.outputs, self.test_outputs or [])]
        old, new = map(chapters.parse_facts, texts)
        for name in {**old, **new} if old != new else ():
            committed, now = old.get(name, "not there"), new.get(name, "not there")
            if committed != now:
                yield f"    {name}: committed {committed}, now {now}"
        if old == new:
            yield "    committed: {!r}\n    now: {!r}".format(*texts)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Seconds per chapter: a course that grows slow should be seen to."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[report.nodeid.split("::")[0]] += getattr(report, "duration", 0.0)
    for name in sorted(seconds):
        terminalreporter.write_line(f"{Path(name).name}: {seconds[name]:.1f} s")
