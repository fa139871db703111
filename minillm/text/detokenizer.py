"""Incremental detokenization: returns text as soon as it can no longer change.

Tokens cannot be decoded one by one: a character may span several tokens, and many decoders drop the
leading space of the first token. Decoding the whole output in every step is correct but quadratic.
So a short window of recent tokens is decoded, which begins with context whose text was already
returned:

    prompt and output ... | context tokens | new tokens
                          |<-------- window ---------->|
    text of the window    |  shown           | pending |

Only an incomplete character is held back:

* A byte-level text that ends inside a character decodes to one U+FFFD at the end, for at most three
  bytes ("maximal subpart" replacement, Unicode standard section 3.9). It is held back.
* ``<0xXX>`` byte tokens (SentencePiece byte fallback) are held back until they form a character.

A byte-level tokenizer needs no window: its text is the concatenation of its tokens' bytes, so a
table and a UTF-8 decoder give the same text in a tenth of the time.
"""

import codecs
from collections.abc import Container, Sequence

from minillm.text.tokenizer import TokenBytes, Tokenizer

_CONTEXT = 6
"""Tokens kept as context: at least four for an incomplete character, and one before it."""

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Detokenizes one output piece by piece.

    For prompt P and output G the pieces join to ``decode(P + G)`` without its common prefix with
    ``decode(P)``. So a character that begins in the prompt belongs to the output.

    Exception: a ``ByteFallback`` decoder replaces a whole run of byte tokens by U+FFFD if any byte
    in it is invalid. Waiting for the end of a run would delay each line of a Llama 2 model, whose
    newline is the token ``<0x0A>``. So each complete character is returned at once, and if a later
    byte of the run is invalid, only the bytes since then become U+FFFD.

    Args:
        tokenizer: gives the bytes of each token, or decodes the window.
        prompt_token_ids: the prompt; only its last tokens are used.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_end", "_run", "_shown", "_skip", "_stream", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._end = 0  # characters that `starts` has added
        self._stream: ByteStream | None = None
        if tokenizer.token_bytes is not None:
            skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
            end = self._prompt_end(prompt_token_ids)
            self._stream = ByteStream(tokenizer.token_bytes, skipped, end)
            return
        self._window: list[int] = []
        self._shown = ""
        self._run = b""  # the last byte tokens, if they may become a character
        for token_id in self._prompt_end(prompt_token_ids):
            self._push(token_id)
        self._shown = self._decode()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add generated ids; return the text that can no longer change."""
        if self._stream is not None:
            return self._stream.push(token_ids)
        return "".join([self._push(token_id) for token_id in token_ids])

    def _push(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skip):
            return ""
        self._window.append(token_id)
        byte = self._tokenizer.byte_fallback.get(token_id)
        if byte is not None:
            return self._push_byte(byte)
        self._run = b""
        text = self._decode()
        stable = text[:-1] if text.endswith(REPLACEMENT) else text
        new = stable[common_length(self._shown, stable) :]
        if len(stable) >= len(self._shown):
            self._shown = stable
        if len(self._window) > 2 * _CONTEXT:
            self._shrink(pending=len(text) - len(self._shown))
        return new

    def flush(self) -> str:
        """Return the text held back at the end of the output; an incomplete character is U+FFFD."""
        if self._stream is not None:
            return self._stream.flush()
        return self._flush()

    def starts(self, token_ids: Sequence[int]) -> list[int]:
        """Add generated ids; return where each begins in the text of all ids added in this way.

        A part of a character begins where the character does, and a token without text where the
        next text does.
        """
        return [self._start(token_id) for token_id in token_ids]

    def _start(self, token_id: int) -> int:
        before = self._end
        self._end += len(self.push([token_id]))
        if not self._tokenizer.has_text(token_id, self._skip):
            return before
        if token_id in self._tokenizer.byte_fallback:
            return max(before, self._end - 1)
        held = len(self._decode()) - len(self._shown) if self._stream is None else self._stream.held
        # Counted from the end, because U+FFFD of bytes that this token left incomplete may come
        # before it. If it continues a character, its own text alone has as many characters or more.
        return max(before, self._end + held - len(self._tokenizer.token_text(token_id)))

    def _flush(self) -> str:
        text = self._decode()
        new = text[common_length(self._shown, text) :]
        self._shown = text
        return new

    def _push_byte(self, byte: int) -> str:
        self._run += bytes([byte])
        try:
            self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""  # the character is incomplete
        self._run = b""
        new = self._flush()
        # A new context, because the decoder would join the next byte to the ones just returned.
        anchor, self._shown = self._tokenizer.anchor
        self._window = [*anchor]
        return new

    def _shrink(self, pending: int) -> None:
        self._window = self._window[-_CONTEXT:]
        text = self._decode()
        self._shown = text[: len(text) - pending]

    def _prompt_end(self, ids: Sequence[int]) -> list[int]:
        """The last tokens that have text, starting outside a run of byte tokens."""
        end: list[int] = []
        for token_id in reversed(ids):
            if self._tokenizer.has_text(token_id, self._skip):
                end.append(token_id)
                if len(end) >= _CONTEXT and token_id not in self._tokenizer.byte_fallback:
                    break
        return end[::-1]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


class ByteStream:
    """Detokenizes one output of a byte-level tokenizer.

    Args:
        table: the bytes of each token.
        skipped: ids that are left out of the text.
        prompt_end: the last tokens of the prompt: four or more, or all if there are fewer.
    """

    __slots__ = ("_drops", "_held", "_rest", "_skipped", "_table")

    def __init__(self, table: TokenBytes, skipped: Container[int], prompt_end: Sequence[int]):
        self._table, self._skipped = table, skipped
        self._held = ""  # a final U+FFFD is held back until the next text
        self._drops = 0
        self._rest = b"".join([table[token_id] for token_id in prompt_end])
        self._decode()
        # If the prompt ends inside a character, the U+FFFD of its bytes belong to the prompt: there
        # may be several, such as two for ED A1, the invalid start of a surrogate.
        self._drops = len(self._rest.decode("utf-8", "replace"))

    def push(self, token_ids: Sequence[int]) -> str:
        """Add generated ids; return the text that can no longer change."""
        table, skipped = self._table, self._skipped
        self._rest += b"".join([table[each] for each in token_ids if each not in skipped])
        text = self._held + self._decode()
        waits = text.endswith(REPLACEMENT) and not self._rest
        self._held = REPLACEMENT if waits else ""
        return text[:-1] if waits else text

    def flush(self) -> str:
        """Return the text held back at the end of the output."""
        held, self._held = self._held, ""
        return held + self._decode(final=True)

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held) + bool(self._rest)

    def _decode(self, final: bool = False) -> str:
        """Decode and remove the complete characters; invalid bytes become U+FFFD."""
        text, used = codecs.utf_8_decode(self._rest, "replace", final)
        self._rest = self._rest[used:]
        if self._rest[:1] == b"\xed" and self._rest[1:2] >= b"\xa0":
            # A surrogate never becomes a character, but Python waits for its third byte.
            text, self._rest = text + self._rest.decode("utf-8", "replace"), b""
        if text and self._drops:
            own = len(text) - len(text.lstrip(REPLACEMENT))
            text, self._drops = text[min(own, self._drops) :], 0
        return text


def prompt_starts(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text, which lacks the special tokens that the
    tokenizer has added."""
    added = 0
    while added < len(token_ids) and token_ids[added] in tokenizer.special_ids:
        if text.startswith(tokenizer.token_text(token_ids[added])):
            break
        added += 1
    own = token_ids[added:]
    if tokenizer.decode(own, skip_special_tokens=False) != text:  # a normalizer has changed it
        for special in (True, False):
            encoding = tokenizer.encoding(text, special)
            if encoding.ids == token_ids:
                return [start for start, _ in encoding.offsets]
    return [0] * added + IncrementalDetokenizer(tokenizer, (), False).starts(own)


def bytes_of(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """The UTF-8 bytes of a token with this `token_text`, also if it is a part of a character."""
    if REPLACEMENT not in text:
        return text.encode()
    if tokenizer.token_bytes is not None:
        return tokenizer.token_bytes[token_id]
    return tokenizer.byte_piece(token_id) or text.encode()


def common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
