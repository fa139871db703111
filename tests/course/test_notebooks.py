"""Every rule of `notebook_rules` on every chapter, and on planted violations: a rule that finds
nothing may be broken."""

import ast
import base64
import copy
import json
import re
import zlib
from fractions import Fraction
from itertools import pairwise

import notebook_rules as rules
import pytest
from notebook_chapter import NOTEBOOKS, Chapter, prose, report, rerun, stale
from notebook_rules import RULES, turns
from toy_notebooks import FACT_TAGS, code, markdown, notebook

from chapters import read_notebook
from tests.test_reading_path import STEPS

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
assert PATHS, "tests over an empty list of files would all pass"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_chapter_keeps_every_rule(path):
    chapter = Chapter.load(path)
    broken = [line for rule in RULES for line in report(chapter, rule)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_listings_show_the_present_source(path):
    """python notebooks/execute.py NN --fill renews them."""
    old, new = read_notebook(path), read_notebook(path)
    prose.renew_listings(new)
    assert new == old


def test_each_chapter_leads_to_the_next():
    lost = [
        a.stem for a, b in pairwise(PATHS) if f"]({b.name})" not in a.read_text("utf-8")[-2000:]
    ]
    assert not lost, "add **Next:** [NN · title](file) to their last cells"


def test_every_small_task_has_one_sealed_answer_and_every_answer_a_task():
    calls = [call for path in PATHS for _, call in Chapter.load(path).calls("turn")]
    names = [rules.first(call) for call in calls if ast.unparse(call.func) == "turn"]
    assert sorted(names) == sorted(turns.load_turns().keys() - {"90.product"})


def test_what_a_task_printed_is_its_sealed_answer_and_its_reason():
    """So the answers of the file are those of the executed chapters. One is cut ("...")."""
    cut = []
    for chapter in map(Chapter.load, PATHS):
        for at, call in chapter.calls("turn"):
            if ast.unparse(call.func) != "turn":
                continue
            name = str(rules.first(call))
            digits, right, said = turns.load_turns()[name].split()
            why = json.loads(zlib.decompress(base64.b64decode(said)))[1]
            printed = " ".join(rules.stdout(chapter.cells[at]["outputs"]).split())
            assert printed.startswith("Right: ") and printed.endswith(f". {why}"), name  # noqa: PT018
            shown = printed.removeprefix("Right: ").removesuffix(f". {why}")
            if shown.endswith("..."):
                cut.append(name)
                continue
            number = shown.replace(",", "")
            value = Fraction(number) if re.fullmatch(r"[\d./]+", number) else shown
            if shown[0] in "[({TF":
                value = ast.literal_eval(shown)
            assert turns.hashed(name, value, int(digits)) == right, name
    assert cut == ["11.softmax"]


READ_BY_ALL = {
    "Scheduler.schedule", "Runner.launch", "Decoder.forward", "Sampler.choose", "Engine.step",
}  # fmt: skip


def test_each_chapter_ends_with_engine_code_to_read_and_two_questions():
    """The links name what stands at their lines, and together show most of the reading path."""
    seen: dict[str, set[int]] = {}
    names = set()
    for path in PATHS:
        chapter = Chapter.load(path)
        cell = chapter.cells[-2]
        text = cell["source"]
        assert "read" in cell["metadata"]["tags"], (
            f"{path.stem}: the last cell but one is no reading"
        )
        now = stale.pointed(text)
        assert text == now, f"lines have moved: {rerun(chapter)} --fill"
        links = re.findall(r"^\* \[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)-L(\d+)\): ", text, re.M)
        assert text.count("](") == len(links) and 1 <= len(links) <= 4, path.stem  # noqa: PT018
        assert text.count("**Question") == text.count("<details><summary>Answer</summary>\n\n") == 2
        names |= {name for name, *_ in links}
        for _, file, first, last in links:
            seen.setdefault(file, set()).update(range(int(first), int(last) + 1))
    on_the_path = {f"minillm/{step.file}" for step in STEPS}
    assert sum(len(lines) for file, lines in seen.items() if file in on_the_path) >= 2500
    assert names >= READ_BY_ALL


@pytest.fixture(autouse=True)
def a_toy_task(monkeypatch):
    """The chapter below asks one more question than the course."""
    known = turns.load_turns()
    monkeypatch.setattr(turns, "load_turns", lambda: {"90.product": SEALED, **known})


def test_claims_are_quoted_whole():
    """What an article says, its figures as it prints them, "verdict: why", and where it stands."""
    for name, claim in prose.load_claims().items():
        assert claim.keys() == {"text", "figures", "verdict", "source"}, name
        assert all(claim["verdict"].partition(": ")), f"{name}: 'wrong: why', or 'holds: why'"
        said = claim["text"] + claim["verdict"]
        assert all(figure in said for figure in claim["figures"]), name


CAPTION = "Time against length: the line rises, and the bound lies below it."
PLOT = {
    "output_type": "display_data",
    "data": {"image/png": "iVBORw0KGgo=", "text/plain": f"[figure] {CAPTION}"},
    "metadata": {"image/png": {"alt": CAPTION}},
}
FACTS = 'fact("saved", 8256, "positions")\nfact("equal", True)\nfact("ratio", "64.5")'
SAID = "saved: 8,256 positions\nequal: True\nratio: 64.5\n"
PROSE = (
    'The cache saves <span data-fact="saved">8,256</span> positions of '
    '<span data-given="N">128</span>; one took <span data-result="step">4.21</span> ms, and '
    '<span data-claim="A24">49,109</span> was claimed. '
)
TIMED = "minillm.errors.MinillmError"
RESULTS = {
    "values": {"step": {"value": 4.2112, "unit": "ms", "text": "4.21"}},
    "timed": {TIMED: stale.fingerprint(TIMED)},
}
# Built here, so that no path of a real machine stands in this file.
PLACES = {name: f"/{name}/someone" for name in ("root", "tmp", "work")}
CLAIMS = {"A24": {"figures": ["49,109", "2,461"]}}
TURN = 'answer = 6 * 7  # answer\nturn("90.product", answer)'
SEALED = turns.sealed("90.product", 42, "Multiply.")
FACT, LAST = 13, 22  # positions of the fact cell and of the papers
CELLS = [
    markdown(
        "# Every token reads the first one again\n\n45 minutes. ![The way](figures/90.svg)",
        "header",
    ),
    code("import time\nN = 128\nLENGTHS = (16, 32)\ndesign()", "setup"),
    code('predict("90.clock", "How much?", ["2", "4"])', "predict"),
    markdown(PROSE, "claim"),
    code("def step():\n    return sum(range(N))", "naive", "example"),
    code('slow = measure(step)\nrecord("step", slow.median * 1e3, "ms")', "measure"),
    code("count = N * 2\ncount", "bottleneck"),
    code("def cached():\n    return N", "fix"),
    code("cached() == N", "equal"),
    code('compare("90.clock", measured=f"{slow.median} times", best=BEST)', "again", "result"),
    code('show(fig, f"It is {N}: the line rises with every token.")', "plot", outputs=(PLOT,)),
    code("show(fig, caption)", outputs=(PLOT,)),
    code("show(fig, caption)", outputs=(PLOT,)),
    code(FACTS, *FACT_TAGS, says=SAID),
    *[code(TURN, "turn", says="Right: 42. Multiply.\n") for _ in range(4)],
    markdown("## It bought less than it promised", "losses"),
    code('task("e90.1")'),
    code('check("e90.1")', "check"),
    code('quiz("90")', "quiz"),
    markdown("[Pope et al., 2023](https://arxiv.org/abs/2211.05102), read 1,234.", "papers"),
]


def chapter(*changes, results=RESULTS, size=1000, **about) -> Chapter:
    """A good chapter with `changes` made to its list of cells by functions."""
    made = copy.deepcopy(CELLS)
    for change in changes:
        change(made)
    for cell in made:  # as execute.py leaves them
        if "nbval-check-output" in cell["metadata"].get("tags", ()):
            cell["metadata"]["jupyter"] = {"source_hidden": True}
    about = {"minutes": 45, "timed": [TIMED], **about}
    return Chapter("90_toy", notebook(*made, **about), results, CLAIMS, size)


def edit(index, old, new):
    """A change: replace a text in a cell's source."""

    def change(made):
        assert old in made[index]["source"]
        made[index]["source"] = made[index]["source"].replace(old, new)

    return change


def add(*more):
    """A change: further cells before the last one."""
    return lambda made: made.__setitem__(slice(-1, -1), copy.deepcopy(list(more)))


def put(index, **values):
    """A change: values of a cell."""
    return lambda made: made[index].update(json.loads(json.dumps(values)))


def drop(index):
    """A change: without a cell."""
    return lambda made: made.pop(index)


def run(source, says=""):
    """A change: one more cell of code."""
    return add(code(source, says=says))


def text(source):
    """A change: one more cell of prose."""
    return add(markdown(source))


def output(**data):
    """A change: one more cell with a displayed output; a double underscore stands for a slash."""
    data = {name.replace("__", "/"): value for name, value in data.items()}
    shown = {"output_type": "display_data", "data": data, "metadata": {}}
    return add(code("x", outputs=(shown,)))


def stream(name, says):
    """One output to a stream."""
    return {"output_type": "stream", "name": name, "text": says}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_chapter_keeps(rule):
    assert report(chapter(), rule) == []


WIDGET = {"application__vnd.jupyter.widget-view+json": {}}
PLANTED = {
    rules.clean_run: [
        (put(5, id=""), "no notebook of format 4.5"),
        (put(4, execution_count=9), "ran as number 9, not 3"),
        (add(code("x", outputs=(stream("stderr", "old"),))), "wrote to stderr"),
        (output(**WIDGET), "not as a clean run"),
        (dict(size=401 * 1024), "401 KiB; at most 400"),
    ],
    rules.python_only: [
        (run("%matplotlib inline"), "no plain Python"),
        (run(" "), "is empty"),
        (run("os.system('ls')"), "leaves no trace"),
    ],
    rules.metadata: [
        (edit(0, "# Every", "Every"), "begins with the title"),
        (dict(question="A topic"), "ending in '?'"),
        (dict(minutes="45"), "minutes (an integer)"),
        (dict(minutes=9), "reading takes"),
        (dict(minutes=61), "at most 60: cut"),
        (dict(chapter="91"), "minillm.chapter is '91'"),
    ],
    rules.elements: [
        (put(8, metadata={"tags": []}), "no cell is tagged 'equal'"),
        (put(6, metadata={"tags": ["bottelneck", "bottleneck"]}), "'bottelneck'"),
        (dict(waived={"fix": "not in this chapter"}), "waived and present"),
        (dict(waived={"fixx": "a good long reason"}), "is no element"),
    ],
    rules.seen_first: [
        (put(4, metadata={"tags": ["naive"]}), 'tagged "example"'),
        (put(4, source="x = 1\n" * 7), "the example has 7 lines; at most 6"),
        (lambda made: [drop(10)(made) for _ in range(3)], "a picture of the mechanism"),
        (drop(12), "2 plots or tables"),
    ],
    rules.alternative_texts: [
        (put(11, outputs=[{**PLOT, "metadata": {}}]), "without alternative text"),
        (put(11, outputs=[{**PLOT, "data": {"image/png": "iVBO="}}]), "without its caption"),
        (output(**{"image__svg+xml": "<svg/>"}), "commit PNG"),
    ],
    rules.fact_cells: [
        (put(FACT, outputs=[]), "no committed output"),
        (put(FACT, metadata={"tags": ["facts"]}), "both tags"),
        (run('fact("a", 1)'), "never checked"),
        (add(code("print('a: 1')", *FACT_TAGS, says="a: 1\n")), "with fact("),
        (put(FACT, outputs=[stream("stdout", SAID + "loading\n")]), "'loading'"),
        (put(FACT, outputs=[stream("stdout", SAID), PLOT]), "nothing else"),
        (edit(FACT, 'fact("eq', '# NBVAL_SKIP\nfact("eq'), "overrides"),
        (put(FACT, outputs=[stream("stdout", "a: 1\nb: 2\n")]), "2 facts"),
        (add(code('fact("equal", True)', *FACT_TAGS, says="equal: True\n")), "stated in cell 13"),
    ],
    rules.no_clock_in_facts: [
        (edit(FACT, "8256", "measure(step).count"), "measure was measured"),
        (
            lambda made: (
                edit(6, "count = N * 2", "gain = 1 / slow.median")(made),
                edit(FACT, "True", "gain > 1")(made),
            ),
            "gain was measured with a clock",
        ),
    ],
    rules.bound_numbers: [
        (edit(3, "8,256", "8,128"), "is 8,256, and the prose says '8,128'"),
        (edit(3, "4.21", "4.2"), "is 4.21, and the prose says '4.2'"),
        (edit(3, "49,109", "49,110"), "quotes 49,109, 2,461, and the prose"),
        (edit(3, '"saved"', '"save"'), "Known: equal, ratio, saved"),
        (edit(3, '"A24"', '"A25"'), "claims.toml has no such entry"),
        (edit(3, "data-given", "data-gven"), "data-gven is no binding"),
        (text("<span class='x'>3</span>"), "is no binding"),
        (edit(1, "N = 128", "N = 128; N = 256"), "one constant"),
        (text("First. It saves 14 ms per token. Then."), "14 is typed"),
        (text("| a | b |\n|---|---|\n| 17 | 3 |"), "17 is typed"),
        (text("Call `step(999)` again."), "999 is typed"),
        (edit(10, "{N}:", "128:"), "build it into an f-string"),
        (edit(9, "{slow.median} times", "42 times"), "42 is typed"),
    ],
    rules.private_things: [
        (run("open('/home/anna/x')"), "source names this machine"),
        (run("x", f"in {PLACES['tmp']}\n"), "output names"),
        (text(f"Look in {PLACES['work']}."), PLACES["work"]),
        (run("x", "<f at 0x7f12ab34cd56>\n"), "0x7f12ab34cd56"),
        (text("Ask 192.168.1.17 for it."), "192.168.1.17"),
        (output(text__html=f"<i>{PLACES['root']}</i>"), PLACES["root"]),
        (dict(results={**RESULTS, "machine": {"name": "/home/anna"}}), "json names this"),
    ],
    rules.results_on_record: [
        (run('record("new", 1.5)'), "record('new') is not in"),
        (dict(results={}), "record('step') is not in results/90_toy.json"),
        (dict(timed=[]), "minillm.timed names the functions"),
        (dict(bands={"gone": 1.5}), "minillm.bands has 'gone'"),
        (dict(results={**RESULTS, "timed": {}}), "changed since the measurement: make stale"),
    ],
    rules.predictions: [
        (put(9, metadata={"tags": ["again"]}), 'tagged "result"'),
        (edit(9, "90.clock", "90.other"), "'90.clock' needs a predict(), and after it"),
        (edit(2, '"4"]', '"4"], choice="b"'), "chooses for the reader"),
        (edit(2, '"90.clock"', "KEY"), "literal string"),
        (edit(9, "best=BEST", 'best="b"'), "has its letter as a literal"),
        (edit(2, "90.clock", "03.clock"), "begins with the chapter"),
        (lambda made: made.insert(14, made.pop(2)), "'90.clock' needs a predict(), and after it"),
    ],
    rules.your_turns: [
        (drop(14), '3 cells are tagged "turn"'),
        (put(14, source='turn("90.product", 1)'), "0 lines end in"),
        (put(14, source="answer = 1  # answer"), "calls turn(name, answer) once"),
        (edit(14, "90.product", "90.sum"), "turns.json has no '90.sum'"),
        (edit(14, "answer = 6", "# It is 42.\nanswer = 6"), "is on the page: 42"),
        (lambda made: made[13].update(markdown("6 times 7 is 42.")), "is on the page: 42"),
        (edit(14, "answer)", "answer + 1)"), "answer + 1 raises as long as"),
        (edit(14, "answer = 6", "count = 6  # answer\nanswer = 6"), "overwrites ['count']"),
        (put(14, outputs=[]), "the published answer is not right"),
        (run("print(answer)"), "uses ['answer'], which a learner may leave open"),
    ],
    rules.tasks_and_papers: [
        (edit(1, "design()", "N"), "no cell calls design()"),
        (drop(19), 'check("e90.1") without task("e90.1")'),
        (add(markdown("> two", "claim")), "a second box of claims"),
        (put(LAST, source="Pope et al."), "no paper has a link"),
        (edit(0, "90.svg", "03.svg"), "the head has no map"),
    ],
    rules.fair_clocks: [
        (put(1, source="ceilings.measure()"), "without device=: say"),
        (put(1, source='LLM("tiny", enforce_eager=True)'), "say that the fast path is off"),
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_planted_violations_are_found(rule):
    for change, says in PLANTED[rule]:
        made = chapter(**change) if isinstance(change, dict) else chapter(change)
        found = report(made, rule)
        assert any(says in line for line in found), (says, found)


ACCEPTED = [
    (rules.bound_numbers, text("Up to 12 of them, 0 to 3, in 2 steps.")),
    (rules.bound_numbers, text("Llama-2-7B and smollm2-135m on an H100 in bf16 and float32.")),
    (rules.bound_numbers, text("See chapter 03, chapters 05, 06 and 17, exercise e13.1.")),
    (rules.bound_numbers, text("It runs `N = 128` first, [here](https://x.org/2309.06180).")),
    (rules.bound_numbers, text('N is <span data-given="LENGTHS[1]">32</span>.')),
    (rules.bound_numbers, edit(3, "8,256", "8256")),  # commas are the writer's choice
    (rules.python_only, run("x = 7 % 4\nif x != 3 or not x:\n    pass\ny = a @ b")),
    (rules.private_things, text("Your copy is work/e03_kv_cache/e03_1.py, as `a/work` is.")),
    (rules.private_things, text("Open http://127.0.0.1:8888 or https://x.org/home/page.")),
]


def test_what_is_in_order_is_accepted():
    for rule, change in ACCEPTED:
        assert report(chapter(change), rule) == []
    waived = chapter(put(7, metadata={}), waived={"fix": "nothing is repaired in this chapter"})
    assert report(waived, rules.elements) == []
    said = put(0, source="# A title\n\nThe engine's fast\npath is off.")
    eager = 'LLM("tiny", enforce_eager=True)\nceilings.measure(device=device)'
    assert report(chapter(said, put(1, source=eager)), rules.fair_clocks) == []
