"""Renders a conversation with a checkpoint's Jinja chat template, in a sandbox.

A template is untrusted code from the publisher of the model. It runs in Jinja's immutable sandbox,
with access to the messages and the special tokens, but not to Python's internals. Its output, and
the results of repetition and powers, are limited to ``MAX_RENDERED_CHARS``. That prevents
accidents; a hostile template can still waste time and memory.

The functions and tags of templates (``raise_exception``, ``strftime_now``, ``tojson``, ``break``,
``continue``, ``{% generation %}``) are those of transformers, for which templates are written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minillm.errors import InvalidRequestError

MAX_RENDERED_CHARS: Final = 8 * 1024 * 1024
"""Maximum length of the rendered text, and of a list or number (in bits) made by one operator."""

Message = Mapping[str, Any]
"""One turn: ``{"role": str, "content": str | [{"type": "text", "text": str}, ...]}``."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks text to train on; inference renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body of the block in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """``namespace()`` without underscore names, which are a known sandbox escape."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter named self, as in Jinja, so that a template can store an attribute "self".
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes <, >, & for HTML; models are trained on the plain characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # A function instead of the type, which would give access to its subclasses and methods.
    return dict(*args, **kwargs)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a limit on the results of ``*`` and ``**``."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left * right`` or ``left ** right`` unless the result is too large."""
        if operator == "**":
            size = _size(left) * abs(right) if isinstance(right, int) else 0
        elif isinstance(left, int) and isinstance(right, int):
            size = _size(left) + _size(right)
        elif isinstance(left, int):
            size = left * _size(right)
        else:
            size = _size(left) * right if isinstance(right, int) else 0
        if size > MAX_RENDERED_CHARS:
            raise jinja2.exceptions.SecurityError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: object) -> int:
    """Bits of an integer, length of a sequence, 0 for other values."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple) else 0


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _SafeNamespace,
        "dict": _new_dict,
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment


class ChatTemplate:
    """A chat template; compiled at the first use, so that ``generate`` works with a broken one.

    Args:
        source: the Jinja text.
        origin: the checkpoint folder, for error messages.
        special_tokens: ``bos_token``, ``eos_token``, ... as variables of the template.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: at least one message, see ``Message``.
            add_generation_prompt: end with the header of the assistant's turn.

        Raises:
            InvalidRequestError: the messages are malformed, or the template raised an error.
        """
        variables = {
            "messages": validate_messages(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._special_tokens,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._compiled.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    break
        except Exception as error:  # a template can raise any exception
            raise InvalidRequestError(self._failure(error)) from error
        if length > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"The chat template of {self.origin} produced more than {MAX_RENDERED_CHARS:,} "
                "characters; send fewer or shorter messages."
            )
        return "".join(pieces)

    def _failure(self, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        line = getattr(error, "lineno", None)
        place = f" (line {line} of the template)" if line else ""
        return f"The chat template of {self.origin} cannot render these messages: {reason}{place}."


def validate_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as plain dictionaries of strings; text parts are joined by newlines.

    Raises:
        InvalidRequestError: messages is not a list or empty, or a field of a message is not text.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            "messages must be a list of {'role': ..., 'content': ...} dictionaries, "
            f"not {type(messages).__name__}."
        )
    if not messages:
        raise InvalidRequestError("messages is empty; a chat needs at least one message.")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] must be a dictionary with 'role' and 'content', "
            f"not {type(message).__name__}."
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"messages[{index}]['role'] must be a string such as 'user', not {role!r:.80}."
        )
    plain = {}
    for key, value in {**message, "content": _plain_content(index, message.get("content"))}.items():
        if value is None:  # clients send "tool_calls": null; templates test for absence
            continue
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidRequestError(
                f"messages[{index}] has {key!r:.80} of type {type(value).__name__}; besides 'role' "
                "and 'content' only string fields are supported."
            )
        plain[key] = str.__str__(value)
    return plain


def _plain_content(index: int, content: object) -> str:
    if isinstance(content, str):
        return str.__str__(content)  # a subclass could carry methods into the sandbox
    if not isinstance(content, list | tuple) or not content:
        raise InvalidRequestError(
            f"messages[{index}]['content'] must be a string or a non-empty list of text parts, "
            f"not {'an empty list' if content in ([], ()) else type(content).__name__}."
        )
    return "\n".join(_part_text(index, part) for part in content)


def _part_text(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequestError(
            f"messages[{index}]['content'] has a part of type {kind!r:.80}; only "
            "{'type': 'text', 'text': '...'} parts are supported."
        )
    return str.__str__(text)
