"""Pieces of text join to the decoded whole, for every kind of tokenizer and any ids."""

import os
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minillm.text.detokenizer import IncrementalDetokenizer
from minillm.text.tokenizer import Tokenizer
from tests.text.build import KINDS, TEXTS

MARK = "<|segment|>"
BYTE_FALLBACK = ["llama2", "metaspace_first"]
OTHERS = ["byte_level", "unigram", "wordlevel", "wordpiece", "bpe_suffix"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    backend = KINDS[kind]()
    backend.add_special_tokens([MARK])
    return Tokenizer(backend)


def draw_ids(data: st.DataObject, tokenizer: Tokenizer, max_size: int) -> list[int]:
    """Random ids: known, unknown, special, and (where there are any) mostly bytes."""
    last = tokenizer.vocab_size - 2  # MARK is the last one
    any_id = st.integers(0, last) | st.integers(last + 2, last + 9)
    common = st.sampled_from([*tokenizer.byte_fallback, *tokenizer.special_ids, 5])
    common = common.filter(lambda i: i <= last)
    return data.draw(st.lists(any_id | common, max_size=max_size))


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush()


def reference(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """``decode`` with a mark wherever a run of byte tokens has become a character, or cannot."""
    marked, run = [], b""
    mark = tokenizer.encode(MARK, add_special_tokens=False)[-1]
    for i in ids:
        if not tokenizer.has_text(i, skip):
            continue
        marked.append(i)
        if i not in tokenizer.byte_fallback:
            run = b""
            continue
        run += bytes([tokenizer.byte_fallback[i]])
        try:
            run.decode()
            finished = True
        except UnicodeDecodeError as error:
            finished = error.reason != "unexpected end of data"
        if finished:
            marked.append(mark)
            run = b""
    return tokenizer.decode(marked, skip_special_tokens=False).replace(MARK, "")


def after(prompt_text: str, whole: str) -> str:
    return whole[len(os.path.commonprefix([prompt_text, whole])) :]  # noqa: RUF071


@pytest.mark.parametrize("ids", [[], [97], [172], [65], [97, 97]])
def test_a_prompt_that_ends_in_half_a_surrogate_has_two_marks(ids: list[int]) -> None:
    """ED A1 waits for a third byte and becomes two U+FFFD, both of which are the prompt's."""
    tokenizer, prompt = tokenizer_of("byte_level"), [172, 97]
    whole = tokenizer.decode(prompt + ids, False)
    expected = after(tokenizer.decode(prompt, False), whole)
    assert stream(tokenizer, prompt, ids, False) == expected


@pytest.mark.parametrize("kind", OTHERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_join_to_the_decoded_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, ids = draw_ids(data, tokenizer, 20), draw_ids(data, tokenizer, 40)
    whole = tokenizer.decode(prompt + ids, skip)
    expected = after(tokenizer.decode(prompt, skip), whole)
    assert stream(tokenizer, prompt, ids, skip) == expected


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_bytes_and_the_window_agree_after_every_token(data: st.DataObject, skip: bool) -> None:
    """Also on when a character comes, for a stop string may end there; and in pieces of any
    size."""
    tokenizer = tokenizer_of("byte_level")
    windowed = Tokenizer(tokenizer._backend)
    windowed.token_bytes = None
    assert tokenizer.token_bytes is not None
    # Bytes of characters, whole and cut: the lead byte and those that may follow are frequent.
    alphabet = bytes_to_unicode()
    ids_of = {byte: tokenizer._backend.token_to_id(alphabet[byte]) for byte in range(256)}
    byte = st.sampled_from([0xE4, 0xB8, 0xAD, 0xEF, 0xBF, 0xBD, 0xED, 0xF0, 0x9F, 0xFF, 0xC3, 0x78])
    some = st.lists(byte.map(ids_of.__getitem__), max_size=12)
    prompt = draw_ids(data, tokenizer, 8) + data.draw(some)
    ids = data.draw(some) + draw_ids(data, tokenizer, 12) + data.draw(some)
    fast = IncrementalDetokenizer(tokenizer, prompt, skip)
    slow = IncrementalDetokenizer(windowed, prompt, skip)
    batched = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces = [slow.push([each]) for each in ids]
    assert [fast.push([each]) for each in ids] == pieces
    cut = data.draw(st.integers(0, len(ids)))
    assert batched.push(ids[:cut]) == "".join(pieces[:cut])
    assert batched.push(ids[cut:]) == "".join(pieces[cut:])
    assert fast.flush() == batched.flush() == slow.flush()
    assert fast.flush() == slow.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_used_where_the_decoder_has_nothing_else(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert (tokenizer.token_bytes is not None) == kind.startswith("byte_level")
    if tokenizer.token_bytes is not None:
        for token_id in range(-1, tokenizer.vocab_size + 2):
            right = tokenizer.decode([token_id], skip_special_tokens=False)
            assert tokenizer.token_bytes[token_id].decode(errors="replace") == right


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_byte_tokens_become_characters_as_soon_as_they_can(kind, data, skip):
    tokenizer = tokenizer_of(kind)
    prompt, ids = draw_ids(data, tokenizer, 20), draw_ids(data, tokenizer, 40)
    expected = after(reference(tokenizer, prompt, skip), reference(tokenizer, prompt + ids, skip))
    assert stream(tokenizer, prompt, ids, skip) == expected


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_half_a_surrogate_holds_no_text_back(kind):
    """ED A0 cannot become a character, so the byte behind it is one by itself."""
    tokenizer = tokenizer_of(kind)
    id_of = {byte: i for i, byte in tokenizer.byte_fallback.items()}
    ids = [id_of[byte] for byte in (0xED, 0xA0, 0x41)]
    assert stream(tokenizer, [], ids[:2], False) == 2 * "\ufffd"
    assert stream(tokenizer, [], ids, False) == reference(tokenizer, ids, False) == "\ufffd\ufffdA"


@pytest.mark.parametrize("kind", [*BYTE_FALLBACK, *OTHERS])
@given(data=st.data(), text=st.sampled_from(TEXTS) | st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_text_is_shown_at_once_and_is_never_half_a_character(kind, data, text):
    """After each id of a text everything is out but an unfinished character."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, ids = ids[:cut], ids[cut:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=False)
    before = reference(tokenizer, prompt, skip=False)
    shown = ""
    for i, token_id in enumerate(ids):
        shown += detokenizer.push([token_id])
        now = after(before, reference(tokenizer, prompt + ids[: i + 1], skip=False))
        assert now.startswith(shown)
        assert set(now[len(shown) :]) <= {"\ufffd"}
    shown += detokenizer.flush()
    assert shown == after(before, tokenizer.decode(prompt + ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ("e4", "b8 ad", "中"),  # the output finishes the character of the prompt
        ("e4", "b8 78", "x"),  # it does not: the U+FFFD belongs to the prompt
        ("e4", "ff 78", "\ufffdx"),
        ("e4 b8 ad", "78", "x"),
        ("78", "e4 b8", "\ufffd"),
    ],
)
def test_a_prompt_that_ends_inside_a_character(prompt: str, output: str, expected: str) -> None:
    tokenizer = tokenizer_of("byte_level")
    alphabet = bytes_to_unicode()

    def ids_of(text: str) -> list[int]:
        ids = [tokenizer._backend.token_to_id(alphabet[b]) for b in bytes.fromhex(text)]
        return [i for i in ids if i is not None]

    assert stream(tokenizer, ids_of(prompt), ids_of(output), True) == expected


def test_a_run_of_bytes_in_the_prompt_is_read_from_its_start() -> None:
    tokenizer = tokenizer_of("llama2")
    to_id = {byte: i for i, byte in tokenizer.byte_fallback.items()}
    prompt = [to_id[b] for b in bytes.fromhex("e4 c3 e4 c3 e4 c3 e4")]  # only the last is open
    assert stream(tokenizer, prompt, [to_id[0xB8], to_id[0xAD]], True) == "中"


def test_a_token_costs_the_same_at_any_length() -> None:
    class Counting(Tokenizer):
        decoded = 0

        def decode(self, ids, skip_special_tokens=True):  # type: ignore[no-untyped-def]
            self.decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    for kind in ("byte_level", "llama2"):
        tokenizer = Counting(KINDS[kind]())
        ids = tokenizer.encode(" ".join(TEXTS)) * 20 + list(range(3, 259)) * 4  # text, then garbage
        detokenizer = IncrementalDetokenizer(tokenizer, ids[: len(ids) // 2])
        assert tokenizer.decoded <= 14 * 40  # only the end of a prompt is read
        tokenizer.decoded = 0
        for token_id in ids:
            detokenizer.push([token_id])
        assert tokenizer.decoded <= 14 * len(ids)
