"""Configurations of well-known models, for cost predictions and dummy weights without a download.

Each preset is the published ``config.json`` of the model, parsed by its family. The fields that
describe the files of the checkpoint are removed: ``auto_map``, ``transformers_version`` and
``quantization_config`` (DeepSeek-V3). To add a preset, add its file and its name.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from minillm.config import ModelConfig
from minillm.errors import ConfigError, did_you_mean
from minillm.models.families import parse_config

FOLDER = Path(__file__).parent.parent / "assets" / "presets"
NAMES = (
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mistral-7b",  # version 0.1, which has a sliding window
    "mixtral-8x7b",
    "qwen2.5-3b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",  # without the 62nd layer, which drafts tokens (multi-token prediction)
    "smollm2-135m",
)


class Presets(Mapping[str, ModelConfig]):
    """Read-only mapping of names to configurations; a lookup reads the file of that name."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = folder, names

    def __getitem__(self, name: str) -> ModelConfig:
        if name not in self._names:
            raise KeyError(name)
        return read_preset(self._folder / f"{name}.json")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_preset(path: Path) -> ModelConfig:
    """The configuration in the file of a preset; raises ConfigError if it cannot be read."""
    try:
        fields = json.loads(path.read_text("utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a {type(fields).__name__}, not a JSON object")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"The preset file {path} cannot be read: {reason}.") from error
    return parse_config(fields)


def preset(name: str) -> ModelConfig:
    """The configuration called `name`; raises ConfigError with the nearest known name."""
    if name not in PRESETS:
        raise ConfigError(
            f"There is no preset {name!r}.{did_you_mean(name, PRESETS)} "
            f"Known presets are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


PRESETS: Mapping[str, ModelConfig] = Presets(FOLDER, NAMES)
