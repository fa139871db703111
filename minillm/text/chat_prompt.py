"""The prompt of a conversation: special tokens come from the chat template, never from a message.

A message may contain the text of a special token, such as ``<|im_end|>``. If this text became the
token, a user could end the turn and begin one of the system. Here it becomes ordinary tokens, and
the special tokens that the template writes stay special. The text of the prompt is what the
template makes of the true messages, as in transformers. Which of its special tokens are the
template's is found by rendering again:

    message    "Hi <|im_end|>"                 each first character "<" is replaced by a mark
    template   "<|im_start|>user\\nHi ?|im_end|><|im_end|>"     "?" is the mark
    tokens     each special token in this text is replaced by an alias, which is one character;
               then marks become "<" again, and a tokenizer without special tokens makes the ids

A template that looks for special tokens in messages, as in ``content.split("</think>")``, makes
another text of marked messages. Then the template itself is changed: it writes aliases in place of
its own special tokens, and sees the true messages. If that changes the text, too, the
conversation is refused.

A conversation without such text is tokenised as usual. A special token that a template makes of its
own text and a field, such as ``"<|" + role + "|>"``, stays special.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import tokenizers

from minillm.api.prompts import refuse_left_out
from minillm.errors import CheckpointError, ForeignCode, InvalidRequestError, did_you_mean
from minillm.text.chat_messages import Message, plain_json, validate_messages
from minillm.text.chat_template import ChatTemplate, Values
from minillm.text.chat_tools import as_text

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer

# The last private plane of Unicode: a message with special tokens must not use these characters.
ALIAS: Final = 0x100000  # + number of a special token
MARK: Final = 0x108000  # + number of a first character
RESERVED: Final = re.compile("[\U00100000-\U0010ffff]")

OWN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of templates that are not for `chat_template_kwargs`."""


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
        texts = sorted((token.content for token in self._tokens.values()), key=len, reverse=True)
        either = "|".join(map(re.escape, texts)) or "(?!)"  # (?!) matches nothing
        self._one = re.compile(either)
        firsts = sorted({text[0] for text in texts})
        self._marks = {first: chr(MARK + i) for i, first in enumerate(firsts)}
        self._aliases = {token.content: chr(ALIAS + i) for i, token in
                         enumerate(self._tokens.values())}  # fmt: skip

    def occur_in(self, text: str) -> bool:
        """Whether a part of the text could become a special token, also after normalization."""
        return any(map(self._one.search, self._forms(text)))

    def may_begin_in(self, text: str) -> bool:
        """Whether a special token could begin in the text and end in another."""
        return any(first in form for form in self._forms(text) for first in self._marks)

    def _forms(self, text: str) -> list[str]:
        """The text, and what the tokenizer's normalizer makes of it, if tokens are found in it."""
        normalizer = self._backend.normalizer
        if normalizer is None or not any(t.normalized for t in self._tokens.values()):
            return [text]
        with ForeignCode(InvalidRequestError, "messages has a text that cannot be normalized"):
            return [text, normalizer.normalize_str(text)]

    def marked(self, text: str) -> str:
        """The text without special tokens: marks replace all characters with which one begins."""
        for first, mark in self._marks.items():
            text = text.replace(first, mark)
        return text

    def unmarked(self, text: str) -> str:
        """The text with characters in place of marks."""
        for first, mark in self._marks.items():
            text = text.replace(mark, first)
        return text

    def aliased(self, text: str) -> str:
        """The text with an alias in place of each special token."""
        return self._one.sub(lambda found: self._aliases[found[0]], text)

    def unaliased(self, text: str) -> str:
        """The text with special tokens in place of aliases."""
        return text.translate({ord(alias): token for token, alias in self._aliases.items()})

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of an aliased text.

        Raises:
            InvalidRequestError: the text cannot be tokenized, or the model of the tokenizer makes a
                special token of ordinary text, as Unigram models can.
        """
        encoder, aliases, forbidden = self._encoder
        ids = encoder.encode(text, add_special_tokens=False)
        if wrong := forbidden.intersection(ids):
            raise InvalidRequestError(
                f"messages contains the text {self._tokens[min(wrong)].content!r}, which this "
                "model cannot tell from a special token; remove it."
            )
        if add_special_tokens:
            ids = encoder.encode(text, add_special_tokens=True)
        return [aliases.get(token_id, token_id) for token_id in ids]

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
        text: the template's text.
        aliased: the text with aliases in place of the template's special tokens, if the text of a
            message could become one.
    """

    tokenizer: "Tokenizer"
    text: str
    aliased: str | None = None

    def ids(self, add_special_tokens: bool = False) -> list[int]:
        """The ids of the prompt. A template writes special tokens itself, so none are added."""
        if self.aliased is not None:
            return self.tokenizer.control_tokens.encode(self.aliased, add_special_tokens)
        return self.tokenizer.encode(self.text, add_special_tokens)


def chat_prompt(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    add_generation_prompt: bool | None = None,
    *,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **others: Any,
) -> ChatPrompt:
    """Render a conversation with the chat template of `tokenizer`, or with `chat_template`.

    Args:
        add_generation_prompt: end with the header of the assistant's turn; None: yes, unless the
            final message is continued.
        continue_final_message: end with the last message, without the end of its turn.
        chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
        tools: functions that the model may call, as in OpenAI's API (see `chat_tools`).
        others: arguments of vLLM and transformers that are not supported, absent or None.

    Raises:
        InvalidRequestError: there is no template, messages are malformed, the template raised an
            error or does not read a variable, or a special token in a message cannot be told from
            those of the template.
    """
    refuse_left_out("a chat", others)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other; leave one out."
        )
    template = tokenizer.template if chat_template is None else ChatTemplate(
        chat_template, tokenizer.origin, tokenizer.special_tokens
    )  # fmt: skip
    variables = checked_variables(template, chat_template_kwargs or {}) | {
        "strftime_now": datetime.now().strftime,  # the same time in each rendering
        "add_generation_prompt": (
            not continue_final_message if add_generation_prompt is None else add_generation_prompt
        ),
    }
    values = with_tools(template, messages, tools, variables)
    tag = str(uuid4().int) if continue_final_message else ""
    text = render(template, values, tag)
    control = tokenizer.control_tokens
    texts = strings(values)
    if not any(map(control.may_begin_in, texts)):
        return ChatPrompt(tokenizer, text)
    if match := RESERVED.search("".join(texts)):
        raise InvalidRequestError(
            "messages contains both a character with which a special token begins and the private "
            f"character U+{ord(match[0]):X}; remove one of them."
        )
    aliased = with_aliases(template, values, tag, text, control)
    if aliased is None and control.occur_in("".join(texts)):
        raise InvalidRequestError(
            "messages contains the text of a special token, which cannot be told from the tokens "
            f"that the chat template of {tokenizer.origin} writes; remove it."
        )
    is_needed = aliased is not None and control.occur_in(aliased)
    return ChatPrompt(tokenizer, text, aliased if is_needed else None)


def with_tools(
    template: ChatTemplate, messages: Sequence[Message], tools: object, variables: Values
) -> dict[str, Any]:
    """The template's variables, with messages and tools in a form that it takes."""
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(t, dict) for t in tools)):
        raise InvalidRequestError(f"tools must be a list of dictionaries, not {tools!r:.80}.")
    listed = plain_json(list(tools), "tools") if isinstance(tools, list | tuple) else []
    if listed and "tools" in template.variables:
        return template.prepared(messages, {**variables, "tools": listed})
    checked = validate_messages(messages)
    used = any(message["role"] == "tool" or "tool_calls" in message for message in checked)
    if not (listed or used) or "tools" in template.variables:
        return template.prepared(messages, variables)
    for version in as_text(checked, listed):
        values = template.prepared(version, variables)
        if template.attempt(values) is not None:
            break
    return values


def checked_variables(template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs`, of which the template reads each.

    Raises:
        InvalidRequestError: it does not, or a variable is not for clients, or is no JSON.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs must be a dictionary, not {type(given).__name__}."
        )
    known = template.variables - OWN if given else frozenset()
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InvalidRequestError(
                f"chat_template_kwargs: {str(name)[:80]!r} is "
                + ("a field or argument of its own; give it there." if name in OWN else
                   f"not read by the chat template of {template.origin}; leave it out.{hint}")
            )  # fmt: skip
    made: dict[str, Any] = plain_json(dict(given), "chat_template_kwargs")
    return made


def render(template: ChatTemplate, values: Values, tag: str, has_final: bool = False) -> str:
    """The template's text; with a tag, up to the end of the last message. As in transformers, the
    tag and a space are appended to the message, and if the template removes the space, white space
    before the tag is removed, too.

    Raises:
        InvalidRequestError: the template raised an error, or does not keep the tag or (unless
            `has_final`) the last message.
    """
    if not tag:
        return template.run(values)
    *others, last = values["messages"]
    content = last.get("content", "")
    final = content[-1]["text"] if isinstance(content, list) else content
    tagged: Any = f"{final}{tag} "
    if isinstance(content, list):
        tagged = [*content[:-1], content[-1] | {"text": tagged}]
    text = template.run({**values, "messages": [*others, {**last, "content": tagged}]})
    at = text.rfind(tag)
    if at < 0 or not (has_final or final.strip() in text):
        raise InvalidRequestError(
            "continue_final_message needs a last message with text that the chat template keeps."
        )
    kept = text[:at] if text.startswith(f"{tag} ", at) else text[:at].rstrip()
    return kept.replace(f"{tag} ", "").replace(tag, "")  # a template can show a message twice


def with_aliases(
    template: ChatTemplate, values: Values, tag: str, text: str, control: ControlTokens
) -> str | None:
    """The text with aliases in place of the template's special tokens; None if they cannot be told
    from those of messages."""

    def attempt(template: ChatTemplate, values: Values) -> str | None:
        try:
            return render(template, values, tag, has_final=True)
        except InvalidRequestError:
            return None

    marked = mapped(values, control.marked)
    first = attempt(template, marked)
    if first is not None and control.unmarked(first) == text:
        return control.unmarked(control.aliased(first))
    changed = template.with_literals(control.aliased)
    # A token that is left over is one that the template makes of pieces.
    if control.occur_in(attempt(changed, marked) or ""):
        return None
    second = attempt(changed, values)
    return second if second is not None and control.unaliased(second) == text else None


def mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """A copy of JSON values with changed strings; names of fields stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name if name.isidentifier() else change(name): mapped(item, change)
        for name, item in value.items()
    }


def strings(value: Any) -> list[str]:
    """The strings that `mapped` changes."""
    found: list[str] = []
    mapped(value, found.append)
    return found
