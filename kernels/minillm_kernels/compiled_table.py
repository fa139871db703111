"""``python -m minillm_kernels.compiled_table``: registers, memory and instructions of all kernels.

Each launch of each family, with the shapes of real models, is compiled for three architectures,
without a GPU. The resources of its machine code become the table in kernels/README.md.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from minillm_kernels import families
from minillm_kernels.check.case import Launch
from minillm_kernels.launch import triton
from minillm_kernels.offline import ARCHITECTURES, Compiled, compile_for

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN = "<!-- compiled: begin (python -m minillm_kernels.compiled_table --write) -->"
END = "<!-- compiled: end -->"
MADE_WITH = re.compile(r"Compiled with Triton (\S+),")
ABSENT = "-"
# Instructions shown in the table, in this order; local memory is shown as spilled bytes.
SHOWN = (
    "HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "UTCIMMA", "LDGSTS", "UTMALDG", "UBLKCP",
)  # fmt: skip
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


def compile_table(family: str) -> str:
    """The table of a family, Markdown; launches with equal figures share a line."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for launch in families.launches(family):
        by_arch = [cells(launch, capability) for capability in ARCHITECTURES]
        for kernel in dict.fromkeys(name for found in by_arch for name in found):
            line = (f"`{kernel}`", *(found.get(kernel, ABSENT) for found in by_arch))
            merged.setdefault(line, []).append(launch.name)
    lines = [("kernel", "launch", *(f"sm_{capability}" for capability in ARCHITECTURES))]
    lines += [("---",) * len(lines[0])]
    lines += [(line[0], "; ".join(names), *line[1:]) for line, names in merged.items()]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"### `{family}`\n\n{rows}\n"


def read(text: str) -> dict[str, str]:
    """The tables of a README by family; raises TableError if it has no place for them."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise TableError(f"{README.name} has no lines '{BEGIN}' and '{END}'; add them.")
    _, *tables = text[begin:end].split("### `")
    return {table.partition("`")[0]: f"### `{table}" for table in tables}


def rows(table: str) -> list[str]:
    """The lines of a family's table that have figures."""
    return [line for line in table.splitlines() if line.startswith("| `")]


def made_with(text: str) -> str:
    """The Triton version of a README's tables; raises TableError if there are none yet."""
    found = MADE_WITH.search(text)
    if found is None or not read(text):
        raise TableError(f"The table in {README.name} is empty; fill it with --write.")
    return found[1]


def replaced(text: str, new: dict[str, str]) -> str:
    """A README with the tables of `new`; those of other families are unchanged."""
    tables = read(text) | new
    source = "Compiled with Triton {}, from launches with the shapes of real models.\n\n"
    whole = source.format(triton.__version__)
    whole += "".join(tables[family] for family in families.CHECKED if family in tables)
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:before]}\n{whole}{text[after:]}"


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
        wanted = families.chosen(options.family, families.CHECKED)
        text = README.read_text("utf-8") if options.write or options.check else ""
        old = read(text) if text else {}
        if options.check and made_with(text) != triton.__version__:
            raise TableError(
                f"The table was compiled with Triton {made_with(text)}, and {triton.__version__} "
                "is installed: figures of different versions cannot be compared."
            )
        new = {family: compile_table(family) for family in wanted}
        if options.check:
            pairs = [(rows(old.get(family, "")), rows(new[family])) for family in wanted]
            different = "".join(
                f"{sign} {row}\n"
                for before, after in pairs
                for sign, some, others in (("-", before, after), ("+", after, before))
                for row in some if row not in others
            )  # fmt: skip
            sys.stdout.write(different or "The table is up to date.\n")
            return int(bool(different))
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.write:
        text = README.read_text("utf-8")  # may have changed during minutes of compiling
        README.write_text(replaced(text, new), "utf-8")
    elif not options.check:
        sys.stdout.write("".join(new.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
