"""e16.1: the standard rule for one chain of drafts. The task is in README.md."""


def accept_probability(p: list[float], q: list[float], token: int) -> float:
    """Return the probability of keeping a draft from the distribution `q` of the small model, where
    the large model has the distribution `p`; `q[token]` is above 0."""
    raise NotImplementedError("TODO e16.1: the smaller of 1 and the quotient")


def residual(p: list[float], q: list[float]) -> list[float]:
    """Return the distribution of the token after a rejection: the part of `p` that exceeds `q`,
    divided by its sum. If that sum is 0, return `p`."""
    raise NotImplementedError("TODO e16.1: the part of p that exceeds q, divided by its sum")


def verify(
    targets: list[list[float]],
    dists: list[list[float]],
    drafts: list[int],
    coins: list[float],
    u: float,
) -> list[int]:
    """Return the tokens of one step: the drafts before the first rejected one, and one more
    token, which is drawn with `u`.

    `targets` are k + 1 distributions of the large model, `dists` the k distributions that the k
    `drafts` were drawn from, and `coins` k numbers that decide whether they are kept.
    """
    raise NotImplementedError("TODO e16.1: coins decide, then one draw with u")
