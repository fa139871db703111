"""How long a decode step takes on a machine: counts of `plan/cost.py` times five measured rates.

The roofline (`cost.step_time`) is a bound: all bytes at the speed of the fastest read there is. A
decode step has three parts that do not overlap, each with a speed of its own:

    products   weights are read as fast as a product of one row reads them, until there are so many
               rows that arithmetic takes longer: the larger of bytes / stream and operations / rate
    pages      attention reads scattered pages, a few numbers of arithmetic for each
    overhead   what a step costs whatever its sizes (starting operations, deciding, books), and what
               each row costs beside (norms, sampling, its line in every list)

`lab/benchmarks/decode_rates.py` measures the five rates, none on a step that is to be explained. A
model that the processor's cache holds is faster than this says.
"""

from dataclasses import dataclass, fields
from math import isfinite

from minillm.errors import ConfigError
from minillm.plan.cost import StepCost


@dataclass(frozen=True)
class DecodeRates:
    """What a machine does for one model, in one precision, with so many threads.

    Attributes:
        stream: bytes/s at which a product of one row reads weights.
        matrix: operations/s of products at the largest batch.
        pages: bytes/s at which decode attention reads the cache.
        step_seconds, row_seconds: overhead of a step, and of each row in it.
    """

    stream: float
    matrix: float
    pages: float
    step_seconds: float
    row_seconds: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = "0 or more" if field.name.endswith("seconds") else "above 0"
            if not (isfinite(value) and (value > 0 or (value == 0 and least == "0 or more"))):
                raise ConfigError(f"{field.name} is {value}; it must be a number, {least}.")


@dataclass(frozen=True)
class DecodeTime:
    """The parts of a decode step, in seconds."""

    products: float
    pages: float
    overhead: float

    @property
    def seconds(self) -> float:
        """All parts: they follow one another."""
        return self.products + self.pages + self.overhead


def decode_time(cost: StepCost, rates: DecodeRates) -> DecodeTime:
    """Predict a step in which every sequence computes one token; `cost` counts it."""
    return DecodeTime(
        products=max(cost.weight_bytes / rates.stream, cost.linear_flops / rates.matrix),
        pages=(cost.kv_read_bytes + cost.kv_write_bytes) / rates.pages,
        overhead=rates.step_seconds + cost.num_tokens * rates.row_seconds,
    )
