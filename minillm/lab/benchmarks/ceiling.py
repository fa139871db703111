"""The ceilings of this machine in this minute: what the shares of a comparison are shares of.

The read bandwidth is the largest that any way of reading reaches here: plain reductions, or the
product of one row with a packed weight, as oneDNN does it and as our own C functions do. Which of
them it is differs between processors, so all are tried, and the result says which one it was. The
rate of operations is that of torch's own product or of ours with many rows, whichever is faster.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from minillm.lab import ceilings
from minillm.lab.benchmarks.others import watching

if TYPE_CHECKING:
    import torch

ONEDNN, OWN, SUMS = "oneDNN's packed product", "our packed product", "minillm.lab.ceilings"
PRODUCTS = (ONEDNN, OWN)
SECONDS = 0.4  # for each way to read: on a shared host a quiet moment must be among them
SHAPE = (32_768, 4096)  # of a bf16 weight that no cache holds: 256 MiB
MANY = (2048, 1024, 4096)  # rows, inputs and outputs of a product that operations bound

Read = tuple[Callable[[], object], int]  # an action, and the bytes that it reads


@dataclass(frozen=True)
class Ceiling:
    """Bytes/s of each way to read, and operations/s in bf16 and float32."""

    ways: Mapping[str, float]
    flops: float
    flops_fp32: float
    others: float = 0.0  # share of the processors that other programs used meanwhile
    machine: str = ""
    packed: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        products = {name: rate for name, rate in self.ways.items() if name in PRODUCTS}
        object.__setattr__(self, "packed", products)

    @property
    def bandwidth(self) -> float:
        """Of the fastest way."""
        return max(self.ways.values())

    @property
    def way(self) -> str:
        """Which way is the fastest."""
        return max(self.ways, key=lambda name: self.ways[name])

    @property
    def packed_bandwidth(self) -> float:
        """Of the faster product of one row with a packed bf16 weight; 0 where there is none."""
        return max(self.packed.values(), default=0.0)

    def rate(self, dtype: str) -> float:
        """Operations/s of products in `dtype`."""
        return self.flops_fp32 if dtype == "float32" else self.flops

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        more = {"bandwidth": self.bandwidth, "packed_bandwidth": self.packed_bandwidth}
        return more | {"way": self.way} | asdict(self)


def best_of(first: Ceiling, second: Ceiling) -> Ceiling:
    """The higher of each: what slows a reading down is never the machine's limit."""
    names = first.ways.keys() | second.ways.keys()
    return Ceiling(
        {name: max(one.ways.get(name, 0.0) for one in (first, second)) for name in sorted(names)},
        max(first.flops, second.flops),
        max(first.flops_fp32, second.flops_fp32),
        min(first.others, second.others),
        first.machine,
    )


def measure_ceiling(device: str, threads: int, refresh: bool = True) -> Ceiling:
    """About four seconds of measuring, with as many threads as the engines have."""
    import torch

    torch.set_num_threads(threads)
    with watching([]) as watch, torch.inference_mode():
        known = ceilings.measure(refresh=refresh, device=device)
        ways, flops = {SUMS: known.bandwidth}, known.peak_flops
        if device == "cpu" and refresh:
            flops = max(flops, our_rate())
            for name, (run, num_bytes) in ways_to_read().items():
                ways[name] = num_bytes / ceilings._best(run, SECONDS)
    return Ceiling(ways, flops, known.peak_flops_fp32, watch.share, known.name)


def ways_to_read() -> dict[str, Read]:
    """Ways to read a buffer that no cache holds, beyond those of `ceilings.measure`."""
    import torch

    weight = torch.ones(SHAPE, dtype=torch.bfloat16)
    numbers = weight.view(torch.float32).view(-1)
    ways: dict[str, Read] = {"dot product": (lambda: torch.dot(numbers, numbers), weight.nbytes)}
    row = weight[:1].clone()
    for run in ceilings._packed_product(row, weight):
        ways[ONEDNN] = (run, weight.nbytes)
    return ways | our_product(row, weight)


def our_rate() -> float:
    """Operations/s of our own product with many rows; 0 where there is none."""
    import torch

    count, inputs, outputs = MANY
    x = torch.ones(count, inputs, dtype=torch.bfloat16)
    product = our_product(x, torch.ones(outputs, inputs, dtype=torch.bfloat16))
    operations = 2 * count * inputs * outputs
    rates = [operations / ceilings._best(run, SECONDS) for run, _ in product.values()]
    return max(rates, default=0.0)


def our_product(x: "torch.Tensor", weight: "torch.Tensor") -> dict[str, Read]:
    """The product of our C functions, on processors for which there is one."""
    import torch

    from minillm.ops import cpu

    if not cpu.takes_panels(weight):
        return {}
    panels = torch.empty(cpu.panels_shape(*weight.shape), dtype=weight.dtype)
    cpu.pack_panels(weight, panels)
    return {OWN: (lambda: cpu.panel_linear(x, panels, None, len(weight)), panels.nbytes)}
