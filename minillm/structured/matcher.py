"""Matchers: which tokens may come next in one text, and how far it has come."""

import re
from typing import Any, Protocol, Self

import numpy as np

from minillm.errors import ForeignCode, InvalidRequestError
from minillm.structured.dfa import Dfa
from minillm.structured.vocabulary import Vocabulary, pack

MAX_MASKS = 128  # that a DFA keeps; a mask has V / 8 bytes


class Matcher(Protocol):
    """The constraint of one text. Its state depends on the accepted tokens alone."""

    def fill(self, bits: np.ndarray) -> None:
        """Write which tokens may come next, token t in bit t % 8 of byte t // 8. Ends of the
        sequence are not among them."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and nothing changes, if it may not come next."""

    def rollback(self, count: int) -> None:
        """Take the last accepted tokens back."""

    def copy(self) -> Self:
        """A matcher in the same state, which advances on its own."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""


class DfaMatcher:
    """The matcher of a regular expression. Copies share the automaton and its masks."""

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary):
        self.dfa, self.vocabulary = dfa, vocabulary
        self._masks: dict[int, np.ndarray] = {}  # by state
        self._states = [1]

    def fill(self, bits: np.ndarray) -> None:
        """See `Matcher`."""
        state = self._states[-1]
        mask = self._masks.get(state)
        if mask is None:
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
            mask = self._masks[state] = pack(self.dfa.mask(state, self.vocabulary))
        bits[: len(mask)] = mask
        bits[len(mask) :] = 0

    def accept(self, token_id: int) -> bool:
        """See `Matcher`."""
        text = self.vocabulary.tokens[token_id]
        state = self.dfa.after(self._states[-1], text) if text else 0
        if state:
            self._states.append(state)
        return state > 0

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        del self._states[len(self._states) - count :]

    def copy(self) -> "DfaMatcher":
        """See `Matcher`."""
        other = DfaMatcher(self.dfa, self.vocabulary)
        other._masks, other._states = self._masks, list(self._states)
        return other

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self.dfa.accepting[self._states[-1]])


class GuidanceMatcher:
    """A matcher of llguidance, which knows JSON schemas, context-free grammars and patterns."""

    def __init__(self, inner: Any, vocabulary: Vocabulary):
        self._inner, self._vocabulary = inner, vocabulary

    def fill(self, bits: np.ndarray) -> None:
        """See `Matcher`. No token is left after a limit of the library was exceeded."""
        own = np.zeros(4 * (len(self._vocabulary) // 32 + 1), dtype=np.uint8)
        if not self._inner.is_error():
            self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        np.bitwise_and(own[: len(bits)], self._vocabulary.text_bits, out=bits)
        if self._inner.is_error():
            bits[:] = 0

    def accept(self, token_id: int) -> bool:
        """See `Matcher`."""
        return (
            bool(self._vocabulary.length[token_id])
            and self._inner.try_consume_tokens([token_id]) == 1
        )

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        if count:
            self._inner.rollback(count)

    def copy(self) -> "GuidanceMatcher":
        """See `Matcher`."""
        return GuidanceMatcher(self._inner.deep_copy(), self._vocabulary)

    @property
    def is_accepting(self) -> bool:
        """See `Matcher`."""
        return bool(self._inner.is_accepting())


def in_one_sentence(error: str) -> str:
    """An error of llguidance without its picture of the grammar."""
    text = re.split(r"\n\s*1 \| ", error)[0]
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    return " ".join(text.replace("\n", " ").replace("^", " ").split())[:300].rstrip(".")


class Guidance:
    """llguidance over one vocabulary, in the form that it reads: ids without text are special
    tokens, and its own end is behind the model's tokens."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, vocabulary: Vocabulary):
        import llguidance

        self._library, self.vocabulary, self.eos_token_id = llguidance, vocabulary, len(vocabulary)
        texts = enumerate([*vocabulary.tokens, b""])
        self.tokens = [token or f"<|{i}|>".encode() for i, token in texts]
        others = [i for i, token in enumerate(vocabulary.tokens) if not token]
        self.special_token_ids = [*others, self.eos_token_id]
        itself: Any = self
        with ForeignCode(InvalidRequestError, "llguidance cannot use this model's tokens"):
            self._tokenizer = llguidance.LLTokenizer(itself, eos_token=[self.eos_token_id])

    def compile(self, lark: str) -> GuidanceMatcher | str:
        """The matcher of a grammar, or why there is none.

        Tokens are not forced: llguidance would otherwise allow only one division of forced text
        into tokens, and a mask would not be that of the grammar alone.
        """
        lark = '%llguidance {"no_forcing": true}\n' + lark
        limits = self._library.LLParserLimits(verbose_errors=False)
        make = self._library.LLMatcher
        with ForeignCode(InvalidRequestError, "structured_outputs cannot be compiled"):
            grammar = make.grammar_from_lark(lark)
            inner = make(self._tokenizer, grammar, log_level=0, limits=limits)
            if inner.is_error():
                return in_one_sentence(inner.get_error())
            return GuidanceMatcher(inner, self.vocabulary)

    def pattern(self, regex: str) -> GuidanceMatcher | str:
        """The matcher of a pattern, whose classes are ASCII as in `dfa.py`."""
        return self.compile(f"start: /{self._library.regex_to_lark(regex, 'dws')}/")
