"""A step-time model of decoding: the counts of `roofline.py` divided by five measured rates.

The roofline (`roofline.step_time`) is a lower bound that assumes the fastest read for all bytes.
This model has three parts, each with its own rate, which do not overlap:

    products   matrix products: the larger of weight bytes / `stream`, the rate of a product with
               one row, and operations / `matrix`
    pages      attention over the blocks of the KV cache, which is memory-bound
    overhead   per step (launches, scheduling, bookkeeping) and per row (norms, sampling,
               bookkeeping)

`lab/benchmarks/decode_rates.py` measures the five rates, without using the steps that the model is
tested on. A model that fits into the processor's cache is faster than predicted.
"""

from dataclasses import dataclass, fields
from math import isfinite

from minillm.errors import ConfigError
from minillm.lab.roofline import StepCost


@dataclass(frozen=True)
class DecodeRates:
    """The measured rates of a machine for one model, dtype and number of threads.

    Attributes:
        stream: bytes/s at which a product with one row reads weights.
        matrix: operations/s of products at the largest batch.
        pages: bytes/s at which decode attention reads the KV cache.
        step_seconds, row_seconds: overhead per step, and per row in it.
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
        """The sum of all parts, which do not overlap."""
        return self.products + self.pages + self.overhead


def decode_time(cost: StepCost, rates: DecodeRates) -> DecodeTime:
    """Predict the time of a decode step with the counts `cost`."""
    return DecodeTime(
        products=max(cost.weight_bytes / rates.stream, cost.linear_flops / rates.matrix),
        pages=(cost.kv_read_bytes + cost.kv_write_bytes) / rates.pages,
        overhead=rates.step_seconds + cost.num_tokens * rates.row_seconds,
    )
