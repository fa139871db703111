"""Any two settings of two axes meet in a combination that `make test` runs."""

import inspect
from itertools import combinations, product

import pytest

from tests.pairs import cases, pairwise, part_and_rest


@pytest.mark.parametrize("lengths", [(7, 6, 2), (6, 3, 2), (2, 2, 2), (3, 4, 3), (4, 3, 3, 2)])
def test_any_two_settings_meet_in_what_is_not_slow(lengths: tuple[int, ...]) -> None:
    axes = [range(length) for length in lengths]
    cells = pairwise(*axes)
    assert [cell.values for cell in cells] == [*product(*axes)]
    usual = [cell.values for cell in cells if not cell.marks]
    assert len(usual) * min(lengths) == len(cells)
    for one, other in combinations(range(len(axes)), 2):
        met = {(cell[one], cell[other]) for cell in usual}
        assert met == set(product(axes[one], axes[other]))


def test_two_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="whole product"):
        pairwise([1, 2], [3, 4])


def test_a_part_and_the_rest_are_all() -> None:
    part, rest = part_and_rest(range(3), 10)
    assert [*part.values[0], *rest.values[0]] == [*range(10)]
    assert not part.marks
    assert [mark.name for mark in rest.marks] == ["slow"]


def test_cases_are_tried_in_turn_and_a_failure_names_its_own() -> None:
    seen: list[tuple] = []

    @cases("one", [1, 2, 3])
    @cases("two three", [(4, 5), (6, 7)])
    def check(fixture: str, one: int, two: int, three: int) -> None:
        seen.append((fixture, one, two, three))
        assert (one, two) != (2, 6)

    assert [*inspect.signature(check).parameters] == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        check(fixture="x")
    assert caught.value.__notes__[-2:] == [
        "in the case of {'two': 6, 'three': 7}",
        "in the case of {'one': 2}",
    ]
    assert seen == [("x", 1, 4, 5), ("x", 1, 6, 7), ("x", 2, 4, 5), ("x", 2, 6, 7)]
    check("y", 1, 2, 3)
    assert seen[4:] == [("y", 1, 2, 3)]
