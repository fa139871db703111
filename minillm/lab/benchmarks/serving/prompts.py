"""Prompts of given lengths, as token ids or as text of single-token words, and the bodies of
requests."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.client import PATHS, Fields
from minillm.lab.benchmarks.serving.workload import Conversation, Segment

# Common words, which most vocabularies hold as one token when a space precedes them.
WORDS = tuple(
    "the of and to in that is was for on with as at by it from be are this an or not have had"  # noqa: SIM905
    " but they you one all we can her his there more if out up what so about who time new see"
    " first two over could no like any may only after other some then into them than now well"
    " work make way even part day place small long little old good great right made under"
    " come life man world house water side hand name back number set end line add read".split()
)
LEAST_WORDS = 16


@dataclass(frozen=True)
class Vocabulary:
    """What prompts are made of.

    Attributes:
        words: words of one token each, when a space precedes them.
        ids: token ids; empty if they are not known.
        exact: whether the number of tokens of a word was checked with the server.
    """

    words: tuple[str, ...] = WORDS
    ids: tuple[int, ...] = ()
    exact: bool = False
    seed: int = 0

    def _draw(self, segment: Segment, size: int) -> list[int]:
        """Positions in the pool. Equal keys give equal positions."""
        rng = np.random.default_rng([self.seed, zlib.crc32(segment.key.encode())])
        return [int(number) for number in rng.integers(size, size=segment.length)]

    def as_ids(self, segments: Sequence[Segment]) -> list[int]:
        """The prompt as token ids."""
        return [
            self.ids[place] for segment in segments for place in self._draw(segment, len(self.ids))
        ]

    def as_text(self, segments: Sequence[Segment]) -> str:
        """The prompt as text; a space precedes every word."""
        return "".join(
            f" {self.words[place]}"
            for segment in segments
            for place in self._draw(segment, len(self.words))
        )


def from_counts(counts: Sequence[Sequence[int]], seed: int) -> Vocabulary:
    """The vocabulary of a server that returned these token ids for the words of `WORDS`.

    Raises:
        ConfigError: too few of the words are one token.
    """
    pairs = [(word, ids[0]) for word, ids in zip(WORDS, counts, strict=True) if len(ids) == 1]
    if len(pairs) < LEAST_WORDS:
        pool = sorted({token_id for ids in counts for token_id in ids})
        if not pool:
            raise ConfigError("The server's /tokenize returns no tokens; give --vocab-size N.")
        return Vocabulary(WORDS, tuple(pool), False, seed)
    words, ids = zip(*pairs, strict=True)
    return Vocabulary(tuple(words), tuple(ids), True, seed)


def any_ids(vocab_size: int, seed: int) -> Vocabulary:
    """A vocabulary of ids for a model without tokenizer. The first ids are left out, because
    special tokens usually are among them."""
    return Vocabulary(WORDS, tuple(range(vocab_size // 4, vocab_size)), False, seed)


@dataclass(frozen=True)
class Writer:
    """Writes the body of each turn.

    Attributes:
        as_ids: prompts are token ids, which keeps their lengths exact. Later turns of a
            conversation repeat the text of replies, so conversations are always text.
    """

    fields: Fields
    vocabulary: Vocabulary
    as_ids: bool

    @property
    def path(self) -> str:
        """The route of all requests."""
        return PATHS["chat" if self.fields.chat else "completions"]

    def body(self, conversation: Conversation, number: int, replies: list[str]) -> bytes:
        """The body of turn `number`, after the earlier `replies`."""
        return self.fields.body(
            self.prompt(conversation, number, replies), conversation[number].max_tokens
        )

    def prompt(self, conversation: Conversation, number: int, replies: list[str]) -> Any:
        """Messages, token ids or text."""
        turns = conversation[: number + 1]
        if self.as_ids and len(conversation) == 1:
            return self.vocabulary.as_ids(turns[0].segments)
        texts = [self.vocabulary.as_text(turn.segments) for turn in turns]
        if not self.fields.chat:
            pairs = zip(texts, [*replies, ""], strict=True)
            return "".join(text + answer for text, answer in pairs)
        messages = []
        for place, text in enumerate(texts):
            messages.append({"role": "user", "content": text.strip()})
            if place < number:
                messages.append({"role": "assistant", "content": replies[place]})
        return messages
