"""Every rule of `notebook_rules` on planted violations: a rule that finds nothing may be broken."""

import copy
import json

import notebook_content as content
import notebook_rules as rules
import pytest
from notebook_chapter import Chapter, report
from notebook_rules import RULES
from toy_notebooks import FACT_TAGS, code, markdown, notebook

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
RESULTS = {"values": {"step": {"value": 4.2112, "unit": "ms", "text": "4.21"}}}
# Built here, so that no path of a real machine stands in this file.
PLACES = {name: f"/{name}/someone" for name in ("root", "tmp", "work")}
CLAIMS = {"A24": {"figures": ["49,109", "2,461"]}}


def cells():
    """The cells of a chapter that keeps every rule."""
    plain = [code("\n".join(f"x{n}{k} = {k}" for k in range(8))) for n in range(13)]
    return [
        markdown("# Every token reads the first one again\n\n45 minutes.", "header"),
        code("import time\nN = 128\nLENGTHS = (16, 32)", "setup"),
        code('predict("90.clock", "How much?", ["2", "4"])', "predict"),
        markdown(PROSE, "claim"),
        code("def step():\n    return sum(range(N))", "naive"),
        code('slow = measure(step)\nrecord("step", slow.median * 1e3, "ms")', "measure"),
        code("count = N * 2\ncount", "bottleneck"),
        code("def cached():\n    return N", "fix"),
        code("cached() == N", "equal"),
        code('compare("90.clock", measured=f"{slow.median} times", best="b")', "again"),
        code('show(fig, f"It is {N}: the line rises with every token.")', "plot", outputs=(PLOT,)),
        code("show(fig, caption)", outputs=(PLOT,)),
        code("show(fig, caption)", outputs=(PLOT,)),
        code(FACTS, *FACT_TAGS, says=SAID),
        *plain,
        markdown("## It bought less than it promised\n\n" + "word " * 900, "losses"),
        code('check("e90.1")', "check"),
        code('quiz("90")', "quiz"),
        markdown("Pope et al., 2023, measured 1,234 things.", "papers"),
    ]


def chapter(*changes, results=RESULTS, claims=CLAIMS, size=1000, **about) -> Chapter:
    """The good chapter with `changes` made to its list of cells by functions."""
    made = copy.deepcopy(cells())
    for change in changes:
        change(made)
    about = {"minutes": 45, **about}
    return Chapter("90_toy", notebook(*made, **about), results, claims, size)


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
    return lambda made: made[index].update(values)


def prose(text):
    """A change: one more cell of prose."""
    return add(markdown(text))


def stream(name, text):
    """One output to a stream."""
    return {"output_type": "stream", "name": name, "text": text}


def display(**data):
    """One displayed output; a double underscore in a name stands for a slash."""
    data = {name.replace("__", "/"): value for name, value in data.items()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_chapter_keeps(rule):
    assert report(chapter(), rule) == []


FACT = 13  # position of the fact cell
PLANTED = [
    (rules.python_only, [add(code("!pip install torch"))], "'!pip install torch' is IPython's"),
    (rules.python_only, [add(code("%matplotlib inline"))], "'%matplotlib inline' is IPython's"),
    (rules.python_only, [add(code("%%time\nstep()"))], "'%%time'"),
    (rules.python_only, [add(code("x = !ls"))], "no Python"),
    (rules.python_only, [add(code("step?"))], "'step?' is IPython's"),
    (rules.python_only, [add(code("def f(:"))], "no Python"),
    (rules.python_only, [add(code(""))], "is empty"),
    (rules.python_only, [add(code("os.system('ls')"))], "whose failure nobody sees"),
    (rules.python_only, [add(code("get_ipython().run_line_magic('time', '')"))], "nobody sees"),
    (content.fact_cells, [put(FACT, execution_count=None)], "no committed output"),
    (content.fact_cells, [put(FACT, outputs=[])], "no committed output"),
    (content.fact_cells, [put(FACT, metadata={"tags": ["facts"]})], "both tags"),
    (content.fact_cells, [add(code('fact("a", 1)'))], "never checked"),
    (content.fact_cells, [add(code("print('a: 1')", *FACT_TAGS, says="a: 1\n"))], "with fact("),
    (content.fact_cells, [put(FACT, outputs=[stream("stdout", SAID + "loading\n")])], "'loading'"),
    (
        content.fact_cells,
        [put(FACT, outputs=[stream("stdout", SAID), display(text__plain="2")])],
        "nothing else",
    ),
    (content.fact_cells, [edit(FACT, 'fact("eq', '# NBVAL_SKIP\nfact("eq')], "overrides"),
    (content.enough_facts, [put(FACT, outputs=[stream("stdout", "a: 1\nb: 2\n")])], "2 facts"),
    (
        content.enough_facts,
        [add(code('fact("equal", True)', *FACT_TAGS, says="equal: True\n"))],
        "'equal' was stated in cell 13",
    ),
    (content.no_clock_in_facts, [edit(FACT, "8256", "measure(step).count")], "measure() in a"),
    (content.no_clock_in_facts, [edit(FACT, "8256", "time.perf_counter()")], "perf_counter() in"),
    (content.no_clock_in_facts, [edit(FACT, "True", "slow.median < 2")], "slow was measured"),
    (
        content.no_clock_in_facts,
        [edit(6, "count = N * 2", "gain = 1 / slow.median"), edit(FACT, "True", "gain > 1")],
        "gain was measured with a clock",
    ),
    (rules.elements, [put(8, metadata={"tags": []})], "no cell is tagged 'equal'"),
    (rules.elements, [put(6, metadata={"tags": ["bottelneck", "bottleneck"]})], "'bottelneck'"),
    (rules.headings, [edit(0, "# Every", "Every")], "begins with the title"),
    (rules.headings, [prose("## The fix")], "'The fix' could stand in any chapter"),
    (rules.headings, [prose("## What we did not win")], "could stand in any chapter"),
    (rules.headings, [prose("### Results:")], "could stand in any chapter"),
    (rules.headings, [prose("# A second title")], "2 headings of the first level"),
    (content.bound_numbers, [edit(3, "8,256", "8,128")], "is 8,256, and the prose says '8,128'"),
    (content.bound_numbers, [edit(3, "4.21", "4.2")], "is 4.21, and the prose says '4.2'"),
    (content.bound_numbers, [edit(3, ">128<", ">?<")], "is 128, and the prose says '?'"),
    (content.bound_numbers, [edit(3, "49,109", "49,110")], "quotes 49,109, 2,461, and the prose"),
    (content.bound_numbers, [edit(3, '"saved"', '"save"')], "Known: equal, ratio, saved"),
    (content.bound_numbers, [edit(3, '"A24"', '"A25"')], "claims.toml has no such entry"),
    (content.bound_numbers, [edit(3, "data-given", "data-gven")], "data-gven is no binding"),
    (content.bound_numbers, [prose("<span class='x'>3</span>")], "is no binding"),
    (content.bound_numbers, [edit(1, "N = 128", "N = 128; N = 256")], "one constant"),
    (content.bound_numbers, [prose("First. It saves 14 ms per token. Then.")], "14 is typed"),
    (content.bound_numbers, [prose("It is 1.5 times faster.")], "1.5 is typed"),
    (content.bound_numbers, [prose("It reads 2,048 slots.")], "2,048 is typed"),
    (content.bound_numbers, [prose("A batch of top-50 rows.")], "50 is typed"),
    (content.bound_numbers, [prose("At T=256 it bends.")], "256 is typed"),
    (content.bound_numbers, [prose("In 60 minutes.")], "60 is typed"),
    (content.bound_numbers, [prose("| a | b |\n|---|---|\n| 17 | 3 |")], "17 is typed"),
    (content.bound_numbers, [prose("Call `step(999)` again.")], "999 is typed"),
    (content.bound_numbers, [edit(10, "{N}:", "128:")], "build it into an f-string"),
    (content.bound_numbers, [edit(9, "{slow.median} times", "42 times")], "42 is typed"),
    (content.private_things, [add(code("open('/home/anna/x')"))], "source names this machine"),
    (content.private_things, [add(code("x", says=f"in {PLACES['tmp']}\n"))], "output names"),
    (content.private_things, [prose(f"Look in {PLACES['work']}.")], PLACES["work"]),
    (content.private_things, [add(code("p = 'C:\\\\Users'"))], "names this machine"),
    (content.private_things, [add(code("x", says="lib/site-packages/torch\n"))], "site-packages"),
    (content.private_things, [add(code("x", says="<f at 0x7f12ab34cd56>\n"))], "0x7f12ab34cd56"),
    (content.private_things, [prose("Ask 192.168.1.17 for it.")], "192.168.1.17"),
    (
        content.private_things,
        [add(code("x", outputs=(display(text__html=f"<i>{PLACES['root']}</i>"),)))],
        PLACES["root"],
    ),
    (
        rules.clean_outputs,
        [add(code("x", outputs=({"output_type": "error", "ename": "KeyError"},)))],
        "an error is committed (KeyError)",
    ),
    (rules.clean_outputs, [add(code("x", outputs=(stream("stderr", "old"),)))], "a warning"),
    (
        rules.clean_outputs,
        [add(code("x", outputs=(display(**{"image__svg+xml": "<svg/>"}),)))],
        "commit PNG",
    ),
    (
        rules.clean_outputs,
        [add(code("x", outputs=(display(**{"application__vnd.jupyter.widget-view+json": {}}),)))],
        "a widget is committed",
    ),
    (
        rules.alternative_texts,
        [add(code("x", outputs=({**PLOT, "metadata": {}},)))],
        "without alternative text",
    ),
    (
        rules.alternative_texts,
        [add(code("x", outputs=({**PLOT, "data": {"image/png": "iVBORw0KGgo="}},)))],
        "without its caption",
    ),
    (rules.shape, [edit(27, "word " * 900, "word " * 9)], "words of prose; a chapter has 800"),
    (rules.shape, [prose("word " * 1500)], "words of prose; a chapter has 800 to 2200"),
    (rules.shape, [add(*[code("y = 1") for _ in range(19)])], "45 code cells; a chapter has 15"),
    (rules.shape, [add(code("y = 1\n" * 240))], "lines of code; a chapter has 100 to 260"),
    (rules.shape, [add(*[code("z = 1\n" * 9) for _ in range(30)])], "9 lines; at most 8"),
    (rules.shape, [put(11, outputs=[])], "2 plots or tables"),
    (rules.cell_ids, [put(5, id="")], "has no id"),
    (rules.cell_ids, [put(5, id="same"), put(6, id="same")], "'same' stands twice"),
    (rules.serial_run, [put(4, execution_count=9)], "ran as number 9, not 3"),
    (rules.serial_run, [put(4, execution_count=None)], "ran as number None"),
    (rules.metadata, [put(4, metadata={"execution": {}})], "times of an execution"),
    (content.predictions, [edit(9, "90.clock", "90.other")], "'90.clock' is never compared"),
    (content.predictions, [edit(9, "90.clock", "90.other")], "compare('90.other') has no pred"),
    (content.predictions, [edit(2, '"4"]', '"4"], choice="b"')], "chooses for the reader"),
    (content.predictions, [edit(2, '"90.clock"', "KEY")], "literal string"),
    (
        content.predictions,
        [edit(2, "90.clock", "03.clock"), edit(9, "90.clock", "03.clock")],
        "begins with the chapter",
    ),
    (
        content.predictions,
        [lambda made: made.insert(14, made.pop(2))],
        "is asked after its answer",
    ),
    (content.results_on_record, [add(code('record("new", 1.5)'))], "record('new') is not in"),
]


@pytest.mark.parametrize(("rule", "changes", "says"), PLANTED)
def test_a_planted_violation_is_found(rule, changes, says):
    found = report(chapter(*changes), rule)
    assert any(says in line for line in found), found


def test_facts_are_not_counted_as_code():
    """They are for the tests: a chapter may state as many as it needs."""
    many = "\n".join(f'fact("f{i}", {i})' for i in range(240))
    for tag in (*FACT_TAGS, "example", "turn"):
        uncounted = "lines of code" not in str(report(chapter(add(code(many, tag))), rules.shape))
        assert uncounted == (tag != "facts")
    assert "lines of code" in str(report(chapter(add(code(many))), rules.shape))


@pytest.mark.parametrize(
    ("rule", "made", "says"),
    [
        (rules.size, chapter(size=401 * 1024), "401 KiB; at most 400"),
        (rules.elements, chapter(waived={"fix": "not in this chapter"}), "waived and present"),
        (
            rules.elements,
            chapter(put(7, metadata={}), waived={"fix": "none"}),
            "gives no reason",
        ),
        (rules.elements, chapter(waived={"fixx": "a good long reason"}), "is no element"),
        (rules.metadata, chapter(question="A topic"), "ending in '?'"),
        (rules.metadata, chapter(minutes="45"), "minutes (an integer)"),
        (rules.metadata, chapter(chapter="91"), "minillm.chapter is '91'"),
        (content.results_on_record, chapter(results={}), "results/90_toy.json is missing"),
        (
            content.results_on_record,
            chapter(results={**RESULTS, "machine": {"name": "/home/anna"}}),
            "names a machine",
        ),
    ],
)
def test_a_planted_violation_beside_the_cells_is_found(rule, made, says):
    found = report(made, rule)
    assert any(says in line for line in found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kernelspec", {"display_name": "minillm", "language": "python", "name": "my-env"}),
        ("widgets", {"state": {}}),
        ("language_info", {"name": "python", "version": "3.11.7"}),
    ],
)
def test_metadata_of_a_machine_is_found(key, value):
    made = chapter()
    made.notebook["metadata"][key] = value
    assert len(report(made, rules.metadata)) == 1


ACCEPTED = [
    (content.bound_numbers, [prose("Up to 12 of them, 0 to 3, in 2 steps.")]),
    (content.bound_numbers, [prose("Llama-2-7B and smollm2-135m on an H100 in bf16 and float32.")]),
    (content.bound_numbers, [prose("An RTX 5070 Ti with PyTorch 2.13, in 16-bit numbers.")]),
    (content.bound_numbers, [prose("See chapter 03, chapters 05, 06 and 17, exercise e13.1.")]),
    (content.bound_numbers, [prose("Shown before (Dao et al., 2022) and by Kwon et al., 2023.")]),
    (content.bound_numbers, [prose("A gibibyte is 2^30 bytes, a gigabyte 10^9.")]),
    (content.bound_numbers, [prose("It runs `N = 128` first, [here](https://x.org/2309.06180).")]),
    (content.bound_numbers, [prose('N is <span data-given="LENGTHS[1]">32</span>.')]),
    (content.bound_numbers, [prose('It is <span data-given="N">128</span>th.')]),
    (content.bound_numbers, [edit(3, "8,256", "8256")]),  # commas are the writer's choice
    (content.bound_numbers, [add(markdown("1,234 tokens, 99 % (2019).", "papers"))]),
    (rules.python_only, [add(code("x = 7 % 4\nif x != 3 or not x:\n    pass\ny = a @ b"))]),
    (content.private_things, [prose("Your copy is work/e03_kv_cache/e03_1.py, as `a/work` is.")]),
    (content.private_things, [prose("Open http://127.0.0.1:8888 or https://x.org/home/page.")]),
    (content.private_things, [add(code("KEY = 0xD2511F53CD9E8D57"))]),
    (rules.headings, [prose("## Where the fix stops helping")]),
    (content.fact_cells, [put(FACT, outputs=[stream("stdout", SAID), stream("stdout", "a: 1\n")])]),
]


@pytest.mark.parametrize(("rule", "changes"), ACCEPTED)
def test_what_is_in_order_is_accepted(rule, changes):
    assert report(chapter(*changes), rule) == []


def test_a_waived_element_with_a_reason_is_accepted():
    made = chapter(put(7, metadata={}), waived={"fix": "nothing is mended in this chapter"})
    assert report(made, rules.elements) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_has_a_planted_violation(rule):
    assert rule in {planted for planted, _, _ in PLANTED} | {rules.size}


def test_the_report_names_the_cell_and_shows_the_sentence():
    text = (
        'After the first. The cache of <span data-given="N">128</span> tokens saves 14.5 ms. End.'
    )
    (line,) = report(chapter(prose(text)), content.bound_numbers)
    assert line.startswith("90_toy cell 30 (markdown, 'After the first.")
    assert "14.5 is typed in the prose: 'The cache of 128 tokens saves 14.5 ms.'" in line
    assert '<span data-fact="NAME">?</span>' in line


def test_the_planted_chapters_are_notebooks():
    """Otherwise the rules are tried on something that Jupyter would not open."""
    import nbformat

    made = chapter()
    nbformat.validate(nbformat.from_dict(json.loads(json.dumps(made.notebook))))
