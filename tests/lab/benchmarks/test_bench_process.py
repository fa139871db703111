"""Engines in processes of their own: what they answer, and every way in which they do not."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minillm.lab.benchmarks.engine_process import (
    OWN,
    EngineFailedError,
    EngineProcess,
    MissingPeerError,
    environment,
    python_of,
)
from tests.lab.benchmarks.test_bench_contest import end, posix

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"ok": json.loads(line)}), flush=True)
"""
Open = Callable[..., EngineProcess]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Open]:
    """Starts a script as an engine."""
    opened = []

    def start(script: str, timeout: float = 300.0) -> EngineProcess:
        command = [sys.executable, "-c", script]
        opened.append(EngineProcess("fake", command, os.environ, tmp_path / "fake.log", timeout))
        return opened[-1]

    yield start
    for one in opened:
        one.close(patient=False)


@pytest.mark.parametrize(("script", "sentence"), [
    ("print('hello there')", "answered 'hello there', which is not valid"),
    ("print('[1, 2]')", "answered '[1, 2]', which is not valid"),
    ("print('{}')", "answered '{}', which is not valid"), ("print('\\xff')", "which is not valid"),
    ("import sys; sys.exit('no such file')", "has ended; last line of its log: no such file"),
    ('print(\'{"error": "KeyError: 7"}\')', "failed: KeyError: 7 (log:"),
    ("import time; time.sleep(600)", "gave no answer within 0.5 s"),
])  # fmt: skip
def test_what_is_no_answer_is_a_sentence(engine: Open, script: str, sentence: str) -> None:
    one = engine(script, timeout=0.5 if "sleep" in script else 300.0)
    with pytest.raises(EngineFailedError) as failed:
        one.ask({"do": "open"})
    assert str(failed.value).startswith("fake ")
    assert sentence in str(failed.value)
    assert str(one.log) in str(failed.value)
    assert one._process.poll() is not None  # it is not left behind
    with pytest.raises(EngineFailedError, match="has ended"):
        one.ask({"do": "open"})


@posix
def test_what_an_engine_started_ends_with_it(engine: Open) -> None:
    one = engine(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        + ECHO.replace("json.loads(line)", "child.pid")
    )
    child = one.ask({"do": "open"})
    one.close(patient=False)
    assert end(child)


def test_a_peer_without_an_environment_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("MINILLM_PEERS", raising=False)
    with pytest.raises(MissingPeerError, match=r"vllm is skipped.*run 'make peers'"):
        python_of("vllm", tmp_path)
    python = tmp_path / ".peers" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert python_of("vllm", tmp_path) == str(python)
    assert python_of(OWN, tmp_path) == python_of("transformers", tmp_path) == sys.executable


def test_every_engine_gets_the_same_threads_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    own, other = environment(OWN, 3), environment("vllm", 3)
    for variables in (own, other):
        assert (variables["OMP_NUM_THREADS"], variables["HF_HUB_OFFLINE"]) == ("3", "1")
    assert "PYTHONPATH" not in other
    assert (Path(own["PYTHONPATH"]) / "minillm" / "__init__.py").exists()
