"""Only the last product is a sum over all units, so that is where the ranks have to meet.

A unit of the hidden layer needs the whole input and nothing of the other units, and the output is a
sum over units. So a rank computes its own units from the first row of the weights to the last
column, and the sum over units becomes a sum over ranks. A bias of the units goes where the units
are. The bias of the output belongs to no unit: it is added when the sum is there, or by one rank
before it.
"""

from collections.abc import Callable

Matrix = list[list[int]]


def heads(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """An equal share of the query heads, and the KV heads that these read."""
    each = num_heads // size
    queries = list(range(rank * each, (rank + 1) * each))
    group = num_heads // num_kv_heads  # query heads that read one KV head
    return queries, list(range(queries[0] // group, queries[-1] // group + 1))


def shard(layer: dict[str, list], rank: int, size: int) -> dict[str, list]:
    """The rank's units: their rows of gate and of up, their columns of down."""
    units = len(layer["gate_up"]) // 2
    first, end = rank * units // size, (rank + 1) * units // size
    gate, up = slice(first, end), slice(units + first, units + end)
    rows, bias = layer["gate_up"], layer["gate_up_bias"]
    return {
        "gate_up": rows[gate] + rows[up],
        "gate_up_bias": bias[gate] + bias[up],
        "down": [row[first:end] for row in layer["down"]],
        "down_bias": layer["down_bias"],
    }


def forward(
    mine: dict[str, list], x: Matrix, rank: int, add_up: Callable[[Matrix], Matrix]
) -> Matrix:
    """Own units, their part of the output, one sum, the bias."""
    stacked = product(x, mine["gate_up"], mine["gate_up_bias"])
    units = len(mine["gate_up"]) // 2
    hidden = [
        [max(0, g) * u for g, u in zip(row[:units], row[units:], strict=True)] for row in stacked
    ]
    bias = mine["down_bias"]
    total = add_up(product(hidden, mine["down"], [0] * len(bias)))
    return [[value + b for value, b in zip(row, bias, strict=True)] for row in total]


def product(x: Matrix, weight: Matrix, bias: list[int]) -> Matrix:
    """Every row of x times every row of the weight, plus the bias."""
    return [
        [sum(a * w for a, w in zip(row, column, strict=True)) + b
         for column, b in zip(weight, bias, strict=True)]
        for row in x
    ]  # fmt: skip
