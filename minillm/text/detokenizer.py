"""Turn generated ids into text as they come, showing only text that can no longer change.

Decoding one token alone is wrong twice: a character may be spread over several tokens, and many
decoders treat the first token of a text specially (they drop its leading space). Decoding the whole
output at every step is right but quadratic. So a short window of recent tokens is decoded, part of
it context whose text is already out:

    prompt and output ... | context tokens | new tokens
                          |<-------- window ---------->|
    text of the window    |  shown           | pending |

Only what may be part of an unfinished character waits:

* A byte-level text that ends inside a character ends with one U+FFFD, for at most three bytes
  ("maximal subpart" replacement, Unicode standard section 3.9). That one character waits.
* ``<0xXX>`` byte tokens (SentencePiece byte fallback) wait until they form a character.

A byte-level tokenizer needs no window: its text is the bytes of its tokens, one after another, so
that a table and a UTF-8 decoder do the same for a tenth of the time.
"""

import codecs
from collections.abc import Container, Sequence

from minillm.text.tokenizer import TokenBytes, Tokenizer

_CONTEXT = 6
"""Tokens kept as context: four are needed to cover an unfinished character, and one before it."""

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of one output, piece by piece; the pieces join to the text of the whole.

    For prompt P and output G the pieces join to ``decode(P + G)`` without the part it shares with
    ``decode(P)``: a character that the prompt left unfinished belongs to the output.

    One exception. A ``ByteFallback`` decoder turns a whole run of byte tokens into U+FFFD when any
    byte of it is invalid. Waiting for the end of every run would delay each line of a Llama 2
    model, whose newline is the token ``<0x0A>``. So characters are shown when they are complete
    and stay if a later byte of the run is invalid; only the bytes since then become U+FFFD.

    Args:
        tokenizer: has the bytes of each token, or decodes the window.
        prompt_token_ids: what precedes the output; only its end is looked at.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_shown", "_skip", "_stream", "_tokenizer", "_utf8", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream: ByteStream | None = None
        if tokenizer.token_bytes is not None:
            skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
            end = self._prompt_end(prompt_token_ids)
            self._stream = ByteStream(tokenizer.token_bytes, skipped, end)
            return
        self._window: list[int] = []
        self._shown = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        for token_id in self._prompt_end(prompt_token_ids):
            self._push(token_id)
        self._shown = self._decode()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add generated ids (known to the tokenizer or not); return the newly stable text."""
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
        self._utf8.reset()
        text = self._decode()
        stable = text[:-1] if text.endswith(_REPLACEMENT) else text
        new = stable[_common_length(self._shown, stable) :]
        if len(stable) >= len(self._shown):
            self._shown = stable
        if len(self._window) > 2 * _CONTEXT:
            self._shrink(pending=len(text) - len(self._shown))
        return new

    def flush(self) -> str:
        """Return what is left at the end of the output, an unfinished character as U+FFFD."""
        if self._stream is not None:
            return self._stream.flush()
        return self._flush()

    def _flush(self) -> str:
        text = self._decode()
        new = text[_common_length(self._shown, text) :]
        self._shown = text
        return new

    def _push_byte(self, byte: int) -> str:
        try:
            if not self._utf8.decode(bytes([byte])):
                return ""  # the character is not complete
        except UnicodeDecodeError:
            self._utf8.reset()  # it never will be
        new = self._flush()
        # Another context, because the decoder would join the next byte to the ones just shown.
        anchor, self._shown = self._tokenizer.anchor
        self._window = [*anchor]
        return new

    def _shrink(self, pending: int) -> None:
        self._window = self._window[-_CONTEXT:]
        text = self._decode()
        self._shown = text[: len(text) - pending]

    def _prompt_end(self, ids: Sequence[int]) -> list[int]:
        """The last tokens that have text, beginning outside a run of byte tokens."""
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
    """The same for a byte-level tokenizer.

    Args:
        table: the bytes of each token.
        skipped: ids that have no text here.
        prompt_end: the last tokens of the prompt, at least four of them if it has so many.
    """

    __slots__ = ("_drops", "_held", "_rest", "_skipped", "_table")

    def __init__(self, table: TokenBytes, skipped: Container[int], prompt_end: Sequence[int]):
        self._table, self._skipped = table, skipped
        self._held = ""  # a U+FFFD at the end waits for the next text
        self._drops = 0
        self._rest = b"".join([table[token_id] for token_id in prompt_end])
        self._decode()
        # Where the prompt ends inside a character, each U+FFFD that comes of it is the prompt's:
        # two of ED A1, which begins a surrogate and so is no beginning at all.
        self._drops = len(self._rest.decode("utf-8", "replace"))

    def push(self, token_ids: Sequence[int]) -> str:
        """Add generated ids; return the newly stable text."""
        table, skipped = self._table, self._skipped
        self._rest += b"".join([table[each] for each in token_ids if each not in skipped])
        text = self._held + self._decode()
        waits = text.endswith(_REPLACEMENT) and not self._rest
        self._held = _REPLACEMENT if waits else ""
        return text[:-1] if waits else text

    def flush(self) -> str:
        """Return what is left."""
        held, self._held = self._held, ""
        return held + self._decode(final=True)

    def _decode(self, final: bool = False) -> str:
        """The whole characters, whose bytes are taken off, and U+FFFD for what never is one."""
        text, used = codecs.utf_8_decode(self._rest, "replace", final)
        self._rest = self._rest[used:]
        if text and self._drops:
            own = len(text) - len(text.lstrip(_REPLACEMENT))
            text, self._drops = text[min(own, self._drops) :], 0
        return text


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
