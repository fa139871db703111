"""The server under many clients that misbehave; see minillm/lab/benchmarks/serving_soak.py."""

import pytest

from minillm.lab.benchmarks.serving_soak import Result, ServingSoak, without_chunks
from minillm.lab.benchmarks.soak_oracle import Broken


@pytest.mark.slow
def test_many_streams_leave_nothing_behind() -> None:
    soak = ServingSoak("tiny", streams=500)
    result = soak.run(2, parts=1)
    assert sum(result.outcomes.values()) >= 500
    assert {each.partition(",")[0] for each in result.outcomes} == {
        "finish", "leave", "slow", "killed", "whole"}  # fmt: skip
    assert result.characters > 10_000


def test_the_soak_finds_another_text() -> None:
    soak = ServingSoak("tiny", streams=1)
    soak.right = dict.fromkeys(soak.right, "something else")
    with pytest.raises(Broken, match="another text"):
        soak.run(3, parts=1)


def test_chunks_are_removed() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert without_chunks(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == b"abcde"
    assert without_chunks(head + b"3\r\nabc\r\n5\r\nde") == b"abcde"
    assert without_chunks(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"


def test_growth_is_the_slope_over_the_last_half() -> None:
    result = Result(1, requests=[100, 300, 500, 900], rss=[10_000, 90_000, 70_000, 70_800])
    assert result.growth == pytest.approx(2000)
    assert Result(1, requests=[100], rss=[10_000]).growth == 0
