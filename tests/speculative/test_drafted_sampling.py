"""Choosing at drafted positions is choosing there alone, with any edits, and leaves no trace.

`sample` makes a sampler for each call, from a whole history: it knows nothing of drafts.
"""

from typing import Any

import numpy as np
import pytest
import torch

from minillm.api.sampling_params import SamplingParams
from minillm.sampling.edits import Edits
from minillm.sampling.sampler import Sampler
from minillm.sampling.token_values import RECENT
from tests.pairs import some
from tests.sampling.sampling_rows import SamplingRow, sample

VOCABULARY = 24  # few tokens and rounded logits, so that edits and their counts decide
STOPS = (4, 9)
WORDS = ((3,), (5, 6), (7, 7, 8), (2, 1), (6, 5, 6, 5))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.6},
    "presence, drawn": {"presence_penalty": 1.1, "top_k": 6},
    "bad words": {"temperature": 0.0, "bad_words": ["x"]},
    "bad words, drawn": {"bad_words": ["x"], "top_p": 0.8},
    "min tokens": {"min_tokens": 25},
    "bias": {"temperature": 0.0, "logit_bias": {3: 2.0, 5: -1.5}},
    "allowed": {"allowed_token_ids": [1, 2, 5, 6, 7, 8]},
    "all of them": {
        "min_p": 0.02,
        "bad_words": ["x"],
        "min_tokens": 30,
        "logit_bias": {6: 1.0, 20: -2.0},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "allowed_token_ids": list(range(0, VOCABULARY, 1)),
    },
}
K = 4


def request(kind: str, number: int, output: list[int]) -> SamplingRow:
    """The row of one sequence, whose prompt depends on its number."""
    params = SamplingParams(**KINDS[kind], max_tokens=1000)
    words = WORDS if params.bad_words else ()
    prompt = [1, 2, 2, 5, number % VOCABULARY]
    return SamplingRow(params, number, 0, 0, prompt, output, STOPS, words)


def alone(logits: torch.Tensor, row: SamplingRow) -> int:
    (token,) = sample(logits[None], [row]).token_ids
    return token


@pytest.mark.parametrize("seed", some([0], range(3)))
def test_every_position_is_chosen_as_it_is_alone(seed: int) -> None:
    """Sequences of all kinds over 40 steps, each with up to four drafts, right ones and wrong: the
    histories outgrow their room in the sampler, and pass the end of `min_tokens`."""
    dice = np.random.default_rng(seed)
    sampler = Sampler(len(KINDS), VOCABULARY, torch.device("cpu"))
    kinds = list(KINDS)
    outputs: list[list[int]] = [[] for _ in kinds]
    for row, kind in enumerate(kinds):
        sampler.set_row(row, request(kind, row, []))
    num_right = num_wrong = 0
    for step in range(40):
        members = [row for row in range(len(kinds)) if dice.random() < 0.8] or [0]
        counts = [int(dice.integers(0, K + 1)) for _ in members]
        shape = sum(counts) + len(counts), VOCABULARY
        logits = torch.from_numpy(dice.normal(size=shape).astype(np.float32) * 2).round()
        drafts: dict[int, list[int]] = {}
        rows, positions, expected = [], [], []
        for row, count in zip(members, counts, strict=True):
            drafts[row] = []
            for each in range(count + 1):
                history = request(kinds[row], row, outputs[row] + drafts[row])
                rows.append(row)
                positions.append(history.position)
                expected.append(alone(logits[len(rows) - 1], history))
                if each < count:  # the token that will be chosen there, or another
                    right = dice.random() < 0.7
                    other = int(dice.integers(VOCABULARY))
                    drafts[row].append(expected[-1] if right else other)
        given = {row: tokens for row, tokens in drafts.items() if tokens}
        tokens, _ = sampler.choose(logits, rows, positions, (), given)
        assert tokens.tolist() == expected, step
        again, _ = sampler.choose(logits, rows, positions, (), given)
        assert again.tolist() == expected, "choosing leaves something behind"
        end = 0
        for row, count in zip(members, counts, strict=True):
            own, end = expected[end : end + count + 1], end + count + 1
            kept = 1
            while kept <= count and own[kept - 1] == drafts[row][kept - 1]:
                kept += 1
            num_right, num_wrong = num_right + kept - 1, num_wrong + (kept <= count)
            sampler.append_run(row, 5 + len(outputs[row]), own[:kept])
            outputs[row] += own[:kept]
        compare_with_fresh(sampler, kinds, outputs, dice)
    assert min(num_right, num_wrong) > 100
    assert max(map(len, outputs)) > 70


def compare_with_fresh(
    sampler: Sampler, kinds: list[str], outputs: list[list[int]], dice: np.random.Generator
) -> None:
    """The edits of every row are, to the bit, those of a row made anew from its tokens."""
    fresh = Sampler(len(kinds), VOCABULARY, torch.device("cpu"))
    for row, kind in enumerate(kinds):
        fresh.set_row(row, request(kind, row, outputs[row]))
    positions = [5 + len(output) for output in outputs]
    rows = fresh.edits.rows_of(range(len(kinds)), positions)
    assert rows == sampler.edits.rows_of(range(len(kinds)), positions)
    logits = torch.from_numpy(dice.normal(size=(len(rows), VOCABULARY)).astype(np.float32))
    at = [positions[row] for row in rows]
    mine, theirs = sampler.edits.apply(logits, rows, at), fresh.edits.apply(logits, rows, at)
    assert torch.equal(mine, theirs)


append, append_run = Edits.append, Sampler.append_run
BUGS = {  # what is replaced, and by what
    "edits ignore earlier drafts": (Edits, "append", lambda *_: None),
    "drafts are counted a place late": (
        Edits, "append", lambda self, rows, at, ids: append(self, rows, [i + 1 for i in at], ids)),
    "each draft is the first": (
        Edits, "append", lambda self, rows, at, ids: append(self, rows, at, ids[:1].expand_as(ids))
    ),
    "rejected drafts stay": (Edits, "snapshot", lambda self: lambda: None),
    "only the last token of a run is appended": (
        Sampler, "append_run",
        lambda self, row, at, ids: append_run(self, row, at + len(ids) - 1, ids[-1:])),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[name])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        test_every_position_is_chosen_as_it_is_alone(0)


def test_drafts_do_not_depend_on_their_neighbours() -> None:
    """A row among others chooses what it chooses in a call of its own."""
    sampler, dice = Sampler(len(KINDS), VOCABULARY, torch.device("cpu")), np.random.default_rng(9)
    for row, kind in enumerate(KINDS):
        sampler.set_row(row, request(kind, row, [5, 6, 5, 7, 7]))
    drafts = {
        row: dice.integers(VOCABULARY, size=row % (K + 1)).tolist() for row in range(len(KINDS))
    }
    rows = [row for row, tokens in drafts.items() for _ in range(len(tokens) + 1)]
    positions = [10 + i for tokens in drafts.values() for i in range(len(tokens) + 1)]
    logits = torch.from_numpy(dice.normal(size=(len(rows), VOCABULARY)).astype(np.float32)).round()
    together, _ = sampler.choose(logits, rows, positions, (), drafts)
    for row in drafts:
        own = [place for place, each in enumerate(rows) if each == row]
        at = [positions[place] for place in own]
        apart, _ = sampler.choose(logits[own], [row] * len(own), at, (), {row: drafts[row]})
        assert apart.tolist() == together[own].tolist()


def test_a_bad_word_as_long_as_any_survives_rejected_drafts() -> None:
    """The first tokens of a word are still known after drafts were written behind its last ones.

    A word has up to 256 characters, each of them up to 4 tokens.
    """
    word = (*(1 + i % 7 for i in range(1024)), 20)
    params = SamplingParams(temperature=0.0, bad_words=["x"], max_tokens=3000)

    def row_of(output: list[int]) -> SamplingRow:
        return SamplingRow(params, 0, 0, 1 + len(output), [0], list(output), (), (word,))

    output = list(word[:-2])
    sampler = Sampler(1, VOCABULARY, torch.device("cpu"))
    sampler.set_row(0, row_of(output))
    logits = torch.zeros(K + 1, VOCABULARY)
    logits[0, word[-2]] = 1.0  # the token before the last of the word,
    logits[1:, 20] = 1.0  # and then the last
    drafts = [9, 9, 9, 9]
    at = 1 + len(output)
    tokens, _ = sampler.choose(logits, [0] * (K + 1), range(at, at + K + 1), (), {0: drafts})
    assert tokens[0] == word[-2] != drafts[0]  # all drafts are rejected
    sampler.append_run(0, at, [word[-2]])
    token, _ = sampler.choose(logits[1:2], [0], [at + 1])
    assert token.tolist() == [alone(logits[1], row_of([*output, word[-2]]))] != [20]
    assert RECENT >= 256 * 4 + 16
