from itertools import pairwise

from minillm_exercises.checking import check, equal, seeds


@check(points=1, task="one window over all numbers")
def test_one_window(impl):
    equal(impl.window_sums([1, 2, 3], 3), [6], "one window", "window_sums([1, 2, 3], 3)")


@check(points=2, task="every window of two")
def test_windows(impl):
    for seed in seeds(2):
        numbers = [seed % 7, seed % 5, seed % 11, 1 + seed % 13]
        want = [a + b for a, b in pairwise(numbers)]
        equal(impl.window_sums(numbers, 2), want, "the windows", f"window_sums({numbers}, 2)")


@check(points=1, task="the largest so far")
def test_meter(impl):
    meter = impl.Meter()
    equal([meter.show(n) for n in (-5, -7, 2, 1)], [-5, -5, 2, 2], "the largest of -5, -7, 2, 1")
