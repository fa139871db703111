"""Turn generated ids into text as they come, showing only text that can no longer change.

Decoding one token alone is wrong twice: a character may be spread over several tokens, and many
decoders treat the first token of a text specially (they drop its leading space). Decoding the whole
output at every step is right but quadratic. So a short window of recent tokens is decoded, part of
it context whose text is already out:

    prompt and output ... | context tokens | new tokens
                          |<-------- window ---------->|
    text of the window    |  shown           | pending |

Two things can still change later text, and nothing else is held back:

* A byte-level text that ends inside a character ends with one U+FFFD, for at most three bytes
  ("maximal subpart" replacement, Unicode standard section 3.9). That one character waits.
* A ``ByteFallback`` decoder turns a run of ``<0xXX>`` tokens into text only if the whole run is
  valid UTF-8, else into one U+FFFD per byte. So a run waits for its end.
"""

from collections.abc import Sequence

from minillm.text.tokenizer import Tokenizer

_CONTEXT = 6
"""Tokens kept as context: four are needed to cover an unfinished character, and one before it."""

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Text of one output, piece by piece; the pieces join to the text of the whole.

    For prompt P and output G the pieces join to ``decode(P + G)`` without the part it shares with
    ``decode(P)``: a character that the prompt left unfinished belongs to the output.

    Args:
        tokenizer: decodes the window.
        prompt_token_ids: what precedes the output; only its end is looked at.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = self._prompt_context(prompt_token_ids)
        self._shown = self._decode()

    def push(self, token_id: int) -> str:
        """Add one generated id (known to the tokenizer or not); return the newly stable text."""
        if not self._tokenizer.has_text(token_id, self._skip):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_fallback_ids:
            return ""
        text = self._decode()
        stable = text[:-1] if text.endswith(_REPLACEMENT) else text
        return self._emit(text, stable)

    def flush(self) -> str:
        """Return what is left at the end of the output, an unfinished character as U+FFFD."""
        text = self._decode()
        return self._emit(text, text)

    def _emit(self, text: str, stable: str) -> str:
        start = _common_length(self._shown, stable)
        if len(stable) >= len(self._shown):
            self._shown = stable
        if len(self._window) > 2 * _CONTEXT:
            self._shrink(pending=len(text) - len(self._shown))
        return stable[start:]

    def _shrink(self, pending: int) -> None:
        window, self._window = self._window, self._window[-_CONTEXT:]
        text = self._decode()
        if len(text) > pending:
            self._shown = text[: len(text) - pending]
        else:  # tokens without text: the next one would be taken for the first of the text
            self._window = window

    def _prompt_context(self, ids: Sequence[int]) -> list[int]:
        """The last tokens that have text, more of them if they are one run of bytes."""
        context: list[int] = []
        plain = False
        for token_id in reversed(ids):
            if plain and len(context) >= _CONTEXT:
                break
            if self._tokenizer.has_text(token_id, self._skip):
                context.append(token_id)
                plain = plain or token_id not in self._tokenizer.byte_fallback_ids
        return context[::-1]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)


def _common_length(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
