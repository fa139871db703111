"""Renders a conversation with a checkpoint's Jinja chat template, in a sandbox.

A template is untrusted code from the publisher of the model. It runs in Jinja's immutable sandbox,
with access to the messages and the special tokens, but not to Python's internals. Its output, and
the results of repetition and powers, are limited to ``MAX_RENDERED_CHARS``. That prevents
accidents; a hostile template can still waste time and memory.

Some templates print contents, others iterate over the parts of contents, and some do either,
depending on the role. So each conversation is rendered once with a tag in place of each content. A
content whose tag does not appear, or appears in a printed list, is given in the other kind: text as
a list of one part, parts joined by newlines. All others are given as the client sent them.

The functions and tags of templates (``raise_exception``, ``strftime_now``, ``tojson``, ``break``,
``continue``, ``{% generation %}``) are those of transformers, for which templates are written.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final
from uuid import uuid4

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minillm.errors import InvalidRequestError
from minillm.text.chat_messages import (
    Message,
    filled,
    joined,
    other_kind,
    parted,
    validate_messages,
)

logger = logging.getLogger(__name__)

MAX_RENDERED_CHARS: Final = 8 * 1024 * 1024
"""Maximum length of the rendered text, and of a list or number (in bits) made by one operator."""

Values = Mapping[str, Any]
"""The variables of a template, ``messages`` among them."""


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
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
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
        literal: what the template writes in place of each of its own texts.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        literal: Callable[[str], str] = str,
    ) -> None:
        self.source = source
        self.origin = origin
        self._literal = literal
        self._special_tokens = {name: literal(text) for name, text in special_tokens.items()}
        self._has_warned = False

    def with_literals(self, literal: Callable[[str], str]) -> "ChatTemplate":
        """This template with changed texts, except those with which it compares."""
        return ChatTemplate(self.source, self.origin, self._special_tokens, literal)

    @cached_property
    def _tree(self) -> nodes.Template:
        return _environment().parse(self.source)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment, tree = _environment(), self._tree
        if self._literal is not str:
            _change_literals(tree, self._literal)
        code = environment.compile(tree)
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not define."""
        try:
            return frozenset(meta.find_undeclared_variables(self._tree))
        except Exception as error:
            raise InvalidRequestError(self._failure(error)) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: at least one message, see ``Message``.
            add_generation_prompt: end with the header of the assistant's turn.

        Raises:
            InvalidRequestError: the messages are malformed, or the template raised an error.
        """
        return self.run(self.prepared(messages, {"add_generation_prompt": add_generation_prompt}))

    def prepared(self, messages: Sequence[Message], variables: Values) -> dict[str, Any]:
        """The variables of `run`: `variables`, and the messages as this template takes them.

        Raises:
            InvalidRequestError: the messages are malformed.
        """
        listed = validate_messages(messages)
        tags = [str(uuid4().int) for _ in listed]  # digits have no upper case
        shown = self._shown(listed, tags, variables)
        if shown is None:  # the template looks into contents, or takes no list, or no absence
            kinds = listed, [joined(m) for m in listed], [parted(m) for m in listed]
            versions = [version for kind in kinds for version in (kind, [filled(m) for m in kind])]
            made = [{**variables, "messages": version} for version in versions]
            return next((version for version in made if self.attempt(version) is not None), made[0])
        if not all(shown):
            asked = zip(listed, shown, strict=True)
            others = [m if is_shown else other_kind(m) for m, is_shown in asked]
            shown = self._shown(others, tags, variables) or shown
            both = zip(listed, others, shown, strict=True)
            listed = [other if is_shown else m for m, other, is_shown in both]
            self._warn_once(shown)
        return {**variables, "messages": listed}

    def _warn_once(self, shown: Sequence[bool]) -> None:
        if not all(shown) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The chat template of %s leaves out the content of messages[%d]: the model does "
                "not see it.", self.origin, list(shown).index(False),
            )  # fmt: skip

    def _shown(
        self, messages: Sequence[dict[str, Any]], tags: Sequence[str], variables: Values
    ) -> list[bool] | None:
        """Whether the template shows the content of each message, if it takes tags as contents."""
        lists = [[{"type": "text", "text": tag}] for tag in tags]
        probes = [
            {**m, **({"content": tag if isinstance(m["content"], str) else parts}
                     if "content" in m else {})}
            for m, tag, parts in zip(messages, tags, lists, strict=True)
        ]  # fmt: skip
        text = self.attempt({**variables, "messages": probes})
        return None if text is None else [
            "content" not in m or (tag in text and str(parts).upper() not in text.upper())
            for m, tag, parts in zip(messages, tags, lists, strict=True)
        ]  # fmt: skip

    def attempt(self, values: Values) -> str | None:
        """`run`, or None if it raises an error."""
        try:
            return self.run(values)
        except InvalidRequestError:
            return None

    def run(self, values: Values) -> str:
        """Return the template's text for its variables, as transformers does.

        Raises:
            InvalidRequestError: the template raised an error, or its text is too long.
        """
        variables = {"tools": None, "documents": None, **self._special_tokens, **values}
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


def _change_literals(node: nodes.Node, change: Callable[[str], str]) -> None:
    """Change the texts that a template writes, not those that it looks for in others."""
    if isinstance(node, nodes.TemplateData):
        node.data = change(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = change(node.value)
    elif isinstance(node, nodes.Compare | nodes.Test):
        return
    method = isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr)
    looked_at = ("args", "kwargs") if method or isinstance(node, nodes.Filter) else ()
    for child in node.iter_child_nodes(exclude=looked_at):
        _change_literals(child, change)
