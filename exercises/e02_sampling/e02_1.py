"""e02.1: filters and a draw. The task is in README.md."""


def keep(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Return the ids of the tokens that may be drawn, best first; of equal logits the smaller id.

    Apply the temperature, then top-k, then top-p to the tokens that top-k kept. Temperature 0
    keeps the best token only. `top_k` 0 and `top_p` 1 keep all. Minus infinity is never kept.
    """
    raise NotImplementedError("TODO e02.1: rank, divide by the temperature, top-k, top-p")


def choose(logits: list[float], temperature: float, top_k: int, top_p: float, u: float) -> int:
    """Return the first kept token at which the sum of probabilities exceeds `u`."""
    raise NotImplementedError("TODO e02.1: add up the probabilities of the kept tokens")
