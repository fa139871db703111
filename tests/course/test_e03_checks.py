"""e03: mistakes that its checks have to notice, and in which words; each is a changed solution."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm_exercises.grader import Grader
from minillm_exercises.manifest import load_manifest
from minillm_exercises.results import Verdict

GUARD = "        if end > slots:\n"
SCORES = ".reshape(count, heads, dim)"
RING = ".reshape(query.shape)"


@pytest.fixture(scope="module")
def graders() -> Iterator[dict[str, Grader]]:
    manifest = load_manifest()
    with Grader(manifest["e03.1"]) as first, Grader(manifest["e03.2"]) as second:
        yield {"e03.1": first, "e03.2": second}


def grade(graders: dict[str, Grader], name: str, folder: Path, *swap: str) -> Verdict:
    """The verdict on a solution in which each old text of `swap` is replaced by the new one."""
    text = (graders[name].exercise.answers / "solution.py").read_text(encoding="utf-8")
    for old, new in zip(swap[::2], swap[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "submission.py"
    path.write_text(text, encoding="utf-8")
    return graders[name].grade(path)


def said(verdict: Verdict) -> str:
    assert verdict.status == "fail"
    return next(check.message for check in verdict.checks if check.status == "fail")


def test_a_refused_append_that_wrote_is_told_where(graders, tmp_path: Path) -> None:
    loop = """        for slot in range(start, min(end, slots)):
            self.keys[row, :, slot] = keys[slot - start]
            self.values[row, :, slot] = values[slot - start]
"""
    verdict = grade(graders, "e03.1", tmp_path, GUARD, loop + GUARD)
    assert "but had already written into slot 5 of row 0, slot 6 of row 0." in said(verdict)
    assert verdict.mutant == "writes_then_refuses"
    assert [check.name for check in verdict.checks if check.status != "pass"] == ["test_full"]


@pytest.mark.parametrize("grown", ["end", "min(end, slots)", "start + 1", "10**3"])
def test_a_length_that_grew_with_a_refusal_is_named(graders, tmp_path: Path, grown: str) -> None:
    swap = (GUARD, f"{GUARD}            self.lengths[row] = {grown}\n")
    verdict = grade(graders, "e03.1", tmp_path, *swap)
    assert "has its length changed?" in said(verdict)
    assert "3 tokens into the 2 slots left of 7; its last token asked again" in said(verdict)
    assert verdict.mutant == "counts_the_refused"


def test_tokens_that_fit_and_are_refused(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e03.1", tmp_path, "end > slots", "end >= slots")
    assert "1 token into the 1 slot left of 2: they fit, but append refused them" in said(verdict)
    assert verdict.mutant == "last_slot_unused"


@pytest.mark.parametrize(("name", "end", "points"), [("e03.1", SCORES, 2), ("e03.2", RING, 0)])
@pytest.mark.parametrize(
    ("method", "says"),
    [
        (".tolist()", "got a list; return a Tensor"),
        (".double()", "it is torch.float64; queries, keys and values are torch.float32"),
        (".bfloat16()", "it is torch.bfloat16"),
    ],
)
def test_what_comes_out_is_a_float32_tensor(
    graders, tmp_path: Path, name: str, end: str, points: int, method: str, says: str
) -> None:
    verdict = grade(graders, name, tmp_path, end, end + method)
    assert says in said(verdict)
    assert verdict.earned == points


def test_queries_that_were_changed(graders, tmp_path: Path) -> None:
    line = "        grouped = queries.reshape("
    verdict = grade(graders, "e03.1", tmp_path, line, "        queries *= 1.5\n" + line)
    assert "attend has changed the queries it was given" in said(verdict)
    line = "        held = "
    verdict = grade(graders, "e03.2", tmp_path, line, "        query /= 2\n" + line)
    assert "attend has changed the query it was given" in said(verdict)


def test_a_query_that_sees_nothing_is_no_unwritten_slot(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e03.1", tmp_path, "(length) > position", "(length) >= position")
    nan = next(check.message for check in verdict.checks if "NaN" in check.message)
    assert "the result of a softmax over no slot" in nan
    assert verdict.mutant == "not_itself"


def test_the_memory_is_graded_whatever_comes_out(graders, tmp_path: Path) -> None:
    verdict = grade(graders, "e03.1", tmp_path, ".softmax(-1)", ".softmax(0)")
    passed = [check.name for check in verdict.checks if check.status == "pass"]
    assert passed == ["test_memory_keys", "test_memory_values"]


OTHER_WORDS = [
    ("torch.arange(self.seen, self.seen + keys.shape[0])", "torch.arange(len(keys))",
     "positions_restart"),
    ("rotated = rotate(query[None], newest)[0]", "rotated = rotate(query[None], 0 * newest)[0]",
     "query_not_rotated"),
    ("self.seen += keys.shape[0]", "self.seen += len(positions)", "counts_the_kept"),
    ("torch.tensor([self.seen - 1])", "torch.tensor([keys.shape[1] - 1])", "query_in_the_window"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "mutant"), OTHER_WORDS)
def test_a_mistake_in_other_words_is_named(
    graders, tmp_path: Path, old: str, new: str, mutant: str
) -> None:
    assert grade(graders, "e03.2", tmp_path, old, new).mutant == mutant
