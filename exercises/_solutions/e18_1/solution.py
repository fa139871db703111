"""Choose with one number and weigh with another; then turn the table around, and back.

A token knows its experts, and an expert wants its tokens: dispatch transposes the table of routes.
So each expert is asked once, whatever the number of its tokens, and its matrices are read once.
Combine goes back to tokens by adding: the sum is all that the experts of a token have in common,
so parts of it may be computed elsewhere, and a token without an expert here has a part of zeros.
"""

from collections.abc import Callable

Rows = list[list[float]]
Pairs = list[tuple[int, float]]


def route(scores: list[float], bias: list[float], k: int) -> Pairs:
    """Sorted by what chooses, the best first; sorting keeps the order of equals."""
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    chosen = sorted(range(len(scores)), key=lambda expert: -choice[expert])[:k]
    total = sum(scores[expert] for expert in chosen)
    return [(expert, scores[expert] / total) for expert in chosen]


def dispatch(routes: list[Pairs], num_experts: int) -> list[Pairs]:
    """The table of routes, by expert."""
    batches: list[Pairs] = [[] for _ in range(num_experts)]
    for token, pairs in enumerate(routes):
        for expert, weight in pairs:
            batches[expert].append((token, weight))
    return batches


def combine(x: Rows, batches: list[Pairs], run: Callable[[int, Rows], Rows]) -> Rows:
    """Every output, times its weight, is added to its token."""
    out = [[0.0] * len(row) for row in x]
    for expert, batch in enumerate(batches):
        if not batch:
            continue
        rows = run(expert, [list(x[token]) for token, _ in batch])
        for (token, weight), row in zip(batch, rows, strict=True):
            out[token] = [a + weight * b for a, b in zip(out[token], row, strict=True)]
    return out
