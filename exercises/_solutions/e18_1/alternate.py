"""Another way: the best expert is taken out k times, and tokens collect what belongs to them."""

from collections import defaultdict
from collections.abc import Callable

Rows = list[list[float]]
Pairs = list[tuple[int, float]]


def route(scores: list[float], bias: list[float], k: int) -> Pairs:
    """Like picking k tokens greedily; max keeps the first of equals."""
    left, chosen = list(range(len(scores))), []
    for _ in range(k):
        chosen.append(max(left, key=lambda expert: scores[expert] + bias[expert]))
        left.remove(chosen[-1])
    own = [scores[expert] for expert in chosen]
    return list(zip(chosen, [score / sum(own) for score in own], strict=True))


def dispatch(routes: list[Pairs], num_experts: int) -> list[Pairs]:
    """Ask every token about every expert."""
    return [
        [(token, weight) for token, pairs in enumerate(routes) for e, weight in pairs if e == own]
        for own in range(num_experts)
    ]


def combine(x: Rows, batches: list[Pairs], run: Callable[[int, Rows], Rows]) -> Rows:
    """Collect first, add up per token at the end."""
    parts: dict[int, list[tuple[float, list[float]]]] = defaultdict(list)
    for expert in range(len(batches)):
        if tokens := [token for token, _ in batches[expert]]:
            outputs = run(expert, [x[token][:] for token in tokens])
            for at, (token, weight) in enumerate(batches[expert]):
                parts[token].append((weight, outputs[at]))
    return [
        [sum(weight * row[place] for weight, row in parts[token]) for place in range(len(x[token]))]
        for token in range(len(x))
    ]
