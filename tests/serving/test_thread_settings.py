"""How the threads of a server's process share the interpreter, and their names."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.serve import bound_socket
from minillm.serving import launch
from minillm.serving.settings import Settings
from minillm.serving.threads import SWITCH_SECONDS, THIS_THREAD
from tests.engine.small import write_model
from tests.serving.async_small import make_async


def test_the_server_runs_with_quick_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    class Recorded:
        failed = False

        def __init__(self, *arguments: object):
            pass

        def run(self, sockets: list[socket.socket]) -> None:
            found.append(sys.getswitchinterval())

    engine: Any = None
    monkeypatch.setattr(launch, "HttpServer", Recorded)
    monkeypatch.setattr(launch, "build_app", lambda engine, settings: None)
    with bound_socket("127.0.0.1", 0) as listening:
        assert launch.serve(engine, Settings(names=("small",)), listening, print) == 0
    assert found == [pytest.approx(SWITCH_SECONDS)]


@pytest.mark.skipif(not THIS_THREAD.exists(), reason="the system does not show names of threads")
def test_the_step_thread_has_its_name_in_the_system(tmp_path: Path) -> None:
    write_model(tmp_path)
    engine = make_async(tmp_path)
    try:
        names = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
        assert "minillm-steps" in names
    finally:
        engine.shutdown()
