"""e02.2: locally typical sampling. The task is in README.md."""


def entropy(logits: list[float]) -> float:
    """Return the expected surprise of the next token, in nats: the sum of p * (-ln p)."""
    raise NotImplementedError("TODO e02.2: the expected surprise")


def typical(logits: list[float], mass: float) -> list[int]:
    """Return, in increasing order, the ids of the fewest tokens whose probabilities reach `mass`.

    Tokens are taken by the distance of their surprise from the entropy, nearest first; at equal
    distance the smaller id first.
    """
    raise NotImplementedError("TODO e02.2: order by distance from the entropy, then the mass")
