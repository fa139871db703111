"""Measures the machine's ceilings (memory bandwidth and FLOP/s), the 100% of a comparison.

The bandwidth is the highest that any read pattern reaches: reductions, or the product of one row
with a packed weight by oneDNN or by minillm's C functions. The fastest pattern depends on the
processor, so all are tried and the result names it. The FLOP/s are those of torch's matrix product
or of minillm's, whichever is faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from minillm.lab import ceilings
from minillm.lab.benchmarks.others import watching

if TYPE_CHECKING:
    import torch

ONEDNN, OWN, SUMS = "oneDNN's packed product", "our packed product", "minillm.lab.ceilings"
SECONDS = 0.4  # for each read pattern; long enough to include a quiet moment of a shared host
SHAPE = (32_768, 4096)  # a bf16 weight of 256 MiB, larger than any cache
MANY = (2048, 1024, 4096)  # rows, inputs and outputs of a compute-bound product

Read = tuple[Callable[[], object], int]  # a function, and the bytes that it reads


@dataclass(frozen=True)
class Ceiling:
    """Bytes/s of each read pattern, and operations/s in bf16, float32 and int8."""

    ways: Mapping[str, float]
    flops: float
    flops_fp32: float
    others: float = 0.0  # fraction of the processors that other programs used meanwhile
    machine: str = ""
    ops_int8: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the fastest read pattern."""
        return max(self.ways.values())

    @property
    def way(self) -> str:
        """Name of the fastest read pattern."""
        return max(self.ways, key=lambda name: self.ways[name])

    def rate(self, dtype: str) -> float:
        """Operations/s of products in `dtype`; in int8 at least those in bf16."""
        if dtype == "int8":
            return max(self.flops, self.ops_int8)
        return self.flops_fp32 if dtype == "float32" else self.flops

    def as_json(self) -> dict[str, Any]:
        """The ceilings as JSON data."""
        return {"bandwidth": self.bandwidth, "way": self.way} | asdict(self)


def best_of(first: Ceiling, second: Ceiling) -> Ceiling:
    """The higher value of each: a disturbance can only lower a measured rate."""
    names = first.ways.keys() | second.ways.keys()
    return Ceiling(
        {name: max(one.ways.get(name, 0.0) for one in (first, second)) for name in sorted(names)},
        max(first.flops, second.flops),
        max(first.flops_fp32, second.flops_fp32),
        min(first.others, second.others),
        first.machine,
        max(first.ops_int8, second.ops_int8),
    )


def measure_ceiling(device: str, threads: int, refresh: bool = True) -> Ceiling:
    """Measure for about four seconds, with the number of threads of the engines."""
    import torch

    torch.set_num_threads(threads)
    with watching([]) as watch, torch.inference_mode():
        known = ceilings.measure(refresh=refresh, device=device)
        ways, flops = {SUMS: known.bandwidth}, known.peak_flops
        if device == "cpu" and refresh:
            flops = max(flops, our_rate())
            for name, (run, num_bytes) in ways_to_read().items():
                ways[name] = num_bytes / ceilings._best(run, SECONDS)
    rates = flops, known.peak_flops_fp32
    return Ceiling(ways, *rates, watch.share, known.name, known.peak_ops_int8)


def ways_to_read() -> dict[str, Read]:
    """Further read patterns over a buffer larger than any cache, besides `ceilings.measure`'s."""
    import torch

    weight = torch.ones(SHAPE, dtype=torch.bfloat16)
    numbers = weight.view(torch.float32).view(-1)
    ways: dict[str, Read] = {"dot product": (lambda: torch.dot(numbers, numbers), weight.nbytes)}
    row = weight[:1].clone()
    for run in ceilings._packed_product(row, weight):
        ways[ONEDNN] = (run, weight.nbytes)
    return ways | our_product(row, weight)


def our_rate() -> float:
    """Operations/s of minillm's matrix product with many rows; 0 if there is none."""
    import torch

    count, inputs, outputs = MANY
    x = torch.ones(count, inputs, dtype=torch.bfloat16)
    product = our_product(x, torch.ones(outputs, inputs, dtype=torch.bfloat16))
    operations = 2 * count * inputs * outputs
    rates = [operations / ceilings._best(run, SECONDS) for run, _ in product.values()]
    return max(rates, default=0.0)


def our_product(x: "torch.Tensor", weight: "torch.Tensor") -> dict[str, Read]:
    """The matrix product of minillm's C functions, on processors that support it."""
    import torch

    from minillm.ops import cpu

    if not cpu.takes_panels(weight):
        return {}
    panels = torch.empty(cpu.panels_shape(*weight.shape), dtype=weight.dtype)
    cpu.pack_panels(weight, panels)
    return {OWN: (lambda: cpu.panel_linear(x, panels, None, len(weight)), panels.nbytes)}
