"""What a chapter must keep to, as functions from a chapter to (cell, what to repair).

`test_notebooks.py` applies every rule to every notebook, `test_notebook_rules.py` shows each rule
planted violations. A cell is its position in the notebook's list, -1 is the notebook as a whole.
"""

import re
import statistics
from collections.abc import Callable

from notebook_chapter import Chapter, Violations, called, chapters, prose, rerun
from notebook_content import (
    bound_numbers,
    enough_facts,
    fact_cells,
    no_clock_in_facts,
    predictions,
    private_things,
    results_on_record,
)

is_fact_cell, parsed, tags = chapters.is_fact_cell, chapters.parsed, chapters.tags

ELEMENTS = tuple(
    "predict naive measure bottleneck fix equal again plot facts losses check quiz papers".split()  # noqa: SIM905
)

OTHER_TAGS = frozenset(
    "setup header claim cover nbval-check-output example turn open".split()  # noqa: SIM905
)
UNCOUNTED = {"example", "turn"}  # cells and lines that do not count as a chapter's code

SAYS_NOTHING = frozenset(
    "prediction predictions measurement measurements bottlenecks equality fact plots loss limits "  # noqa: SIM905
    "limitations exercise exercises questions references paper introduction conclusion summary "
    "overview setup results background motivation".split()
) | {"naive version", "measure again", "prove equality", "what we did not win", "further reading"}

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}

LIMITS = {"bytes": 400 * 1024, "words": (800, 2200), "code": (100, 260), "cells": (15, 40)}


def python_only(chapter: Chapter) -> Violations:
    """A failing `!command` or unknown magic leaves no trace that a test could see."""
    for index, cell in chapter.code():
        for line in cell["source"].splitlines():
            if re.match(r"\s*(%%?\w|![\w./(]|\?\w)|.*\w\?\??$", line) and parsed(cell) is None:
                yield index, f"{line.strip()!r} is IPython's, not Python: write a call instead."
                break
        else:
            if parsed(cell) is None:
                yield index, "this code cell is no Python that can be parsed: mend its syntax."
            elif not cell["source"].strip():
                yield index, "this code cell is empty: delete it."
            elif list(
                called(parsed(cell), "system", "getoutput", "run_line_magic", "run_cell_magic")
            ):
                yield (
                    index,
                    "a shell or magic call, whose failure nobody sees: call Python instead.",
                )


def size(chapter: Chapter) -> Violations:
    """A page that GitHub shows and git keeps cheaply."""
    if chapter.size > LIMITS["bytes"]:
        yield -1, f"{chapter.size / 1024:.0f} KiB; at most 400: fewer or smaller pictures."


def elements(chapter: Chapter) -> Violations:
    """The same parts in every chapter, as tags; a missing one is waived with a reason."""
    present = {tag for cell in chapter.cells for tag in tags(cell)}
    waived = chapter.about.get("waived", {})
    for element in ELEMENTS:
        if element in present and element in waived:
            yield -1, f"the element {element!r} is waived and present: remove it from 'waived'."
        elif element in waived and len(str(waived[element]).split()) < 3:
            yield -1, f"the waiver of {element!r} gives no reason: say why in a few words."
        elif element not in present | set(waived):
            yield (
                -1,
                (
                    f"no cell is tagged {element!r}: tag one, or give the reason in the notebook's "
                    f"metadata minillm.waived."
                ),
            )
    for element in set(waived) - set(ELEMENTS):
        yield -1, f"{element!r} in 'waived' is no element; they are {', '.join(ELEMENTS)}."
    for index, cell in enumerate(chapter.cells):
        for tag in set(tags(cell)) - set(ELEMENTS) - OTHER_TAGS:
            yield index, f"the tag {tag!r} is unknown: a spelling mistake?"


def headings(chapter: Chapter) -> Violations:
    """Headings are the chapter's own sentences; "Results" says nothing about this one."""
    if not chapter.cells or not chapter.cells[0]["source"].startswith("# "):
        yield 0, "the first cell begins with the title, '# ...'."
    titles = 0
    for index, cell in enumerate(chapter.cells):
        if cell["cell_type"] != "markdown":
            continue
        for marks, heading in re.findall(r"^(#+) +(.*)$", cell["source"], re.MULTILINE):
            titles += marks == "#"
            plain = re.sub(r"^(the|a|our) ", "", re.sub(r"[^a-z ]", "", heading.lower()).strip())
            if plain in SAYS_NOTHING.union(ELEMENTS):
                yield (
                    index,
                    f"the heading {heading!r} could stand in any chapter: say what this one says.",
                )
    if titles > 1:
        yield -1, f"{titles} headings of the first level: a chapter has one title."


def clean_outputs(chapter: Chapter) -> Violations:
    """No errors, no warnings, no widgets that a page cannot show, no picture but PNG."""
    for index, cell in chapter.code():
        for output in cell["outputs"]:
            kind, data = output["output_type"], output.get("data", {})
            if kind == "error":
                yield index, f"an error is committed ({output.get('ename')}): catch it in the code."
            if output.get("name") == "stderr":
                yield (
                    index,
                    f"a warning is committed: {output['text'].strip()[:80]!r}. Do not cause it.",
                )
            for mime in data:
                if mime.startswith("image/") and mime != "image/png":
                    yield index, f"a picture as {mime}: commit PNG, which no test compares."
                if "widget" in mime:
                    yield (
                        index,
                        f"a widget is committed, which no page shows: run {rerun(chapter)}.",
                    )


def alternative_texts(chapter: Chapter) -> Violations:
    """Who cannot see a plot reads its caption."""
    for index, cell in chapter.code():
        outputs = cell["outputs"]
        texts = " ".join(
            str(v) for o in outputs for k, v in o.get("data", {}).items() if k[:5] == "text/"
        )
        for output in outputs:
            if "image/png" not in output.get("data", {}):
                continue
            alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
            if len(alt.split()) < 5:
                yield (
                    index,
                    "a picture without alternative text: end the cell with show(fig, caption).",
                )
            elif alt not in texts:
                yield (
                    index,
                    "a picture without its caption below: end the cell with show(fig, caption).",
                )


def words_in(chapter: Chapter) -> int:
    """Words of prose: what has a letter or a digit in it, without markup."""
    texts = (
        prose.MARKUP.sub(" ", cell["source"])
        for cell in chapter.cells
        if cell["cell_type"] != "code"
    )
    return sum(bool(re.search(r"\w", word)) for text in texts for word in text.split())


def shape(chapter: Chapter) -> Violations:
    """An hour's reading: cells that fit the eye, code that fits the head. Facts, worked
    examples and small tasks are not counted."""
    cells = [
        cell for _, cell in chapter.code()
        if not is_fact_cell(cell) and not UNCOUNTED & set(tags(cell))
    ]  # fmt: skip
    lines = [sum(bool(line.strip()) for line in cell["source"].splitlines()) for cell in cells]
    measured = {"words": words_in(chapter), "code": sum(lines), "cells": len(cells)}
    names = {"words": "words of prose", "code": "lines of code", "cells": "code cells"}
    for key, value in measured.items():
        low, high = LIMITS[key]
        if not low <= value <= high:
            yield -1, f"{value} {names[key]}; a chapter has {low} to {high}."
    if lines and statistics.median(lines) > 8:
        yield (
            -1,
            f"the median code cell has {statistics.median(lines):g} lines; at most 8: split some.",
        )
    if shown(chapter) < 3:
        yield -1, f"{shown(chapter)} plots or tables; a chapter has three to five."


def shown(chapter: Chapter) -> int:
    """How many pictures and tables a reader sees, counting each table of Markdown or HTML."""
    outputs = [output for _, cell in chapter.code() for output in cell["outputs"]]
    datas = [output.get("data", {}) for output in outputs]
    printed = sum("image/png" in data or "<table" in str(data.get("text/html")) for data in datas)
    texts = [c["source"] for c in chapter.cells if c["cell_type"] == "markdown"]
    texts += [str(data.get("text/markdown", "")) for data in datas]
    return printed + sum(len(re.findall(r"^\|[-:| ]+\|$", t, re.MULTILINE)) for t in texts)


def metadata(chapter: Chapter) -> Violations:
    """The metadata of the format and of the course, and nothing of the machine."""
    known = chapter.notebook["metadata"]
    fix = f"run {rerun(chapter)}"
    if known.get("kernelspec") != KERNELSPEC:
        yield -1, f"the kernel is {known.get('kernelspec')}, not the plain python3: {fix}."
    if "widgets" in known:
        yield -1, f"widget state is committed: {fix}."
    if "version" in known.get("language_info", {}):
        yield -1, f"the Python version of a machine is committed in language_info: {fix}."
    about = chapter.about
    if about.get("chapter") != chapter.stem[:2]:
        yield (
            -1,
            f"metadata minillm.chapter is {about.get('chapter')!r}, the file is {chapter.stem}.",
        )
    if not str(about.get("question", "")).endswith("?"):
        yield -1, "metadata minillm.question is the chapter's question, ending in '?'."
    if not isinstance(about.get("minutes"), int) or not isinstance(about.get("needs"), list):
        yield -1, "metadata minillm has minutes (an integer) and needs (a list of chapters)."
    for index, cell in enumerate(chapter.cells):
        if {"execution", "ExecuteTime"} & set(cell.get("metadata", {})):
            yield index, f"times of an execution are committed in the metadata: {fix}."


def cell_ids(chapter: Chapter) -> Violations:
    """Without lasting ids every save changes the whole file."""
    seen: set[str] = set()
    for index, cell in enumerate(chapter.cells):
        name = cell.get("id")
        if not name:
            yield index, "this cell has no id: save the notebook in format 4.5."
        elif name in seen:
            yield index, f"the id {name!r} stands twice: give one of the cells another."
        seen.add(name)


def serial_run(chapter: Chapter) -> Violations:
    """Outputs from one run, top to bottom: execution counts 1, 2, 3 and no gap."""
    counts = [cell.get("execution_count") for _, cell in chapter.code()]
    for (index, _), count, wanted in zip(chapter.code(), counts, range(1, 10_000), strict=False):
        if count != wanted:
            yield index, f"this cell ran as number {count}, not {wanted}: run {rerun(chapter)}."
            return


RULES: tuple[Callable[[Chapter], Violations], ...] = (
    python_only,
    fact_cells,
    enough_facts,
    no_clock_in_facts,
    size,
    elements,
    headings,
    bound_numbers,
    private_things,
    clean_outputs,
    alternative_texts,
    shape,
    metadata,
    cell_ids,
    serial_run,
    predictions,
    results_on_record,
)
