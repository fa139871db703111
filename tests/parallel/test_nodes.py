"""Ranks that connect: as threads here, where only the connections are in question; as processes of
two network namespaces, where the whole is.
"""

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, NodeError
from minillm.parallel import node, nodes, worker
from minillm.parallel.handshake import Arrival
from minillm.parallel.node import serve_rank, split_address
from tests.engine.small import make
from tests.models.tiny import Tiny
from tests.parallel.test_processes import alone, generate, open_files, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SECRET = "a secret of these tests"
LIMIT = 120.0  # seconds; what takes longer hangs
EXTERNAL = {"distributed_executor_backend": "external"}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_SECRET", SECRET)


@pytest.fixture
def lend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Future[None]]]]:
    """Start ranks for the next engine, as threads of this process: `lend(2)`."""
    addresses: Queue[str] = Queue()
    monkeypatch.setattr(node, "watch", lambda *_: None)  # it ends the process
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    before = open_files()
    with ThreadPoolExecutor(8) as pool:

        def start(size: int, *each: dict[str, Any]) -> list[Future[None]]:
            options = [*each, *({} for _ in range(size - len(each)))]

            def publish(where: str) -> None:
                for _ in options:
                    addresses.put(where)

            monkeypatch.setattr(nodes, "publish", publish)
            return [
                pool.submit(lambda more: serve_rank(addresses.get(), SECRET.encode(), **more), each)
                for each in options
            ]

        yield start
    gc.collect()  # errors know what was open
    wait_until(lambda: open_files() <= before, f"more than {before} files are open")


# ---- the tokens of one rank --------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_the_tokens_of_one_rank(sizes, folder, lend, caplog):
    expected = alone(folder)
    caplog.set_level(logging.INFO)
    more = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    ranks = lend(sizes[0] * sizes[1])
    with make(folder, max_model_len=96, **EXTERNAL, **more) as llm:
        assert generate(llm) == expected
        assert generate(llm) == expected
        assert llm.engine.runner.process_ids == []
    for each in ranks:
        assert each.result(LIMIT) is None
    assert "Waiting for" in caplog.text
    assert "rank 0: loading the model" in caplog.messages
    assert SECRET not in caplog.text


@pytest.mark.parametrize("shares", [True, False])
def test_copies(shares, lend, tmp_path):
    """With and without shared experts."""
    folder = Tiny("qwen3_moe", {"num_hidden_layers": 2}, seed=2).write(tmp_path).folder
    expected = alone(folder)
    lend(2)
    more = {"data_parallel_size": 2, "enable_expert_parallel": shares}
    with make(folder, max_model_len=96, **EXTERNAL, **more) as llm:
        assert generate(llm) == expected


def test_numbers_that_ranks_say_and_two_engines(folder, lend):
    """Both with the same secret; and rank 1 of the first takes no part in the second."""
    expected = alone(folder)
    engines = []
    for order in ((1, 0), (0, 1)):
        lend(2, *({"number": each} for each in order))
        engines.append(make(folder, max_model_len=96, tensor_parallel_size=2, **EXTERNAL))
    for llm in reversed(engines):
        assert generate(llm) == expected
    engines[0].close()
    assert generate(engines[1]) == expected
    engines[1].close()


# ---- what cannot be ----------------------------------------------------------------------------


def changed(folder: Path, to: Path, change: Callable[[Path], None]) -> Path:
    """A copy of a model, changed."""
    shutil.copytree(folder, to)
    change(to)
    return to


def other_config(to: Path) -> None:
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))


def other_tensors(to: Path) -> None:
    path = to / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ').replace(b'"F32"', b'"I32"'))


def other_values(to: Path) -> None:
    path = to / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_config, r"here config \w{12}, on node .* config \w{12};"),
        (other_tensors, r"here tensors \d+ of \w{12} and content .* tensors \d+ of"),
        (other_values, r"here content 1 files of \w{12}, on node .* content 1 files of \w{12};"),
        (shutil.rmtree, r"^Node \S+ does not have the model of node .*--model"),
    ],
)
def test_another_checkpoint(change, what, folder, lend, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "START_PATIENCE", 0.5)  # the first rank waits for the second
    other = changed(folder, tmp_path / "other", change)
    ranks = lend(2, {"number": 0}, {"number": 1, "model": str(other)})
    with pytest.raises(CheckpointError, match=what) as caught:
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    assert "\n" not in str(caught.value)
    assert isinstance(ranks[1].exception(LIMIT), CheckpointError)
    assert ranks[0].exception(LIMIT) is not None


def test_other_versions(folder, lend, monkeypatch):
    real = node.connect
    monkeypatch.setattr(node, "connect", lambda *a, **more: real(*a, **more, torch="1.0"))
    ranks = lend(2)
    with pytest.raises(NodeError, match=r"^The nodes do not match: node .* has torch 1\.0, node "):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    for each in ranks:
        assert isinstance(each.exception(LIMIT), NodeError)


def test_ranks_that_do_not_come(folder, lend, monkeypatch):
    monkeypatch.setattr(nodes, "PATIENCE", 1.0)
    ranks = lend(1)
    name = socket.gethostname()
    with pytest.raises(
        NodeError, match=rf"^1 of 2 ranks connected to 127.0.0.1:\d+ in 1 s \(from {name}\)"
    ):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    assert "The driver at 127.0.0.1:" in str(ranks[0].exception(LIMIT))


def test_two_ranks_with_one_number(folder, lend):
    ranks = lend(2, {"number": 1}, {"number": 1})
    with pytest.raises(NodeError, match=r"^2 ranks say that they are number 1, 1; .* 0 to 1 "):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    for each in ranks:
        assert isinstance(each.exception(LIMIT), NodeError)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "needs ranks; set tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "master_addr": "192.0.2.7"}, "^Cannot listen at 192.0.2.7:0"),
        ({"tensor_parallel_size": 2, "master_port": 70_000}, "from 0 to 65535"),
        ({"tensor_parallel_size": 2, "master_port": -1}, "master_port"),
        ({"tensor_parallel_size": 2, "master_addr": ""}, "master_addr is ''"),
    ],
)
def test_bad_arguments(given, what, folder):
    with pytest.raises((ConfigError, NodeError), match=what):
        make(folder, **EXTERNAL, **given)


def test_no_secret_and_other_sizes_than_torchrun_has(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"^torchrun has started 3 ranks, .* is 2;"):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("MINILLM_SECRET")
    with pytest.raises(ConfigError, match=r"^The secret that nodes share is not set; on every"):
        make(folder, tensor_parallel_size=2, **EXTERNAL)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:0", "host:70000"])
def test_bad_addresses(text):
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        split_address(text)


# ---- between two network namespaces ------------------------------------------------------------

DRIVER = """
import json, sys
from minillm import LLM, SamplingParams
from minillm.errors import EngineDeadError
from minillm.parallel import nodes

addr, prompts, sizes = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
nodes.publish = lambda where: print(where, flush=True)
sizes |= {"distributed_executor_backend": "external", "master_addr": addr}
llm = LLM("tiny", dtype="float32", **sizes)
greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
found = llm.generate(prompts, greedy, use_tqdm=False)
print(json.dumps([each.outputs[0].token_ids for each in found]), flush=True)
sys.stdin.readline()
try:
    llm.generate(prompts, greedy, use_tqdm=False)
except EngineDeadError as error:
    print(error, flush=True)
llm.close()
"""
TEXTS = ["def fib(n):", "import os", "class Tree:"]


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], list[str]]]:
    """Two machines with a wire: commands that run others there. They are 10.200.0.1 and .2."""
    names = [f"minillm-{os.getpid()}-{each}" for each in "ab"]
    try:
        for each in names:
            ip(f"netns add {each}")
        ip(f"-n {names[0]} link add wire type veth peer name wire netns {names[1]}")
        for number, each in enumerate(names, 1):
            ip(f"-n {each} addr add 10.200.0.{number}/24 dev wire")
            ip(f"-n {each} link set wire up")
            ip(f"-n {each} link set lo up")
        first, second = (["ip", "netns", "exec", each] for each in names)
        yield first, second
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    finally:
        for each in names:
            subprocess.run(["ip", "netns", "del", each], capture_output=True, check=False)


def python(stack: contextlib.ExitStack, *command: str, **more: Any) -> subprocess.Popen[str]:
    """A process that ends with the test."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = stack.enter_context(subprocess.Popen(command, text=True, **(pipes | more)))
    stack.callback(process.kill)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ({"tensor_parallel_size": 2}, "ab"),
        ({"pipeline_parallel_size": 2}, "ba"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "abba"),
    ],
)
def test_two_machines_and_a_rank_that_is_killed(sizes, places, namespaces):
    """Sums and boundaries cross the wire; the loopback would not do."""
    expected = []
    with LLM("tiny", dtype="float32") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = llm.generate(TEXTS, greedy, use_tqdm=False)
        expected = [list(each.outputs[0].token_ids) for each in found]
    there = dict(zip("ab", namespaces, strict=True))
    with contextlib.ExitStack() as stack:
        given = "10.200.0.1", json.dumps(TEXTS), json.dumps(sizes)
        driver = python(stack, *there["a"], sys.executable, "-c", DRIVER, *given)
        address = driver.stdout.readline().strip()
        assert address.startswith("10.200.0.1:")
        node = sys.executable, "-m", "minillm", "node", "--connect", address, "--rank"
        ranks = [python(stack, *there[p], *node, str(n)) for n, p in enumerate(places)]
        assert json.loads(driver.stdout.readline()) == expected
        for each in (driver, *ranks):
            assert SECRET not in Path(f"/proc/{each.pid}/cmdline").read_text()
        ranks[1].send_signal(signal.SIGKILL)
        driver.stdin.write("\n")
        driver.stdin.flush()
        name = socket.gethostname()
        said = driver.stdout.readline()
        assert said.startswith(f"Rank 1 of {len(ranks)} (node {name}) is gone ")
        assert said.endswith("its connection has ended.\n")
        _, errors = driver.communicate(timeout=LIMIT)
        assert driver.returncode == 0, errors
        for each in ranks:
            _, errors = each.communicate(timeout=LIMIT)
            assert SECRET not in errors
        assert [each.returncode != 0 for each in ranks] == [True] * len(ranks)


@pytest.mark.slow
def test_torchrun_on_two_machines(namespaces):
    """One command on both; the first of them writes the text."""
    with LLM("tiny") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        expected = llm.generate([TEXTS[0]], greedy, use_tqdm=False)[0].outputs[0].text
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])  # in another namespace it is free
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node"]
    command += ["1", "--master-addr", "10.200.0.1", "--master-port", port, "--node-rank"]
    generates = ["generate", TEXTS[0], "--temperature", "0", "--max-tokens", "12", "-tp", "2"]
    with contextlib.ExitStack() as stack:
        running = [
            python(stack, *place, *command, str(n), "-m", "minillm", "node", *generates)
            for n, place in enumerate(namespaces)
        ]
        said = [each.communicate(timeout=LIMIT) for each in running]
    assert [each.returncode for each in running] == [0, 0], said
    assert said[0][0].strip() == expected.strip()
    assert said[1][0] == ""


def test_the_order_of_ranks():
    """By the numbers that they say; else those of a node together, as they came."""

    def order(*hellos: tuple[str, int | None]) -> list[tuple[str, int | None]]:
        arrived = [Arrival({"node": n, "rank": r}, socket.socket()) for n, r in hellos]
        for each in arrived:
            each.connection.close()
        return [(each.hello["node"], each.hello["rank"]) for each in nodes.in_order(arrived)]

    assert order(("b", 2), ("a", 0), ("b", 1)) == [("a", 0), ("b", 1), ("b", 2)]
    assert order(("b", None), ("a", None), ("b", None)) == [("b", None), ("b", None), ("a", None)]
    with pytest.raises(NodeError):
        order(("a", None), ("b", 1))
