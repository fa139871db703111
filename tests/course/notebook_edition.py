"""Rules of the second edition: a picture and an example first, something to do in every section.

They hold for chapters whose metadata says `"edition": 2`.
"""

import ast
import re
from collections.abc import Iterator

from notebook_chapter import Chapter, Violations, called, chapters, names_in, stale

tags, parsed = chapters.tags, chapters.parsed
EARLY = 12  # cells, prose included: setup, then the example and the picture of the mechanism
EXAMPLE_LINES = 6
LEAST_TURNS = 4
FIGURE = re.compile(r"!\[|<img |```mermaid")


def second(chapter: Chapter) -> bool:
    """Whether the chapter was rewritten for the second edition."""
    return chapter.about.get("edition") == 2


def seen_first(chapter: Chapter) -> Violations:
    """A worked example with real numbers and a picture of the mechanism, before anything else."""
    if not second(chapter):
        return
    early = list(enumerate(chapter.cells))[:EARLY]
    examples = [(index, cell) for index, cell in early if "example" in tags(cell)]
    if not examples:
        yield -1, f'none of the first {EARLY} cells is tagged "example": show one with numbers.'
    for index, cell in examples:
        lines = [line for line in cell["source"].splitlines() if line.strip()]
        if cell["cell_type"] == "code" and len(lines) > EXAMPLE_LINES:
            yield index, f"the example has {len(lines)} lines; at most {EXAMPLE_LINES}."
    if not any(has_picture(cell) for _, cell in early):
        yield -1, f"none of the first {EARLY} cells shows a picture of the mechanism."


def has_picture(cell: dict) -> bool:
    """Whether a cell is a picture, or shows one."""
    if cell["cell_type"] == "markdown":
        return bool(FIGURE.search(cell["source"]))
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))


def turn_cells(chapter: Chapter) -> Iterator[tuple[int, dict]]:
    """Position and cell of the small tasks."""
    return ((i, cell) for i, cell in enumerate(chapter.cells) if "turn" in tags(cell))


def your_turns(chapter: Chapter) -> Violations:
    """Small tasks that are solved on the page and that no later cell needs."""
    found = list(turn_cells(chapter))
    if second(chapter) and len(found) < LEAST_TURNS:
        yield -1, f'{len(found)} cells are tagged "turn"; a chapter has at least {LEAST_TURNS}.'
    for index, cell in found:
        source, tree = cell["source"], parsed(cell)
        answers = [line for line in source.splitlines() if line.endswith("  # answer")]
        if not 1 <= len(answers) <= 6:
            yield index, f'{len(answers)} lines end in "  # answer"; a small task has 1 to 6.'
        if tree is None or not list(called(tree, "turn")):
            yield index, "this task never calls turn(answer, expected, hint)."
        said = chapters.stdout(cell.get("outputs", []))
        if "Right: " not in said or "Not yet" in said or "Your turn" in said:
            yield index, f"the published answer is not right: {said.strip()[:60]!r}."
        made = assigned(tree) if tree else set()
        for later, other in list(chapter.code()):
            if later > index and "turn" not in tags(other):
                used = made & names_in(parsed(other) or ast.Module([], []))
                if used and not used & before(chapter, index):
                    yield later, f"this cell uses {sorted(used)}, which a learner may leave open."


def assigned(tree: ast.Module) -> set[str]:
    """Names that a cell's top level defines."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for target in node.targets for n in ast.walk(target)
                      if isinstance(n, ast.Name)}  # fmt: skip
    return found


def before(chapter: Chapter, index: int) -> set[str]:
    """Names that earlier cells, other than small tasks, define."""
    cells = [cell for at, cell in chapter.code() if at < index and "turn" not in tags(cell)]
    return set().union(*(assigned(parsed(cell) or ast.Module([], [])) for cell in cells))


def tasks_in_place(chapter: Chapter) -> Violations:
    """Each exercise that is graded here is also shown here."""
    if not second(chapter):
        return
    shown, graded = ids(chapter, "task"), ids(chapter, "check")
    for name in sorted(graded - shown):
        yield -1, f'check("{name}") without task("{name}"), which shows what to do.'


def ids(chapter: Chapter, function: str) -> set[str]:
    """The first arguments of all calls of a function."""
    calls = [
        call for _, cell in chapter.code()
        for call in called(parsed(cell) or ast.Module([], []), function)
    ]  # fmt: skip
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}


def sources_linked(chapter: Chapter) -> Violations:
    """At most one box of claims, and papers with links."""
    if not second(chapter):
        return
    boxes = [index for index, cell in enumerate(chapter.cells) if "claim" in tags(cell)]
    for index in boxes[1:]:
        yield index, "a second box of claims: keep the most instructive one."
    for index, cell in enumerate(chapter.cells):
        if "papers" in tags(cell) and "](http" not in cell["source"]:
            yield index, "no paper has a link."


def clocks_named(chapter: Chapter) -> Violations:
    """A chapter that records measurements names the code that they time, and is not older."""
    about = chapter.about
    if second(chapter) and chapter.results.get("values") and not about.get("timed"):
        yield -1, "metadata minillm.timed names the functions and files whose time is recorded."
    for name in about.get("bands", {}):
        if name not in chapter.results.get("values", {}):
            yield -1, f"minillm.bands has {name!r}, which the chapter does not record."
    if names := stale.changed(about, chapter.results):
        number = chapter.stem[:2]
        yield -1, f"{', '.join(names)} changed since the measurement: make stale CHAPTER={number}."


def device_of_ceilings(chapter: Chapter) -> Violations:
    """Ceilings belong to the device that the model runs on, which is a GPU where there is one."""
    if not second(chapter):
        return
    for index, cell in chapter.code():
        for call in called(parsed(cell) or ast.Module([], []), "measure"):
            named = {keyword.arg for keyword in call.keywords}
            if ast.unparse(call.func) == "ceilings.measure" and "device" not in named:
                yield index, "ceilings.measure() without device=: say whose rates these are."


def slow_path_said(chapter: Chapter) -> Violations:
    """A chapter that measures the engine without its fast path says so before it measures."""
    if not second(chapter):
        return
    calls = [
        call for _, cell in chapter.code()
        for call in called(parsed(cell) or ast.Module([], []), "LLM")
    ]  # fmt: skip
    eager = any(
        keyword.arg == "enforce_eager" and ast.unparse(keyword.value) == "True"
        for call in calls
        for keyword in call.keywords
    )
    early = [c["source"] for c in chapter.cells[:EARLY] if c["cell_type"] == "markdown"]
    if eager and "fast path" not in " ".join(" ".join(early).split()):
        yield -1, f"enforce_eager=True: the first {EARLY} cells say that the fast path is off."


RULES = (
    seen_first,
    your_turns,
    tasks_in_place,
    sources_linked,
    clocks_named,
    device_of_ceilings,
    slow_path_said,
)
