"""Schemas of JSONSchemaBench (Geng et al., 2025), whose licences are those of their sources:
a clone of github.com/guidance-ai/jsonschemabench, whose folder MINILLM_JSON_SCHEMA_BENCH names."""

import json
import os
import random
from pathlib import Path

import pytest

from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.errors import InvalidRequestError
from minillm.structured.grammars import Grammars
from minillm.text.tokenizer import Tokenizer
from tests.structured.conftest import PADDING, TINY
from tests.structured.test_schemas import text_of

FOLDER = Path(os.environ.get("MINILLM_JSON_SCHEMA_BENCH", "")) / "data"
SETS = 10
OF_EACH = 6
pytestmark = pytest.mark.skipif(
    not os.environ.get("MINILLM_JSON_SCHEMA_BENCH"), reason="MINILLM_JSON_SCHEMA_BENCH is not set"
)


def test_every_finished_text_is_valid() -> None:
    """60 schemas under random logits. Some are refused, in one sentence with the place; a text that
    takes more than 1,000 tokens is not finished."""
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer, dice = Tokenizer.from_folder(TINY), random.Random(1)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + PADDING)
    valid, refused = 0, []
    for folder in sorted(FOLDER.iterdir()):
        for file in dice.sample(sorted(folder.glob("*.json")), OF_EACH):
            schema = json.loads(file.read_text("utf-8"))
            given = {"json": schema}
            try:
                grammars.matcher(StructuredOutputsParams.of(given))
                text = text_of(grammars, given, dice, 250)
            except (InvalidRequestError, AssertionError) as error:
                refused.append(str(error))
                continue
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
            valid += 1
    assert all("['json'] " in each or "does not end: " in each for each in refused)
    assert valid >= SETS * OF_EACH * 2 // 3, (valid, refused)
