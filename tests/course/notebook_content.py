"""Rules about what a chapter says: its facts, its numbers, its predictions, nothing private.

Each is a function from a chapter to (cell, what to repair); `notebook_rules` lists them all.
"""

import ast
import json
import re
import socket
from collections.abc import Iterator

from notebook_chapter import Chapter, Violations, called, chapters, names_in, prose, rerun

is_fact_cell, parsed, stdout, tags = (
    chapters.is_fact_cell,
    chapters.parsed,
    chapters.stdout,
    chapters.tags,
)
CLOCKS = {"measure", "record", "perf_counter", "monotonic", "process_time", "time", "timeit"}

PRIVATE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|var|Users|private)/\w|(?<![\w.])/(?:root|tmp|work)\b"
    r"|\b[A-Z]:\\\\?[A-Z]\w|site-packages|\bipykernel_\d+|\bat 0x[0-9a-f]{6,}"
    r"|\b(?!127\.0\.0\.1)(?:\d{1,3}\.){3}\d{1,3}\b"
)


def fact_cells(chapter: Chapter) -> Violations:
    """nbval compares nothing where an output or an execution count is missing."""
    for index, cell in chapter.code():
        here = set(tags(cell))
        if ("facts" in here) != ("nbval-check-output" in here):
            yield index, "a fact cell has both tags, facts and nbval-check-output; add the other."
        if not is_fact_cell(cell):
            if (tree := parsed(cell)) and list(called(tree, "fact")):
                yield (
                    index,
                    "fact() outside a fact cell is never checked: tag it facts,nbval-check-output.",
                )
            continue
        if cell.get("execution_count") is None or not stdout(cell["outputs"]):
            yield index, f"this fact cell has no committed output: run {rerun(chapter)}."
        if any(output["output_type"] != "stream" for output in cell["outputs"]):
            yield index, "a fact cell prints facts and nothing else; move the other output away."
        tree = parsed(cell)
        if tree is not None and not list(called(tree, "fact")):
            yield index, "a fact cell states its facts with fact(name, value)."
        lines = stdout(cell["outputs"]).splitlines()
        for line in lines:
            if not chapters.FACT.fullmatch(line):
                yield index, f"the output {line[:60]!r} is no fact of the form 'name: value'."
        if cell["source"].count("NBVAL_"):
            yield index, "an NBVAL comment overrides the tags: remove it."


def enough_facts(chapter: Chapter) -> Violations:
    """A chapter that states less than three facts can rot unseen; one name, one fact."""
    seen: dict[str, int] = {}
    for index, cell in chapter.code():
        for name in chapters.parse_facts(stdout(cell["outputs"])) if is_fact_cell(cell) else ():
            if name in seen:
                yield (
                    index,
                    f"the fact {name!r} was stated in cell {seen[name]}: rename one of them.",
                )
            seen[name] = index
    if len(seen) < 3:
        yield -1, f"the chapter states {len(seen)} facts: state at least 3."


def clocked_names(chapter: Chapter) -> set[str]:
    """Names whose value came out of a clock, directly or through other names."""
    found: set[str] = set()
    assigned: list[tuple[set[str], ast.AST]] = []
    for _, cell in chapter.code():
        for node in ast.walk(parsed(cell) or ast.Module([], [])):
            if (
                isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
                and node.value
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                assigned.append((names, node.value))
    while True:
        new = {
            name
            for names, value in assigned
            if list(called(value, *CLOCKS)) or names_in(value) & found
            for name in names
        }
        if new <= found:
            return found
        found |= new


def no_clock_in_facts(chapter: Chapter) -> Violations:
    """A fact is the same on every machine, however busy it is."""
    clocked = clocked_names(chapter)
    for index, cell in chapter.code():
        tree = parsed(cell) if is_fact_cell(cell) else None
        if tree is None:
            continue
        for call in called(tree, *CLOCKS):
            yield index, f"{ast.unparse(call.func)}() in a fact cell: facts depend on no clock."
        for name in sorted(names_in(tree) & clocked):
            yield index, f"{name} was measured with a clock: facts depend on none; use a counter."


def bound_numbers(chapter: Chapter) -> Violations:
    """A typed number becomes wrong silently; a bound one is computed, measured or quoted."""
    sources, code = chapter.sources, prose.free_code(chapter.notebook)
    for index, cell in prose.prose_cells(chapter.notebook):
        yield from ((index, wrong) for wrong in spans_of(cell["source"], sources, chapter))
        opened = len(re.findall(r"<span\b", cell["source"]))
        if opened != len(list(prose.SPAN.finditer(cell["source"]))):
            yield index, 'a <span> is no binding: write <span data-fact="NAME">?</span> exactly.'
        minutes = (
            (str(chapter.about.get("minutes")),) if "header" in tags(cell) or index == 0 else ()
        )
        for number, sentence in prose.loose_numbers(cell["source"], code, minutes):
            yield (
                index,
                (
                    f"{number} is typed in the prose: {sentence!r}. Bind it: "
                    f'<span data-fact="NAME">?</span>, data-result, data-given or data-claim.'
                ),
            )
    for index, cell in chapter.code():
        for call in called(parsed(cell) or ast.Module([], []), "show", "compare"):
            for text in typed_text(call):
                for number, _ in prose.loose_numbers(text):
                    yield index, f"{number} is typed in {text!r}: build it into an f-string."


def spans_of(source: str, sources: prose.Sources, chapter: Chapter) -> Iterator[str]:
    """What is wrong with the spans of one cell."""
    for match in prose.SPAN.finditer(source):
        kind, name, text = match["kind"], match["name"], match["text"]
        value = getattr(sources, kind, {}).get(name) if kind in prose.KINDS else None
        if value is None:
            yield prose.unknown(kind, name, sources)
        elif kind == "claim":
            if text.strip() not in value:
                yield f"claim {name} quotes {', '.join(value)}, and the prose says {text!r}."
        elif not prose.same_number(text, value):
            yield (
                f"data-{kind}={name!r} is {value}, and the prose says {text!r}: "
                f"run {rerun(chapter)} --fill and read the sentence again."
            )


def typed_text(call: ast.Call) -> Iterator[str]:
    """The literal texts in a call's arguments, but for a key, which is compare's first."""
    skip = 1 if ast.unparse(call.func).split(".")[-1] == "compare" else 0
    for argument in [*call.args[skip:], *(keyword.value for keyword in call.keywords)]:
        formats = {
            id(part)
            for node in ast.walk(argument)
            if isinstance(node, ast.FormattedValue)
            for part in ast.walk(node)
        }
        for node in ast.walk(argument):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in formats
            ):
                yield node.value


def private_things(chapter: Chapter) -> Violations:
    """A chapter names no machine: no paths, addresses, host names."""
    host = socket.gethostname()
    telling = re.escape(host) if len(host) >= 8 and re.search(r"\d", host) else r"(?!)"
    pattern = re.compile(f"{PRIVATE.pattern}|{telling}")
    for index, cell in enumerate(chapter.cells):
        places = {"source": cell["source"]}
        for output in cell.get("outputs", ()):
            text = output.get("text", "") + "".join(
                value
                for kind, value in output.get("data", {}).items()
                if kind.startswith("text/") and isinstance(value, str)
            )
            places["output"] = places.get("output", "") + text
        for place, text in places.items():
            if match := pattern.search(text):
                line = text[text.rfind("\n", 0, match.start()) + 1 :].split("\n")[0]
                yield index, f"the {place} names this machine: {line.strip()[:100]!r}."


def predictions(chapter: Chapter) -> Violations:
    """A guess comes before its measurement, is compared with it, and is not made for the reader."""
    asked: dict[str, int] = {}
    compared: dict[str, int] = {}
    for index, cell in chapter.code():
        for call in called(parsed(cell) or ast.Module([], []), "predict", "compare"):
            name = ast.unparse(call.func).split(".")[-1]
            key = (
                call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            )
            if not isinstance(key, str):
                yield index, f"{name}() takes its key as a literal string, first."
                continue
            (asked if name == "predict" else compared).setdefault(key, index)
            if not key.startswith(f"{chapter.stem[:2]}."):
                yield index, f"the key {key!r} begins with the chapter: '{chapter.stem[:2]}.'."
            if name == "predict" and any(k.arg == "choice" for k in call.keywords):
                yield index, f"predict({key!r}) chooses for the reader: remove choice=."
    for key, index in asked.items():
        if key not in compared:
            yield index, f"the prediction {key!r} is never compared with a measurement."
        elif compared[key] <= index:
            yield index, f"the prediction {key!r} is asked after its answer (cell {compared[key]})."
    for key in set(compared) - set(asked):
        yield compared[key], f"compare({key!r}) has no prediction."


def results_on_record(chapter: Chapter) -> Violations:
    """Measured numbers are kept with the machine they came from, and with nothing private."""
    wanted = set()
    for _, cell in chapter.code():
        for call in called(parsed(cell) or ast.Module([], []), "record"):
            if call.args and isinstance(call.args[0], ast.Constant):
                wanted.add(call.args[0].value)
    known = set(chapter.results.get("values", {}))
    if wanted and not chapter.results:
        yield -1, f"results/{chapter.stem}.json is missing: run {rerun(chapter)}."
        return
    for name in sorted(wanted - known):
        yield -1, f"record({name!r}) is not in results/{chapter.stem}.json: run {rerun(chapter)}."
    text = json.dumps(chapter.results)
    if match := PRIVATE.search(text):
        yield -1, f"results/{chapter.stem}.json names a machine: {match[0]!r}."
