"""Locating and reading checkpoints: a local folder, a GGUF file, an embedded model, one in a Python
package, or a Hugging Face hub id.

Only JSON, safetensors and GGUF files are read; code in a checkpoint is never run.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.api.sampling_params import SamplingParams, shown
from minillm.config import ModelConfig
from minillm.errors import (
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
    did_you_mean,
    reason,
)
from minillm.gguf.container import is_gguf
from minillm.layers.linear_methods import TensorSlice
from minillm.models.families import parse_config
from minillm.models.families.fields import integer, section
from minillm.models.gguf import open_gguf_model
from minillm.models.packaged import PACKAGED, packaged_file
from minillm.models.presets import PRESETS, preset
from minillm.quantization.formats import Header
from minillm.quantization.gguf.tensors import gguf_headers, read_gguf

ASSETS = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja")  # configuration and tokenizer; weights are fetched separately
HUB_WEIGHTS = ("*.safetensors",)
HUB_IGNORED = ("*/*", "consolidated*")  # other formats of the same weights
SAMPLING_FIELDS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
DTYPES: Mapping[str, torch.dtype] = {  # names in safetensors' headers
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSource:
    """A model before its weights are read. `folder` is None for a preset, and the file itself for a
    GGUF file."""

    name: str
    config: ModelConfig
    folder: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    hub_id: str | None = None  # if set, the weights may not have been fetched yet
    ignored_layers: int = 0  # multi-token prediction layers at the end of the checkpoint
    quantization: Mapping[str, Any] = field(default_factory=dict)  # of config.json; empty: none


def open_model(model: str | Path) -> ModelSource:
    """Describe `model`: an embedded or packaged name, ``preset:NAME``, a folder, a GGUF file, or a
    hub id. Does not fetch weights, except those of a packaged model.

    Raises ModelNotFoundError, CheckpointError, ConfigError or UnsupportedFeatureError.
    """
    name = str(model)
    if name.startswith("preset:"):
        return ModelSource(name, preset(name.removeprefix("preset:")))
    local = local_folder(name)
    folder = local or download(name)
    said = folder  # where generation settings are
    if is_gguf(folder):
        config, generation, ignored, quantization = open_gguf_model(folder)
    else:
        config_data = read_json(folder / "config.json")
        said = folder / "generation_config.json"
        generation = read_json(said) if said.is_file() else {}
        generation.setdefault("eos_token_id", config_data.get("eos_token_id"))
        config = parse_config(config_data)
        ignored = integer(config_data, "num_nextn_predict_layers", 0)
        quantization = quantization_settings(config_data, folder)
    return ModelSource(
        name,
        config,
        folder,
        end_of_sequence_ids(generation["eos_token_id"], folder),
        sampling_defaults(generation, said),
        None if local else name,
        ignored,
        quantization,
    )


def quantization_settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """How a checkpoint's weights are quantised: `quantization_config` of config.json, or the
    separate file of old GPTQ checkpoints. Empty if they are not."""
    settings = section(config, "quantization_config") or section(config, "compression_config")
    old = folder / "quantize_config.json"
    if not settings and old.is_file():
        return {"quant_method": "gptq", **read_json(old)}
    return settings


def sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Recommended sampling parameters from generation_config.json, under the names of
    `SamplingParams`. The same fields are used as in vLLM."""
    defaults: dict[str, Any] = {
        SAMPLING_FIELDS[name]: int(value) if is_whole(value) else value  # such as top_k 50.0
        for name, value in generation.items()
        if name in SAMPLING_FIELDS and value is not None
    }
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{path} recommends a setting that does not exist: {error}"
        ) from error
    return defaults


def is_whole(value: object) -> bool:
    """Whether this is a float with an integer value."""
    return isinstance(value, float) and value.is_integer()


def end_of_sequence_ids(value: Any, folder: Path) -> tuple[int, ...]:
    """Parse ``eos_token_id``: one id, a list, or null for none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(f"{folder} gives the end-of-sequence id {value!r}; ids are integers.")
    return tuple(ids)


def embedded_models() -> list[str]:
    """Names of the models included in the installation."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_folder(name: str) -> Path:
    """The local folder (or GGUF file) of a model. Fetches the small files of a hub id if
    necessary."""
    return local_folder(name) or download(name)


def local_folder(name: str) -> Path | None:
    """The folder of an embedded or local model, or a GGUF file, downloaded if it is packaged; None
    if `name` can only be a hub id."""
    if name in embedded_models():
        return ASSETS / name
    if name in PACKAGED:
        return packaged_file(PACKAGED[name])
    try:
        path = Path(name).expanduser()
        is_folder, is_file, beside = path.is_dir(), path.is_file(), path.parent.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted; unknown user after ~
        raise ModelNotFoundError(
            f"The folder {shown(name)} cannot be looked up: {reason(error)}."
        ) from error
    if is_folder or (is_file and is_gguf(path)):
        return path
    if is_file:
        raise ModelNotFoundError(
            f"{name} is a file that does not begin with 'GGUF'; give a GGUF file, or the folder "
            "that holds config.json and the weights."
        )
    if HUB_ID.fullmatch(name) and not beside:
        return None
    names = [*embedded_models(), *PACKAGED]
    known = [*names, *(f"preset:{key}" for key in PRESETS)]
    raise ModelNotFoundError(
        f"There is no folder {shown(name)}; give a Hugging Face model folder, a GGUF file, a hub "
        f"id such as 'org/name', or one of {', '.join(names)}."
        f"{did_you_mean(name, known)}"
    )


def download(
    hub_id: str, patterns: tuple[str, ...] = HUB_FILES, revision: str | None = None
) -> Path:
    """Resolve a hub id to its cached snapshot, fetching missing files that match `patterns`."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(HUB_IGNORED),
        )
        return Path(folder)
    except Exception as error:  # error types depend on the version's HTTP client
        raise ModelNotFoundError(
            f"The model {hub_id!r} is not in the local hub cache and could not be fetched "
            f"({type(error).__name__}); check the name, go online once, or give a local folder."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object. Errors name the file that is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"The folder {str(path.parent)!r} has no {path.name}; give a Hugging Face model folder."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; it must be a JSON object.")
    return data


def weight_files(source: ModelSource) -> list[Path]:
    """The weight files of a model, fetched from the hub if necessary; empty for a preset."""
    folder = source.folder
    if folder and source.hub_id:
        # A snapshot folder is named after its commit: fetch the weights of the same commit.
        folder = download(source.hub_id, HUB_WEIGHTS, revision=folder.name)
    return shard_files(folder) if folder else []


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those listed in its index, or the only one. A GGUF file is its
    own."""
    if is_gguf(folder):
        return [folder]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise CheckpointError(f"{folder / INDEX} has no weight_map.")
        names = sorted({str(name) for name in weight_map.values()})
    elif (folder / WEIGHTS).is_file():  # ignores other formats of the same weights
        names = [WEIGHTS]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) > 1:
            raise CheckpointError(
                f"{folder} holds {len(names)} safetensors files but no {INDEX} to relate them."
            )
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "; convert its pickled weights to safetensors, pickle is never read" * pickled
        raise ModelNotFoundError(f"{folder} holds no safetensors file{hint}.")
    for name in names:
        if Path(name).name != name:  # no path out of the folder
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not a plain file.")
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder / INDEX} names {name}, but that file is missing.")
    return [folder / name for name in names]


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """Open a memory-mapped safetensors file. Errors name the file."""
    try:
        path.open("rb").close()  # raises OSError for permissions; safetensors' error is ambiguous
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); fetch it again."
        ) from error


def shard_headers(path: Path) -> dict[str, Header]:
    """Shape and dtype of every tensor in a file, by name. Reads only the file's header."""
    if is_gguf(path):
        return gguf_headers(path)
    with open_shard(path), path.open("rb") as file:  # safetensors has checked the header's form
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size), object_pairs_hook=partial(without_repeats, path))
    return {
        name: Header(tuple(entry["shape"]), DTYPES.get(entry["dtype"]))
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of a header. Raises CheckpointError if it has a name twice, which safetensors
    forbids and does not check."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise CheckpointError(f"{path} has {twice} twice; a name stands for one tensor.")
    return entries


def read_tensors(path: Path, slices: Mapping[str, TensorSlice]) -> Iterator[tuple[str, Tensor]]:
    """Read the given slices of a file's tensors, one at a time.

    The file is memory-mapped, so only the pages of a slice are read.
    """
    if is_gguf(path):
        yield from read_gguf(path, slices)
        return
    with open_shard(path) as file:
        for name in file.keys():  # noqa: SIM118
            wanted = slices.get(name)
            if wanted is None:
                continue
            if wanted == TensorSlice.whole(wanted.shape):
                yield name, file.get_tensor(name)
            else:
                yield name, file.get_slice(name)[wanted.index]
