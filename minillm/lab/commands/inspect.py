"""Show how weights are stored, which kernel computes with them, and their range.

The model is loaded as a CPU engine in bfloat16 does it, from a folder or a GGUF
file.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from minillm.cli.terminal import Terminal, plural, size
from minillm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from minillm.layers.linear_methods import Matrix
    from minillm.models.decoder import Decoder

USAGE = "FOLDER [--against FOLDER] [--json]"
EXAMPLES = """\
examples:
  minillm inspect FOLDER                   formats, kernels, ranges of values
  minillm inspect FOLDER --against 16BIT   and the error relative to 16 bits
  minillm inspect FOLDER --json            the same for programs
"""


@dataclass(frozen=True)
class Check:
    """The dequantised values of one matrix."""

    name: str
    smallest: float
    largest: float
    finite: bool
    error: float | None = None  # |difference| / |reference|, Frobenius norms


@dataclass
class Kind:
    """Matrices that are stored alike: how, which kernel computes with them, and their bytes."""

    names: str
    layout: str
    bits: float
    group: int | None
    kernel: str
    count: int = 0
    num_bytes: int = 0
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True)
class Inspection:
    """What a model's weights are."""

    model: str
    format: str
    kinds: list[Kind]


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("model", metavar="FOLDER", help="embedded name, folder or hub id")
    parser.add_argument("--against", metavar="FOLDER",
                        help="a model of the same shape in 16 bits, to compare with")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace, terminal: Terminal) -> int:
    """Inspect a model, and return 1 if a value is not finite."""
    with terminal.progress("Loading"):
        inspection = inspect_folder(args.model, args.against)
    if args.json:
        terminal.line(json.dumps(asdict(inspection)))
    else:
        show(inspection, terminal)
    return int(any(not check.finite for kind in inspection.kinds for check in kind.checks))


def inspect_folder(name: str, against: str | None = None) -> Inspection:
    """Inspect a folder or a GGUF file.

    Raises:
        ConfigError: `against` is quantised, or its matrices are others.
    """
    import torch

    from minillm.models.checkpoint import open_model, shard_headers, weight_files
    from minillm.models.loader import load_model, stored_format

    source = open_model(name)
    headers = {
        key: header for path in weight_files(source) for key, header in shard_headers(path).items()
    }
    format = stored_format(source, headers)
    text = f"not quantised, {source.config.dtype}" if format is None else format.describe()
    reference = None
    if against is not None:
        other = open_model(against)
        if other.quantization:
            raise ConfigError(f"--against {against} is quantised; give a folder in 16 or 32 bits.")
        reference = {each: values for each, values in parts_of(load_model(other, torch.float32))}
    model = load_model(source, torch.bfloat16)
    return Inspection(name, text, kinds_of(model, reference))


def kinds_of(model: "Decoder", reference: "dict[str, Tensor] | None" = None) -> list[Kind]:
    """The matrices of a loaded model, grouped by how they are stored. Packs the model."""
    import torch

    from minillm.lab.kernel_names import kernel_of
    from minillm.layers.linear_methods import Matrix
    from minillm.layers.panel_methods import PanelHeadsMethod
    from minillm.models.packing import pack_weights
    from minillm.quantization.mixed import holders

    found: dict[tuple[object, ...], Kind] = {}
    members: list[tuple[Kind, Matrix]] = []
    for matrix in holders(model):
        if not matrix.out_features:
            continue
        kind = kind_of(matrix)
        kind = found.setdefault((kind.names, kind.layout, kind.bits, kind.group), kind)
        kind.count += 1
        kind.num_bytes += int(kind.bits * matrix.out_features * matrix.in_features / 8)
        kind.checks += [check(*part, reference) for part in values_of(matrix)]
        members.append((kind, matrix))
    pack_weights(model)
    for kind, matrix in members:
        kernel = kernel_of(matrix)
        if kind.layout != "dense" and isinstance(matrix.weight, torch.Tensor):
            kernel = kernel.replace("not quantised", "made dense when loaded (no C product)")
        if isinstance(matrix.method, PanelHeadsMethod):
            kernel = "C panels of each head, not quantised"
        if kernel not in kind.kernel:
            kind.kernel += f" or {kernel}" if kind.kernel else kernel
    return list(found.values())


def kind_of(matrix: "Matrix") -> Kind:
    """How one matrix is stored, before it is packed for a kernel."""
    from minillm.quantization.methods import QuantizedMethod

    names = "+".join(dict.fromkeys(part.name.rpartition(".")[2] for part in matrix.parts))
    method = matrix.method
    if not isinstance(method, QuantizedMethod):
        return Kind(names, "dense", 16.0, None, "")
    weights = method.quantized(matrix)
    layout = str(weights.codes.dtype).removeprefix("torch.") if weights.bits == 8 else "int4"
    layout = f"table of {len(weights.table)} values" if weights.table is not None else layout
    layout += ", zero points" * (weights.zeros is not None) + ", minima" * (
        weights.minima is not None
    )
    layout += ", act order" * (weights.order is not None)
    bits = round(8 * weights.num_bytes / (weights.shape[0] * weights.shape[1]), 3)
    return Kind(names, layout, bits, weights.group_size, "")


def values_of(matrix: "Matrix") -> "Iterator[tuple[str, Tensor]]":
    """Name and dense values of each checkpoint matrix that a layer holds."""
    from minillm.quantization.methods import QuantizedMethod

    method = matrix.method
    if isinstance(method, QuantizedMethod):
        values = method.quantized(matrix).dense()
    else:
        values = matrix.values().float()
    rows = values.flatten(0, -2).split([len(part.rows) for part in matrix.parts])
    yield from zip((part.name for part in matrix.parts), rows, strict=True)


def parts_of(model: "Decoder") -> "Iterator[tuple[str, Tensor]]":
    """Name and dense values of all checkpoint matrices."""
    from minillm.quantization.mixed import holders

    for matrix in holders(model):
        yield from values_of(matrix)


def check(name: str, values: "Tensor", reference: "dict[str, Tensor] | None") -> Check:
    """Range, finiteness and error of a matrix."""
    import torch

    error = None
    if reference is not None:
        due = reference.get(name)
        if due is None or due.shape != values.shape:
            raise ConfigError(f"The folder of --against has no matrix {name} of this shape.")
        error = float((values - due).norm() / due.norm().clamp(min=1e-30))
    low, high = (float(end) for end in values.aminmax())
    return Check(name, low, high, bool(torch.isfinite(values).all()), error)


def show(inspection: Inspection, terminal: Terminal) -> None:
    """Print a table of kinds, and the matrices that stand out."""
    terminal.heading(f"{inspection.model}: {inspection.format}")
    rows = []
    for kind in inspection.kinds:
        errors = [one.error for one in kind.checks if one.error is not None]
        low = min(one.smallest for one in kind.checks)
        high = max(one.largest for one in kind.checks)
        rows.append((
            kind.names, kind.layout, f"{kind.bits:g}", str(kind.group or ""), str(kind.count),
            size(kind.num_bytes), kind.kernel, f"{low:.3g} to {high:.3g}",
            f"{max(errors):.2g}" if errors else "",
        ))  # fmt: skip
    columns = ("weights", "layout", "bits", "group", "layers", "bytes", "kernel", "range", "error")
    terminal.table(columns, rows)
    bad = [one.name for kind in inspection.kinds for one in kind.checks if not one.finite]
    if bad:
        terminal.line(f"  Not finite: {plural(len(bad), 'weight')}, {bad[0]} first.")
