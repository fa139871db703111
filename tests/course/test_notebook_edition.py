"""The rules of the second edition on planted violations."""

import copy
import json

import notebook_edition as edition
import pytest
from notebook_chapter import Chapter, report, stale
from toy_notebooks import code, markdown, notebook

PICTURE = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}, "metadata": {}}
TURN = 'answer = 2 * 3  # answer\nturn(answer, 6, "Multiply.")'
RESULTS = {"values": {"step": {"value": 4.0, "unit": "ms", "text": "4.00"}}}
EAGER = 'llm = LLM("tiny", enforce_eager=True)'
TIMED = "minillm.errors.MinillmError"


def cells():
    """The cells of a chapter that keeps the rules."""
    return [
        markdown("# A title", "header"),
        code("import time", "setup"),
        code("print(2 * 3)", "example", says="6\n"),
        code("show(fig, caption)", outputs=(PICTURE,)),
        *[code(TURN, "turn", says="Right: 6.\n") for _ in range(4)],
        code('task("e90.1")'),
        code('check("e90.1")', "check"),
        markdown("> a box", "claim"),
        markdown("[Pope et al. (2023)](https://arxiv.org/abs/2211.05102)", "papers"),
    ]


def chapter(*changes, results=None, **about):
    """The good chapter with some changes."""
    made = copy.deepcopy(cells())
    for change in changes:
        change(made)
    known = {"timed": [TIMED]} | {"edition": 2} | about
    if results is None:
        results = {**RESULTS, "timed": {TIMED: stale.fingerprint(TIMED)}}
    return Chapter("90_toy", notebook(*made, **known), results)


def put(index, **values):
    """A change: values of a cell."""
    return lambda made: made[index].update(json.loads(json.dumps(values)))


def drop(index):
    """A change: without a cell."""
    return lambda made: made.pop(index)


def add(*more):
    """A change: more cells at the end."""
    return lambda made: made.extend(more)


def after(name):
    """A change: one more cell that uses a name."""
    return add(code(f"print({name})"))


@pytest.mark.parametrize("rule", edition.RULES)
def test_a_good_chapter_keeps_the_rule(rule):
    assert report(chapter(), rule) == []


PLANTED = [
    (edition.seen_first, [drop(2)], 'tagged "example"'),
    (edition.seen_first, [put(2, source="x = 1\n" * 7)], "the example has 7 lines; at most 6"),
    (edition.seen_first, [put(3, outputs=[])], "a picture of the mechanism"),
    (edition.your_turns, [drop(4)], '3 cells are tagged "turn"'),
    (edition.your_turns, [put(4, source='turn(1, 1, "x")')], "0 lines end in"),
    (edition.your_turns, [put(4, source="answer = 1  # answer")], "never calls turn"),
    (edition.your_turns, [put(4, outputs=[])], "the published answer is not right"),
    (edition.your_turns, [after("answer")], "uses ['answer'], which a learner may leave open"),
    (edition.tasks_in_place, [drop(8)], 'check("e90.1") without task("e90.1")'),
    (edition.sources_linked, [add(markdown("> two", "claim"))], "a second box of claims"),
    (edition.sources_linked, [put(11, source="Pope et al.")], "no paper has a link"),
    (edition.device_of_ceilings, [put(1, source="ceilings.measure()")], "without device=: say"),
    (edition.slow_path_said, [put(1, source=EAGER)], "say that the fast path is off"),
]


@pytest.mark.parametrize(("rule", "changes", "says"), PLANTED)
def test_a_planted_violation_is_found(rule, changes, says):
    assert any(says in line for line in report(chapter(*changes), rule))
    if "turn" not in says:  # small tasks are checked wherever they are
        assert report(chapter(*changes, edition=1), rule) == [] or rule is edition.your_turns


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (chapter(timed=[]), "minillm.timed names the functions"),
        (chapter(bands={"gone": 1.5}), "minillm.bands has 'gone'"),
        (chapter(results=RESULTS), f"{TIMED} changed since the measurement: make stale CHAPTER=90"),
    ],
)
def test_a_clock_without_its_code_is_found(made, says):
    assert any(says in line for line in report(made, edition.clocks_named))


def test_a_chapter_that_says_what_it_measures_keeps_the_rules():
    said = put(0, source="# A title\n\nThe engine's fast\npath is off.")
    measured = put(1, source=f"{EAGER}\nceilings.measure(device=device)")
    for rule in (edition.device_of_ceilings, edition.slow_path_said):
        assert report(chapter(said, measured), rule) == []


def test_every_rule_is_planted():
    assert {rule for rule, _, _ in PLANTED} | {edition.clocks_named} == set(edition.RULES)
