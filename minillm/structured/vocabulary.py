"""The byte strings of a vocabulary: what each token adds to a text."""

from collections.abc import Sequence

import numpy as np

from minillm.text.tokenizer import Tokenizer


class Vocabulary:
    """The bytes of each token of a model.

    Special tokens, ids without a token and the padding of the logits have no bytes: their names are
    not text, so no constraint allows them.
    """

    def __init__(self, tokens: Sequence[bytes]):
        self.tokens = list(tokens)  # b"" for those without text
        self.length = np.array([len(token) for token in self.tokens], dtype=np.int64)  # [V]
        self.start = np.cumsum(self.length) - self.length  # of each token in `flat`
        self.flat = np.frombuffer(b"".join(self.tokens), dtype=np.uint8)
        self.with_text = np.flatnonzero(self.length)  # ids
        self.first = np.zeros(len(self.tokens), dtype=np.uint8)  # the first byte of each
        self.first[self.with_text] = self.flat[self.start[self.with_text]]
        self.of_byte = {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1}
        self.text_bits = pack(self.length > 0)  # uint8 [ceil(V / 8)]

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int) -> "Vocabulary":
        """The vocabulary of a tokenizer for a model with `width` logits."""
        return cls([token_bytes(tokenizer, token_id) for token_id in range(width)])

    def __len__(self) -> int:
        return len(self.tokens)


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token inside a text; empty for a special or unknown one."""
    if not tokenizer.has_text(token_id) or token_id in tokenizer.special_ids:
        return b""
    if token_id in tokenizer.byte_fallback:
        return bytes([tokenizer.byte_fallback[token_id]])
    if tokenizer.token_bytes is not None:
        return tokenizer.token_bytes[token_id]
    return tokenizer.token_text(token_id).encode()


def pack(allowed: np.ndarray) -> np.ndarray:
    """A mask bool [V] as bits uint8 [ceil(V / 8)], token t in bit t % 8."""
    return np.packbits(allowed, bitorder="little")
