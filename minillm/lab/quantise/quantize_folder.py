"""Quantises a checkpoint into a folder: one shard per layer, then everything else.

A finished layer is a finished file, so a stopped run continues: it reads the finished layers back,
and calibrates the next one with them. `quantize.json` holds the settings until the folder is
complete; config.json is written last.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from minillm.lab.quantise.calibration import layer_of, quantizable
from minillm.lab.quantise.making import eight_bit_head
from minillm.lab.quantise.quantize_layers import (
    LayerResult,
    checkpoint_tensors,
    group_size,
    quantize_layers,
)
from minillm.lab.quantise.recipe import Recipe
from minillm.lab.quantise.writers import WRITERS, Writer
from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import CheckpointTensor, Matrix
from minillm.models.checkpoint import (
    INDEX,
    ModelSource,
    open_shard,
    read_json,
    reason,
    shard_headers,
    weight_files,
)
from minillm.models.decoder import Block, Decoder
from minillm.models.loader import DTYPES, fill, load_model
from minillm.quantization.formats import format_of
from minillm.quantization.methods import LoadingMethod
from minillm.quantization.readers import READERS

STATE = "quantize.json"
COPIED = ("*.json", "*.jinja", "*.model", "merges.txt", "LICENSE*")
NOT_COPIED = ("config.json", "quantize_config.json", INDEX, STATE)


@dataclass(frozen=True)
class Report:
    """A finished folder: the error of each quantised matrix, and the bytes of all tensors."""

    folder: Path
    format: str
    group: int  # 0: whole rows
    errors: Mapping[str, float]
    num_bytes: int
    source_bytes: int


def quantize_folder(
    source: ModelSource,
    recipe: Recipe,
    out: Path,
    windows: Tensor | None = None,
    format: str | None = None,
) -> Report:
    """Quantise the checkpoint of `source` into the folder `out`, or continue a stopped run.

    Args:
        windows: token ids [W, T] of a calibration text (`lab/quantise/calibration_text.py`).
        format: one of WRITERS; None: the usual one of the method.

    Memory: the model in its own type, one layer in float32 with its Hessians, and the activations
    of the calibration text. Raises ConfigError, CheckpointError or UnsupportedFeatureError.
    """
    format = recipe.format(format)
    if source.folder is None:
        raise ConfigError(
            f"{source.name} is a shape without weights; there is nothing to quantise."
        )
    if source.quantization:
        raise ConfigError(f"{source.name} is quantised already; quantise the original checkpoint.")
    if recipe.calibrated and windows is None:
        raise ConfigError(f"{recipe.method} needs a calibration text.")
    model = load_model(source, DTYPES[source.config.dtype])
    if recipe.head and model.lm_head is None:
        raise UnsupportedFeatureError(
            f"The embedding of {source.name} is also its output matrix, and compressed-tensors has "
            "no quantised embeddings; leave --head out, or load it with quantization='int8' or "
            "'int4', which keep it in 8 bits."
        )
    group = group_size(model, recipe)
    writer = WRITERS[format](recipe, group)
    ignored = [name for name in ignored_modules(model) if name != "lm_head" or not recipe.head]
    settings = writer.config(ignored)
    begin(out, job_state(source, recipe, format, windows))
    run = Run(source, out, writer, settings, model)
    run.quantize(recipe, windows)
    return run.finish(recipe, windows)


def job_state(
    source: ModelSource, recipe: Recipe, format: str, windows: Tensor | None
) -> dict[str, Any]:
    """What must be the same when a run continues."""
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weight_files(source)
    }
    text = None if windows is None else sha256(windows.numpy().tobytes()).hexdigest()
    return {"recipe": asdict(recipe), "format": format, "files": files, "calibration": text}


def begin(out: Path, state: dict[str, Any], name: str = STATE) -> None:
    """Create the folder, or check that it holds a stopped run with the same state."""
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        if (out / name).is_file():
            if read_json(out / name) != state:
                raise ConfigError(
                    f"{out} holds a run with other settings, another model or another text; "
                    "repeat its arguments, or give an empty folder."
                )
        elif any(out.iterdir()):
            raise ConfigError(f"{out} is not empty; give a new folder as --out.")
        else:
            write_text(out / name, json.dumps(state, indent=2) + "\n")


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """Convert errors of the file system into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {reason(error)}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def ignored_modules(model: Decoder) -> list[str]:
    """The linear modules that are not quantised, by name."""
    layers = [layer_of(model, index) for index in range(len(model.layers))]
    done = {id(matrix) for layer in layers for matrix in quantizable(layer)}
    rest = [
        part.name
        for matrix in model.modules()
        if isinstance(matrix, Matrix) and not isinstance(matrix, Embedding)
        for part in matrix.parts
        if id(matrix) not in done
    ]
    return list(dict.fromkeys((*rest, "lm_head")))


@dataclass(frozen=True)
class Run:
    """A run that writes into `out`."""

    source: ModelSource
    out: Path
    writer: Writer
    settings: dict[str, Any]  # quantization_config
    model: Decoder

    def shard(self, index: int) -> Path:
        """The file of a layer; the last holds the tensors outside layers."""
        count = self.source.config.num_layers + 1
        return self.out / f"model-{index + 1:05}-of-{count:05}.safetensors"

    def quantize(self, recipe: Recipe, windows: Tensor | None) -> None:
        """Write all layers that are not finished."""
        layers, done = self.model.layers, 0
        while done < len(layers) and self.shard(done).is_file():
            restore(layer_of(self.model, done), self.shard(done), self.settings)
            done += 1
        scales = self.writer.scale_dtype(self.model.dtype)
        results = quantize_layers(self.model, recipe, windows, scales, done)
        label = f"Quantising ({recipe.method})"
        with tqdm(total=len(layers), initial=done, desc=label, unit="layer", delay=2) as progress:
            for result in results:
                self.write_layer(result)
                layers[result.index] = nn.Identity()  # frees the layer
                progress.update()

    def write_layer(self, result: LayerResult) -> None:
        """Write the shard of a layer."""
        tensors = {k: v for made in result.made for k, v in self.writer.tensors(made).items()}
        errors = {made.name: made.error for made in result.made}
        self.write(self.shard(result.index), tensors | dict(result.others), errors)

    def write(self, path: Path, tensors: Mapping[str, Tensor], errors: dict[str, float]) -> None:
        """Write a shard completely or not at all, with the errors in its header."""
        part = path.with_name(f"{path.name}.part")
        with writable(self.out):
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, part, {"format": "pt", "errors": json.dumps(errors)})
            os.replace(part, path)

    def finish(self, recipe: Recipe, windows: Tensor | None) -> Report:
        """Write everything but the layers."""
        model, count = self.model, self.source.config.num_layers
        rest = [model.embedding, model.norm, *([] if recipe.head else [model.lm_head])]
        tensors = {t.name: t.target for each in rest if each for t in each.checkpoint_tensors()}
        errors: dict[str, float] = {}
        if recipe.head and model.lm_head is not None:
            made = eight_bit_head(model.lm_head, self.writer.scale_dtype(model.dtype))
            tensors |= self.writer.head(made)
            errors[made.name] = made.error
        self.write(self.shard(count), tensors, errors)
        report = self.report(recipe)
        config = read_json(self.folder / "config.json")
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0  # these layers are not written
        with writable(self.out):
            for pattern in COPIED:
                for path in self.folder.glob(pattern):
                    if path.name not in NOT_COPIED:
                        shutil.copyfile(path, self.out / path.name)
            write_text(self.out / "README.md", readme(self.source, recipe, report, windows))
            config["quantization_config"] = self.settings
            write_text(self.out / "config.json", json.dumps(config, indent=2) + "\n")
            (self.out / STATE).unlink()
        return report

    @property
    def folder(self) -> Path:
        """The folder of the source."""
        if self.source.folder is None:
            raise ConfigError(f"{self.source.name} has no folder.")
        return self.source.folder

    def report(self, recipe: Recipe) -> Report:
        """Write the index of the shards, and gather errors and sizes from their headers."""
        weight_map: dict[str, str] = {}
        errors: dict[str, float] = {}
        paths = [self.shard(i) for i in range(self.source.config.num_layers + 1)]
        for path in paths:
            weight_map |= dict.fromkeys(shard_headers(path), path.name)
            with open_shard(path) as file:
                errors |= json.loads(file.metadata()["errors"])
        size = sum(path.stat().st_size for path in paths)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        with writable(self.out):
            write_text(self.out / INDEX, json.dumps(index, indent=2) + "\n")
        before = sum(path.stat().st_size for path in weight_files(self.source))
        format = recipe.format(self.writer.name)
        return Report(self.out, format, self.writer.group, errors, size, before)


def restore(layer: Block, path: Path, settings: Mapping[str, Any]) -> None:
    """Read a finished layer back."""
    format = format_of(settings, shard_headers(path), READERS)
    matrices = [module for module in layer.modules() if isinstance(module, Matrix)]
    for matrix in matrices:
        dtype, device = matrix.weight.dtype, matrix.weight.device
        matrix.method = LoadingMethod(format)
        matrix.weight = None  # type: ignore[assignment]
        matrix.create(dtype, device)
    wanted: dict[str, CheckpointTensor] = {each.name: each for each in checkpoint_tensors(layer)}
    fill(wanted, [path])
    for matrix in matrices:
        matrix.method.after_loading(matrix)


def readme(source: ModelSource, recipe: Recipe, report: Report, windows: Tensor | None) -> str:
    """What was made, with which settings, and the errors by layer."""
    text = "none" if windows is None else f"{len(windows)} windows of {windows.shape[1]} tokens"
    settings = {**recipe.settings(), "format": report.format, "calibration": text}
    if "group_size" in settings:
        settings["group_size"] = report.group or "whole rows"
    rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
    errors = "\n".join(f"| {name} | {error:.4f} |" for name, error in report.errors.items())
    of = "weights" if windows is None else "outputs on the calibration text"
    return f"""# {Path(source.name).name}, quantised with {recipe.method}

Made by `minillm quantize` from {Path(source.name).name}: {report.source_bytes:,} bytes became
{report.num_bytes:,}. Embedding, output matrix, norms and routers are as in the original.

| setting | value |
|---|---|
{rows}

Root mean square error of the {of}, relative to the values:

| matrix | error |
|---|---|
{errors}
"""
