"""What is said of drafts: lengths and rates, of an interval or of all."""

from operator import attrgetter

import pytest

from minillm.scheduling.record import Counters, Drafted

drafts_of = attrgetter("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_at")


def test_lengths_and_rates_by_hand():
    """Three rows: 4 drafts of which 4, 1 and 0 are accepted, and a row without any."""
    counters = Counters()
    for row in ((4, 4), (4, 1), (4, 0), (0, 0)):
        counters.add_drafts(Drafted(0, *row, 9))
    assert drafts_of(counters) == (3, 12, 5, [2, 1, 1, 1])
    assert counters.mean_length == 1 + 5 / 3
    assert counters.rate == 5 / 12
    assert counters.rates_at == (2 / 3, 1 / 3, 1 / 3, 1 / 3)
    assert sum(counters.rates_at) == pytest.approx(counters.mean_length - 1)


def test_an_interval_is_what_came_since():
    counters = Counters()
    counters.add_drafts(Drafted(0, 2, 1, 9))
    before = Counters().plus(counters)
    counters.add_drafts(Drafted(0, 4, 3, 9))  # more places than before
    assert drafts_of(counters.since(before)) == (1, 4, 3, [1, 1, 1, 0])
    assert drafts_of(before) == (1, 2, 1, [1, 0])
    assert drafts_of(before.since(before)) == (0, 0, 0, [0, 0])


def test_without_drafts_a_row_yields_one_token():
    none = Counters()
    assert (none.mean_length, none.rate, none.rates_at) == (1, None, ())


def test_what_follows_a_stop_was_not_accepted():
    counters, drafted = Counters(), Drafted(0, 4, 4, 9)
    counters.add_drafts(drafted)
    counters.cut_drafts(drafted, 3)
    assert drafts_of(counters) == (1, 4, 1, [1, 0, 0, 0])
