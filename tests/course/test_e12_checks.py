"""e12: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

from pathlib import Path

import pytest
from submissions import Graded, failed, said

from minillm_exercises.grader import Grader

EXERCISES = ("e12.1", "e12.2")  # for the fixture `graded`


# ---- e12.1 ------------------------------------------------------------------------------------

MINE = """
class Decoder:
    def __init__(self, device, sizes):
        self.device, self.top = device, sizes[-1]
        self.tokens, self.slots, self.tables, self.lengths, self.out = [
            device.buffer(self.top) for _ in range(5)]
        for i in range(self.top):
            self.tokens[i], self.slots[i], self.lengths[i] = 0, -1, 0
        self.graphs, self.used = {}, 0
        for size in sizes[::-1]:
            self.graphs[size] = device.capture(
                size, self.tokens, self.slots, self.tables, self.lengths, self.out)

    def step(self, rows):
        n = len(rows)
        if n > self.top:
            return self.device.eager(rows)
        if n == 0:
            return []
        for i in range(max(n, self.used)):
            if i < n:
                self.tokens[i], self.slots[i], self.tables[i], self.lengths[i] = rows[i]
            else:
                self.slots[i] = -1
                self.lengths[i] = 0
        self.used = n
        size = min(size for size in self.graphs if size >= n)
        self.device.replay(self.graphs[size])
        return [self.out[i] for i in range(n)]
"""


def changed(source: str, *swap: str) -> str:
    """`source` with some of its text replaced."""
    for old, new in zip(swap[::2], swap[1::2], strict=True):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def test_a_decoder_that_cleans_only_what_the_last_batch_left_is_right(graded: Graded) -> None:
    assert graded("e12.1", source=MINE).status == "pass"


def test_rows_may_stand_anywhere_in_the_graph(graded: Graded) -> None:
    """The last row first: nothing asks in which order they lie in the buffers."""
    turned = changed(
        MINE, "= rows[i]", "= rows[n - 1 - i]", "self.out[i] for", "self.out[n - 1 - i] for"
    )
    assert graded("e12.1", source=turned).status == "pass"


BUCKETS_1 = [
    (("                self.slots[i] = -1\n                self.lengths[i] = 0\n",
      "                pass\n"), "no_padding"),
    (("                self.slots[i] = -1\n", ""), "slots_stay"),
    (("                self.lengths[i] = 0\n", ""), "lengths_stay"),
    (("sizes[::-1]", "sizes"), "ascending_captures"),
    (("0, -1, 0\n", "0, -1, 1\n", "                self.lengths[i] = 0\n",
      "                self.lengths[i] = 1\n"), "reads_one"),
    (("if size >= n", "if size > n or size == self.top"), "next_size"),
    (("for i in range(n)]", "for i in range(size)]"), "padding_returned"),
    (("if n == 0:", "if n < 0:"), "runs_without_rows"),
    (("self.device.eager(rows)", "self.step(rows[:self.top]) + self.step(rows[self.top:])"),
     "splits_the_batch"),
    (("min(size for size in self.graphs if size >= n)", "self.top"), "always_the_largest"),
    (("= 0, -1, 0", "= 0, 0, 0"), "zeros"),
    (("        for i in range(self.top):\n"
      "            self.tokens[i], self.slots[i], self.lengths[i] = 0, -1, 0\n", ""),
     "captures_garbage"),
]  # fmt: skip


@pytest.mark.parametrize(("swap", "mutant"), BUCKETS_1)
def test_a_mistake_with_graphs_in_other_words_is_named(
    graded: Graded, swap: tuple[str, ...], mutant: str
) -> None:
    verdict = graded("e12.1", source=changed(MINE, *swap))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant, said(verdict)


def test_a_row_of_padding_that_writes_is_told_with_the_owner_of_the_slot(graded: Graded) -> None:
    verdict = graded("e12.1", source=changed(MINE, *BUCKETS_1[0][0]))
    assert "a row of padding wrote token" in said(verdict)
    [stale] = [check.message for check in verdict.checks if check.name == "test_stale"]
    assert "which is a slot of text 'e'" in stale


CHEATS_1 = [
    ("size = min(size for size in self.graphs if size >= n)\n"
     "        self.device.replay(self.graphs[size])\n",
     "self.out[:n] = self.device.eager(rows)\n", "the launches"),
    ("        self.device.replay(self.graphs[size])\n", "", "the launches"),
    ("        self.used = n\n", "        self.used = n\n        self.device.buffer(1)\n",
     "none of them new"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), CHEATS_1)
def test_who_avoids_the_graphs_is_caught(graded: Graded, old: str, new: str, says: str) -> None:
    verdict = graded("e12.1", source=changed(MINE, old, new))
    assert {"test_full", "test_buckets", "test_everything"} <= set(failed(verdict))
    assert any(says in check.message for check in verdict.checks)


def test_tokens_may_be_a_tuple_and_no_list_of_ones_own(graded: Graded) -> None:
    end = "return [self.out[i] for i in range(n)]"
    own = "class Yes(list):\n    def __eq__(self, other): return True\n\n" + MINE
    refused = changed(own, end, "return Yes(self.out[i] for i in range(n))")
    assert "which is a kind of list of your own" in said(graded("e12.1", source=refused))
    plain = changed(MINE, end, "return tuple(self.out[i] for i in range(n))")
    assert graded("e12.1", source=plain).status == "pass"


# ---- e12.2 ------------------------------------------------------------------------------------

LOOP = """
class Overlapped:
    def __init__(self, device, num_blocks):
        self.device, self.free = device, set(range(num_blocks))
        self.waiting, self.running, self.step = [], [], []

    def add(self, name, prompt, most):
        self.waiting.append(
            {"name": name, "prompt": prompt, "most": most, "rows": 0, "got": 0})

    def abort(self, name):
        self.waiting = [r for r in self.waiting if r["name"] != name]
        self.running = [r for r in self.running if r["name"] != name]

    def turn(self):
        while self.waiting and self.free:
            r = self.waiting.pop(0)
            r["block"] = min(self.free)
            self.free.remove(r["block"])
            self.device.load(r["block"], r["prompt"][:-1])
            self.running.append(r)
        old, self.step = self.step, [r for r in self.running if r["rows"] < r["most"]]
        rows = []
        for r in self.step:
            token = r["prompt"][-1]
            for place, other in enumerate(old):
                if other is r:
                    token = -1 - place
            rows.append([r["block"], len(r["prompt"]) - 1 + r["rows"], token])
            r["rows"] += 1
        if rows:
            self.device.launch(rows)
        told = {}
        for r, token in zip(old, self.device.fetch() if old else []):
            if any(r is other for other in self.running):
                told[r["name"]] = token
                r["got"] += 1
                if token == 0 or r["got"] == r["most"]:
                    self.running = [other for other in self.running if other is not r]
            if not any(r is other for other in self.step):
                self.free.add(r["block"])
        return told
"""


def test_whoever_keeps_a_list_of_those_who_run_is_right(graded: Graded) -> None:
    assert graded("e12.2", source=LOOP).status == "pass"


def test_rows_may_be_in_any_order_and_blocks_any_free_ones(graded: Graded) -> None:
    turned = 'self.running if r["rows"]', 'self.running[::-1] if r["rows"]'
    other = changed(LOOP, *turned, "min(self.free)", "max(self.free)")
    assert graded("e12.2", source=other).status == "pass"


def test_the_given_loop_under_the_new_name_is_right_and_has_a_bubble_per_step(
    graders: dict[str, Grader], graded: Graded
) -> None:
    starter = Path(graders["e12.2"].exercise.starter).read_text(encoding="utf-8")
    source = starter[: starter.index("class Overlapped")]
    verdict = graded("e12.2", source=changed(source, "class Synchronous", "class Overlapped"))
    right = {"test_alone", "test_together", "test_ended", "test_aborted", "test_names"}
    assert not right & set(failed(verdict))
    assert {"test_bubbles", "test_bubbles_of_many", "test_everything"} <= set(failed(verdict))
    assert "Bubbles" in said(verdict)
    assert "the first in turn 2): expected 0, got 5" in said(verdict)
    assert verdict.mutant == "waits_for_tokens"


END = "                    self.running = [other for other in self.running if other is not r]\n"
LAST = (
    "            if not any(r is other for other in self.step):\n"
    '                self.free.add(r["block"])\n'
)
ABORT = '        self.running = [r for r in self.running if r["name"] != name]\n'
FREED = '        self.free |= {r["block"] for r in self.running if r["name"] == name}\n'
ALIVE = "            if any(r is other for other in self.running):\n"
STEP_BEHIND = [
    ((END, END + "                    self.free.add(r[\"block\"])\n", LAST, "",
      ABORT, FREED + ABORT), "frees_at_once"),
    ((ABORT, FREED + ABORT), "abort_frees_as_well"),
    ((ALIVE, "            if True:\n"), "extra_token_told"),
    (("r[\"rows\"] < r[\"most\"]]", "r[\"got\"] < r[\"most\"]]"), "length_by_tokens"),
    (("enumerate(old)", "enumerate(self.step)", "if other is r:",
      "if other is r and any(r is o for o in old):"), "row_of_this_step"),
    (("-1 - place", "-place"), "row_without_one"),
    (("- 1 + r[\"rows\"], token", "+ r[\"rows\"], token"), "position_from_the_end"),
    (("- 1 + r[\"rows\"], token", "- 1 + r[\"got\"], token"), "position_behind"),
    (("        while self.waiting and self.free:", "        if self.waiting and self.free:"),
     "admits_one"),
    (("self.waiting.pop(0)", "self.waiting.pop()"), "first_place"),
    (("for other in self.running):\n                told",
      "for other in self.running) and token:\n                told"), ""),
    (("self.device.fetch() if old else []", "self.device.fetch() if old and rows else []"),
     "last_fetch_missing"),
]  # fmt: skip


@pytest.mark.parametrize(("swap", "mutant"), STEP_BEHIND)
def test_a_mistake_in_the_loop_in_other_words_is_named(
    graded: Graded, swap: tuple[str, ...], mutant: str
) -> None:
    verdict = graded("e12.2", source=changed(LOOP, *swap))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant, said(verdict)


def test_wrong_tokens_come_with_the_load_that_was_too_early(graded: Graded) -> None:
    verdict = graded("e12.2", source=changed(LOOP, *STEP_BEHIND[0][0]))
    assert failed(verdict)[0] == "test_ended"
    assert (
        "block 0 was loaded for 'c' while a step was in the queue that still writes a token of"
        in said(verdict)
    )


def test_wrong_tokens_come_with_the_row_that_was_somebody_elses(graded: Graded) -> None:
    verdict = graded("e12.2", source=changed(LOOP, *STEP_BEHIND[4][0]))
    assert "takes the token that" in said(verdict)


def test_what_the_device_cannot_do_is_said(graded: Graded) -> None:
    for old, new, says in (
        ("        if rows:\n", "        if True:\n", "A step without rows was launched"),
        ("[:-1])\n", ")\n", "no waiting request has this prompt"),
        ("self.device.fetch() if old else []", "[]", "A third step was launched: two are in the"),
        ("self.device.launch(rows)", "self.device.launch(rows + rows)", "have the same block"),
    ):
        assert says in said(graded("e12.2", source=changed(LOOP, old, new))), new
