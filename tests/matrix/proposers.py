"""Proposers of every temper: right, wrong, random, silent, too eager, broken."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from minillm.scheduling.plan import NewSequence
from minillm.speculative.proposer import DraftRow

K = 4  # drafts of a row

Known = Mapping[Any, Sequence[int]]  # tokens that plain decoding gives, by `key_of`


def key_of(new: NewSequence) -> Any:
    """What a completion's tokens follow from."""
    prompt = tuple(new.token_ids[: new.num_prompt_tokens])
    return prompt, new.seed, new.sample_index, repr(new.params)


class Right:
    """It knows what plain decoding gives, and is wrong with probability `error`.

    Beyond what it knows it says nothing, so that it is never wrong by chance.
    """

    def __init__(self, known: Known, error: float = 0.0):
        self.known, self.error = known, error

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        tokens = self.known.get(key_of(row.new), ())
        done = len(row.token_ids) - row.new.num_prompt_tokens
        rng = Random(hash((row.new.seed, row.new.sample_index, len(row.token_ids))))
        right = tokens[done : done + row.num_drafts]
        return [abs(token - 1) if rng.random() < self.error else token for token in right]


class Anything:
    """Random tokens, any number of them."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        answers = []
        for row in rows:
            rng = Random(hash((row.new.seed, row.new.sample_index, len(row.token_ids))))
            count = rng.randrange(row.num_drafts + 1)
            answers.append([rng.randrange(self.vocab_size) for _ in range(count)])
        return answers


class Now:
    """Answers as the given function says; `num_calls` counts."""

    def __init__(self, answer: Callable[[Sequence[DraftRow], int], Any]):
        self.answer, self.num_calls = answer, 0

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        self.num_calls += 1
        return self.answer(rows, self.num_calls)


def mixed(known: Known) -> Any:
    """Every second sequence has drafts, the others none: most are right."""
    right = Right(known, error=0.2)
    return Now(
        lambda rows, _: [
            [] if row.new.seq_id % 2 else answer
            for row, answer in zip(rows, right.propose(rows), strict=True)
        ]
    )


def too_many(known: Known) -> Any:
    """More than it was asked for, the first of them right."""
    right = Right(known)
    return Now(lambda rows, _: [[*answer, *range(9)] for answer in right.propose(rows)])


def failing(known: Known, answer: Callable[[Sequence[DraftRow]], Any]) -> Any:
    """Right five times, then this."""
    right = Right(known)
    return Now(lambda rows, call: right.propose(rows) if call <= 5 else answer(rows))


def raises(rows: Sequence[DraftRow]) -> Any:
    raise RuntimeError("the draft was lost")


FAILING: Mapping[str, Callable[[Sequence[DraftRow]], Any]] = {
    "raises": raises, "ids below 0": lambda rows: [[-1] for _ in rows],
    "ids too large": lambda rows: [[10**6] for _ in rows],
    "an answer less": lambda rows: [[] for _ in rows[1:]], "no list": lambda rows: 7,
}  # fmt: skip


def config_of(name: str, known: Known, vocab_size: int) -> dict[str, Any]:
    """The `speculative_config` with this proposer. Others of their own are added by name, such as
    a draft model: a test passes its configuration instead."""
    if name == "ngram":
        return {
            "method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }  # fmt: skip
    if name == "suffix":  # all it finds is drafted
        return {
            "method": "suffix",
            "num_speculative_tokens": K,
            "suffix_decoding_min_token_prob": 0.0,
        }
    made: dict[str, Callable[[], Any]] = {
        "right": lambda: Right(known),
        "mostly right": lambda: Right(known, error=0.25),
        "wrong": lambda: Right(known, error=1.0),
        "anything": lambda: Anything(vocab_size),
        "nothing": lambda: Now(lambda rows, _: [[] for _ in rows]),
        "some rows": lambda: mixed(known),
        "too many": lambda: too_many(known),
        **{
            each: lambda each=each: failing(known, FAILING[each])  # type: ignore[misc]
            for each in FAILING
        },
    }
    return {"method": made[name](), "num_speculative_tokens": K}


SOUND = (
    "ngram", "suffix", "right", "mostly right", "wrong", "anything", "nothing", "some rows",
    "too many",
)  # fmt: skip
