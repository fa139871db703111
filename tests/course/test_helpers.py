"""The notebooks' helpers: facts are exact, timing is honest, predictions are kept."""

import json
import sys
from fractions import Fraction
from html import unescape
from pathlib import Path

import pytest

from minillm.lab.simulation import Simulation
from minillm_exercises import notebook, widgets
from minillm_exercises.errors import ExerciseError
from minillm_exercises.notebook import compare, fact, predict, quiz, record, task, turn
from minillm_exercises.plots import bound, figure, listing, series, show
from minillm_exercises.predictions import Prediction
from minillm_exercises.quiz import load_quiz, quiz_text
from minillm_exercises.timing import Timing, measure
from minillm_exercises.widgets import design, explore


@pytest.fixture(autouse=True)
def _work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_WORK", str(tmp_path / "work"))
    for name in ("MINILLM_QUICK", "MINILLM_RESULTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list:
    """What is displayed."""
    things: list = []
    monkeypatch.setattr("IPython.display.display", things.append)
    return things


class FakeClock:
    """A clock that moves only when a step says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spending(clock: FakeClock, *seconds: float):
    """A step whose runs take the given times, in order; the last one repeats."""
    left = list(seconds)

    def step() -> None:
        clock.now += left.pop(0) if len(left) > 1 else left[0]

    return step


@pytest.mark.parametrize(("value", "line"), [
    (True, "it: True"), (8256, "it: 8,256"), (Fraction(129, 2), "it: 129/2"), ("64.5", "it: 64.5"),
    (0, "it: 0"),
])  # fmt: skip
def test_a_fact_is_one_line(value, line, capsys) -> None:
    fact("it", value)
    assert capsys.readouterr().out == line + "\n"


@pytest.mark.parametrize("value", [1.5, None, [1], float("nan")])
def test_what_is_not_exact_is_no_fact(value) -> None:
    with pytest.raises(ExerciseError, match="facts are exact"):
        fact("it", value)


@pytest.mark.parametrize(("value", "text"), [
    (49109, "49,100"), (0.01234, "0.0123"), (0.5, "0.500"), (4.2, "4.20"), (123.456, "123"),
    (99.96, "100"), (9.996, "10.0"), (0.9996, "1.00"), (0, "0"), (-4.2, "-4.20"),
])  # fmt: skip
def test_a_record_has_three_digits_and_no_exponent(value, text, capsys) -> None:
    record("it", value, "ms")
    assert capsys.readouterr().out == f"measured: it = {text} ms\n"


def test_records_are_kept_only_for_publication(tmp_path, monkeypatch) -> None:
    path = tmp_path / "results.jsonl"
    monkeypatch.setenv("MINILLM_RESULTS", str(path))
    record("rate", 49109.4, "tokens/s")
    record("share", 0.25)
    first, second = map(json.loads, path.read_text().splitlines())
    values = {"name": "rate", "value": 49109.4, "unit": "tokens/s", "text": "49,100"}
    assert first == values | {"others": 0.0}
    assert second["name"] == "share"


def test_the_first_run_is_told_apart_and_the_median_ignores_an_outlier() -> None:
    clock = FakeClock()
    timing = measure(spending(clock, 9.0, 1.0, 1.0, 50.0, 1.0, 1.0), clock=clock, budget=1e9)
    assert (timing.first, timing.median, timing.count) == (9.0, 1.0, 7)
    assert max(timing.times) == 50.0


def test_the_quartiles_hold_the_middle_half() -> None:
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0), 7.0)
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)
    assert str(timing) == "3 s (middle half 2 to 4, 5 runs, the first 7)"


def test_setup_is_not_timed_and_gives_fresh_input_each_time() -> None:
    clock, given = FakeClock(), []

    def setup() -> list[int]:
        clock.now += 1000
        return []

    def step(argument: list[int]) -> None:
        clock.now += 2
        argument.append(1)
        given.append(len(argument))

    assert set(measure(step, setup=setup, clock=clock, budget=1e9).times) == {2.0}
    assert set(given) == {1}


def test_the_budget_ends_the_repeats_but_not_before_three() -> None:
    clock = FakeClock()
    assert measure(spending(clock, 0.5), repeats=100, budget=2.0, clock=clock).count == 4
    assert measure(spending(clock, 0.9), repeats=100, budget=1.0, clock=clock).count == 3
    assert measure(spending(clock, 5.0), repeats=100, budget=1.0, clock=clock).count == 1
    assert measure(spending(clock, 0.1), repeats=2, budget=1.0, clock=clock).count == 2


def test_quick_mode_times_once(monkeypatch) -> None:
    monkeypatch.setenv("MINILLM_QUICK", "1")
    clock = FakeClock()
    timing = measure(spending(clock, 3.0, 1.0), clock=clock)
    assert (timing.times, timing.first) == ((3.0,), 3.0)


def test_a_gpu_is_waited_for_before_both_readings(monkeypatch) -> None:
    log: list[str] = []

    class Torch:
        class cuda:
            @staticmethod
            def synchronize(device: str) -> None:
                log.append(f"wait {device}")

    monkeypatch.setitem(sys.modules, "torch", Torch)
    clock = FakeClock()

    def read() -> float:
        log.append("read")
        return clock()

    measure(lambda: log.append("step"), repeats=1, warmup=0, device="cuda:1", clock=read)
    assert log == ["wait cuda:1", "read", "step", "wait cuda:1", "read"]


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}, {"budget": 0.0}])
def test_measure_refuses_nonsense(wrong) -> None:
    with pytest.raises(ExerciseError, match="it needs"):
        measure(lambda: None, **wrong)


def test_a_prediction_is_kept_and_shown_again(capsys) -> None:
    predict("03.clock", "How many times?", ["60", "15", "4"], choice="b")
    assert capsys.readouterr().out == "How many times?\n  a)  60\n  b)  15\n  c)  4\n"
    compare("03.clock", "4.2 times", "c")
    assert capsys.readouterr().out == "You said b: 15. Measured: 4.2 times, that is c.\n"
    predict("03.clock", "How many times?", ["60", "15", "4"], choice="C")
    capsys.readouterr()
    compare("03.clock", "4.2 times", "c")
    assert "as you said" in capsys.readouterr().out


def test_what_was_not_measured_is_not_called_measured(capsys) -> None:
    compare("nothing", "4.2 times", "c", found="Computed")
    predict("03.clock", "How many times?", ["60", "15", "4"], choice="b")
    assert capsys.readouterr().out.startswith("Computed: 4.2 times. That is c.")
    compare("03.clock", "4.2 times", "c", found="Counted")
    assert capsys.readouterr().out == "You said b: 15. Counted: 4.2 times, that is c.\n"


def test_a_value_between_two_options_is_only_nearest_to_one(capsys) -> None:
    compare("nothing", "30", "a", between=True)
    assert capsys.readouterr().out == "Measured: 30. That is nearest to a.\n"
    predict("02.people", "How many?", ["60", "15", "4"], choice="b")
    capsys.readouterr()
    compare("02.people", "30", "a", between=True)
    compare("02.people", "14", "b", between=True)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "You said b: 15. Measured: 30, that is nearest to a."
    assert told[1] == "You said b: 15. Measured: 14, nearest to b, as you said."


def test_predictions_survive_a_damaged_file(tmp_path, capsys) -> None:
    path = tmp_path / "work" / "predictions.json"
    path.parent.mkdir()
    path.write_text("{ damaged")
    compare("a", "x", "b")
    predict("a", "?", ["x", "y"], choice="a")
    assert json.loads(path.read_text()) == {"a": ["a", "x"]}
    (kept,) = (path.parent / ".history").iterdir()
    assert kept.read_text() == "{ damaged"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path) -> None:
    (tmp_path / "work").write_text("a file where the folder should be")
    with pytest.raises(ExerciseError, match="MINILLM_WORK"):
        predict("a", "?", ["x", "y"], choice="a")


@pytest.mark.parametrize("choice", ["d", "", "ab", 3])
def test_a_choice_must_be_an_option(choice) -> None:
    with pytest.raises(ExerciseError, match="none of a, b"):
        predict("k", "?", ["x", "y"], choice=choice)


def test_axes_need_labels_and_the_bound_is_black_dashed_and_named() -> None:
    with pytest.raises(ExerciseError, match="label"):
        figure("tokens", " ")
    _, ax = figure("tokens", "time (ms)")
    bound(ax, [1, 2, 3], [1, 2, 3], "bytes / bandwidth")
    (line,) = ax.lines
    assert (line.get_color(), line.get_linestyle()) == ("black", "--")
    assert [t.get_text() for t in ax.texts] == ["bytes / bandwidth"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("tokens", "time (ms)")


def test_the_caption_is_the_alternative_text(monkeypatch) -> None:
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: shown.append((a, k)))
    fig, _ = figure("tokens", "time (ms)")
    show(fig, "Time grows with the tokens.")
    (((data,), options), ((text,), _)) = shown
    assert data["image/png"].startswith(b"\x89PNG")
    assert options["metadata"]["image/png"]["alt"] == "Time grows with the tokens."
    assert text.data == "*Time grows with the tokens.*"
    for caption in ("", "Figure 1", "no full stop in this caption"):
        with pytest.raises(ExerciseError, match="no sentence"):
            show(fig, caption)


def test_a_listing_is_folded_and_says_its_source(shown) -> None:
    listing("How a plot is made", Prediction.text, series)
    (page,) = shown
    text = page.data
    assert text.startswith("<details><summary>How a plot is made</summary>\n\n```python\ndef text(")
    assert "\n\ndef series(" in text
    assert text.endswith("```\n\n</details>")
    with pytest.raises(ExerciseError, match="needs a function"):
        listing("Nothing")


def test_explore_draws_the_static_twin_and_checks_its_choices() -> None:
    calls = []
    explore(lambda **k: calls.append(k), {"t": 1, "p": 2}, t=[0, 1], p=[2])
    assert calls == [{"t": 1, "p": 2}]
    with pytest.raises(ExerciseError, match="same arguments"):
        explore(print, {"t": 1}, p=[1])
    with pytest.raises(ExerciseError, match="none of"):
        explore(print, {"t": 5}, t=[1, 2])


QUIZ = """
[[question]]
text = "Which?"
options = ["this", "that"]
answer = "b"
why = "Because."
[[question]]
text = "And?"
options = ["x", "y", "z"]
answer = "a"
why = "So."
"""


@pytest.fixture
def quizzes(tmp_path: Path) -> Path:
    (tmp_path / "quiz").mkdir()
    (tmp_path / "quiz" / "03.toml").write_text(QUIZ)
    return tmp_path


def test_a_quiz_asks_without_telling(quizzes) -> None:
    text = quiz_text("03", root=quizzes)
    assert "1. Which?\n  a)  this\n  b)  that" in text
    assert "Because" not in text


def test_a_quiz_answers_with_reasons(quizzes) -> None:
    assert quiz_text("03", "b c", root=quizzes).splitlines() == [
        "1. right. Because.",
        "2. c is wrong, a is right. So.",
        "1 of 2 right.",
    ]
    assert quiz_text("03", "- a", root=quizzes).splitlines() == ["2. right. So.", "1 of 2 right."]


def test_quiz_mistakes_are_sentences(quizzes) -> None:
    for answers, message in (("b d", "one of a, b, c"), ("b a c", "2 questions and 3 answers")):
        with pytest.raises(ExerciseError, match=message):
            quiz_text("03", answers, root=quizzes)
    with pytest.raises(ExerciseError, match="have one: 03"):
        quiz_text("99", root=quizzes)
    (quizzes / "quiz" / "03.toml").write_text("[[question]]\ntext='x'")
    with pytest.raises(ExerciseError, match="damaged"):
        load_quiz("03", quizzes)


@pytest.fixture
def live(monkeypatch, shown) -> list:
    """A live notebook: what it displays. `display` of the cell that runs may be asked twice."""
    for module in (widgets, notebook):
        monkeypatch.setattr(module, "is_live", lambda: True)
    widgets._mark.cache_clear()
    return shown


def test_a_slider_draws_again_below_and_only_when_moved(live) -> None:
    calls = []
    explore(lambda **k: calls.append(k), {"t": 1, "p": 2}, t=[0, 1], p=[2])
    assert calls == [{"t": 1, "p": 2}]
    (box,) = live
    slider = next(child for child in box.children if getattr(child, "description", "") == "t")
    slider.value = 0
    assert calls == [{"t": 1, "p": 2}, {"t": 0, "p": 2}]


def labels(shown: list) -> list[str]:
    """The kinds of cells that were marked."""
    texts = (getattr(thing, "data", None) or "" for thing in shown)
    return [text.split("minillm-")[1].split('"')[0] for text in texts if "minillm-" in text]


def test_a_live_cell_is_marked_once_with_its_kind(monkeypatch, live) -> None:
    cell = [1]
    monkeypatch.setattr(widgets, "cell_number", lambda: cell[0])
    fact("a", 1)
    fact("b", 2)
    compare("03.none", "4 ms", "b")
    cell[0] = 2
    fact("c", 3)
    turn("03.none", ...)
    predict("03.none", "Which?", ["this", "that"])
    assert labels(live) == ["fact", "result", "fact", "turn", "predict"]
    design()
    assert "<style>" in live[-1].data
    for kind in ("predict", "turn", "result", "fact", "exercise", "quiz"):
        assert f":has(.minillm-{kind})" in live[-1].data


def test_nothing_is_marked_on_a_page(shown, capsys) -> None:
    design()
    fact("a", 1)
    quiz("1b")
    assert shown == []
    assert 'Answer with quiz("01b", "a b c")' in capsys.readouterr().out


def test_a_quiz_has_buttons_in_a_live_notebook(live, capsys) -> None:
    quiz("3")
    rows = [thing for thing in live if hasattr(thing, "children")]
    questions = load_quiz("03")
    assert len(rows) == len(questions)
    assert "Answer with" not in capsys.readouterr().out
    for row, question in zip(rows, questions, strict=True):
        *options, said = row.children
        assert said.value == ""
        for button in options:
            button.click()
            right = button.description == question.answer
            assert (" right. " in said.value) == right or " is wrong, " in said.value
            assert question.why.split()[0] in said.value


def test_a_button_puts_the_starter_into_a_cell(live) -> None:
    task("e03.1")
    task("e99.9")  # a sentence, and no button
    (button,) = [x.data for x in live if "jupyterapp" in str(getattr(x, "data", ""))]
    code = unescape(button.split('data-code="')[1].split('"')[0])
    assert "class KVCache" in code
    assert code.endswith('check("e03.1", KVCache)')


def test_a_trace_is_a_viewer_in_jupyterlab_and_a_line_on_a_page(monkeypatch, shown, capsys) -> None:
    simulation = Simulation(9)
    simulation.add(20, 4)
    simulation.run()
    widgets.step_through(simulation.trace)
    assert "opens here" in capsys.readouterr().out
    monkeypatch.setattr(widgets, "is_live", lambda: True)
    widgets.step_through(simulation.trace)
    assert "srcdoc" in shown[0].value
    assert capsys.readouterr().out == ""


def test_a_task_is_shown_with_its_starter(shown) -> None:
    task("e03.1")
    task("e99.9")
    text = shown[0]._repr_markdown_()
    assert shown[0]._repr_html_() is None  # JupyterLab would prefer it to Markdown
    assert text.startswith("**e03.1 · The KV cache of one layer**")
    assert "NaN" in text  # of the README's section
    assert "```python\n" in text
    assert "class KVCache" in text
    assert "RingCache" not in text
    assert "no exercise 'e99.9'" in str(shown[1])
