"""``python -m minillm_kernels.compiled_table``: registers, memory and instructions of all kernels.

Each launch of each family, with the shapes of real models, is compiled for three architectures,
without a GPU. The resources of its machine code become the table in kernels/README.md.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm_kernels import families
from minillm_kernels.check.case import Launch
from minillm_kernels.launch import triton
from minillm_kernels.offline import ARCHITECTURES, Compiled, compile_for

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- compiled: begin (python -m minillm_kernels.compiled_table --write) -->"
END = "<!-- compiled: end -->"
MADE_WITH = re.compile(r"Made with Triton ([\w.]+)")
ABSENT = "-"
# Instructions shown in the table, in this order; local memory is shown as spilled bytes.
SHOWN = (
    *("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "QGMMA", "UTCQMMA"),
    *("LDGSTS", "UTMALDG", "UBLKCP", "USETMAXREG"),
)
EXAMPLES = """\
examples:
  python -m minillm_kernels.compiled_table                    the whole table, to the screen
  python -m minillm_kernels.compiled_table gemv fused         two families
  python -m minillm_kernels.compiled_table --write            into kernels/README.md
  python -m minillm_kernels.compiled_table --check            is kernels/README.md up to date?

exit codes: 0, 1 if --check found a difference, 2 if it cannot be done here.
"""


class TableError(ValueError):
    """The table is missing, or was compiled with another version of Triton."""


@dataclass(frozen=True)
class Line:
    """One kernel with one set of figures.

    Attributes:
        kernel: name of the Triton function, numbered if a launch uses it several times.
        launches: the launches of its family that compile to exactly these figures.
        cells: the figures by architecture, in the order of `ARCHITECTURES`.
    """

    kernel: str
    launches: tuple[str, ...]
    cells: tuple[str, ...]


Table = Mapping[str, Sequence[Line]]  # by family


def figures(compiled: Compiled) -> str:
    """Registers, warps, shared memory, instructions, and spilled bytes if there are any."""
    parts = [f"{compiled.registers} regs", f"{compiled.num_warps} warps"]
    if compiled.shared:
        parts.append(f"{compiled.shared / 1024:.1f} KiB")
    if compiled.spills:
        parts.append(f"**spills {compiled.stack} B**")
    parts += [f"{name} {compiled.opcodes[name]}" for name in SHOWN if compiled.opcodes[name]]
    return ", ".join(parts)


def cells(launch: Launch, capability: int) -> dict[str, str]:
    """The figures of every kernel of a launch, by kernel name."""
    found: dict[str, str] = {}
    for compiled in compile_for(capability, launch.run):
        text, number, name = figures(compiled), 1, compiled.kernel
        while name in found and found[name] != text:
            number += 1
            name = f"{compiled.kernel} ({number})"
        found[name] = text
    return found


def compile_table(names: Sequence[str]) -> dict[str, list[Line]]:
    """The table of these families; launches with equal figures share a line."""
    table: dict[str, list[Line]] = {}
    for family in names:
        merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for launch in families.launches(family):
            by_arch = [cells(launch, capability) for capability in ARCHITECTURES]
            for kernel in dict.fromkeys(name for found in by_arch for name in found):
                found = tuple(each.get(kernel, ABSENT) for each in by_arch)
                merged.setdefault((kernel, found), []).append(launch.name)
        table[family] = [Line(kernel, tuple(of), found) for (kernel, found), of in merged.items()]
    return table


def render(table: Table, version: str) -> str:
    """The table as Markdown, with the version of Triton that compiled it."""
    count = sum(len(line.launches) for lines in table.values() for line in lines)
    source = f"{count} compiled kernels, from launches with the shapes of real models"
    parts = [f"Made with Triton {version}: {source}.", ""]
    for family, lines in table.items():
        heads = " | ".join(f"sm_{capability}" for capability in ARCHITECTURES)
        parts += [f"### `{family}`", "", f"| kernel | launch | {heads} |"]
        parts += ["|---|---|" + "---|" * len(ARCHITECTURES)]
        for line in lines:
            found = " | ".join(line.cells)
            parts.append(f"| `{line.kernel}` | {'; '.join(line.launches)} | {found} |")
        parts.append("")
    return "\n".join(parts)


def parse(text: str) -> dict[str, list[Line]]:
    """Parse the Markdown that `render` wrote."""
    table: dict[str, list[Line]] = {}
    family = ""
    for row in text.splitlines():
        if row.startswith("### `"):
            family = row.strip("#` ")
            table[family] = []
        elif row.startswith("| `"):
            kernel, launches, *found = (part.strip() for part in row.strip("|").split(" | "))
            found[-1] = found[-1].rstrip("| ")
            table[family].append(Line(kernel.strip("`"), tuple(launches.split("; ")), tuple(found)))
    return table


def section(text: str) -> str:
    """The text between the markers of a README; raises TableError if there are none."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise TableError(f"{README.name} has no lines '{BEGIN}' and '{END}'; add them.")
    return text[begin + len(BEGIN) : end]


def made_with(text: str) -> str:
    """The Triton version of a README's table; raises TableError if the table is empty."""
    found = MADE_WITH.search(section(text))
    if found is None:
        raise TableError(f"The table in {README.name} is empty; fill it with --write.")
    return found[1]


def stated(table: Table, family: str, launch: str, capability: int) -> dict[str, str]:
    """The figures of a table for the kernels of one launch on one architecture."""
    column = ARCHITECTURES.index(capability)
    lines = [line for line in table.get(family, ()) if launch in line.launches]
    return {line.kernel: line.cells[column] for line in lines if line.cells[column] != ABSENT}


def replaced(text: str, old: Table, new: Table) -> str:
    """A README whose table has the families of `new`; other families are unchanged."""
    whole = {
        family: new.get(family) or old.get(family) or []
        for family in families.FAMILIES
        if family in new or family in old
    }
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:before] + "\n" + render(whole, triton.__version__) + "\n" + text[after:]


def differences(old: Table, new: Table) -> Iterator[str]:
    """Lines that are only in `new` or only in `old`."""
    for family, lines in new.items():
        had = set(old.get(family, ()))
        yield from (f"+ {family}: {line}" for line in lines if line not in had)
        yield from (f"- {family}: {line}" for line in old.get(family, ()) if line not in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm_kernels.compiled_table",
        description="Compile every kernel for sm_80, sm_90 and sm_100; no GPU is needed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--write", action="store_true", help="put it into kernels/README.md")
    parser.add_argument("--check", action="store_true", help="compare with kernels/README.md")
    options = parser.parse_args(arguments)
    try:
        wanted = families.chosen(options.family)
        text = README.read_text("utf-8") if options.write or options.check else ""
        old = parse(section(text)) if text else {}
        if options.check and made_with(text) != triton.__version__:
            raise TableError(
                f"The table was compiled with Triton {made_with(text)}, and {triton.__version__} "
                "is installed: figures of different versions cannot be compared."
            )
        return _act(options, wanted, old)
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _act(options: argparse.Namespace, wanted: Sequence[str], old: Table) -> int:
    new = compile_table(wanted)
    if options.check:
        return _say(differences({family: old.get(family, ()) for family in wanted}, new))
    if options.write:
        text = README.read_text("utf-8")  # may have changed during minutes of compiling
        README.write_text(replaced(text, parse(section(text)), new), "utf-8")
    else:
        sys.stdout.write(render(new, triton.__version__))
    return 0


def _say(lines: Iterable[str]) -> int:
    found = list(lines)
    sys.stdout.write("".join(f"{line}\n" for line in found) or "The table is up to date.\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
