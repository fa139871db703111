"""e16.1: the standard rule for one chain of drafts. The task is in README.md."""


def accept_probability(p: list[float], q: list[float], token: int) -> float:
    """With which probability a draft is kept that the small model drew from the law `q`, where the
    law of the large model is `p`; `q[token]` is above 0."""
    raise NotImplementedError("TODO e16.1: the smaller of 1 and the quotient")


def residual(p: list[float], q: list[float]) -> list[float]:
    """The law from which the token is drawn after a rejection: what `p` has more than `q`, as
    shares of their sum. Where nothing is left, `p` itself."""
    raise NotImplementedError("TODO e16.1: what p has more, divided by its sum")


def verify(
    targets: list[list[float]],
    laws: list[list[float]],
    drafts: list[int],
    coins: list[float],
    u: float,
) -> list[int]:
    """The tokens that one step yields: the drafts before the first rejected one, and one more
    token, which is drawn with `u`.

    `targets` are k + 1 laws of the large model, `laws` the k laws that the k `drafts` were drawn
    from, `coins` k numbers that decide about them.
    """
    raise NotImplementedError("TODO e16.1: coins decide, then one draw with u")
