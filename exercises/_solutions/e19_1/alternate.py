"""Another way: the ranks of a unit and of a head are asked for, and rank 0 brings the bias along.

The output is built column by column of `down`, as a sum of outer products, and the bias goes into
the part of rank 0, so that the sum holds it once.
"""

from collections.abc import Callable

Matrix = list[list[int]]


def heads(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """Query heads whose rank this is, and the set of what they read."""
    mine = [head for head in range(num_heads) if head * size // num_heads == rank]
    return mine, sorted({head * num_kv_heads // num_heads for head in mine})


def shard(layer: dict[str, list], rank: int, size: int) -> dict[str, list]:
    """Cut the layer into gate, up and down first."""
    units = len(layer["down"][0])
    mine = range(rank * units // size, (rank + 1) * units // size)

    def both(stack: list) -> list:
        gate, up = stack[:units], stack[units:]
        return [gate[i] for i in mine] + [up[i] for i in mine]

    return {
        "gate_up": both(layer["gate_up"]),
        "gate_up_bias": both(layer["gate_up_bias"]),
        "down": [[row[i] for i in mine] for row in layer["down"]],
        "down_bias": list(layer["down_bias"]),
    }


def forward(
    mine: dict[str, list], x: Matrix, rank: int, add_up: Callable[[Matrix], Matrix]
) -> Matrix:
    """Unit after unit."""
    count = len(mine["gate_up"]) // 2
    columns = list(zip(*mine["down"], strict=True))
    part = []
    for row in x:
        out = list(mine["down_bias"]) if rank == 0 else [0] * len(mine["down_bias"])
        for unit in range(count):
            gate, up = (
                sum(map(int.__mul__, row, mine["gate_up"][at])) + mine["gate_up_bias"][at]
                for at in (unit, unit + count)
            )
            if gate > 0:
                out = [value + gate * up * w for value, w in zip(out, columns[unit], strict=True)]
        part.append(out)
    return add_up(part)
