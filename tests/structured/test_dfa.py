"""The masks of the regular expressions are right: llguidance and Python's `re` say the same."""

import random
import re

import numpy as np
import pytest

from minillm.errors import InvalidRequestError
from minillm.structured.dfa import Dfa, utf8_ranges
from minillm.structured.grammars import Grammars
from minillm.structured.matcher import DfaMatcher
from minillm.structured.vocabulary import Vocabulary, token_bytes
from tests.structured.conftest import PADDING, allowed

PARTS = ["a", "b", "7", "é", "日", r"\d", r"\w", r"\s", ".", "[a-f]", '[^a-z"]', "[é-ü0-3]", r"\.",
         "x", "ion", r"[^\d]", r"\W", "😀", r"\u00e9", r"[\w.-]", r"\n", " ", '"', "/", r"\D",
         r"\S", "[߿-ࠀ]", "[^\uffff-\U00010001]"]  # fmt: skip
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "*?", "{0}", "{3}"]


def pattern_of(dice: random.Random, depth: int = 3) -> str:
    kind = dice.random()
    if depth == 0 or kind < 0.3:
        return dice.choice(PARTS)
    inner = pattern_of(dice, depth - 1)
    if kind < 0.55:
        return inner + pattern_of(dice, depth - 1)
    if kind < 0.7:
        return f"(?:{inner}|{pattern_of(dice, depth - 1)})"
    return f"({inner}){dice.choice(REPEATS)}"


PATTERNS = [pattern_of(random.Random(seed)) for seed in range(200)]
BOMBS = {
    "(a|b)*a(a|b){20}": "more than 4,096 states", "a{1,100000}": "more than 20,000 states",
    "((a{99}){99}){99}": "more than 20,000 states",
    "(" * 9000 + "a" + ")" * 9000: "too many groups",
    "(?=a)b": "assert is not supported", r"(a)\1": "groupref is not", r"\ba": "at is not",
    "(?i)a": "sets flags", "a*+": "possessive_repeat is not", "(": "unterminated",
    "a{3,2}": "min repeat", r"\p{L}": "bad escape", "a^b": "at is not supported",
}  # fmt: skip


def test_masks_of_200_patterns_are_those_of_llguidance(grammars: Grammars) -> None:
    pytest.importorskip("llguidance")
    vocabulary, guidance, steps = grammars.vocabulary, grammars.guidance, 0
    for seed, pattern in enumerate(PATTERNS):
        mine, other, dice = DfaMatcher(Dfa(pattern), vocabulary), guidance.pattern(pattern), seed
        for _ in range(12):
            mask = allowed(mine, grammars.width)
            assert (mask == allowed(other, grammars.width)).all(), pattern
            assert mine.is_accepting == other.is_accepting, pattern
            ids = np.flatnonzero(mask)
            if not len(ids):
                break
            dice = dice * 7919 + 13
            token, steps = int(ids[dice % len(ids)]), steps + 1
            assert mine.accept(token)
            assert other.accept(token)
    assert steps > 500


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_texts_that_match_are_those_of_re(start: int) -> None:
    """Random texts that match, and the same with a letter changed."""
    dice, both = random.Random(start), set()
    for pattern in PATTERNS[start : start + 50]:
        dfa = Dfa(pattern)
        text, state = b"", 1
        for _ in range(dice.randrange(12)):
            options = np.flatnonzero(dfa.next[state])
            if not len(options):
                break
            text += bytes([options[dice.randrange(len(options))]])
            state = dfa.after(state, text[-1:])
        shown = text.decode(errors="ignore")
        for each in (shown, shown[1:], shown + "a", shown.replace("a", "b")):
            found = re.fullmatch(pattern, each, re.ASCII)
            assert bool(dfa.accepting[dfa.after(1, each.encode())]) == (found is not None), pattern
            both.add(found is not None)
    assert both == {True, False}


def test_every_character_has_exactly_its_bytes() -> None:
    dfa = Dfa("[^a]")
    for code in [*range(0x3000), *range(0xD700, 0xE100), *range(0xFF00, 0x10100), 0x10FFFF]:
        text = chr(code).encode(errors="surrogatepass")
        valid = code != ord("a") and not 0xD800 <= code < 0xE000
        assert bool(dfa.accepting[dfa.after(1, text)]) == valid, hex(code)
    wrong = b"\xc0\xaf", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80"  # no UTF-8
    assert not any(dfa.after(1, text) for text in wrong)
    sizes = [np.prod([b - a + 1 for a, b in each]) for each in utf8_ranges(0, 0x10FFFF)]
    assert sum(sizes) == 0x110000 - 0x800


@pytest.mark.parametrize("pattern", BOMBS, ids=lambda pattern: pattern[:20])
def test_what_is_not_regular_or_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match=BOMBS[pattern]) as caught:
        Dfa(pattern)
    assert len(str(caught.value)) < 250


def test_no_way_leads_into_a_dead_end() -> None:
    """A byte after which nothing matches is not allowed, even if the text matches so far."""
    dfa = Dfa(r"ab[^\x00-\U0010ffff]|ac")
    assert [dfa.after(1, text) > 0 for text in (b"a", b"ab", b"ac")] == [True, False, True]


def test_special_tokens_and_padding_have_no_bytes(grammars: Grammars, tokenizer) -> None:
    vocabulary = grammars.vocabulary
    assert len(vocabulary) == tokenizer.vocab_size + PADDING
    assert set(vocabulary.tokens[-PADDING:]) == {b""}
    assert all(vocabulary.tokens[each] == b"" for each in tokenizer.special_ids)
    ids = tokenizer.encode("x = 'é日' # <|end|>\n", add_special_tokens=False)
    assert b"".join(vocabulary.tokens[each] for each in ids).decode() == "x = 'é日' # <|end|>\n"


def test_bytes_of_other_kinds_of_vocabularies() -> None:
    """Byte fallback and SentencePiece's blanks (vLLM#31391, llguidance#268)."""
    import tokenizers
    from tokenizers import decoders

    from minillm.text.tokenizer import Tokenizer

    words = ["<unk>", "▁a", "b", "<0xC3>", "<0xA9>", "▁", "<s>"]
    vocab = {word: place for place, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>"])
    made = [token_bytes(Tokenizer(backend), each) for each in range(len(words))]
    assert made[1:] == [b" a", b"b", b"\xc3", b"\xa9", b" ", b""]
    mask = Dfa("é").mask(1, Vocabulary(made))
    assert np.flatnonzero(mask).tolist() == [3]
