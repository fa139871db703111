"""Output of commands: results go to stdout, remarks and progress to stderr.

Sizes of memory are in binary units (GiB); bandwidths and traffic are in decimal units (GB/s, GB).
"""

import io
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import environ
from typing import TextIO

from minillm.cli.interrupt import check

# Generated text is untrusted: control characters are escaped, so that it cannot move the cursor.
CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))
}
LONG = 2.0  # seconds; longer tasks are reported in logs


class OutputError(OSError):
    """Writing to standard output failed, for example because the disk is full."""


@contextmanager
def told_apart() -> Iterator[None]:
    """Convert errors of writing into `OutputError`, except BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"The output cannot be written: {error.strerror}.") from error


class Terminal:
    """The standard output streams, and what they can display."""

    def __init__(self) -> None:
        self.out, self.err = sys.stdout, sys.stderr
        for stream in (self.out, self.err):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without the character shows "?"
        self.interactive = self.out.isatty()
        self.width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))

    def write(self, text: str) -> None:
        """Write a part of the result."""
        with told_apart():
            self.out.write(text)

    def flush(self) -> None:
        """Flush standard output."""
        with told_apart():
            self.out.flush()

    def line(self, text: str = "") -> None:
        """Write one line of the result."""
        self.write(text + "\n")

    def stream(self, text: str) -> None:
        """Write and flush a piece of generated text; raises KeyboardInterrupt after Ctrl-C."""
        check()
        self.write(text.translate(CONTROLS) if self.interactive else text)
        self.flush()

    def stream_prompt(self, text: str) -> None:
        """Write the prompt in a dim style, before the generated text."""
        lines = text.translate(CONTROLS).split("\n")
        self.write("\n".join(self.style(line, "2") if line else "" for line in lines))

    def remark(self, text: str) -> None:
        """Write one line of additional information, such as timings, to stderr."""
        self.flush()
        lines = wrap(text, self.width) if self.err.isatty() else [text]
        self.err.write(self.style("\n".join(lines), "2", self.err) + "\n")
        self.err.flush()

    def style(self, text: str, code: str, stream: TextIO | None = None) -> str:
        """`text` in an ANSI style (1 bold, 2 dim), on terminals without NO_COLOR (no-color.org)."""
        plain = environ.get("NO_COLOR") or environ.get("TERM") == "dumb"
        if plain or not (stream or self.out).isatty():
            return text
        return f"\x1b[{code}m{text}\x1b[0m"

    def paragraph(self, text: str) -> None:
        """Write text, indented and wrapped."""
        for line in wrap(text, self.width - 2):
            self.line(f"  {line}")

    def heading(self, text: str) -> None:
        """Write the heading of a section."""
        self.line(self.style(text, "1"))

    def rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write labels and values in two columns; long values are wrapped."""
        width = max(len(label) for label, _ in rows)
        for label, value in rows:
            lines = wrap(value, self.width - width - 4) or [""]
            self.line(f"  {self.style(label.ljust(width), '2')}  {lines[0]}")
            for more in lines[1:]:
                self.line(" " * (width + 4) + more)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table: the first column left-aligned, the others right-aligned."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for index, row in enumerate([header, *rows]):
            cells = [
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line("  " + self.style("   ".join(cells), "0" if index else "2"))

    def bar(self, fraction: float, width: int = 40) -> str:
        """A progress bar, full at 1; ASCII characters if the terminal's encoding is not UTF."""
        full = round(min(max(fraction, 0.0), 1.0) * width)
        unicode = (self.out.encoding or "").lower().replace("-", "").startswith("utf")
        done, rest = ("█", "░") if unicode else ("#", "-")
        return done * full + rest * (width - full)

    @contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """Show a message during the block. On a terminal it is erased afterwards; in a log, only
        the duration of a long block is written."""
        self.flush()
        live, started = self.err.isatty() and environ.get("TERM") != "dumb", time.perf_counter()
        if live:
            self.err.write(self.style(f"{what} ...", "2", self.err))
            self.err.flush()
        try:
            yield
            check()
        finally:
            took = time.perf_counter() - started
            if live:
                self.err.write("\r\x1b[K")
            elif took > LONG:
                self.err.write(f"{what} took {seconds(took)}.\n")
            self.err.flush()


def wrap(text: str, width: int) -> list[str]:
    """Wrap `text` at spaces into lines of at most `width` characters; words are not split."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def size(num_bytes: float) -> str:
    """Memory in binary units, three significant digits: ``1.19 GiB``."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def amount(value: float, unit: str = "") -> str:
    """A quantity in decimal units, three significant digits: ``48.1 GB``, ``8.03 G``."""
    return _scaled(value, 1000, tuple(f"{prefix}{unit}" for prefix in ("", "k", "M", "G", "T")))


def billions(count: int) -> str:
    """A number of parameters: ``7.8 M``, ``70.6 B``."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / step, power + 1
    return f"{digits(value)} {units[power]}".rstrip()


def digits(value: float) -> str:
    """Three significant digits without an exponent: ``0.0123``, ``1.23``, ``123``, ``1,234``."""
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.3g}"


def seconds(value: float) -> str:
    """A duration: ``850 us``, ``8.13 ms``, ``2.4 s``."""
    if value < 0.0009995:
        return f"{digits(value * 1e6)} us"
    return f"{digits(value * 1e3)} ms" if value < 0.9995 else f"{digits(value)} s"


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {noun}" + "s" * (count != 1)
