"""What a chapter must keep to, as functions from a chapter to (cell, what to repair).

`test_notebooks.py` applies every rule to every notebook, `test_notebook_rules.py` shows each rule
planted violations. A cell is its position in the notebook's list, -1 is the notebook as a whole.
What a rule says of outputs holds for a clean run: `notebooks/execute.py` leaves them so.
"""

import ast
import contextlib
import copy
import json
import re
import socket
import warnings
from collections.abc import Callable, Iterator

from notebook_chapter import (
    Chapter,
    Violations,
    called,
    chapters,
    execute,
    names_in,
    prose,
    rerun,
    stale,
)

from minillm_exercises import turns

is_fact_cell, stdout, tags = chapters.is_fact_cell, chapters.stdout, chapters.tags

ELEMENTS = tuple(
    "predict naive measure bottleneck fix equal again plot facts losses check quiz papers".split()  # noqa: SIM905
)
OTHER_TAGS = frozenset(
    "setup header claim cover nbval-check-output example turn open read repeats result".split()  # noqa: SIM905
)
BYTES = 400 * 1024  # a page that GitHub shows and git keeps cheaply
EARLY = 12  # cells, prose included: setup, then the example and the picture of the mechanism
EXAMPLE_LINES = 6
LEAST_TURNS, LEAST_FACTS, LEAST_SHOWN = 4, 3, 3
FIGURE = re.compile(r"!\[|<img |```mermaid")
CLOCKS = {"measure", "record", "perf_counter", "monotonic", "process_time", "time", "timeit"}
PRIVATE = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|var|Users|private)/\w|(?<![\w.])/(?:root|tmp|work)\b"
    r"|\b[A-Z]:\\\\?[A-Z]\w|site-packages|\bipykernel_\d+|\bat 0x[0-9a-f]{6,}"
    r"|\b(?!127\.0\.0\.1)(?:\d{1,3}\.){3}\d{1,3}\b"
)


def clean_run(chapter: Chapter) -> Violations:
    """The file is a notebook as one run from top to bottom leaves it, with nothing of a machine."""
    import nbformat  # takes seconds, which no other worker of a test run has to spend

    made = copy.deepcopy(chapter.notebook)
    try:
        with warnings.catch_warnings(action="ignore"):  # ids that stand twice are replaced
            nbformat.validate(made)
    except nbformat.ValidationError as error:
        yield -1, f"this is no notebook of format 4.5: {str(error).splitlines()[0]}"
    for problem in execute.normalise(made):
        yield -1, problem
    for index, (cell, normal) in enumerate(zip(chapter.cells, made["cells"], strict=True)):
        if cell != normal:
            yield index, f"this cell is not as a clean run leaves it: run {rerun(chapter)}."
    if chapter.notebook["metadata"] != made["metadata"]:
        yield -1, f"the metadata are not those of a clean run: run {rerun(chapter)}."
    for wanted, (index, cell) in enumerate(chapter.code(), 1):
        if (count := cell.get("execution_count")) != wanted:
            yield index, f"this cell ran as number {count}, not {wanted}: run {rerun(chapter)}."
            return
    if chapter.size > BYTES:
        yield -1, f"{chapter.size / 1024:.0f} KiB; at most 400: fewer or smaller pictures."


def python_only(chapter: Chapter) -> Violations:
    """A failing `!command` or unknown magic leaves no trace that a test could see."""
    for index, cell in chapter.code():
        if chapters.parsed(cell) is None or not cell["source"].strip():
            yield index, "this code cell is empty or no plain Python: write calls, not IPython's."
    for index, _ in chapter.calls("system", "getoutput", "run_line_magic", "run_cell_magic"):
        yield index, "a shell or magic call, whose failure leaves no trace: call Python instead."


def metadata(chapter: Chapter) -> Violations:
    """What the index and the path through the course are made from."""
    about = chapter.about
    if about.get("chapter") != chapter.number:
        yield -1, f"minillm.chapter is {about.get('chapter')!r}, the file is {chapter.stem}."
    if not str(about.get("question", "")).endswith("?"):
        yield -1, "metadata minillm.question is the chapter's question, ending in '?'."
    if not isinstance(about.get("minutes"), int) or not isinstance(about.get("needs"), list):
        yield -1, "metadata minillm has minutes (an integer) and needs (a list of chapters)."
    elif not (due := reading_minutes(chapter)) <= about["minutes"] <= 60:
        yield -1, f"reading takes {due:.0f} minutes or more, and may take at most 60: cut or split."
    if not chapter.cells[0]["source"].startswith("# "):
        yield 0, "the first cell begins with the title, '# ...'."


def reading_minutes(chapter: Chapter) -> float:
    """A minute for 80 words, 20 lines of open code or a picture, two for a prediction, a small task
    or the quiz. What is folded or behind the quiz does not count, but for "Read now"."""
    minutes = past = 0
    for cell in chapter.cells:
        here, text = set(tags(cell)), re.sub(r"(?s)<details>.*?</details>", "", cell["source"])
        if cell["cell_type"] == "markdown":
            spent = len(re.sub(r"<[^>]+>|\]\([^)]*\)", "", text).split()) / 80
        elif here & {"predict", "turn", "quiz"}:
            spent = 2
        else:
            folded = "setup" in here or cell["metadata"].get("jupyter")
            spent = 0 if folded else len(re.findall(r"^.*\S", text, re.MULTILINE)) / 20
            spent += any("image/png" in output.get("data", {}) for output in cell["outputs"])
        minutes += spent * (not past or "read" in here)
        past |= "quiz" in here
    return minutes


def elements(chapter: Chapter) -> Violations:
    """The same parts in every chapter, as tags; a missing one is waived with a reason."""
    present = {tag for cell in chapter.cells for tag in tags(cell)}
    waived = chapter.about.get("waived", {})
    for element in ELEMENTS:
        if element in present and element in waived:
            yield -1, f"the element {element!r} is waived and present: remove it from 'waived'."
        elif element not in present and len(str(waived.get(element, "")).split()) < 3:
            yield -1, f"no cell is tagged {element!r}: tag one, or say why in minillm.waived."
    for element in set(waived) - set(ELEMENTS):
        yield -1, f"{element!r} in 'waived' is no element; they are {', '.join(ELEMENTS)}."
    for index, cell in enumerate(chapter.cells):
        for tag in set(tags(cell)) - set(ELEMENTS) - OTHER_TAGS:
            yield index, f"the tag {tag!r} is unknown: a spelling mistake?"


def seen_first(chapter: Chapter) -> Violations:
    """A worked example with real numbers and a picture of the mechanism, before anything else;
    three pictures or tables in all."""
    early = list(enumerate(chapter.cells))[:EARLY]
    examples = [(index, cell) for index, cell in early if "example" in tags(cell)]
    if not examples:
        yield -1, f'none of the first {EARLY} cells is tagged "example": show one with numbers.'
    for index, cell in examples:
        lines = [line for line in cell["source"].splitlines() if line.strip()]
        if cell["cell_type"] == "code" and len(lines) > EXAMPLE_LINES:
            yield index, f"the example has {len(lines)} lines; at most {EXAMPLE_LINES}."
    if not any(
        "header" not in tags(cell) and FIGURE.search(cell["source"])
        if cell["cell_type"] == "markdown"
        else any("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))
        for _, cell in early
    ):
        yield -1, f"none of the first {EARLY} cells shows a picture of the mechanism."
    if (number := shown(chapter)) < LEAST_SHOWN:
        yield -1, f"{number} plots or tables; a chapter has at least {LEAST_SHOWN}."


def shown(chapter: Chapter) -> int:
    """How many pictures and tables a reader sees, counting each table of Markdown or HTML."""
    datas = [o.get("data", {}) for _, cell in chapter.code() for o in cell["outputs"]]
    printed = sum("image/png" in data or "<table" in str(data.get("text/html")) for data in datas)
    texts = [c["source"] for c in chapter.cells if c["cell_type"] == "markdown"]
    texts += [str(data.get("text/markdown", "")) for data in datas]
    return printed + sum(len(re.findall(r"^\|[-:| ]+\|$", t, re.MULTILINE)) for t in texts)


def alternative_texts(chapter: Chapter) -> Violations:
    """Who cannot see a plot reads its caption."""
    for index, cell in chapter.code():
        datas = [output.get("data", {}) for output in cell["outputs"]]
        texts = " ".join(str(v) for d in datas for kind, v in d.items() if kind[:5] == "text/")
        for output in cell["outputs"]:
            kinds = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
            if not kinds:
                continue
            alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
            if kinds != ["image/png"]:
                yield index, f"a picture as {kinds}: commit PNG, which no test compares."
            elif len(alt.split()) < 5:
                yield index, "a picture without alternative text: end with show(fig, caption)."
            elif alt not in texts:
                yield index, "a picture without its caption below: end with show(fig, caption)."


def fact_cells(chapter: Chapter) -> Violations:
    """nbval compares nothing where an output is missing; less than three facts rot unseen."""
    seen: dict[str, int] = {}
    for index, cell, tree in chapter.trees():
        here, states = set(tags(cell)), bool(list(called(tree, "fact")))
        if len({"facts" in here, is_fact_cell(cell), states}) > 1:
            yield (
                index,
                "facts are stated with fact(name, value), in a cell with both tags, facts and "
                "nbval-check-output; otherwise they are never checked.",
            )
        if not is_fact_cell(cell):
            continue
        if not stdout(cell["outputs"]):
            yield index, f"this fact cell has no committed output: run {rerun(chapter)}."
        if any(output["output_type"] != "stream" for output in cell["outputs"]):
            yield index, "a fact cell prints facts and nothing else; move the other output away."
        for line in stdout(cell["outputs"]).splitlines():
            if not chapters.FACT.fullmatch(line):
                yield index, f"the output {line[:60]!r} is no fact of the form 'name: value'."
        if "NBVAL_" in cell["source"]:
            yield index, "an NBVAL comment overrides the tags: remove it."
        for name in chapters.parse_facts(stdout(cell["outputs"])):
            if name in seen:
                yield index, f"the fact {name!r} was stated in cell {seen[name]}: rename one."
            seen[name] = index
    if len(seen) < LEAST_FACTS:
        yield -1, f"the chapter states {len(seen)} facts: state at least {LEAST_FACTS}."


def clocked_names(chapter: Chapter) -> set[str]:
    """Names whose value came out of a clock, directly or through other names."""
    found: set[str] = set()
    kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
    nodes = [n for _, _, tree in chapter.trees() for n in ast.walk(tree) if isinstance(n, kinds)]
    assigned = [
        ({name for target in targets for name in names_in(target)}, node.value)
        for node in nodes
        if node.value
        for targets in [node.targets if isinstance(node, ast.Assign) else [node.target]]
    ]
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
    for index, cell, tree in chapter.trees():
        if is_fact_cell(cell):
            calls = {ast.unparse(call.func) for call in called(tree, *CLOCKS)}
            for name in sorted(calls | (names_in(tree) & clocked)):
                yield index, f"{name} was measured with a clock: facts depend on none."


def bound_numbers(chapter: Chapter) -> Violations:
    """A typed number becomes wrong silently; a bound one is computed, measured or quoted."""
    sources, code = chapter.sources, "\n".join(cell["source"] for _, cell in chapter.code())
    for index, cell in enumerate(chapter.cells):
        if cell["cell_type"] != "markdown" or "papers" in tags(cell):
            continue
        yield from ((index, wrong) for wrong in spans_of(cell["source"], sources, chapter))
        opened = len(re.findall(r"<span\b", cell["source"]))
        if opened != len(list(prose.SPAN.finditer(cell["source"]))):
            yield index, 'a <span> is no binding: write <span data-fact="NAME">?</span> exactly.'
        heads = "header" in tags(cell) or index == 0
        minutes = (str(chapter.about.get("minutes")),) if heads else ()
        for number, sentence in prose.loose_numbers(cell["source"], code, minutes):
            bind = '<span data-fact="NAME">?</span>, data-result, data-given or data-claim'
            yield index, f"{number} is typed in the prose: {sentence!r}. Bind it: {bind}."
    for index, call in chapter.calls("show", "compare"):
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
    skip = int(ast.unparse(call.func).split(".")[-1] == "compare")
    for argument in [*call.args[skip:], *(keyword.value for keyword in call.keywords)]:
        fields = [node for node in ast.walk(argument) if isinstance(node, ast.FormattedValue)]
        formats = {id(part) for node in fields for part in ast.walk(node)}
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and id(node) not in formats:
                yield from [node.value] if isinstance(node.value, str) else []


def private_things(chapter: Chapter) -> Violations:
    """A chapter names no machine: no paths, addresses, host names."""
    host = socket.gethostname()
    telling = re.escape(host) if len(host) >= 8 and re.search(r"\d", host) else r"(?!)"
    pattern = re.compile(f"{PRIVATE.pattern}|{telling}")
    for index, cell in enumerate(chapter.cells):
        texts = {"source": cell["source"], "output": ""}
        for output in cell.get("outputs", ()):
            shown = [v for kind, v in output.get("data", {}).items() if kind.startswith("text/")]
            texts["output"] += output.get("text", "") + "".join(map(str, shown))
        for place, text in texts.items():
            if match := pattern.search(text):
                line = text[text.rfind("\n", 0, match.start()) + 1 :].split("\n")[0]
                yield index, f"the {place} names this machine: {line.strip()[:100]!r}."
    if match := PRIVATE.search(json.dumps(chapter.results)):
        yield -1, f"results/{chapter.stem}.json names this machine: {match[0]!r}."


def results_on_record(chapter: Chapter) -> Violations:
    """Measured numbers are kept with the machine they came from, and named with their code."""
    wanted = {first(call) for _, call in chapter.calls("record")} - {None}
    known, about = chapter.results.get("values", {}), chapter.about
    for name in sorted(wanted - set(known)):
        yield -1, f"record({name!r}) is not in results/{chapter.stem}.json: {rerun(chapter)}."
    if known and not about.get("timed"):
        yield -1, "metadata minillm.timed names the functions and files whose time is recorded."
    for name in set(about.get("bands", {})) - set(known):
        yield -1, f"minillm.bands has {name!r}, which the chapter does not record."
    if names := stale.changed(about, chapter.results):
        number = chapter.number
        yield -1, f"{', '.join(names)} changed since the measurement: make stale CHAPTER={number}."


def first(call: ast.Call) -> str | None:
    """A call's first argument, if it is a literal string."""
    node = call.args[0] if call.args else None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def predictions(chapter: Chapter) -> Violations:
    """A guess comes before its measurement, is compared with it, and is not made for the reader."""
    places: dict[str, dict[str, int]] = {"predict": {}, "compare": {}}
    for index, call in chapter.calls(*places):
        name, key = ast.unparse(call.func).split(".")[-1], first(call)
        if key is None:
            yield index, f"{name}() takes its key as a literal string, first."
            continue
        places[name].setdefault(key, index)
        if not key.startswith(f"{chapter.number}."):
            yield index, f"the key {key!r} begins with the chapter: '{chapter.number}.'."
        if name == "predict" and any(keyword.arg == "choice" for keyword in call.keywords):
            yield index, f"predict({key!r}) chooses for the reader: remove choice=."
        if (tag := {"compare": "result"}.get(name, name)) not in tags(chapter.cells[index]):
            yield index, f'a cell with {name}() is tagged "{tag}", which gives it its colour.'
        best = [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "best")]
        if name == "compare" and any(isinstance(node, ast.Constant) for node in best):
            yield index, f"compare({key!r}) has its letter as a literal: compute it from the data."
    asked, compared = places.values()
    for key in asked.keys() | compared.keys():
        if asked.get(key, 10**6) >= compared.get(key, -1):
            at = asked.get(key, compared.get(key, -1))
            yield at, f"{key!r} needs a predict(), and after it a compare() with the measurement."


def your_turns(chapter: Chapter) -> Violations:
    """Small tasks that are solved on the page and that no later cell needs."""
    found = [(index, cell, tree) for index, cell, tree in chapter.trees() if "turn" in tags(cell)]
    if len(found) < LEAST_TURNS:
        yield -1, f'{len(found)} cells are tagged "turn"; a chapter has at least {LEAST_TURNS}.'
    kept: set[str] = set()  # names that cells other than small tasks define
    left_open: set[str] = set()
    for index, cell, tree in chapter.trees():
        if "turn" not in tags(cell):
            if used := left_open & names_in(tree) - kept:
                yield index, f"this cell uses {sorted(used)}, which a learner may leave open."
            kept |= defined(tree)
            continue
        if taken := defined(tree) & kept:
            yield index, f"this task overwrites {sorted(taken)} of an earlier cell."
        left_open |= defined(tree) - kept
        answers = [line for line in cell["source"].splitlines() if line.endswith("  # answer")]
        if not 1 <= len(answers) <= 6:
            yield index, f'{len(answers)} lines end in "  # answer"; a small task has 1 to 6.'
        if len(calls := list(called(tree, "turn"))) != 1 or not calls[0].args:
            yield index, "this task calls turn(name, answer) once."
        else:
            yield from ((index, wrong) for wrong in given_away(chapter, index, calls[0]))
        said = stdout(cell["outputs"])
        if "Right: " not in said or "Not yet" in said or "Your turn" in said:
            yield index, f"the published answer is not right: {said.strip()[:60]!r}."


def given_away(chapter: Chapter, index: int, call: ast.Call) -> Iterator[str]:
    """A learner's copy of a task may not show the answer, nor raise before there is one."""
    name = str(first(call))
    if (sealed := turns.load_turns().get(name)) is None or turns.of_chapter(name) != chapter.number:
        yield f"exercises/turns.json has no {name!r}: add turns.sealed({name!r}, answer, hint)."
        return
    source = chapter.cells[index]["source"]
    source = turns.blanked(source) if turns.RUN.search(source) else source
    above = chapter.cells[index - 1]
    text = " ".join(re.findall("#.*", source))
    text += prose.MARKUP.sub(" ", above["source"]) if above["cell_type"] == "markdown" else ""
    shown = [float(n.replace(",", "").rstrip(".")) for n in re.findall(r"\d[\d,]*\.?\d*", text)]
    tree = ast.parse(source)
    for node in ast.walk(tree):
        with contextlib.suppress(ValueError):  # no literal
            shown.append(ast.literal_eval(node))
    digits, right, _ = sealed.split()
    for value in shown:
        free = isinstance(value, int | float) and value <= prose.FREE
        if not free and turns.hashed(name, value, int(digits)) == right:
            yield f"the answer to {name!r} is on the page: {value!r}."
    open_names = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and "Ellipsis" in ast.dump(node.value)
        for name in defined(ast.Module([node], []))
    }
    for node in ast.walk(tree):
        counted = isinstance(node, ast.BinOp | ast.Compare | ast.Subscript | ast.Attribute)
        counted |= isinstance(node, ast.Call) and ast.unparse(node.func) != "turn"
        if counted and names_in(node) & open_names:
            yield f"{ast.unparse(node)} raises as long as the answer is open."


def defined(tree: ast.Module) -> set[str]:
    """Names that a cell's top level defines."""
    found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    targets = [target for n in tree.body if isinstance(n, ast.Assign) for target in n.targets]
    return found.union(*map(names_in, targets))


def tasks_and_papers(chapter: Chapter) -> Violations:
    """Each exercise that is graded here is also shown here; a map is on top, papers have links."""
    shown, graded = ({first(c) for _, c in chapter.calls(name)} for name in ("task", "check"))
    for name in sorted(map(str, graded - shown)):
        yield -1, f'check("{name}") without task("{name}"), which shows what to do.'
    if not list(chapter.calls("design")):
        yield -1, "no cell calls design(), which gives the cells their colours."
    if f"](figures/{chapter.number}.svg)" not in chapter.cells[0]["source"]:
        yield 0, f"the head has no map: ![A request's way ...](figures/{chapter.number}.svg)."
    boxes = [index for index, cell in enumerate(chapter.cells) if "claim" in tags(cell)]
    for index in boxes[1:]:
        yield index, "a second box of claims: keep the most instructive one."
    for index, cell in enumerate(chapter.cells):
        if "papers" in tags(cell) and "](http" not in cell["source"]:
            yield index, "no paper has a link."


def fair_clocks(chapter: Chapter) -> Violations:
    """Ceilings belong to the device of the model; the engine's slow path is named as such."""
    for index, call in chapter.calls("measure"):
        named = {keyword.arg for keyword in call.keywords}
        if ast.unparse(call.func) == "ceilings.measure" and "device" not in named:
            yield index, "ceilings.measure() without device=: say whose rates these are."
    eager = any(
        keyword.arg == "enforce_eager" and ast.unparse(keyword.value) == "True"
        for _, call in chapter.calls("LLM")
        for keyword in call.keywords
    )
    early = [c["source"] for c in chapter.cells[:EARLY] if c["cell_type"] == "markdown"]
    if eager and "fast path" not in " ".join(" ".join(early).split()):
        yield -1, f"enforce_eager=True: the first {EARLY} cells say that the fast path is off."


RULES: tuple[Callable[[Chapter], Violations], ...] = (
    clean_run, python_only, metadata, elements, seen_first, alternative_texts, fact_cells,
    no_clock_in_facts, bound_numbers, private_things, results_on_record, predictions, your_turns,
    tasks_and_papers, fair_clocks,
)  # fmt: skip
