"""The text of a comparison: the same token windows for all models.

A window has T tokens. The first one is context only: tokens 2 to T are scored, and only their bytes
are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.lab.quantise import calibration_text
from minillm.models.checkpoint import ASSETS
from minillm.text.tokenizer import Tokenizer

HELD_OUT = ASSETS / "held_out.txt.gz"  # standard library files that no embedded model has seen
WINDOWS, LENGTH = 40, 512


@dataclass(frozen=True)
class Windows:
    """Token ids int64 [W, T], and the UTF-8 bytes of the scored tokens of each window [W]."""

    name: str
    ids: Tensor
    num_bytes: Tensor

    @property
    def num_scored(self) -> int:
        """Scored tokens of a window."""
        return self.ids.shape[1] - 1


def read_text(path: Path | None = None) -> str:
    """A UTF-8 file; by default text that is held out from the embedded models. Raises ConfigError
    if it cannot be read."""
    return calibration_text.read_text(path, HELD_OUT, "text")


def cut_windows(
    tokenizer: Tokenizer, text: str, name: str, count: int = WINDOWS, length: int = LENGTH
) -> Windows:
    """`count` windows of `length` tokens, evenly spaced over the text, without overlap.

    Raises:
        ConfigError: the text is too short.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < count * length:
        raise ConfigError(
            f"The text has {len(ids):,} tokens, but {count} windows of {length} need "
            f"{count * length:,}; give a longer --text, or smaller --windows or --length."
        )
    steps = max(1, count - 1)
    starts = [i * (len(ids) - length) // steps for i in range(count)]
    rows = [ids[start : start + length] for start in starts]
    sizes = [count_bytes(tokenizer, row[1:]) for row in rows]
    return Windows(name, torch.tensor(rows), torch.tensor(sizes, dtype=torch.float64))


def count_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """UTF-8 bytes of tokens inside a text."""
    if tokenizer.token_bytes is not None:
        return sum(len(tokenizer.token_bytes[i]) for i in ids)
    return sum(
        1 if i in tokenizer.byte_fallback else len(tokenizer.token_text(i).encode()) for i in ids
    )
