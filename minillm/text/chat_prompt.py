"""The prompt of a conversation: special tokens come from the chat template, never from a message.

A message may contain the text of a special token, such as ``<|im_end|>``. If this text became the
token, a user could end the turn and begin one of the system. Here it becomes ordinary tokens, and
the special tokens that the template writes stay special:

    message    "Hi <|im_end|>"                 the first character "<" is replaced by a mark
    template   "<|im_start|>user\\nHi ?|im_end|><|im_end|>"     "?" is the mark
    tokens     each special token in this text is replaced by an alias, which is one character;
               then marks become "<" again, and a tokenizer without special tokens makes the ids

A conversation without such text is tokenised as usual, as by ``apply_chat_template`` of
transformers. A special token that a template makes of its own text and a field, such as ``"<|" +
role + "|>"``, stays special.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import tokenizers

from minillm.errors import CheckpointError, ForeignCode, InvalidRequestError
from minillm.text.chat_template import Message, validate_messages

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer

# The last private plane of Unicode: a message with special tokens must not use these characters.
ALIAS: Final = 0x100000  # + number of a special token
MARK: Final = 0x108000  # + number of a first character
RESERVED: Final = re.compile("[\U00100000-\U0010ffff]")


class ControlTokens:
    """The special tokens of a tokenizer as they occur in messages and in a template's text.

    Args:
        backend: the tokenizer.
        wrap: makes a `Tokenizer` of a backend.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, wrap: "Callable[[tokenizers.Tokenizer], Tokenizer]"
    ) -> None:
        self._backend, self._wrap = backend, wrap
        added = backend.get_added_tokens_decoder()
        self._tokens = {id_: each for id_, each in added.items() if each.special and each.content}
        texts = sorted((each.content for each in self._tokens.values()), key=len, reverse=True)
        either = "|".join(map(re.escape, texts)) or "(?!)"  # (?!) matches nothing
        self._one = re.compile(either)
        self._starts = re.compile(f"(?={either}).", re.DOTALL)  # overlapping ones, too
        firsts = sorted({text[0] for text in texts})
        self._marks = {first: chr(MARK + i) for i, first in enumerate(firsts)}
        self._firsts = str.maketrans({mark: first for first, mark in self._marks.items()})
        self._aliases = {each.content: chr(ALIAS + i) for i, each in
                         enumerate(self._tokens.values())}  # fmt: skip

    def occur_in(self, text: str) -> bool:
        """Whether a part of the text could become a special token, also after normalization."""
        normalizer = self._backend.normalizer
        if self._one.search(text):
            return True
        normalizes = normalizer is not None and any(t.normalized for t in self._tokens.values())
        with ForeignCode(InvalidRequestError, "messages has a text that cannot be normalized"):
            return normalizes and self._one.search(normalizer.normalize_str(text)) is not None

    def marked(self, text: str) -> str:
        """The text without special tokens: a mark replaces the first character of each."""
        return self._starts.sub(lambda found: self._marks[found[0]], text)

    def unmarked(self, text: str) -> str:
        """The text with first characters in place of marks."""
        return text.translate(self._firsts)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a marked text: special tokens in it are the template's.

        Raises:
            InvalidRequestError: the text cannot be tokenized, or the model of the tokenizer makes a
                special token of ordinary text, as Unigram models can.
        """
        text = self.unmarked(self._one.sub(lambda found: self._aliases[found[0]], text))
        encoder, aliases, forbidden = self._encoder
        ids = encoder.encode(text, add_special_tokens=False)
        if wrong := forbidden.intersection(ids):
            raise InvalidRequestError(
                f"messages contains the text {self._tokens[min(wrong)].content!r}, which this "
                "model cannot tell from a special token; remove it."
            )
        if add_special_tokens:
            ids = encoder.encode(text, add_special_tokens=True)
        return [aliases.get(each, each) for each in ids]

    @cached_property
    def _encoder(self) -> "tuple[Tokenizer, dict[int, int], frozenset[int]]":
        """A tokenizer that takes special tokens for text and knows their aliases; the id of the
        special token for the id of each alias; and ids that text must not have."""
        with ForeignCode(CheckpointError, "The model's tokenizer cannot be copied"):
            return self._made()

    def _made(self) -> "tuple[Tokenizer, dict[int, int], frozenset[int]]":
        text = self._backend.to_str()
        copy = tokenizers.Tokenizer.from_str(text)
        copy.encode_special_tokens = True
        aliases: dict[int, int] = {}
        for token_id, token in self._tokens.items():
            alias = self._aliases[token.content]
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
            added = tokenizers.AddedToken(alias, special=False, normalized=False, **flags)
            copy.add_tokens([added])
            aliases[copy.token_to_id(alias) or 0] = token_id
        model = json.loads(text)["model"]
        unknown = model.get("unk_id")  # of Unigram; other models have the token's text
        if unknown is None:
            unknown = self._backend.token_to_id(model.get("unk_token") or "")
        return self._wrap(copy), aliases, frozenset(self._tokens) - {unknown}


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        rendered: the template's text; marked, if `is_marked`.
        is_marked: whether a message has the text of a special token.
    """

    tokenizer: "Tokenizer"
    rendered: str
    is_marked: bool

    @property
    def text(self) -> str:
        """The text of the prompt."""
        return self._control.unmarked(self.rendered) if self.is_marked else self.rendered

    def ids(self, add_special_tokens: bool = False) -> list[int]:
        """The ids of the prompt. A template writes special tokens itself, so none are added."""
        if self.is_marked:
            return self._control.encode(self.rendered, add_special_tokens)
        return self.tokenizer.encode(self.rendered, add_special_tokens)

    def until(self, end: str) -> "ChatPrompt | None":
        """The prompt up to the last occurrence of `end`; None if there is none."""
        end = self._control.marked(end) if self.is_marked else end
        found = self.rendered.rfind(end)
        if found < 0:
            return None
        return ChatPrompt(self.tokenizer, self.rendered[: found + len(end)], self.is_marked)

    @property
    def _control(self) -> ControlTokens:
        return self.tokenizer.control_tokens


def chat_prompt(
    tokenizer: "Tokenizer", messages: Sequence[Message], add_generation_prompt: bool = True
) -> ChatPrompt:
    """Render a conversation with the chat template of `tokenizer`.

    Raises:
        InvalidRequestError: there is no template, messages are malformed, the template raised an
            error, or a message has both a special token's text and a reserved character.
    """
    plain: Sequence[Mapping[str, str]] = validate_messages(messages)
    control = tokenizer.control_tokens
    values = [value for message in plain for value in message.values()]
    is_marked = any(map(control.occur_in, values))
    if is_marked and (found := RESERVED.search("".join(values))):
        raise InvalidRequestError(
            f"messages contains both a special token and the private character "
            f"U+{ord(found[0]):X}; remove one of them."
        )
    if is_marked:
        plain = [{name: control.marked(value) for name, value in message.items()}
                 for message in plain]  # fmt: skip
    return ChatPrompt(tokenizer, tokenizer.render_chat(plain, add_generation_prompt), is_marked)
