"""Chapter 03's own functions: middles of times."""

from minillm_exercises.chapters import ch03


def test_middles_and_what_is_built_on_them():
    assert ch03.middles([1, 9, 2, 4, 4, 80], 3) == [2, 4]
    slow, fast = [2] * 8 + [3] * 8 + [6] * 8, [2] * 8 + [2] * 8 + [3] * 7 + [900]
    assert ch03.clock_ratio(slow, fast) == 11 / 7
