"""A tokenizer of real size: Qwen3's 151,669 tokens, compared with transformers."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minillm.text.chat_prompt import chat_prompt
from minillm.text.detokenizer import IncrementalDetokenizer
from minillm.text.tokenizer import Tokenizer
from tests.text.build import TEXTS
from tests.text.test_chat_tools import CONVERSATIONS as WITH_CALLS
from tests.text.test_chat_tools import TOOLS, for_transformers

SIZE = 151_669
Pair = tuple[Tokenizer, PreTrainedTokenizerBase]
PAGE = (Path(__file__).resolve().parents[2] / "minillm" / "GUIDE.md").read_text("utf-8")
CONVERSATIONS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é 中 😀"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
)


@pytest.fixture(scope="module")
def both(qwen3: Path) -> Pair:
    ours, theirs = Tokenizer.from_folder(qwen3), AutoTokenizer.from_pretrained(qwen3)
    assert ours.vocab_size == len(theirs) == SIZE
    return ours, theirs


@pytest.mark.parametrize("text", [*TEXTS, PAGE], ids=range(len(TEXTS) + 1))
def test_texts_have_the_same_ids(both: Pair, text: str) -> None:
    assert both[0].encode(text) == both[1].encode(text)


@given(text=st.text(max_size=60))
@settings(max_examples=300)
def test_any_text_has_the_same_ids_and_comes_back(both: Pair, text: str) -> None:
    ids = both[0].encode(text)
    assert ids == both[1].encode(text)
    assert both[0].decode(ids, False) == both[1].decode(ids)


@given(seed=st.integers(0, 2**32), skip=st.booleans(), cut=st.integers(0, 60))
@settings(max_examples=300)
def test_random_ids_stream_to_the_text_that_transformers_decodes(
    both: Pair, seed: int, skip: bool, cut: int
) -> None:
    """Most random tokens are whole words, so a third are the tokens of single bytes, and some are
    special."""
    ours, theirs = both
    draw = random.Random(seed)
    kinds = (range(256), range(SIZE), sorted(ours.special_ids))
    ids = [draw.choice(draw.choice(kinds)) for _ in range(60)]
    detokenizer = IncrementalDetokenizer(ours, [], skip)
    text = "".join(detokenizer.push([each]) for each in ids[:cut])
    text += detokenizer.push(ids[cut:]) + detokenizer.flush()
    assert text == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("ask", [False, True])
def test_the_prompt_is_what_transformers_renders(both: Pair, messages: list, ask: bool) -> None:
    wanted = both[1].apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    assert both[0].render_chat(messages, add_generation_prompt=ask) == wanted


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize("thinks", [False, True])
def test_tools_and_calls_are_those_of_transformers(both: Pair, name: str, thinks: bool) -> None:
    wanted = both[1].apply_chat_template(
        for_transformers(WITH_CALLS[name]), tools=TOOLS, tokenize=False,
        add_generation_prompt=True, enable_thinking=thinks,
    )  # fmt: skip
    variables = {"enable_thinking": thinks}
    ours = chat_prompt(both[0], WITH_CALLS[name], tools=TOOLS, chat_template_kwargs=variables)
    assert ours.text == wanted
