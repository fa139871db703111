"""e07 and e08: what their checks let pass, what they notice, and in which words.

Each submission is the solution with some of its text replaced.
"""

from pathlib import Path

import pytest

from minillm_exercises.grader import Grader
from minillm_exercises.limits import Limits
from minillm_exercises.results import Verdict

EXERCISES = ("e07.1", "e07.2", "e08.1", "e08.2")
POP = "self.free_blocks.pop()"
LEAVE = """        for place in range(self._unseen(self.lengths[name])):
            self._give_up(table[place])
            table[place] = None
"""
TAKE = """        if offset == 0:
            table.append(self._take())
"""
CHEAPER = "2 * size * block_price < victim.computed * token_price"


def changed(graders: dict[str, Grader], name: str, *swap: str) -> str:
    """The solution in which each old text of `swap` is replaced by the new one."""
    text = (graders[name].exercise.answers / "solution.py").read_text(encoding="utf-8")
    for old, new in zip(swap[::2], swap[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def grade(graders: dict[str, Grader], name: str, folder: Path, *swap: str) -> Verdict:
    path = folder / "submission.py"
    path.write_text(changed(graders, name, *swap), encoding="utf-8")
    return graders[name].grade(path)


def said(verdict: Verdict) -> str:
    assert verdict.status == "fail"
    return next(check.message for check in verdict.checks if check.status == "fail")


@pytest.mark.parametrize("name", ["e07.1", "e07.2"])
@pytest.mark.parametrize("place", ["0", "len(self.free_blocks) // 2"])
def test_any_free_block_may_be_taken(graders, tmp_path: Path, name: str, place: str) -> None:
    assert grade(graders, name, tmp_path, POP, f"self.free_blocks.pop({place})").status == "pass"


@pytest.mark.parametrize(
    ("name", "old", "new", "mutant"),
    [
        ("e07.1", "shared = offset > 0 and self.holders[table[-1]] > 1", "shared = 0 > offset",
         "never_copies"),
        ("e07.1", "self.holders[source] -= 1", "pass", "source_keeps_its_holder"),
        ("e07.1", "-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1",
         "prompt_one_more"),
        ("e07.2", "max(0, length - self.window) // ", "max(0, length - self.window + 1) // ",
         "one_too_early"),
        ("e07.2", LEAVE + TAKE, TAKE + LEAVE, "takes_first"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_whichever_block_is_taken(
    graders, tmp_path: Path, name: str, old: str, new: str, mutant: str
) -> None:
    assert grade(graders, name, tmp_path, old, new, POP, "self.free_blocks.pop(0)").mutant == mutant


def test_the_message_names_blocks_by_what_they_are(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e07.1", tmp_path, "            source = table[-1]\n", "",
                    "self.holders[source] -= 1", "self.holders[table[-1]] -= 1")  # fmt: skip
    assert "('a free block', 2, 'its last block'), got ('a free block', 2, None)" in said(verdict)
    assert "BlockManager(5, 4): allocate('a', 6), fork('a', 'b'), append('b')" in said(verdict)
    assert verdict.mutant == "copy_unsaid"


def test_a_table_that_others_change_is_noticed(graders, tmp_path: Path) -> None:
    """Who hands out his own list is judged by what was in it when he did."""
    own = "return list(self.tables[name])"
    same = ("list(self.tables[parent])", "self.tables[parent]")
    verdict = grade(graders, "e07.1", tmp_path, own, "return self.tables[name]", *same)
    assert "which was not about 'a': does it share its list with another table?" in said(verdict)
    assert grade(graders, "e07.1", tmp_path, own, "return self.tables[name]").status == "pass"
    assert grade(graders, "e07.2", tmp_path, own, "return self.tables[name]").status == "pass"


def test_another_error_than_value_error_is_named(graders, tmp_path: Path) -> None:
    old = 'raise ValueError(f"{name!r} is in use")'
    verdict = grade(graders, "e07.1", tmp_path, old, "raise RuntimeError(name)")
    assert "expected 'ValueError', got 'RuntimeError'" in said(verdict)
    assert [check.name for check in verdict.checks if check.status != "pass"] == ["test_names"]


def test_a_pool_with_no_block_to_spare_gets_a_sentence(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e07.2", tmp_path, LEAVE + TAKE, TAKE + LEAVE)
    assert "IndexError: pop from empty list (WindowManager(2, 2, 3): " in said(verdict)
    assert "if it first lets go of what the new token does not see" in said(verdict)


def test_an_index_error_of_another_kind_is_left_alone(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e07.2", tmp_path, "block = table[-1]", "block = table[len(table)]")
    told = " ".join(check.message for check in verdict.checks)
    assert "list index out of range" in told
    assert "lets go" not in told


def test_lengths_at_which_entries_go_are_told(graders, tmp_path: Path) -> None:
    late = ("length - self.window)", "length - 2 - self.window)")
    verdict = grade(graders, "e07.2", tmp_path, *late)
    told = {check.name: check.message for check in verdict.checks}["test_lengths"]
    assert "expected {0: 5, 1: 7, 2: 9" in told
    assert "got {0: 7, 1: 9" in told


PLANS = [
    # A property is missed in its own words, before the whole plan is compared.
    ("given, left = {}, budget", "given, left = {}, budget - 1", "tokens are left, which"),
    ("min(todo, most, left)", "min(todo, most, max(1, left))", "and the budget is"),
    ("if count > 0:", "if count >= 0:", "it should be 1 to"),
    ("request[1] == 1]", "request[1] == 1][:1]", "decode and get no token"),
    ("waiting[: seats - len(running)]", "waiting", "running ones: there are"),
    ("*admitted]:", "*admitted[::-1]]:", "could compute more"),
]


@pytest.mark.parametrize(("old", "new", "words"), PLANS)
def test_a_random_plan_is_judged_property_by_property(
    graders, tmp_path: Path, old: str, new: str, words: str
) -> None:
    verdict = grade(graders, "e08.1", tmp_path, old, new)
    told = {check.name: check.message for check in verdict.checks}["test_everything"]
    assert words in told
    assert "running=[" in told


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("return dict(sorted(given.items()))", "pass"),  # the order of the entries is free
        ("return list(given.items())", "fail"),
    ],
)
def test_the_form_of_a_plan(graders, tmp_path: Path, end: str, status: str) -> None:
    verdict = grade(graders, "e08.1", tmp_path, "return given", end)
    assert verdict.status == status


@pytest.mark.parametrize(
    ("old", "new", "mutant"),
    [
        (CHEAPER, "size * block_price < victim.computed * token_price", "one_way"),
        (CHEAPER, "not victim.computed * token_price < 2 * size * block_price", "tie_swaps"),
        (CHEAPER, "float(2 * size * block_price) < victim.computed * token_price", "floats"),
        ("since)", "since - 1)", "preempts_itself"),
    ],
)
def test_mistakes_about_prices_and_victims(
    graders, tmp_path: Path, old: str, new: str, mutant: str
) -> None:
    verdict = grade(graders, "e08.2", tmp_path, old, new)
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("return None", "got None, which says that all together are too few"),
        ("return [name for name, _ in ways]", "expected None or"),
        ("return {}", "expected None or"),
    ],
)
def test_the_form_of_a_decision(graders, tmp_path: Path, end: str, words: str) -> None:
    verdict = grade(graders, "e08.2", tmp_path, "return ways", end)
    assert words in said(verdict)


ENDS = [
    ("e07.1", "        self.lengths[name] += 1\n        return", "test_grow"),
    ("e07.2", "        block = table[-1]\n        return", "test_short"),
    ("e08.1", "    given, left = {}, budget\n    for", "test_chunks"),
    ("e08.2", "    ways = []\n    for", "test_prices"),
]


@pytest.mark.parametrize(("name", "line", "check"), ENDS)
@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        ("raise SystemExit(0)", "crashed", "exit"),
        ("1 / 0", "fail", "ZeroDivisionError"),
        ("while True: pass", "timeout", "Used 1 s of processor time"),
    ],
)
def test_a_crash_an_exit_and_an_endless_loop(
    graders, name: str, line: str, check: str, extra: str, status: str, words: str
) -> None:
    first, last = line.rsplit("\n", 1)
    indent = len(first.splitlines()[-1]) - len(first.splitlines()[-1].lstrip())
    source = changed(graders, name, line, f"{first}\n{' ' * indent}{extra}\n{last}")
    verdict = graders[name].run(source, checks=[check], limits=Limits(cpu=1.0))
    assert verdict.status == status
    assert words in " ".join([verdict.message or "", *(c.message for c in verdict.checks)])
