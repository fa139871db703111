"""Bodies of requests: the turns of a conversation as prompts."""

from dataclasses import dataclass
from typing import Any

from minillm.lab.benchmarks.serving.client import PATHS, Fields
from minillm.lab.benchmarks.serving.prompts import Vocabulary
from minillm.lab.benchmarks.serving.workload import Conversation


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
