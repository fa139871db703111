"""e02.1: filters and a draw. The task is in README.md."""


def keep(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Ids of the tokens that may be drawn, best first; of equal logits the smaller id first.

    Temperature, then top-k, then top-p among what top-k kept. Temperature 0 keeps the best
    token only; `top_k` 0 and `top_p` 1 are no limits. Minus infinity is never kept.
    """
    raise NotImplementedError("TODO e02.1: rank, divide by the temperature, top-k, top-p")


def choose(logits: list[float], temperature: float, top_k: int, top_p: float, u: float) -> int:
    """The kept token in whose share of the probability `u` (0 <= u < 1) lies, best first."""
    raise NotImplementedError("TODO e02.1: walk along the shares of the kept tokens")
