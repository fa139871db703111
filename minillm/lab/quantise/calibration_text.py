"""The calibration text as windows of tokens."""

import gzip
from pathlib import Path

import torch
from torch import Tensor

from minillm.errors import ConfigError, reason
from minillm.models.checkpoint import ASSETS
from minillm.text.tokenizer import Tokenizer

DEFAULT = ASSETS / "calibration.txt.gz"  # training files of the embedded models, no held-out text
SAMPLES, LENGTH = 64, 512


def read_text(
    path: Path | None = None, default: Path = DEFAULT, what: str = "calibration file"
) -> str:
    """A UTF-8 file, or a packed default: a sample of the embedded models' training text. Raises
    ConfigError if it cannot be read."""
    try:
        data = (path or default).read_bytes()
        return (data if path else gzip.decompress(data)).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"The {what} {path} cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The {what} {path} is not UTF-8.") from error


def calibration_windows(
    tokenizer: Tokenizer,
    text: str | None = None,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
) -> Tensor:
    """`samples` windows of `length` tokens [samples, length], drawn without overlap by `seed`.

    Args:
        text: the calibration text; None: a sample of the embedded models' training text.

    Raises:
        ConfigError: the text is too short for the windows.
    """
    if samples < 1 or length < 1:
        raise ConfigError(
            f"There must be at least 1 window of 1 token, not {samples} windows of {length}."
        )
    ids = tokenizer.encode(read_text() if text is None else text)
    if len(ids) < samples * length:
        raise ConfigError(
            f"The calibration text has {len(ids):,} tokens, but {samples} windows of {length} need "
            f"{samples * length:,}; give a longer text, or fewer --samples or a smaller --length."
        )
    generator = torch.Generator().manual_seed(seed)
    count = len(ids) // length
    shift = int(torch.randint(len(ids) - count * length + 1, (1,), generator=generator))
    chosen = torch.randperm(count, generator=generator)[:samples]
    return torch.tensor(ids[shift : shift + count * length]).view(count, length)[chosen]
