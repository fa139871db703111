"""Chapter 22's own functions: the server process, step times, the search."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.lab.benchmarks.serving.reply import Reply
from minillm.lab.hardware import DATASHEET
from minillm.lab.links import LINKS
from minillm.lab.parallel_cost import Devices, precision, stage_times
from minillm.lab.parallel_layout import Layout
from minillm.models.presets import preset
from minillm_exercises.chapters import ch22, ch22_ship
from minillm_exercises.errors import ExerciseError

H100, LLAMA = DATASHEET["h100-sxm"], preset("llama-3.1-70b")
STEPS = (
    ([1] * 9, [100] * 9, 9),
    ([1, 1, 300], [50, 70, 800], 2),
    ([500], [1000], 0),  # a piece inside a prompt has no logits
    ([4, 4, 1], [100, 90, 80], 9),  # drafts
)


def test_the_tools_count_from_sending_and_our_load_generator_from_when_it_was_due(monkeypatch):
    """The reply of the chapter: due at 0, sent at 50 ms, a frame without text at 100, then text."""
    reply = Reply(0, 0, 0.0, 0.05, 1.0, 200, None, [0.1, 0.5, 0.6, 1.0], [0.5, 0.6, 1.0],
                  output_tokens=4)  # fmt: skip
    tables = []
    monkeypatch.setattr(ch22, "show_table", lambda head, rows: tables.append(rows))
    ch22.show_tools(reply)
    assert tables == [[
        ["vllm", "`ttft` 50", "`tpot` 300", "100", "300"],
        ["aiperf", "`time_to_first_token` 450", "`inter_token_latency` 167", "500", "167"],
        ["guidellm", "`time_to_first_token` 450", "`time_per_output_token` 238", "500", "250"],
    ]]  # fmt: skip


@pytest.mark.parametrize("link", ["nvlink", "pcie"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("queries", "lengths", "logits"), STEPS)
def test_the_times_are_those_of_tensor_parallelism(queries, lengths, logits, ranks, link):
    seconds = ch22_ship.StepSeconds(LLAMA, H100, ranks, LINKS[link])
    devices = Devices(H100, LINKS[link], Layout(tensor=ranks), is_recorded=True)
    (stage,) = stage_times(LLAMA, devices, queries, lengths, precision(LLAMA, None, None), logits)
    assert seconds.of(queries, lengths, logits) == pytest.approx(stage.seconds)


def shipped(**limits):
    return ch22_ship.Configuration(H100, 3.0, ranks=4, link=LINKS["nvlink"], **limits)


def test_the_search_finds_the_last_rate_that_holds_and_ends_runs_early(monkeypatch):
    ended = {}

    def run(model, config, rate, requests, seed):  # of ten requests one may be late
        for place in range(requests):
            ended[rate] = place + 1
            first = 9.0 if place % 10 < 1 + (rate > 34) else 0.1
            yield ch22.answered(place, 0.0, (first, 9.1), 30)

    monkeypatch.setattr(ch22_ship, "run", run)
    sold = ch22_ship.highest_rate(LLAMA, shipped(), {"ttft": 0.5})
    mean = sum(new for _, _, new in ch22_ship.demand(680, 0)) / 680
    assert (sold.rate, sold.tokens) == (34, pytest.approx(34 * mean))
    assert sold.dollars == ch22_ship.price(shipped(), sold.tokens)
    assert len(ended) <= 5
    for rate, number in ended.items():  # a run ends with the first late answer too many
        assert number == (max(200, 20 * rate) if rate <= 34 else 10 * rate + 1)
    assert ch22_ship.highest_rate(LLAMA, shipped(), {"ttft": 0.05}).rate == 0


def test_an_error_in_the_thread_is_raised_here():
    async def wrong():
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        ch22.in_thread(wrong)


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why_and_leaves_nothing():
    with pytest.raises(ExerciseError, match=r"The server did not start: .*nowhere"):
        ch22.LocalServer("nowhere")


PARENT = """
import sys
from minillm_exercises.chapters.ch22 import LocalServer
server = LocalServer("tiny", "--max-num-seqs", "2")
print(server.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_server_ends_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    server = int(parent.stdout.readline())
    os.kill(server, 0)  # it runs
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # it has ended, and its exit code was not read yet
            return
        time.sleep(0.1)
    pytest.fail("the server outlived the process that started it")


def test_requests_at_once_and_rates_by_hand():
    replies = [Reply(n, 0, n, n, n + 2.5) for n in range(4)]  # each second one, each takes 2.5
    assert ch22.most_at_once(replies) == 3
    assert ch22.rate_of(replies) == pytest.approx(4 / 5.5)
    assert ch22.refused(0, 1.0).outcome == "rejected"


def test_the_prefix_cache_saves_the_system_prompt():
    without, with_cache = (
        next(ch22_ship.run(LLAMA, shipped(prefix_cache=cache), 1, requests=1, seed=0))
        for cache in (False, True)
    )
    seconds = ch22_ship.StepSeconds(LLAMA, H100, 4, LINKS["nvlink"])
    ((_, own, _),) = ch22_ship.demand(1, 0)
    for reply, cached in ((without, 0), (with_cache, 496)):  # whole blocks of 16
        wanted = seconds.of([500 + own - cached], [500 + own], 1)
        assert reply.frames[0] - reply.intended == pytest.approx(wanted)
