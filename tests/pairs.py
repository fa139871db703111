"""Products of settings: many in one test, or some in `make test` and all in `make test-full`."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import product
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """`pytest.mark.parametrize` within one test, for cases of a millisecond. A failure has the case
    in its notes. Not for tests that skip: the first case to do so would end the others. Another
    test may call it for one case, with all arguments."""
    keys, values = names.split(), list(values)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name not in keys]

        @wraps(test)
        def run(*given: Any, **named: Any) -> None:
            if len(given) + len(named) > len(others):
                return test(*given, **named)
            for value in values:
                case = dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
                try:
                    test(*given, **named, **case)
                except Exception as error:
                    error.add_note(f"in the case of {case}")
                    raise

        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def pairwise(*axes: Sequence[Any]) -> list:
    """Parameters for all combinations of three or more axes. Those that are not marked slow are one
    in as many as the shortest axis is long, and any two settings of two axes meet in one of them.

    Each combination of the other axes has one setting of the shortest, because the sum of all
    indices is a multiple of its length.
    """
    if len(axes) < 3:
        raise ValueError(f"Any two settings of {len(axes)} axes meet only in the whole product.")
    shortest = min(map(len, axes))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, indices, strict=True)),
            marks=[pytest.mark.slow] if sum(indices) % shortest else [],
        )
        for indices in product(*(range(len(axis)) for axis in axes))
    ]


def some(usual: Sequence[Any], whole: Iterable[Any]) -> list:
    """Parameters: all of `whole`, of which those in `usual` are not slow. A tuple is several."""
    several = ((x if isinstance(x, tuple) else (x,), x in usual) for x in whole)
    return [pytest.param(*x, marks=[pytest.mark.slow] * (not quick)) for x, quick in several]


def one_in(count: int, whole: Iterable[Any]) -> list:
    """Parameters: all of `whole`, of which one in `count` is not slow."""
    return some((every := list(whole))[::count], every)


def part_and_rest(part: range, whole: int) -> list:
    """Parameters: the seeds of `make test`, and those up to `whole`, which are slow."""
    rest = pytest.param(range(part.stop, whole), id="all", marks=pytest.mark.slow)
    return [pytest.param(part, id="usual"), rest]
