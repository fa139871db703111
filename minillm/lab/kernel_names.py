"""The kernel of a loaded matrix, in words."""

from minillm.layers.linear_methods import Matrix, PackedLinearMethod, PanelLinearMethod
from minillm.ops.cpu_quantized import FLOAT8, MINIMA, ZEROS, MatrixParts
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.panels import PanelQuantizedMethod


def kernel_of(matrix: Matrix) -> str:
    """The kernel of a matrix's products on this processor, and the resident form that it reads."""
    method = matrix.method
    if isinstance(method, PanelQuantizedMethod):
        parts = method.parts(matrix)
        outliers = f", from {method.threshold:g} on of 16" * bool(method.threshold)
        inputs = f"of {8 << parts.twice} bits{outliers}"
        if parts.float8:
            inputs = f"in {str(method.dtype).removeprefix('torch.')}"
        return f"C panels, {_form(parts)}, activations {inputs}"
    if isinstance(method, QuantizedMethod):
        weights = method.quantized(matrix)
        kind = "FP8" if weights.codes.dtype == FLOAT8 else f"int{weights.bits}"
        return f"dense for each call, {kind}, groups of {weights.group_size}"
    width = f"{_dtype(matrix)}, not quantised"
    if isinstance(method, PanelLinearMethod):
        return f"C panels, {width}"
    return f"{'oneDNN' if isinstance(method, PackedLinearMethod) else 'torch'}, {width}"


def _form(parts: MatrixParts) -> str:
    """The form of codes: bits or table, group, offsets, order."""
    kind = f"int{parts.bits}" if parts.numbers is None else "table of 16 values"
    kind = "FP8 (e4m3)" if parts.float8 else kind
    offsets = {ZEROS: ", zero points", MINIMA: ", minima"}.get(parts.offset_kind, "")
    order = "" if parts.order is None else ", act order"
    return f"{kind}, groups of {parts.group}{offsets}{order}"


def _dtype(matrix: Matrix) -> str:
    """The name of the type in which a matrix that is not quantised is stored."""
    tensors = [*matrix.parameters(recurse=False), *matrix.buffers(recurse=False)]
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "no tensors"
