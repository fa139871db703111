"""e05 and e06: programs as strangers write them, right and wrong, and what their checks say."""

import pytest

from minillm_exercises.limits import Limits
from minillm_exercises.results import Verdict
from tests.course.submissions import Graded

EXERCISES = ("e05.1", "e05.2", "e06.1", "e06.2")
IMPATIENT = Limits(cpu=1.0)  # for loops that do not end


def said(verdict: Verdict) -> str:
    assert verdict.status == "fail"
    return next(check.message for check in verdict.checks if check.status in ("fail", "error"))


SEEN = "key == query or (text[key] and key < query)"
POSITION = "sum(text[:slot])"
IDS = "[pad] * (size - len(prompt)) + prompt for"
RETURN = "        return running, ended\n"
RATE = "return batch // (Fraction(costs.overhead, MICRO) + max(reading, computing))"
COUNT = "            for earlier in self.queue[:place]:\n                earlier.overtaken += 1\n"
KEY = "self.queue[place].predicted"

RIGHT = [  # what the README leaves open
    ("e05.1", SEEN, "key == query or (text[key] and (key < query or not text[query]))"),
    ("e05.1", SEEN, "(text[key] and key <= query) or not text[query]"),
    ("e05.1", SEEN, "key <= query and text[query] == text[key]"),
    ("e05.1", POSITION, "sum(text[:slot]) if text[slot] else len(text) - 1"),
    ("e05.1", "[self._seen(text) for text in self.text]", "tuple(map(self._seen, self.text))"),
    ("e05.2", "max(0, min(stored, read, computed))", "max(min(read, stored, computed), 0)"),
    ("e06.1", RETURN, "        return [tuple(running), tuple(ended)]\n"),
    ("e06.1", "self.queue.extend(requests)", "self.queue += [tuple(r) for r in requests]"),
    ("e06.2", f"key=lambda place: {KEY}", f"key=lambda place: ({KEY}, place)"),
    ("e06.2", COUNT, COUNT.replace("+= 1", "+= self.queue[place] is not earlier")),
]


@pytest.mark.parametrize(("name", "old", "new"), RIGHT)
def test_what_the_task_leaves_open_is_right(graded: Graded, name: str, old: str, new: str) -> None:
    assert graded(name, old, new).status == "pass"


NAMED = [  # exercise, the mistake in other words, the mutant it is known as
    ("e05.1", SEEN, "text[key]", "looks_ahead"),
    ("e05.1", SEEN, "text[query] and text[key] and key <= query", "pads_see_nothing"),
    ("e05.1", SEEN, "key <= query or text[query] < text[key]", "sees_pads"),
    ("e05.1", "self.text[row].append(token is not None)", "self.text[row].append(row == row)",
     "ended_is_text"),
    ("e05.1", "size = max(map(len, prompts))", "size = 1 + max(len(p) for p in prompts)",
     "room_for_one_more"),
    ("e05.2", RATE, RATE.replace("batch //", "1 //"), "one_sequences_rate"),
    ("e05.2", "max(0, min(stored, read, computed))", "max(0, min(computed, read))",
     "memory_ignored"),
    ("e05.2", "max(0, min(stored, read, computed))", "min(stored, read, computed) or 0",
     "less_than_none"),
    ("e06.1", "self.queue.popleft()", "self.queue[-1]; self.queue.pop()", "last_come_first"),
    ("e06.1", RETURN, "        left = any(name for name in self.seats)\n"
     "        return running, ended if left else []\n", "last_ones_forgotten"),
    ("e06.2", KEY, "(self.queue[place].predicted, self.queue[place].name)", "ties_by_name"),
    ("e06.2", "len(self.queue) + self.patience", "self.patience", "promise_without_the_queue"),
    ("e06.2", "return 0", "return len(self.queue) - 1", ""),
    ("e06.2", COUNT, "            if place:\n                self.queue[0].overtaken += 1\n",
     "counts_the_oldest_only"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "mutant"), NAMED)
def test_a_mistake_in_other_words(
    graded: Graded, name: str, old: str, new: str, mutant: str
) -> None:
    verdict = graded(name, old, new)
    assert (verdict.status, verdict.mutant) == ("fail", mutant)


TOLD = [  # exercise, change, what the first failing check says
    ("e05.1", SEEN, f"int({SEEN})", "expected True and False, got ['int']"),
    ("e05.1", POSITION, "sum(text[:slot]) if text[slot] else len(text)",
     "the pad in slot 0 of row 1 has position 3; a table of positions has rows 0 to 2 here"),
    ("e05.1", "[self._seen(text) for text in self.text]", "self._seen(self.text[0])",
     "expected 2 rows of 3 slots each, got rows of [3, 3, 3] slots"),
    ("e05.1", "[self._seen(text) for text in self.text]", "map(self._seen, self.text)",
     "an iterator (is a list(...) missing?)"),
    ("e05.1", "@property\n    def positions", "def positions", "are its parentheses missing?"),
    ("e05.1", IDS, "prompt + [pad] * (size - len(prompt)) for",
     "The ids of row 1 (Batch([[5, 6, 7], [8]], 0)): expected [0, 0, 8], got [8, 0, 0]"),
    ("e05.2", RATE, RATE.replace("//", "/"), "Tokens per second of the worked example"),
    ("e06.1", RETURN, "        return running\n", "expected two lists"),
    ("e06.1", RETURN, "        return ended, running\n", "expected 2 entries, one per seat"),
    ("e06.1", RETURN, "        yield running, ended\n", "is there a yield?"),
    ("e06.1", "self.seats[seat] = first", "self.seats[seat] = self.seats[-1] = first",
     "a sits in two seats at once"),
    ("e06.1", "self.seats[seat] = None", "self.seats[seat - 1] = None",
     "b made its last token in step 1, and still sits in seat 1"),
    ("e06.1", "self.seats[seat] = None", "self.seats[:] = [None] * len(self.seats)",
     "a has made 1 of 3 tokens and has lost its seat"),
    ("e06.2", "return admitted", "return None", "expected a list of names, got None"),
    ("e06.2", "return admitted", "return admitted[::-1]", "the shortest that waits is next"),
    ("e06.2", "len(admitted) < free", "len(admitted) <= free", "where 1 can be"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "sentence"), TOLD)
def test_what_a_mistake_is_told(
    graded: Graded, name: str, old: str, new: str, sentence: str
) -> None:
    assert sentence in said(graded(name, old, new))


def test_the_model_says_why_a_row_comes_out_differently(graded: Graded) -> None:
    reasons = {
        "Its positions are not those of the text.": (POSITION, "slot"),
        "It sees pad as text: its token in slot 3": (SEEN, "key <= query"),
        "has a pad in slot 0 that sees nothing": (SEEN, "text[key] and key <= query"),
    }
    for reason, swap in reasons.items():
        checks = {check.name: check for check in graded("e05.1", *swap).checks}
        assert reason in checks["test_model"].message


def test_a_batch_that_is_searched_one_by_one_runs_out_of_time(graded: Graded) -> None:
    loop = """    batch = 0
    while (batch + 1) * cache <= costs.memory - costs.weight_bytes:
        batch += 1
    return batch"""
    answer = "    return max(0, min(stored, read, computed))"
    assert graded("e05.2", answer, loop, limits=IMPATIENT).status == "timeout"


FIRST = {  # a place that every check of the exercise comes by
    "e05.1": "        self.pad = pad\n",
    "e05.2": "    cache = costs.context * costs.token_bytes\n    time",
    "e06.1": "        running = list(self.seats)\n",
    "e06.2": "        admitted: list[str] = []\n",
}
ENDS = {
    "while True:\n{0}    pass\n{0}": "timeout",
    "raise SystemExit\n{0}": "crashed",
    "1 / 0\n{0}": "fail",
}


@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize("code", ENDS)
def test_loops_exits_and_crashes_are_verdicts(graded: Graded, name: str, code: str) -> None:
    place = FIRST[name]
    indent = place[: len(place) - len(place.lstrip())]
    text = indent + code.format(indent) + place.lstrip()
    verdict = graded(name, place, text, limits=IMPATIENT)
    assert verdict.status == ENDS[code]
    if ENDS[code] == "fail":
        assert "ZeroDivisionError" in said(verdict) or "division by zero" in said(verdict)
