"""e02.2: locally typical sampling. The task is in README.md."""


def entropy(logits: list[float]) -> float:
    """The expected surprise of the next token, in nats: the sum of p * (-ln p)."""
    raise NotImplementedError("TODO e02.2: the expected surprise")


def typical(logits: list[float], mass: float) -> list[int]:
    """Ids, increasing, of the fewest tokens that hold `mass` of the probability, taken in the
    order of how far their surprise is from the entropy; equally far, the smaller id first."""
    raise NotImplementedError("TODO e02.2: order by distance from the entropy, then the mass")
