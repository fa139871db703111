"""Loads a `Decoder` from a checkpoint, file by file.

The names and shapes of all tensors in the files' headers must match the model exactly. This is
checked before weights are read.
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ConfigError
from minillm.layers.linear_methods import PLAIN, CheckpointTensor, Matrix, TensorSlice
from minillm.models.checkpoint import ModelSource, read_tensors, shard_headers, weight_files
from minillm.models.decoder import Decoder, MethodOf
from minillm.quantization.consistency import check_settings, check_unquantised, leftover
from minillm.quantization.formats import Format, Header, Headers, format_of
from minillm.quantization.methods import LoadingMethod
from minillm.quantization.readers import READERS

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
OUTPUT, INPUT = "lm_head.weight", "model.embed_tokens.weight"
PROGRESS_BYTES = 1 << 30  # show a progress bar from this size on
# RoPE's buffers, which old checkpoints contain; they are computed instead.
COMPUTED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    shard: Callable[[Decoder], None] | None = None,
    config: ModelConfig | None = None,
) -> Decoder:
    """Build the model of `source` with weights from its files, or random ones (format "dummy").

    For a rank's shard, `config` has the shapes of the shard, and `shard` selects its part; it may
    also replace methods of matrices. Peak memory is the weights plus one tensor. Raises
    CheckpointError, naming the tensor, if a file is damaged or a tensor is missing, unknown or of
    the wrong shape.
    """
    if load_format == "dummy":
        model = Decoder(source.config, dtype, device, max_model_len)
        model.initialize(seed=seed)
        return model.eval()
    if source.folder is None:
        raise ConfigError(
            f"{source.name} is a shape without weights; add load_format='dummy' for random ones."
        )
    files, format, zeros = checked_files(source, dtype)
    shape = config or source.config
    model = Decoder(shape, dtype, device, max_model_len, reading(format), shard)
    fill(model.checkpoint_tensors(), files, source.config.tie_word_embeddings)
    check_zeros(zeros, files)
    for matrix in model.modules():
        if isinstance(matrix, Matrix):
            matrix.method.after_loading(matrix)
    return model.eval()


def checked_files(
    source: ModelSource, dtype: torch.dtype
) -> tuple[list[Path], Format | None, dict[str, tuple[int, ...]]]:
    """The weight files of a model, the format of a quantised one, and the tensors that must be 0.
    Checks the headers before memory is allocated: config.json may give sizes that the files do not
    have."""
    files = weight_files(source)
    headers = [(path, name, entry) for path in files for name, entry in shard_headers(path).items()]
    format = stored_format(source, {name: header for _, name, header in headers})
    if format is None:
        check_unquantised(name for _, name, _ in headers)
    expected = Decoder(source.config, dtype, "meta", None, reading(format))
    check_model(format, expected)
    zeros = check_tensors(source, expected.checkpoint_tensors(), headers, format)
    return files, format, zeros


def stored_format(source: ModelSource, headers: Headers) -> Format | None:
    """The format of a quantised checkpoint; None if it is not quantised."""
    if not source.quantization:
        return None
    format = format_of(source.quantization, headers, READERS)
    logger.info("%s is quantised: %s.", source.name, format.describe())
    return format


def reading(format: Format | None) -> MethodOf | None:
    """How the matrices of a quantised checkpoint are read; the one that MLA absorbs is dense."""
    return None if format is None else lambda matrix: LoadingMethod(format, matrix.is_absorbed)


def check_model(format: Format | None, model: Decoder) -> None:
    """Compare the settings of a quantised checkpoint with the headers of the model's matrices."""
    if format is not None:
        check_settings(format, (module for module in model.modules() if isinstance(module, Matrix)))


def check_tensors(
    source: ModelSource,
    wanted: Mapping[str, CheckpointTensor],
    stored: list[tuple[Path, str, Header]],
    format: Format | None = None,
) -> dict[str, tuple[int, ...]]:
    """Check that each expected tensor is in exactly one file with its shape, and no other is.
    Returns the shapes of tensors that are not needed if they are 0."""
    found: dict[str, Path] = {}
    zeros: dict[str, tuple[int, ...]] = {}
    headers = {name: header for _, name, header in stored}
    for path, name, header in stored:
        if name in found:
            raise CheckpointError(f"{name} is in both {found[name].name} and {path.name}.")
        found[name] = path
        target = wanted.get(name)
        if name == OUTPUT and target is None and header.dtype in PLAIN:
            target = wanted.get(INPUT)  # tied: the loader compares it with the embedding
        if target is None:
            if format is not None and format.is_zero(name):
                zeros[name] = header.shape
            elif not is_expected_extra(source, name) and not (format and format.is_unused(name)):
                raise CheckpointError(without_place(source, path, name, headers, format))
        elif target.slice.shape != header.shape:
            raise CheckpointError(
                f"{name} in {path.name} has shape {list(header.shape)}, but config.json describes "
                f"{list(target.slice.shape)}."
            )
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        raise CheckpointError(f"{source.folder} has no tensor {missing[0]}{more}.")
    return zeros


def without_place(
    source: ModelSource, path: Path, name: str, headers: Headers, format: Format | None
) -> str:
    """The message for a tensor that the model has no place for."""
    tensor = f"{path.name} has a tensor {name} of shape {list(headers[name].shape)}"
    reason = leftover(name, format, headers, source.config.tie_word_embeddings)
    if reason is not None:
        return f"{tensor}, which nothing reads: {reason}."
    return f"{tensor} that the {source.config.family} model of config.json has no place for."


def check_zeros(zeros: Mapping[str, tuple[int, ...]], files: list[Path]) -> None:
    """Check that tensors without a place in the model change nothing."""
    slices = {name: TensorSlice.whole(shape) for name, shape in zeros.items()}
    for path in files if zeros else ():
        for name, tensor in read_tensors(path, slices):
            if tensor.any():
                raise CheckpointError(
                    f"{path.name} has a tensor {name} that the model has no place for, and its "
                    "values are not 0."
                )


def is_expected_extra(source: ModelSource, name: str) -> bool:
    """Whether a tensor is known to be unnecessary: RoPE's buffers, and DeepSeek's
    multi-token prediction layers after the last decoder layer."""
    if COMPUTED.fullmatch(name):
        return True
    layer = LAYER.match(name)
    last = source.config.num_layers + source.ignored_layers
    return bool(layer) and source.config.num_layers <= int(layer[1]) < last  # type: ignore[index]


def fill(wanted: dict[str, CheckpointTensor], files: list[Path], tied: bool = False) -> None:
    """Load the held part of each tensor, by its layer's method."""
    slices = {name: tensor.slice for name, tensor in wanted.items()}
    if tied and INPUT in wanted:
        slices[OUTPUT] = slices[INPUT]
    total = sum(path.stat().st_size for path in files)
    with tqdm(
        total=total, desc="Loading", unit="B", unit_scale=True, disable=total < PROGRESS_BYTES
    ) as progress:
        filled: set[str] = set()
        for path in files:
            for name, values in read_tensors(path, slices):
                progress.update(values.nbytes)
                place = INPUT if name == OUTPUT and tied else name
                if place in filled:
                    check_tied(wanted[place].target, values)
                else:
                    wanted[place].load(values)
                    filled.add(place)


def check_tied(target: Tensor, tensor: Tensor) -> None:
    """Check that a tied tensor stored twice has the same values."""
    if not torch.equal(tensor.to(target.device, target.dtype), target):
        raise CheckpointError(
            f"config.json ties {OUTPUT} to {INPUT}, but the file has two different tensors; "
            "set tie_word_embeddings to false in config.json."
        )
