"""Finding a model and reading its files: a local folder, an embedded model, or a hub id.

Only JSON and safetensors are read. Nothing here runs code from a checkpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.api.sampling_params import SamplingParams, shown
from minillm.config import ModelConfig
from minillm.errors import (
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    did_you_mean,
)
from minillm.layers.linear_methods import TensorSlice
from minillm.models.families import integer, parse_config
from minillm.models.presets import PRESETS, preset

ASSETS = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja")  # what describes a model; its weights are fetched to load it
HUB_WEIGHTS = ("*.safetensors",)
HUB_IGNORED = ("*/*", "consolidated*")  # other formats of the same weights
SAMPLING_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelSource:
    """What there is to know before weights are read. `folder` is None for a preset."""

    name: str
    config: ModelConfig
    folder: Path | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    hub_id: str | None = None  # the weights may have to be fetched still
    ignored_layers: int = 0  # extra layers at the end of the file (multi-token prediction)


def open_model(model: str | Path) -> ModelSource:
    """Describe `model`: an embedded name, ``preset:NAME``, a folder, or a hub id, whose weights
    are not fetched for this.

    Raises ModelNotFoundError, CheckpointError, ConfigError or UnsupportedFeatureError.
    """
    name = str(model)
    if name.startswith("preset:"):
        return ModelSource(name, preset(name.removeprefix("preset:")))
    local = local_folder(name)
    folder = local or download(name)
    config_data = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    eos = generation.get("eos_token_id", config_data.get("eos_token_id"))
    return ModelSource(
        name,
        parse_config(config_data),
        folder,
        end_of_sequence_ids(eos, folder),
        sampling_defaults(generation, generation_file),
        None if local else name,
        integer(config_data, "num_nextn_predict_layers", 0),
    )


def sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the model's authors recommend, under the names of `SamplingParams`; those that vLLM
    takes over."""
    defaults: dict[str, Any] = {
        SAMPLING_FIELDS[name]: int(value) if is_whole(value) else value  # a top_k of 50.0 is meant
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
    """Whether this is a float without a fraction."""
    return isinstance(value, float) and value.is_integer()


def end_of_sequence_ids(value: Any, folder: Path) -> tuple[int, ...]:
    """One id, several, or none (null)."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(f"{folder} gives the end-of-sequence id {value!r}; ids are integers.")
    return tuple(ids)


def embedded_models() -> list[str]:
    """Names of the models that are part of the installation."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_folder(name: str) -> Path:
    """The local folder of a model, fetching the small files of a hub id when online."""
    return local_folder(name) or download(name)


def local_folder(name: str) -> Path | None:
    """The folder of an embedded model or on disk; None for what can only be a hub id."""
    if name.endswith(".gguf"):
        raise UnsupportedFeatureError("GGUF files are not supported by this version.")
    if name in embedded_models():
        return ASSETS / name
    try:
        path = Path(name).expanduser()
        is_folder, is_file, beside = path.is_dir(), path.is_file(), path.parent.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted; no such user's ~
        raise ModelNotFoundError(
            f"The folder {shown(name)} cannot be looked up: {reason(error)}."
        ) from error
    if is_folder:
        return path
    if is_file:
        raise ModelNotFoundError(
            f"{name} is a file; give the folder that holds config.json and the weights."
        )
    if HUB_ID.fullmatch(name) and not beside:
        return None
    known = [*embedded_models(), *(f"preset:{key}" for key in PRESETS)]
    raise ModelNotFoundError(
        f"There is no folder {shown(name)}; give a Hugging Face model folder, a hub id such as "
        f"'org/name', or one of {', '.join(embedded_models())}.{did_you_mean(name, known)}"
    )


def download(
    hub_id: str, patterns: tuple[str, ...] = HUB_FILES, revision: str | None = None
) -> Path:
    """Resolve a hub id to its cached snapshot, fetching what is missing of the named files."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(HUB_IGNORED),
        )
        return Path(folder)
    except Exception as error:  # its HTTP client, and so the errors of that, change with versions
        raise ModelNotFoundError(
            f"The model {hub_id!r} is not in the local hub cache and could not be fetched "
            f"({type(error).__name__}); check the name, go online once, or give a local folder."
        ) from error


def reason(error: Exception) -> str:
    """What the operating system says, without its number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object, or say which file is missing or damaged."""
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
    """The weight files of a model that has some, fetched first if they are still on the hub."""
    folder = source.folder
    if folder and source.hub_id:
        # A snapshot's folder is called after its commit: weights of the config that was read.
        folder = download(source.hub_id, HUB_WEIGHTS, revision=folder.name)
    return shard_files(folder) if folder else []


def shard_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those its index names, or the only one."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise CheckpointError(f"{folder / INDEX} has no weight_map.")
        names = sorted({str(name) for name in weight_map.values()})
    elif (folder / WEIGHTS).is_file():  # other formats of the same weights may lie beside it
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
        if Path(name).name != name:  # an index must not lead out of its folder
            raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not a plain file.")
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder / INDEX} names {name}, but that file is missing.")
    return [folder / name for name in names]


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """A memory-mapped safetensors file, with damage reported by file name."""
    try:
        path.open("rb").close()  # safetensors' errors do not tell what is wrong from who may read
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); fetch it again."
        ) from error


def shard_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a file, from its header alone."""
    with open_shard(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_tensors(path: Path, slices: Mapping[str, TensorSlice]) -> Iterator[tuple[str, Tensor]]:
    """Those tensors of a file, or the parts of them, that are named; one in memory at a time.

    The file is mapped: of a part, only its own pages are read.
    """
    with open_shard(path) as file:
        for name in file.keys():  # noqa: SIM118
            wanted = slices.get(name)
            if wanted is None:
                continue
            if wanted == TensorSlice.whole(wanted.shape):
                yield name, file.get_tensor(name)
            else:
                yield name, file.get_slice(name)[wanted.index]
