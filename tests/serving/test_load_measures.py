"""Latencies, windows and objectives against numbers that were worked out by hand."""

from typing import Any

import pytest

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.percentiles import percentile, statistics
from minillm.lab.benchmarks.serving.reply import COLUMNS, Reply, row
from minillm.lab.benchmarks.serving.slo import evaluate, parse_slo
from minillm.lab.benchmarks.serving.summary import (
    Evaluation,
    offered,
    peak_concurrency,
    summarise,
    tokens_within,
)


def reply(**given: Any) -> Reply:
    """Due at 10.0, sent at 10.1. Frames: an empty one (the role), three with text, an empty one
    with the finish reason; 5 tokens, because one frame holds two."""
    values: dict[str, Any] = {
        "index": 0, "turn": 0, "intended": 10.0, "sent": 10.1, "end": 11.5, "status": 200,
        "frames": [10.4, 10.5, 10.7, 11.1, 11.3], "texts": [10.5, 10.7, 11.1],
        "prompt_tokens": 20, "output_tokens": 5, "finish_reason": "length",
    }  # fmt: skip
    return Reply(**(values | given))


def failed(status: int | None = 500, index: int = 1, at: float = 10.0) -> Reply:
    return Reply(index, 0, at, at, at + 0.1, status, "broken")


def test_the_latencies_by_hand() -> None:
    assert measures.vllm(reply()) == pytest.approx({"ttft": 0.4, "tpot": 0.9 / 4, "e2el": 1.3})
    assert measures.gaps(reply().frames) == pytest.approx([0.1, 0.2, 0.4, 0.2])
    one = reply(frames=[10.4], texts=[10.4], output_tokens=1)
    assert measures.vllm(one) == pytest.approx({"ttft": 0.4, "tpot": None, "e2el": 0.4})


def test_tokens_without_usage_are_the_frames_with_text() -> None:
    assert reply(output_tokens=None).tokens == 3
    assert reply().tokens == 5


def test_statistics() -> None:
    assert percentile([3.0, 1.0, 2.0, 10.0], 90) == pytest.approx(7.9)
    assert statistics([None]) is None
    assert statistics([1.0, None, 3.0]) == pytest.approx(
        {"count": 2, "mean": 2, "std": 1, "max": 3, "p50": 2, "p90": 2.8, "p99": 2.98}
    )


@pytest.mark.parametrize(("text", "found"), [
    ("ttft=500ms,tpot=50ms", {"ttft": 0.5, "tpot": 0.05}), ("e2el=2s", {"e2el": 2.0}),
    ("ttft=250", {"ttft": 0.25}), (" tpot = 900us ", {"tpot": 9e-4}),
])  # fmt: skip
def test_objectives(text: str, found: dict[str, float]) -> None:
    assert parse_slo(text) == pytest.approx(found)


@pytest.mark.parametrize(("text", "message"), [
    ("ttf=5ms", "Did you mean 'ttft'"), ("", "no measure ''"), ("ttft", "positive time"),
    ("ttft=-5", "positive time"), ("ttft=inf", "positive time"), ("ttft=1h", "positive time"),
    ("ttft=1,ttft=2", "twice"),
])  # fmt: skip
def test_wrong_objectives_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


def test_failures_and_rejections_count_against_attainment() -> None:
    slow = reply(frames=[12.0, 12.1], texts=[12.0, 12.1])
    replies = [reply(), reply(), slow, failed(500), failed(503)]
    found = evaluate(replies, {"ttft": 0.5, "tpot": 0.5}, wall=4.0)
    assert found["good"] == 2
    assert found["attainment"] == 2 / 5
    assert found["attainment_of"] == {"ttft": 2 / 5, "tpot": 3 / 5}
    assert found["goodput"] == 0.5


def test_a_request_without_tpot_meets_its_objective() -> None:
    one = reply(frames=[10.4], texts=[10.4], output_tokens=1)
    assert evaluate([one], {"tpot": 1e-6}, 1.0)["attainment"] == 1


def flight(index: int, sent: float, end: float) -> Reply:
    frames = [(sent + end) / 2, end]
    return reply(index=index, intended=sent, sent=sent, end=end, frames=frames, output_tokens=4)


def test_the_flight_by_hand() -> None:
    """In flight: 1 from 0, 2 from 1, 3 from 2, 2 from 5, 1 from 6, 2 from 7, 1 from 7.5, 0 from
    8."""
    replies = [flight(0, 0, 6), flight(1, 1, 5), flight(2, 2, 8), flight(3, 7, 7.5)]
    assert peak_concurrency(replies) == 3
    assert peak_concurrency([flight(0, 0, 2), flight(1, 2, 5)]) == 1  # the second follows at once
    assert peak_concurrency([]) == 0
    found = offered(replies)
    assert found is not None
    assert found["request_rate"] == 3 / 7
    # Frames of 2 tokens each: at 3 and 6, 3 and 5, 5 and 8, 7.25 and 7.5; at 6 it is closed.
    assert tokens_within(replies, (1, 6)) == 2 * 4


def test_the_summary_of_a_run() -> None:
    late = reply(index=2, intended=12.0, sent=12.0, end=14.0, frames=[13.0, 14.0], output_tokens=2,
                 texts=[13.0, 14.0])  # fmt: skip
    how = Evaluation({"ttft": 0.6})
    found = summarise([reply(), failed(503, 1, 11.0), late], 10.0, how)
    assert (found["sent"], found["ok"], found["rejected"], found["failed"]) == (3, 2, 1, 0)
    assert found["errors"] == {"503: broken": 1}
    assert found["wall"] == 4
    assert found["output_throughput"] == pytest.approx(7 / 4)
    assert found["input_throughput"] == pytest.approx(40 / 4)
    assert found["request_throughput"] == pytest.approx(0.5)
    assert found["offered"]["request_rate"] == pytest.approx(2 / 2)
    assert found["offered"]["output_throughput"] == pytest.approx(5 / 2)
    assert found["lateness"]["max"] == pytest.approx(0.1)
    assert found["slo"]["attainment"] == pytest.approx(1 / 3)
    latencies = found["latencies"]
    assert latencies["ttft"]["mean"] == pytest.approx((0.4 + 1.0) / 2)
    assert latencies["itl"]["count"] == 5
    assert latencies["itl"]["max"] == pytest.approx(1.0)


def test_nothing_succeeded() -> None:
    found = summarise([failed(500)], 10.0, Evaluation({"ttft": 1.0}))
    assert found["slo"]["attainment"] == 0
    assert found["output_throughput"] == 0
    assert found["offered"] is None


def test_a_row_of_json() -> None:
    found = dict(zip(COLUMNS, row(reply(), 9.0), strict=True))
    assert found["intended"] == 1.0
    assert found["sent"] == pytest.approx(1.1)
    assert found["frames_us"] == [300_000, 400_000, 600_000, 1_000_000, 1_200_000]
    assert found["without_text"] == [0, 4]
    assert found["outcome"] == "ok"
