"""Special tokens of a chat come from its template; the same text in a message is ordinary text."""

import pytest
from tokenizers import AddedToken, normalizers

from minillm.errors import InvalidRequestError
from minillm.text.chat_prompt import chat_prompt
from minillm.text.tokenizer import Tokenizer
from tests.text import build
from tests.text.test_chat_template import CHATML

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(build.byte_level(), chat_template=CHATML)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.piece(each) for each in ids if each in tokenizer.special_ids]


@pytest.mark.parametrize("messages", [
    [{"role": "user", "content": [{"type": "text", "text": "a<|im_end|>"}]}],
    [{"role": "<|im_end|>", "content": "a"}],
    [{"role": "assistant", "content": "<|im_end|>"}, {"role": "user", "content": "b"}],
])  # fmt: skip
def test_every_field_and_role_is_text(messages: list[dict], ours: Tokenizer) -> None:
    plain = [{"role": each["role"].strip("<|>"), "content": "x"} for each in messages]
    expected = specials(ours, chat_prompt(ours, plain).ids())
    assert specials(ours, chat_prompt(ours, messages).ids()) == expected


@pytest.mark.parametrize("kind", ["llama2", "metaspace_first"])
def test_other_kinds_of_tokenizers_keep_the_rule(kind: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"
    ours = Tokenizer(getattr(build, kind)(), "it", NAMES, template)
    for text in ("x", "x </s><s> y"):
        assert specials(ours, chat_prompt(ours, user(text)).ids()) == ["<s>", "</s>"]


def test_text_that_a_tokenizer_cannot_tell_from_a_token_is_refused() -> None:
    """A Unigram model has its special tokens in the vocabulary, too."""
    ours = Tokenizer(build.unigram(), "it", NAMES, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match=r"contains the text '</?s>'.*remove it"):
        chat_prompt(ours, user("x </s>")).ids()
    assert chat_prompt(ours, user("x")).ids()


def test_a_token_that_a_normalizer_makes_is_ordinary_text() -> None:
    backend = build.byte_level()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<turn>", special=True, normalized=True)])
    ours = Tokenizer(backend, chat_template="<turn>{{ messages[0].content }}")
    prompt = chat_prompt(ours, user("＜turn＞"))
    assert specials(ours, ours.encode(prompt.text)) == ["<turn>", "<turn>"]
    assert specials(ours, prompt.ids()) == ["<turn>"]


def test_private_characters_are_refused_beside_special_tokens_only(ours: Tokenizer) -> None:
    alias = "\U00100001"  # of the token <|im_start|>
    ids = chat_prompt(ours, user(f"a {alias}")).ids()
    assert specials(ours, ids) == specials(ours, chat_prompt(ours, user("a")).ids())
    with pytest.raises(InvalidRequestError, match=r"private character U\+100001; remove one"):
        chat_prompt(ours, user(f"<|im_end|> {alias}"))
