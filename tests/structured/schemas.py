"""JSON schemas of many kinds, written for these tests."""

from typing import Any


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others; `required` of them, or all."""
    names = required.split() or list(properties)
    made = {"type": "object", "properties": properties, "required": names}
    return made | {"additionalProperties": False}


SHORT = {"type": "string", "maxLength": 12}
SMALL = {"type": "integer", "minimum": -9, "maximum": 120}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed(name=SHORT, age=SMALL, email=SHORT, tags={"type": "array", "items": SHORT}),
    "optional": closed("a", a=SMALL, b=SHORT, c={"type": "boolean"}),
    "enum": {"enum": ["red", "green", 7, None, True, {"a": [1]}]},
    "const": {"const": {"version": [1, 2, "é"]}},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "bounds": {"type": "integer", "exclusiveMinimum": 17, "maximum": 2300},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "string": {"type": "string", "minLength": 2, "maxLength": 20},
    "long string": {"type": "string", "maxLength": 100_000},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "part of a pattern": {"type": "string", "pattern": "[0-9]x", "maxLength": 30},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "time": {"type": "string", "format": "date-time"},
    "mail": {"type": "string", "format": "email"},
    "address": {"type": "string", "format": "ipv4"},
    "list": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [SMALL, SHORT], "items": False, "minItems": 2},
    "empty list": {"type": "array", "maxItems": 0},
    "matrix": {"type": "array", "maxItems": 3,
               "items": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 2}},
    "any of": {"anyOf": [SMALL, SHORT, closed(x=SMALL)]},
    "one of, disjoint": {"oneOf": [closed(kind={"const": "a"}, n=SMALL),
                                   closed(kind={"const": "b"}, s=SHORT)]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 90}]},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 50},
    "tree": {"$defs": {"node": closed("value", value=SMALL, left={"$ref": "#/$defs/node"})},
             "$ref": "#/$defs/node"},
    "old definitions": {"definitions": {"n": SMALL},
                        "type": "array", "items": {"$ref": "#/definitions/n"}, "maxItems": 4},
    "map": {"type": "object", "additionalProperties": SMALL, "maxProperties": 2},
    "names": {"type": "object", "patternProperties": {"^x_[a-z]{1,4}$": SMALL},
              "additionalProperties": False},
    "nested": closed(a=closed(b=closed(c=closed(d=SMALL)))),
    "keys to escape": closed(**{'a"b': SMALL, "c\\d": SMALL, "é\n": SMALL}),
    "a name like an option": closed(**{"$ref": SHORT}),
    "tool call": closed(name={"const": "f"}, arguments=closed(city=SHORT, unit={"enum": ["C"]})),
    "titles": {"title": "T", "description": "D", "examples": [1], "default": 2} | SMALL,
}  # fmt: skip
