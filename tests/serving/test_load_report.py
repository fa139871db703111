"""The report, the figure and the JSON of the load generator, and its errors."""

import asyncio
import io
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.cli import main
from minillm.cli.terminal import Terminal
from minillm.errors import NodeError
from minillm.lab.benchmarks.serving.bench import Plan
from minillm.lab.benchmarks.serving.figure import draw
from minillm.lab.benchmarks.serving.measurement import Wanted, collected
from minillm.lab.benchmarks.serving.reply import COLUMNS
from minillm.lab.benchmarks.serving.server_process import (
    free_port,
    last_line,
    serve_command,
    serving,
)
from minillm.lab.benchmarks.serving.slo import parse_slo
from minillm.lab.benchmarks.serving.summary import Evaluation
from minillm.lab.benchmarks.serving.sweep import sweep
from minillm.lab.benchmarks.serving.table import late_lines, show
from minillm.lab.benchmarks.serving.workload import Arrivals, parse_workload
from tests.serving.load_fake import FakeServer, bench_of, running
from tests.serving.virtual_time import run_virtual


@pytest.fixture(scope="module")
def swept() -> dict[str, Any]:
    """A sweep of a server with a capacity of 10 requests/s, which refuses above 12 in flight."""

    async def run() -> dict[str, Any]:
        evaluation = Evaluation(parse_slo("ttft=300ms,tpot=150ms"))
        workload = parse_workload("fixed:input=10,output=4")
        loads = (2.0, 5.0, 9.0, 20.0)
        plan = Plan(workload, Arrivals(1.0), loads, 40, repeats=2, evaluation=evaluation)
        server = FakeServer(ttft=0.1, itl=0.1, slots=4, refuse_above=12)
        async with bench_of(server, plan) as bench:
            points = await sweep(bench)
            return collected(Wanted(plan, hardware="2 processors"),
                             bench, points, None)  # fmt: skip

    found: dict[str, Any] = run_virtual(run())
    return found


@pytest.mark.slow
def test_the_sweep_is_json_with_all_rows(swept: dict[str, Any]) -> None:
    found = json.loads(json.dumps(swept, allow_nan=False))
    assert found["columns"] == list(COLUMNS)
    assert len(found["runs"]) == 8
    assert {len(run["rows"]) for run in found["runs"]} == {40}
    assert all(len(row) == len(COLUMNS) for run in found["runs"] for row in run["rows"])
    overloaded = found["points"][-1]
    assert overloaded["rejected"]["median"] > 0.1
    assert overloaded["attainment"]["median"] < 0.9
    assert found["knee"]["load"] < 20


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_figure_is_written(swept, name, start, tmp_path):
    draw(swept, str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_report(swept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    show(swept, Terminal())
    text = out.getvalue()
    for part in (
        "TTFT p50",
        "ITL p99",
        "SLO met",
        "goodput",
        "20/s",
        "Knee:",
        "503: overloaded",
        "late (p99)",
    ):
        assert part in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_frames_of_many_tokens_and_a_late_client_are_pointed_out(swept: dict[str, Any]) -> None:
    def lines(**changed: Any) -> str:
        runs = [one | {"summary": one["summary"] | changed} for one in swept["runs"]]
        return " ".join(late_lines(swept | {"runs": runs}))

    assert "frames for" not in lines()
    assert "24 frames for" in lines(frames=3)
    assert "another machine" not in lines()
    assert "another machine" in lines(lateness={"p99": 0.05})


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A fast server in a thread."""
    ready, done, found = threading.Event(), threading.Event(), []

    async def run() -> None:
        async with running(FakeServer(ttft=0.01, itl=0.001, key="k")) as address:
            found.append(address)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(30)
    yield found[0]
    done.set()
    thread.join()


def command(*args: str) -> int:
    return main(["bench", "serve", *args])


@pytest.mark.slow
def test_the_command_measures_a_server(url, tmp_path, capsys):
    path, plot = tmp_path / "a.json", tmp_path / "a.svg"
    code = command(url, "--api-key", "k", "--request-rate", "50,inf", "--requests", "10",
                   "--workload", "fixed:input=5,output=3", "--slo", "ttft=10s",
                   "--json", str(path), "--plot", str(plot))  # fmt: skip
    assert code == 0
    found = json.loads(path.read_text())
    assert [run["load"] for run in found["runs"]] == [50.0, None]
    assert [run["summary"]["ok"] for run in found["runs"]] == [10, 10]
    assert found["plan"]["prompts"] == "ids"
    assert plot.stat().st_size > 1000
    assert "all at once" in capsys.readouterr().out


def test_a_single_run_lists_its_latencies(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = command(url, "--api-key", "k", "--concurrency", "2", "--quick", "--endpoint", "chat",
                   "--workload", "lognormal:input=5,output=3")  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    for part in ("ttft", "itl", "measure, as in vLLM", "8 of 8 requests", "2 requests at once"):
        assert part in out


MISTAKES = """
--request-rate 0 | argument --request-rate: '0' is not a list of numbers above 0
--burstiness 2 --concurrency 4 | --burstiness is for an open loop
--concurrency 1,2 --request-rate 3 | give one number
--workload fixd | Did you mean 'fixed'
--prompts ids --endpoint chat | leave out --prompts
--slo ttft | positive time
--search | --search needs objectives
--search --slo ttft=1 --concurrency 2 | leave out --concurrency
--search --slo ttft=1 --request-rate 1,2 | a single --request-rate
--target 1.5 | argument --target: '1.5' is not a number above 0, at most 1
--warmup 8 --quick | less than the 8 requests
--duration 5 --request-rate inf | needs finite rates
--duration 5 --requests 3 | --duration excludes --requests
--duration 5 --concurrency 1 | --duration is for an open loop
--duration 1e6 --request-rate 4 | at most 1,000,000 requests
--plot a.txt | must end in .png
--server-options x | leave it out with a URL
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_one_sentence(line: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, message = line.split(" | ")
    try:
        code = command(url, "--api-key", "k", *args.split())
    except SystemExit as ended:
        code = int(str(ended.code))
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert err.count("error:") == 1


def test_problems_of_the_server_are_one_sentence(url, capsys):
    for args, message in (
        (["http://127.0.0.1:1"], "No server answers at http://127.0.0.1:1"),
        ([url], "--api-key"),
        ([url, "--api-key", "k", "--served-model-name", "fak"], "Did you mean 'fake'"),
    ):
        assert command(*args) == 2
        err = capsys.readouterr().err
        assert message in err
        assert len(err.strip().splitlines()) == 1


def test_a_server_that_refuses_the_workload_is_reported_before_the_run(capsys):
    from minillm.errors import ConfigError
    from minillm.lab.benchmarks.serving.measurement import measure

    async def run() -> None:
        plan = Plan(parse_workload("fixed"), Arrivals(math.inf), (math.inf,), 3)
        async with running(FakeServer(break_if=lambda number: True)) as address:
            await measure(Wanted(plan), address, lambda text: None)

    with pytest.raises(ConfigError, match="with status 500: broken on purpose"):
        asyncio.run(run())


# ---- the server's process ----------------------------------------------------------------------

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_and_stopped() -> None:
    from urllib.error import URLError
    from urllib.request import urlopen

    port = free_port()
    with serving([sys.executable, "-c", HEALTHY, str(port)], port) as address:
        assert urlopen(f"{address}/health").status == 200
    with pytest.raises(URLError):
        urlopen(f"{address}/health")


def test_a_server_that_does_not_start_is_one_sentence() -> None:
    script = "import sys; sys.stderr.write('noise\\nerror: There is no model.\\n'); sys.exit(2)"
    with (
        pytest.raises(NodeError, match="exit code 2 before it was ready: There is no model"),
        serving([sys.executable, "-c", script], free_port()),
    ):
        pass


def test_the_command_line_of_the_server(tmp_path: Path) -> None:
    made = serve_command("tiny", 81, ["-tp", "2"])
    assert made[1:] == ["-m", "minillm", "serve", "tiny", "--port", "81", "-tp", "2"]
    (tmp_path / "log").write_text("")
    assert last_line(tmp_path / "log") == "it wrote nothing."
