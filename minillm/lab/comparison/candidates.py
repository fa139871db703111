"""What a comparison compares: folders and GGUF files, and methods that are applied to the model.

    int8  int4                      as LLM(quantization=...): the output matrix in 8 bits
    rtn:4:128  gptq:3:64  awq:4     method, bits and group size (`row`: a scale per row)
    nf4  fp8  fp8:row  smoothquant  methods without a choice of bits

Words may follow: `sym`, `act-order`, `static-groups`, `no-clip`, `no-double`; `head8` and `head16`
for the output matrix; `a8` rounds the inputs of quantised products as C does: 8 bits in groups of
32, 16 bits for the output matrix.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError, did_you_mean
from minillm.lab.quantise.calibration import layer_of, quantizable
from minillm.lab.quantise.making import Made
from minillm.lab.quantise.quantize_layers import cast, quantized_model
from minillm.lab.quantise.recipe import GROUPED, METHODS, SETTINGS, Recipe
from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import HUB_ID, ModelSource, embedded_models, open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.packaged import PACKAGED
from minillm.models.quantize import ROUNDINGS, quantize_weights
from minillm.quantization.methods import QuantizedMethod, install, to_dense
from minillm.quantization.mixed import MixedMethod, holders, members
from minillm.quantization.rounding import round_symmetric

# Words after a method, with the setting and the value that they give.
WORDS: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "sym": ("symmetric", True),
        "act-order": ("act_order", True),
        "static-groups": ("static_groups", True),
        "no-clip": ("clip", False),
        "no-double": ("double", False),
        "row": ("group_size", -1),
    }
)
ROUNDED = 32  # inputs that share a scale, as in matrix.h
SWITCHES = ("head8", "head16", "a8")
NOT_DENSE = (QuantizedMethod, MixedMethod)
EXAMPLES = "int8, int4, gptq:4:128, awq:4:128, nf4"


@dataclass(frozen=True)
class Candidate:
    """One row of a comparison. `recipe` is None for a file, and for int8 and int4 as a model is
    loaded (`loading`)."""

    name: str
    recipe: Recipe | None = None
    loading: str | None = None
    eight_bit_head: bool = False
    eight_bit_inputs: bool = False

    @property
    def is_method(self) -> bool:
        """Whether it is a method that is applied to the model."""
        return self.recipe is not None or self.loading is not None


@dataclass
class Opened:
    """A candidate's model. Times are None for a file."""

    candidate: Candidate
    model: Decoder
    source: ModelSource
    made: list[Made] = field(default_factory=list)
    calibration_tokens: int = 0
    seconds: float | None = None
    cpu_seconds: float | None = None


def parse(text: str) -> Candidate:
    """A candidate from its name on the command line.

    Raises:
        ConfigError: it is neither a method nor an existing file or folder.
    """
    method, *words = text.split(":")
    if method in METHODS or method in ROUNDINGS:
        return method_candidate(text, method, words)
    if method == "preset":
        raise ConfigError(f"{text} has no weights; give it as MODEL, and methods after it.")
    known_model = text in (*embedded_models(), *PACKAGED) or Path(text).expanduser().exists()
    if known_model or HUB_ID.fullmatch(text):
        return Candidate(text)
    if text.endswith(".gguf") or "/" in text:
        raise ConfigError(f"There is no file or folder {text!r}.")
    known = sorted({*METHODS, *ROUNDINGS})
    raise ConfigError(
        f"{text!r} is neither a file nor a folder nor a method; methods are {', '.join(known)}."
        f"{did_you_mean(method, known)}"
    )


def method_candidate(text: str, method: str, words: list[str]) -> Candidate:
    """A method with its settings."""
    settings: dict[str, Any] = {}
    grouped = method in GROUPED
    numbers = ["bits", "group_size"] if grouped else ["group_size"] if method == "fp8" else []
    for word in words:
        if word.isdecimal() and numbers:
            settings[numbers.pop(0)] = int(word)
        elif word in WORDS and method in SETTINGS[WORDS[word][0]]:
            name, value = WORDS[word]
            settings[name] = value
        elif word not in SWITCHES:
            allowed = [w for w, (name, _) in WORDS.items() if method in SETTINGS[name]]
            raise ConfigError(
                f"{text!r} has {word!r}; after {method} there may be "
                f"{'bits, a group size, ' * grouped}{', '.join([*allowed, *SWITCHES])}."
            )
    inputs = "a8" in words or method == "smoothquant"
    if method in ROUNDINGS and "head16" not in words:
        return Candidate(text, loading=method, eight_bit_head=True, eight_bit_inputs=inputs)
    recipe = Recipe("rtn" if method == "int4" else method, **settings)
    return Candidate(text, recipe, None, "head8" in words, inputs)


def open_candidate(
    candidate: Candidate,
    base: ModelSource,
    dtype: torch.dtype,
    calibration: Tensor | None,
) -> Opened:
    """Load a candidate: a file, or the base model to which a method is applied.

    Args:
        calibration: token ids [W, T]; required by calibrated methods.
    """
    if not candidate.is_method:
        source = open_model(candidate.name)
        return Opened(candidate, load_model(source, dtype), source)
    model = load_base(base, dtype)
    opened = Opened(candidate, model, base)
    wall, cpu = time.perf_counter(), time.process_time()
    if candidate.recipe is not None:
        used = calibration if candidate.recipe.calibrated else None
        opened.made = quantized_model(model, candidate.recipe, used)
        opened.calibration_tokens = 0 if used is None else used.numel()
    else:
        quantize_weights(model, str(candidate.loading))
    if candidate.eight_bit_head and candidate.recipe is not None:
        quantize_head(model)
    opened.seconds = time.perf_counter() - wall
    opened.cpu_seconds = time.process_time() - cpu
    if candidate.eight_bit_inputs:
        round_inputs(model)
    return opened


def load_base(source: ModelSource, dtype: torch.dtype) -> Decoder:
    """The 16-bit model; random weights for a shape. Of a quantised model, the values of its codes:
    they are the reference for what rounds them again.

    Raises:
        ConfigError: a matrix cannot be made dense.
    """
    model = load_model(source, dtype, load_format="auto" if source.folder else "dummy")
    for matrix in list(holders(model)):
        to_dense(matrix)
    if any(isinstance(getattr(m, "method", None), NOT_DENSE) for m in model.modules()):
        raise ConfigError(
            f"{source.name} is quantised in a form that cannot be made dense here; give the 16-bit "
            "model first, and this one after it."
        )
    return model


def output_matrix(model: Decoder) -> Matrix:
    """The output matrix, which may be the embedding."""
    return model.embedding if model.lm_head is None else model.lm_head


@torch.inference_mode()
def quantize_head(model: Decoder) -> None:
    """Store the output matrix in 8 bits, a scale per row."""
    matrix = output_matrix(model)
    install(matrix, round_symmetric(matrix.values()), model.dtype)


# ---- 8-bit inputs -----------------------------------------------------------------------------


class RoundedInputs(QuantizedMethod):
    """A quantised matrix whose inputs are rounded to 8 bits by groups, as integer products do.
    Simulated in the model's dtype."""

    def __init__(self, inner: QuantizedMethod):
        super().__init__(inner.dtype, inner.names)
        self.inner = inner

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return self.inner.apply(matrix, rounded(x), bias)


def rounded(x: Tensor) -> Tensor:
    """[N, in] in 255 steps for each 32 inputs."""
    groups = x.float().unflatten(-1, (-1, ROUNDED if x.shape[-1] % ROUNDED == 0 else x.shape[-1]))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((groups / scale).round() * scale).flatten(-2).to(x.dtype)


def round_inputs(model: Decoder) -> None:
    """Round the inputs of all quantised products but those of the output matrix. Stacked experts
    are left out."""
    output = output_matrix(model)
    for matrix in model.modules():
        is_single = isinstance(matrix, Matrix) and matrix.copies is None and matrix is not output
        if is_single and type(matrix.method) is QuantizedMethod:
            matrix.method = RoundedInputs(matrix.method)


# ---- facts ------------------------------------------------------------------------------------


def layer_matrices(model: Decoder) -> list[Matrix]:
    """The matrices of the layers that methods quantise."""
    return [m for i in range(len(model.layers)) for m in quantizable(layer_of(model, i))]


def facts(opened: Opened) -> dict[str, Any]:
    """How the weights are stored: bits, group, zero points, type of scales, and what stays in 16
    bits."""
    model, candidate = opened.model, opened.candidate
    matrices = [member for each in layer_matrices(model) for member in members(each)]
    parts = [m.method.quantized(m) for m in matrices if isinstance(m.method, QuantizedMethod)]
    bits = sorted({part.bits for part in parts})
    if candidate.recipe is not None:
        bits = [candidate.recipe.width]
    rows = {part.shape[1] for part in parts}
    groups = sorted({part.group_size for part in parts})
    inputs = any(isinstance(m.method, RoundedInputs) for m in matrices)
    return {
        "weight_bits": bits or [16],
        "input_bits": 8 if inputs else 16,
        "group_sizes": ["row"] if parts and {*groups} == rows else groups,
        "zero_points": "none" if not parts else offsets(parts[0].parts().keys()),
        "scale_dtype": sorted({str(part.scales.dtype).removeprefix("torch.") for part in parts}),
        "sixteen_bit": sixteen_bit(model, matrices),
        "calibration_tokens": opened.calibration_tokens,
    }


def offsets(names: Any) -> str:
    """How a group's values are shifted."""
    kinds = {"zeros": "integers", "minima": "minima", "table": "none (table)"}
    return next((what for name, what in kinds.items() if name in names), "none")


def sixteen_bit(model: Decoder, quantized: list[Matrix]) -> list[str]:
    """The kinds of matrices that are not quantised, and the norms."""
    if not any(isinstance(each.method, QuantizedMethod) for each in quantized):
        return ["everything"]
    found = ["norms"]
    known = {id(each) for each in quantized}
    for matrix in holders(model):
        if isinstance(matrix.method, QuantizedMethod):
            continue
        if matrix is model.lm_head:
            found.append("output matrix")
        elif isinstance(matrix, Embedding):
            found.append("embedding" if model.lm_head is not None else "embedding (tied output)")
        elif id(matrix) in known:
            found.append("linear layers")
        else:
            found.append(matrix.parts[0].name.rsplit(".", 1)[-1])
    return list(dict.fromkeys(found))


def as_served(model: Decoder, dtype: torch.dtype) -> None:
    """Change the dtype of a loaded model; codes and scales stay. Undoes `round_inputs`: the
    engine's products round inputs themselves."""
    for matrix in model.modules():
        if isinstance(matrix, Matrix) and isinstance(matrix.method, RoundedInputs):
            matrix.method = matrix.method.inner
    cast(model, dtype)
