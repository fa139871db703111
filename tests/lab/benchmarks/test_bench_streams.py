"""The benchmark of streams: its client, its times of threads, and its table."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.errors import NodeError
from minillm.lab.benchmarks import serving_streams
from minillm.lab.benchmarks.serving_streams import LOOP, Pair, Run, rows, summary
from minillm.lab.benchmarks.streams_client import run_streams, text_of
from minillm.lab.benchmarks.streams_first_token import described, first_token_delays
from minillm.lab.benchmarks.thread_times import OTHERS, STEPS, Times, thread_times
from tests.serving.http_small import Served, served, write_chat_model

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_chat_model(tmp_path_factory.mktemp("streams"))
    with served(folder, {"request_trace": True}) as made:
        yield made


@pytest.mark.parametrize("parse", [False, True])
def test_streams_have_the_texts_of_single_requests(server: Served, parse: bool) -> None:
    got = run_streams(server.port, PROMPTS, 9, parse)
    expected = [server.complete(each, max_tokens=9, ignore_eos=True) for each in PROMPTS]
    assert got.texts() == [each["choices"][0]["text"] for each in expected]
    assert len(PROMPTS) <= got.events <= 9 * len(PROMPTS)
    assert all(0 < first <= got.seconds for first in got.first)
    assert got.num_bytes == sum(map(len, got.replies))


def test_an_error_is_not_taken_for_a_stream(server: Served) -> None:
    got = run_streams(server.port, [[10**9]], 9, False)
    with pytest.raises(NodeError, match="400 Bad Request"):
        got.texts()


def test_a_stream_without_its_end_is_not_complete() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert text_of(head + event + event + b"data: [DONE]\n\n") == "aa"
    with pytest.raises(NodeError, match="no complete stream"):
        text_of(head + event)


def test_the_delay_of_a_first_token_is_after_its_step(server: Served) -> None:
    trace = server.engine.trace
    delays = first_token_delays(server.port, PROMPTS)
    first_steps = [record for record in trace if record.num_prefill_tokens][-len(PROMPTS) :]
    assert len(delays) == len(first_steps) == len(PROMPTS)
    for each, record in zip(delays, first_steps, strict=True):
        # The client sent the request before its step began, and was not idle for long.
        assert 0 < each < 1000 * (record.computed - record.started) + 10_000
    assert "2.50 ms" in described([1.0, 2.5, 4.0])
    assert "at most 4.00 ms" in described([1.0, 2.5, 4.0])


def write_thread(folder: Path, name: str, times: str) -> None:
    folder.mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "schedstat").write_text(f"{times}\n")


def test_times_of_threads_are_added_by_name(tmp_path: Path) -> None:
    tasks = tmp_path / "70" / "task"
    write_thread(tasks / "70", "python", "1000000000 500000000 3")
    write_thread(tasks / "71", "minillm-steps", "2000000000 0 3")
    write_thread(tasks / "72", "python", "3000000000 0 3")
    write_thread(tasks / "73", "asyncio_0", "1000000000 250000000 3")
    (tasks / "74").mkdir()  # it has just ended
    found = thread_times(70, LOOP, tmp_path)
    assert found.processors == {LOOP: 1.0, STEPS: 2.0, OTHERS: 4.0}
    assert found.waits == {LOOP: 0.5, STEPS: 0.0, OTHERS: 0.25}
    new = Times({LOOP: 1.5, STEPS: 2.0, OTHERS: 4.0, "C worker": 1.0}, found.waits) - found
    assert new.processors == {LOOP: 0.5, STEPS: 0.0, OTHERS: 0.0, "C worker": 1.0}


def test_a_run_with_other_threads_has_its_own_times() -> None:
    assert thread_times(threading.get_native_id() + 10**7, LOOP) == Times({}, {})


def run(rate: float, **times: float) -> Run:
    return Run(rate, Times({name.replace("_", " "): each for name, each in times.items()}, {}))


def test_the_ratio_and_the_medians() -> None:
    pairs = [
        Pair(run(100.0, step_thread=3.0), run(rate, step_thread=2.0, event_loop=1.0), 4)
        for rate in (50.0, 90.0, 80.0)
    ]
    assert [pair.ratio for pair in pairs] == [0.5, 0.9, 0.8]
    served = summary([pair.served for pair in pairs])
    assert served["tokens_per_second"] == 80.0
    assert served["rates"] == [50.0, 90.0, 80.0]
    assert served["processors"] == {STEPS: 2.0, LOOP: 1.0}
    table = {row[0]: row[1:] for row in rows(summary([pairs[0].offline]), served, 1000)}
    assert table["tokens/s"] == ["100.0", "80.0"]
    assert table["us/token, event loop"] == ["", "1,000.0"]
    assert table["us/token, process"] == ["3,000.0", "3,000.0"]


def test_prompts_differ_between_repeats_and_not_between_both_sides() -> None:
    work = serving_streams.Work(3, 8, 4, False)
    assert work.prompts(1) == work.prompts(1)
    assert work.prompts(1) != work.prompts(2)
    assert work.tokens == 12


def test_a_run_measures_both_sides(monkeypatch: pytest.MonkeyPatch, server: Served) -> None:
    class Engine:
        group = 10**8

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"seconds": 2.0, "texts": [""] * len(request["prompts"])}

    work, engine = serving_streams.Work(3, 4, 5, False), Engine()
    monkeypatch.setattr(serving_streams, "LAST_ID", 40)
    offline, texts = serving_streams.offline_run(engine, work, work.prompts(0))  # type: ignore[arg-type]
    assert (offline.tokens_per_second, texts) == (7.5, [""] * 3)
    made, texts = serving_streams.served_run(server.port, 10**8, work, work.prompts(0))
    assert made.events >= 3
    assert made.tokens_per_second > 0
    assert len(texts) == 3
