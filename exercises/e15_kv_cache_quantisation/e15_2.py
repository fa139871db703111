"""e15.2: attention of one tile with sums of whole numbers. The task is in README.md."""


def quantize_query(query: list[float]) -> tuple[list[int], float]:
    """Return the codes, from -127 to 127, and the scale of a query."""
    raise NotImplementedError("TODO e15.2: scale = largest / 127, the nearest codes")


def score_sums(query_codes: list[int], stored: list[list[int]]) -> list[int]:
    """Return the sum of query code * key code of each position; `stored` has key codes + 128."""
    raise NotImplementedError("TODO e15.2: sums of whole numbers, without the 128")


def weight_codes(weighted: list[float]) -> tuple[list[int], float]:
    """Return the codes, from 0 to 127, and the unit of numbers that are 0 or more."""
    raise NotImplementedError("TODO e15.2: unit = largest / 127, the nearest codes")


def value_sums(codes: list[int], values: list[list[int]]) -> list[int]:
    """Return the sum of weight code * value code over all positions, for each number of a head."""
    raise NotImplementedError("TODO e15.2: sums of whole numbers over the positions")


def attend(
    query: list[float],
    stored: list[list[int]],
    key_scales: list[float],
    values: list[list[int]],
    value_scales: list[float],
    count: int,
    scale: float,
) -> list[float]:
    """Return the output of a query over the first `count` positions of a tile."""
    raise NotImplementedError("TODO e15.2: scores, weights, weight codes, outputs")
