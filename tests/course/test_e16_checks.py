"""e16: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e16.1", "e16.2")  # for the fixture `graded`

# As it stands in the published listing, made to fit the exercise: a quotient that is guarded.
LISTING = """
def accept_probability(p, q, token):
    return min(1.0, p[token] / (q[token] + GUARD))

def residual(p, q):
    rest = [max(a - b, 0) for a, b in zip(p, q)]
    return [r / sum(rest) for r in rest] if sum(rest) else list(p)

def verify(targets, laws, drafts, coins, u):
    out = []
    for i, d in enumerate(drafts):
        r = accept_probability(targets[i], laws[i], d)
        if coins[i] >= r:
            return out + [draw(REJECTED, u)]
        out.append(d)
    return out + [draw(targets[-1], u)]

def draw(law, u):
    s = 0.0
    for t, x in enumerate(law):
        s += x
        if s > u:
            return t
    return max(t for t, x in enumerate(law) if x)
"""
RIGHT = {"GUARD": "0", "REJECTED": "residual(targets[i], laws[i])"}


def listing(**changes: str) -> str:
    source = LISTING
    for name, text in (RIGHT | changes).items():
        source = source.replace(name, text)
    return source


def test_another_loop_is_right(graded: Graded) -> None:
    assert graded("e16.1", source=listing()).status == "pass"


def test_the_published_guard_is_named(graded: Graded) -> None:
    verdict = graded("e16.1", source=listing(GUARD="1e-8"))
    assert verdict.mutant == "epsilon"
    assert "the large one itself" in said(verdict)


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        ("targets[i]", "new_law_after_rejection"),
        ("laws[i]", "takes_the_other_law"),
        ("residual(targets[0], laws[0])", "batch_stops"),
    ],
)
def test_a_wrong_law_after_a_rejection_is_named(graded: Graded, law: str, mutant: str) -> None:
    assert graded("e16.1", source=listing(REJECTED=law)).mutant == mutant


def test_the_law_is_told_where_only_the_law_is_wrong(graded: Graded) -> None:
    """Every small case is right, and one token in thousands of draws is not."""
    source = listing().replace(
        "    s = 0.0\n", "    u = 0.99 if 0.34 < u < 0.36 and len(law) == 3 else u\n    s = 0.0\n"
    )
    verdict = graded("e16.1", source=source)
    assert "test_law" in failed(verdict)
    assert "test_chain" not in failed(verdict)
    assert "The law of the first token" in said(verdict)


WRITER = """
import math

def pick(law, noise):
    logs = [math.log(x) if x else -math.inf for x in law]
    return max(range(len(law)), key=lambda t: logs[t] + noise[t])

def draft(small, noise, tokens, k):
    out = []
    while len(out) < k:
        text = tokens + out
        out.append(pick(small(text), noise(AT)))
    return out

def generate(large, propose, noise, tokens, count, k):
    new = []
    while len(new) < count:
        text = tokens + new
        most = min(k, count - len(new) - 1)
        guess = propose(text, most) if most > 0 else []
        laws = large(text, guess)
        own = [pick(law, noise(len(text) + i)) for i, law in enumerate(laws)]
        same = 0
        while same < len(guess) and own[same] == guess[same]:
            same += 1
        new += KEPT
    return new

def agreement(p, q):
    return sum(
        1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p)))
        for i in range(len(p)) if p[i] * q[i] > 0
    )
"""


def test_another_writer_is_right(graded: Graded) -> None:
    source = WRITER.replace("AT", "len(text)").replace("KEPT", "own[: same + 1]")
    assert graded("e16.2", source=source).status == "pass"


@pytest.mark.parametrize(
    ("at", "kept", "mutant"),
    [
        ("len(tokens)", "own[: same + 1]", "drafts_with_one_noise"),
        ("len(text)", "own[: max(same, 1)]", "no_bonus"),
        ("len(text)", "guess[: same + 1] if same < len(guess) else own", "keeps_the_draft"),
    ],
)
def test_a_mistake_in_other_words_is_named(graded: Graded, at: str, kept: str, mutant: str) -> None:
    verdict = graded("e16.2", source=WRITER.replace("AT", at).replace("KEPT", kept))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_a_model_that_is_asked_for_each_token_has_too_many_steps(graded: Graded) -> None:
    source = WRITER.replace("AT", "len(text)").replace("KEPT", "own[: same + 1]")
    source = source.replace("laws = large(text, guess)", "laws = [large(text, guess[:i])[-1] "
                            "for i in range(len(guess) + 1)]")  # fmt: skip
    verdict = graded("e16.2", source=source)
    assert verdict.mutant == "one_by_one"
    assert "test_texts" not in failed(verdict)
    assert "Steps" in said(verdict)
