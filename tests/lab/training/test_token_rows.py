"""Rows of tokens: every token once per epoch, the same rows on every machine and after resuming."""

import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from minillm.lab.training.data import encode_file, row
from minillm.lab.training.tokenizer import PATTERN, train_tokenizer
from minillm.models.checkpoint import ASSETS

STREAM = np.arange(10_000, dtype=np.uint16)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tiny" / "tokenizer.json"))


def test_an_epoch_visits_each_window_once_in_shuffled_order() -> None:
    window, count = 64, (len(STREAM) - 1) // 64 - 1
    starts = [int(row(STREAM, index, window, seed=3)[0]) for index in range(count)]
    assert len(set(starts)) == count
    assert {b - a for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False)} == {window}
    assert starts != sorted(starts)
    again = [int(row(STREAM, index, window, seed=3)[0]) for index in range(count, 2 * count)]
    assert again != starts
    assert again[0] % window != starts[0] % window  # cut at other places


def test_a_row_is_a_stretch_of_the_stream_and_a_pure_function() -> None:
    for index in (0, 5, 1000, 12345):
        one = row(STREAM, index, 100, seed=1)
        assert one.dtype == np.int64
        assert np.array_equal(one, np.arange(one[0], one[0] + 101))
        assert np.array_equal(one, row(STREAM, index, 100, seed=1))
    assert not np.array_equal(row(STREAM, 5, 100, 1), row(STREAM, 5, 100, 2))


def test_training_files_keep_their_text_and_show_split_line_breaks(tokenizer: Tokenizer) -> None:
    text = "class A:\n" + "".join(f"    def f{i}(self):\n        return {i}\n" for i in range(900))
    ids = encode_file(tokenizer, text, random.Random(0))
    assert tokenizer.decode(ids) == text
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids != whole
    extra = len(ids) - len(whole)
    assert 1 <= extra <= len(text) / 1000


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("if x:\n    return y", ["if", " x", ":", "\n    ", "return", " y"]),
        ("a.b(c_d)\n\n\ndef", ["a", ".b", "(c", "_d", ")", "\n\n\n", "def"]),
        ("x = 12345  # no", ["x", " =", " ", "123", "45", " ", " #", " no"]),
    ],
)
def test_pieces_of_python(text: str, pieces: list[str]) -> None:
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_training_a_vocabulary() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 50, vocab_size=265)
    assert tokenizer.get_vocab_size() == 265
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    text = "grüße \x00\t\r\n 日本 🎉 def"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0  # a prompt is the start of a file
    assert tokenizer.decode(ids) == text
    assert max(len(piece) for piece in tokenizer.get_vocab() if "<" not in piece) > 1
