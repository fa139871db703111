"""Whatever a model writes under a schema is JSON that the schema allows."""

import json
import random
import re

import numpy as np
import pytest

from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.structured.grammars import Grammars
from tests.structured.conftest import allowed
from tests.structured.schemas import SCHEMAS

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
MOST = 150  # tokens, after which texts are brought to an end
ENDS = b'"]}@'


def text_of(grammars: Grammars, given: dict, dice: random.Random, most: int = MOST) -> str:
    """A text that random logits write. After `most` tokens, tokens that end something are
    preferred, because a text may otherwise go on for ever."""
    matcher = grammars.matcher(StructuredOutputsParams.of(given))
    tokens, text = grammars.vocabulary.tokens, b""
    for step in range(4 * most):
        ids = np.flatnonzero(allowed(matcher, grammars.width))
        if matcher.is_accepting and (not len(ids) or dice.random() < 0.3 or step > most):
            return text.decode()
        assert len(ids), (given, text)
        if step > most:
            ends = [each for each in ids if len(tokens[each]) == 1 and tokens[each] in ENDS]
            ids = ends or [each for each in ids if len(tokens[each]) == 1]
        token = int(dice.choice(list(ids)))
        assert matcher.accept(token)
        text += tokens[token]
    raise AssertionError(f"{given} does not end: {text[:200]!r}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_logits_write_what_the_schema_allows(grammars: Grammars, name: str) -> None:
    schema, dice = SCHEMAS[name], random.Random(name)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for _ in range(4):
        text = text_of(grammars, {"json": schema}, dice, MOST // 3)
        validator.validate(json.loads(text))


def test_any_object_is_an_object(grammars: Grammars) -> None:
    dice = random.Random(1)
    for _ in range(8):
        assert isinstance(json.loads(text_of(grammars, {"json_object": True}, dice, 30)), dict)


BLANKS = re.compile(r"\s{2,}")


def test_blanks_come_to_an_end(grammars: Grammars) -> None:
    """vLLM#38696, vLLM#44619, xgrammar#412, omlx#2990: a model that prefers blanks."""
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 9}
    tokens = grammars.vocabulary.tokens
    blanks = {i for i, each in enumerate(tokens) if each and not each.strip(b" \n\t\r")}

    def greedy(given: dict) -> str:
        matcher, text = grammars.matcher(StructuredOutputsParams.of(given)), b""
        for _ in range(40):
            ids = np.flatnonzero(allowed(matcher, grammars.width)).tolist()
            if not ids:
                break
            token = next((each for each in ids if each in blanks), ids[0])
            matcher.accept(token)
            text += tokens[token]
        return text.decode()

    assert not BLANKS.search(greedy({"json": schema}))
    assert " " not in greedy({"json": schema, "whitespace_pattern": r"\n?"})
    assert BLANKS.search(greedy({"json": schema, "whitespace_pattern": " *"}))  # if asked for


def test_properties_come_in_the_order_of_the_schema(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}},
              "required": ["a", "z"], "additionalProperties": False}  # fmt: skip
    for given in (schema, json.dumps(schema)):
        text = text_of(grammars, {"json": given}, random.Random(0))
        assert re.sub(r"\s", "", text) == '{"z":1,"a":2}'


def test_options_within_a_schema_do_not_loosen_it(grammars: Grammars) -> None:
    """The library reads options from schemas, which are a client's."""
    loose = {"type": "array", "items": {"const": 1},
             "x-guidance": {"whitespace_flexible": True, "lenient": True}}  # fmt: skip
    matcher = grammars.matcher(StructuredOutputsParams(json=loose))
    assert not all(map(matcher.accept, grammars._tokenizer.encode("[ \n\t 1", False)))
