"""What a learner types, on a small course graded by the real grader."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_exercises.cli import main
from minillm_exercises.cli.parser import COMMANDS, EXAMPLES, build_parser
from minillm_exercises.quiz import load_quiz
from minillm_exercises.readme import brief, task
from minillm_exercises.results import Verdict
from tests.course.small import MUTANT, SOLUTION, STARTER, Terminal


def test_the_board_says_where_you_stand(at: Terminal) -> None:
    shown = at.sees(
        "list",
        "- not here  e91.1  Not for this machine",
        "needs no_such_package",
        "0 of 9 points, 0 of 3 done",
        "Next: python -m minillm_exercises start e90.1",
    )
    assert re.search(r"e90\.1  Add two numbers +90 +5  ●○○ +0/3", shown.splitlines()[1])
    at.write(SOLUTION)
    at.sees("run e90.1")
    at.write("nonsense(", "e90.2")
    bar = "█" * 10 + "░" * 20 + "  3 of 9 points, 1 of 3 done"
    shown = at.sees("list", bar, "Next: python -m minillm_exercises run e90.2")
    assert re.search(r"✓ done +e90\.1 .* 3/3", shown)
    assert re.search(r"… begun +e90\.2 ", shown)


def test_colour_carries_nothing_alone(at: Terminal) -> None:
    at.write(MUTANT)
    for words in (("list",), ("run",), ("hint", "e90.1"), ("solution", "e90.1", "--give-up")):
        _, plain = at.type(*words)
        _, bright = at.type(*words, colour=True)
        if words[0] != "hint":  # the second hint is another one
            stripped = re.sub(r"\x1b\[[0-9;]*m", "", bright)
            assert stripped.split() == plain.split()
        assert "\x1b[" in bright


def test_a_task_is_one_section_of_the_readme(at: Terminal) -> None:
    whole = task(at.exercise())
    assert whole.startswith("Write `add`")
    assert whole.endswith("More about sums.")
    assert task(at.exercise("e90.2")) == "Count."
    assert task(at.exercise("e91.1")) == ""
    readme = at.exercise().folder / "README.md"
    readme.write_text("## e90.1\n\n```\n# no heading\n```\n\n### part\n\nend\n\n# other\n")
    assert task(at.exercise()) == "```\n# no heading\n```\n\n### part\n\nend"
    assert brief(at.exercise()) == "```\n# no heading\n```"


def test_start_gives_the_file_once(at: Terminal) -> None:
    at.sees(
        "start e90.1",
        "Write `add` so that\nit returns the sum.",
        "def add(a, b) -> int",
        "python -m minillm_exercises run e90.1",
        lacks=["More about sums"],
    )
    first, rest = at.file().read_text().split("\n", 1)
    said = "this line lets the grader notice a newer starter"
    assert re.fullmatch(rf"# minillm exercise e90\.1, starter [0-9a-f]{{8}}: {said}", first)
    assert rest == STARTER
    at.file().write_text("mine")
    at.sees("start e90.1", "already there")
    assert at.file().read_text() == "mine"


def test_a_newer_starter_is_said_and_put_beside(at: Terminal) -> None:
    at.sees("start e90.1")
    starter, notice = at.exercise().starter, "start e90.1 --new puts it beside yours."
    starter.write_bytes(STARTER.replace("\n", "\r\n").encode())  # line ends are nothing new
    at.sees("run", code=1, lacks=[notice])
    at.sees("start e90.1 --new", "newest starter")
    starter.write_text(STARTER + "\nEXTRA = 1\n")
    mine = at.file().read_text()
    at.sees("run", notice, code=1)
    at.sees("list", notice)
    at.sees("start e90.1 --new")
    beside = at.file().with_name("e90_1.new.py").read_text()
    assert "EXTRA = 1" in beside
    assert at.file().read_text() == mine
    # the notice ends as promised: the new first line over the old one
    at.file().write_text(beside.split("\n")[0] + "\n" + mine.split("\n", 1)[1])
    at.sees("list", lacks=[notice])


def test_a_verdict_screen(at: Terminal) -> None:
    at.write(MUTANT + "\n\nprint('loaded \\x1b[31mred')\n")
    at.sees(
        "run",
        "✓ passed   small numbers     1/1",
        "✗ not yet  negative numbers  0/2",
        "-1 plus 2 (add(-1, 2)): expected 1, got 3.",
        "Perhaps: You add the sizes: a minus counts.",
        "Your code printed:\n  loaded red",
        "1 of 3 points, public checks 1/2; an instructor may run more.",
        "Stuck: python -m minillm_exercises hint e90.1  (hint 1 of 3)",
        code=1,
        lacks=["Graded in"],
    )
    at.sees("run -v", "Graded in", code=1)


def test_passing_proposes_what_follows(at: Terminal) -> None:
    at.write(SOLUTION)
    points = "3 of 3 points, public checks 2/2; an instructor may run more."
    at.sees("run", points, "Next: python -m minillm_exercises start e90.2", "solution e90.1")


@pytest.mark.parametrize(("text", "says"), [
    (STARTER, "TODO e90.1: add them"), ("def add(a, b:\n", "Line 2"),
    ("import os\n\n\ndef add(a, b):\n    os._exit(0)\n", "import"),
    ("def sub(a, b):\n    return a\n", "add"),
    ("def add(a, b):\n    raise SystemExit(0)\n", "exit"),
    ("def add(a, b):\n    return a.nothing\n", "nothing"),
])  # fmt: skip
def test_bad_files_get_a_sentence(at, text, says):
    at.write(text)
    at.sees("run e90.1", says, code=1, lacks=["Traceback"])


def test_after_a_bad_file_the_next_still_runs(at: Terminal) -> None:
    at.write("def add(a, b:\n")
    counter = "class Counter:\n    count = 0\n\n    def add(self):\n        self.count += 1\n"
    at.write(counter, "e90.2")
    at.sees("run --all", "✗ e90.1", "✓ e90.2", "1 of 2 begun exercises pass.", code=1)


def test_a_grader_that_fails_stops_nothing(at: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(exercise: object, file: Path, seed: int = 0) -> Verdict:
        raise ZeroDivisionError("oh")

    at.write(SOLUTION)
    at.session = replace(at.session, grade=broken)
    said = "The grader itself failed (ZeroDivisionError: oh); your code is not to blame."
    at.sees("run --all", said, code=1)


def test_run_takes_the_last_one_and_another_file(at: Terminal, tmp_path: Path) -> None:
    at.write(SOLUTION)
    at.write("", "e90.2")
    assert "e90.2" in at.type("run")[1].splitlines()[0]
    at.type("run", "e90.1")
    assert "e90.1" in at.type("run")[1].splitlines()[0]
    attempts = at.session.progress().of("e90.1").attempts
    other = tmp_path / "e90_1_other.py"
    other.write_text(MUTANT)
    assert at.type("run", "--file", str(other))[0] == 1
    assert at.session.progress().of("e90.1").attempts == attempts  # nothing is remembered
    assert at.session.progress().of("e90.1").status == "pass"
    nameless = tmp_path / "try.py"
    nameless.write_text(SOLUTION)
    assert at.type("run", "e90.1", "--file", str(nameless))[0] == 0
    nameless.write_text(at.file().read_text())  # its stamp says what it is
    assert at.type("run", "--file", str(nameless))[0] == 0


def test_run_as_json(at: Terminal) -> None:
    at.write(MUTANT)
    code, shown = at.type("run", "--json")
    data = json.loads(shown)
    assert code == 1
    assert (data["status"], data["earned"], data["mutant"]) == ("fail", 1, "sizes")
    assert [check["status"] for check in data["checks"]] == ["pass", "fail"]
    assert "trace" not in data["checks"][0]
    assert isinstance(json.loads(at.type("run", "--all", "--json")[1]), list)


def test_a_copy_without_solutions_offers_none(at: Terminal) -> None:
    (at.exercise().answers / "solution.py").unlink()
    at.sees("hint e90.1 -n 3", lacks=["solution e90.1"])
    for text, code in ((MUTANT, 1), (SOLUTION, 0)):
        at.write(text)
        at.sees("run", code=code, lacks=["solution e90.1"])


def test_hints_come_one_by_one_and_are_counted(at: Terminal) -> None:
    def seen(name: str = "e90.1") -> int:
        return at.session.progress().of(name).hints

    at.sees("hint e90.1", "think of a sum", lacks=["look at +"])
    at.sees("hint e90.1", "look at +")
    assert seen() == 2
    at.sees("hint e90.1 -n 1")
    assert seen() == 2
    at.sees("hint e90.1", "take a, go b steps on", "That was the last")
    at.sees("hint e90.1")
    assert seen() == 3
    assert at.sees("hint e90.2 -n 2").count("Hint ") == seen("e90.2") == 2


def test_solution_opens_after_a_pass_or_on_giving_up(at: Terminal) -> None:
    at.sees("solution e90.1", "--give-up", code=1, lacks=["a + b"])
    assert not at.session.progress().of("e90.1").gave_up
    at.sees("solution e90.1 --give-up", "return a + b")
    assert at.session.progress().of("e90.1").gave_up
    assert not (at.session.workspace.root / "e90_sums").exists()  # nothing written
    at.write(SOLUTION)
    at.sees("run")
    other = "solution e90.1 --alternate"
    at.sees("solution e90.1", f"Another way: python -m minillm_exercises {other}")
    at.sees(other, "sum((a, b))")
    at.sees("solution e90.1 --save")
    assert at.file().with_name("e90_1.solution.py").read_text() == SOLUTION


def test_reset_asks_and_keeps(at: Terminal) -> None:
    at.write(SOLUTION)
    at.type("run")
    at.answers = ["n", "", "what"]
    for _ in range(4):  # the fourth time nobody answers
        at.sees("reset e90.1", code=1)
    assert SOLUTION in at.file().read_text()
    at.answers = ["y"]
    at.sees("reset e90.1")
    assert STARTER in at.file().read_text()
    assert SOLUTION in (at.session.workspace.root / ".history" / "e90_1.1.py").read_text()
    at.write(MUTANT)
    at.sees("reset e90.1 --yes")
    assert MUTANT in (at.session.workspace.root / ".history" / "e90_1.2.py").read_text()
    at.sees("list", "begun")


MISTAKES = [
    (("lst",), "Did you mean 'list'?"), (("run", "e90.9"), "Did you mean 'e90.2'?"),
    (("run", "--all", "e90.1"), "give no ID"),
    (("run", "e90.1"), "`start e90.1` gives you its file first"),
    (("run", "--file", "missing/e90_1.py"), "There is no file"),
    (("run", "--all"), "Nothing is begun yet"),
    (("hint", "e90.1", "-n", "4"), "hints 1 to 3, not 4"),
    (("start", "e91.1"), "cannot be done here: it needs no_such_package"),
    (("solution", "e90.2"), "no solution of e90.2"), (("reset", "e90.1"), "nothing to reset"),
    (("quiz", "90"), "has no quiz"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), MISTAKES)
def test_mistakes_are_one_sentence(at, capsys, words, says):
    code, shown = at.type(*words)
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    assert shown == ""
    assert error.startswith("error: ")
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["e90.1", "90.1", "E90.1", "e90_1", "e90_1.py", " e90.1 "])
def test_an_exercise_has_many_spellings(at: Terminal, name: str) -> None:
    assert at.session.find(name).id == "e90.1"


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"examples:\n  python -m minillm_exercises {name}" in shown
        for line in EXAMPLES[name].splitlines():  # the examples themselves parse
            build_parser().parse_args(line.partition("   ")[0].split())
    assert main([]) == 0
    assert "to teach:" in capsys.readouterr().out


def test_a_quiz_is_asked_and_judged(at: Terminal) -> None:
    letters = [question.answer for question in load_quiz("03")]
    at.sees("quiz 3", "1. ", "  a)  ", "Answer with: python -m minillm_exercises quiz 03 a b c")
    at.sees("quiz 1B", "Answer with: python -m minillm_exercises quiz 01b a b c")
    at.sees(f"quiz 03 {' '.join(letters)}", "1. right.", "3 of 3 right.")
    at.sees(f"quiz 03 - {' '.join(letters[1:])}", "2. right.", "2 of 3 right.", code=1)


@pytest.mark.slow
def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    done = command("list", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "[" not in done.stdout  # no colours in a pipe
    assert re.search(r"e00\.1 .*\*\.\. ", done.stdout)


def test_as_people_type_it(tmp_path: Path) -> None:
    done = command("list", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "e00.1" in done.stdout
    done = command("start e00.1", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "e00_measuring" / "e00_1.py").is_file()
    done = command("run", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "TODO e00.1" in done.stdout
    assert done.stderr == ""


def command(words: str, work: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the real command on the real course, with a learner's folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "minillm_exercises", *words.split()],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "MINILLM_WORK": str(work), **environment},
    )  # fmt: skip
