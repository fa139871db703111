"""What a request's output must look like: a JSON schema, a regular expression, a choice, a grammar.

Schemas come from untrusted clients and are compiled by a library, so the size and the depth of each
are limited here. `minillm/structured/` compiles and enforces them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from minillm.api.refusals import explain_frozen, refuse_unknown_arguments, shown
from minillm.errors import InvalidRequestError, UnknownArgumentError, did_you_mean

MAX_BYTES = 2**16  # of a schema, a pattern, a grammar, or of all choices together
MAX_DEPTH = 32  # nested objects and lists of a schema
MAX_ENTRIES = 10_000  # of an enum or a choice
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@refuse_unknown_arguments
@explain_frozen
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """vLLM's constraints of an output; exactly one of the first five fields is set.

    Attributes:
        json: a JSON schema, as a dictionary or as text; kept as text.
        regex: a pattern that the whole output matches; classes such as ``\\d`` are ASCII.
        choice: the output is one of these texts.
        grammar: a context-free grammar in llguidance's Lark dialect.
        json_object: the output is any JSON object.
        whitespace_pattern: what may stand between the tokens of JSON; by default at most one blank
            or line break, because a model may otherwise write blanks for ever.

    Raises:
        InvalidRequestError: names the field and, within a schema, the JSON path.
        UnknownArgumentError: a name that does not exist.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object not in (None, True, False):
            raise _wrong("json_object", self.json_object, "true or false")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs sets {' and '.join(given) or 'no constraint'}; set exactly "
                f"one of {', '.join(KINDS)}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None:
                _check_text(name, text)
        if self.whitespace_pattern is not None and given[0] not in ("json", "json_object"):
            raise InvalidRequestError(
                f"structured_outputs sets whitespace_pattern and {given[0]}; it is for json and "
                "json_object only, so leave it out."
            )

    @property
    def kind(self) -> str:
        """The field that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """The parameters in a mapping of fields to values, as a request in JSON has them."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise _wrong("", given, "an object such as {'regex': '[0-9]+'}")
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownArgumentError(
                    f"structured_outputs has no key {shown(name)}; it has {', '.join(known)}."
                    f"{did_you_mean(str(name), known)}"
                )
        return cls(**given)

    def plain(self) -> dict[str, Any]:
        """The fields that are set, as JSON: `of` reads them."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


def _wrong(name: str, value: object, allowed: str) -> InvalidRequestError:
    what = f"structured_outputs[{name!r}]" if name else "structured_outputs"
    return InvalidRequestError(f"{what} is {shown(value)}; it must be {allowed}.")


def _check_text(name: str, text: object) -> int:
    """The bytes of a text, which must be a valid one."""
    if not isinstance(text, str) or not text:
        raise _wrong(name, text, "a non-empty text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _wrong(name, text, "valid text, without lone surrogates") from None
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs[{name!r}] has {size:,} bytes; at most {MAX_BYTES:,} are allowed."
        )
    return size


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_ENTRIES:
        raise _wrong("choice", value, f"a list of 1 to {MAX_ENTRIES:,} texts")
    size = sum(_check_text("choice", text) for text in value)
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"structured_outputs['choice'] has {size:,} bytes; at most {MAX_BYTES:,} are allowed."
        )
    return tuple(value)


def _schema(given: object) -> str:
    """The text of a schema. The order of its properties is kept: it is the order of the output."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        _check_text("json", text)
        schema = json.loads(text)
    except RecursionError:
        raise _too_deep("$") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise _wrong("json", given, f"a JSON schema ({error})") from None
    if not isinstance(schema, dict):
        raise _wrong("json", given, "a JSON schema, which is an object")
    for path, depth, node in nodes(schema):
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        if not isinstance(node, dict):
            continue
        entries, target = node.get("enum"), node.get("$ref")
        if isinstance(entries, list) and len(entries) > MAX_ENTRIES:
            raise InvalidRequestError(
                f"structured_outputs['json'] has {len(entries):,} entries at {path}.enum; at most "
                f"{MAX_ENTRIES:,} are allowed."
            )
        if isinstance(target, str) and not target.startswith("#"):
            raise InvalidRequestError(
                f"structured_outputs['json'] has the $ref {shown(target)} at {path}; only "
                "references within the schema, which begin with '#', are followed."
            )
    return text


def _too_deep(path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs['json'] is nested deeper than {MAX_DEPTH} levels"
        f"{f' at {path}' if path != '$' else ''}; make it flatter, or use $ref."
    )


def nodes(schema: object) -> Iterator[tuple[str, int, object]]:
    """The objects and lists of a schema, outer ones first: JSON path, depth, value."""
    level: list[tuple[str, object]] = [("$", schema)]
    for depth in range(1, MAX_DEPTH + 2):
        inner: list[tuple[str, object]] = []
        for path, node in level:
            yield path, depth, node
            if isinstance(node, dict):
                inner += [(f"{path}.{str(key)[:40]}", child) for key, child in node.items()]
            elif isinstance(node, list):
                inner += [(f"{path}[{place}]", child) for place, child in enumerate(node)]
        level = [(path, child) for path, child in inner if isinstance(child, dict | list)]
