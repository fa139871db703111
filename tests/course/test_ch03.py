"""Chapter 03's own functions: middles of times, leads of tokens."""

import torch

from minillm_exercises.chapters import ch03


def test_middles_and_what_is_built_on_them():
    assert ch03.middles([1, 9, 2, 4, 4, 80], 3) == [2, 4]
    slow, fast = [2] * 8 + [3] * 8 + [6] * 8, [2] * 8 + [2] * 8 + [3] * 7 + [900]
    assert ch03.clock_ratio(slow, fast) == 11 / 7


def test_leads_are_negative_where_another_token_wins():
    rows = torch.tensor([[1.0, 4.0, 2.0], [1.0, 4.0, 2.0]])
    assert ch03.leads(rows, [1, 2]) == [2.0, -2.0]
