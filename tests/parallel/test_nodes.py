"""Ranks that meet in a store: as threads here, where only the connections are in question; as
processes of two network namespaces, where the whole is.
"""

import contextlib
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, NodeError
from minillm.parallel import launch, meeting, worker
from minillm.parallel.meeting import Address, torchrun_address
from minillm.parallel.worker import serve_rank
from tests.engine.small import make
from tests.matrix.cells import folder_of
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.parallel.test_processes import OTHERS, alone, children, generate, open_files, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
LIMIT = 120.0  # seconds; what takes longer hangs
EXTERNAL = {"distributed_executor_backend": "external"}


@pytest.fixture
def lend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Future[None]]]]:
    """Start the ranks of the next engine as torchrun would, those after the first as threads of
    this process: `lend(2)`."""
    monkeypatch.setattr(worker, "watch", lambda *_: None)  # it ends the process
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # a process's first leaves a pipe
    before = open_files()
    OTHERS.update(children(os.getpid()))
    stores = []
    with ThreadPoolExecutor(8) as pool:

        def start(size: int, lent: int | None = None) -> list[Future[None]]:
            store = TCPStore("127.0.0.1", 0, None, True, timedelta(10), wait_for_workers=False)
            stores.append(store)
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "RANK": 0}
            variables |= {"WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": True}
            for name, each in variables.items():
                monkeypatch.setenv(name, str(each))
            address = torchrun_address()
            return [pool.submit(serve_rank, address, n) for n in range(1, lent or size)]

        yield start
    stores.clear()
    gc.collect()  # errors know what was open
    wait_until(lambda: open_files() <= before, f"more than {before} files are open")
    wait_until(lambda: not children(os.getpid()), "processes are left")


# ---- the tokens of one rank --------------------------------------------------------------------


@pytest.mark.parametrize("sizes", some([((2, 2),)], [((2, 1),), ((1, 2),), ((2, 2),)]))
def test_the_tokens_of_one_rank(sizes, folder, lend, caplog):
    expected = alone(folder)
    caplog.set_level(logging.INFO)
    more = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    ranks = lend(sizes[0] * sizes[1])
    with make(folder, max_model_len=96, **EXTERNAL, **more) as llm:
        assert generate(llm) == expected
        assert generate(llm) == expected
        assert llm.engine.runner.process_ids == children(os.getpid())
    for each in ranks:
        assert each.result(LIMIT) is None
    assert "rank 1: loading the model" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_copies(shares, lend):
    """With and without shared experts."""
    folder = folder_of("qwen3_moe")
    expected = alone(folder)
    lend(2)
    more = {"data_parallel_size": 2, "enable_expert_parallel": shares}
    with make(folder, max_model_len=96, **EXTERNAL, **more) as llm:
        assert generate(llm) == expected


@pytest.mark.slow
def test_two_stores_and_one_engine_for_each(folder, lend):
    """Rank 1 of the first engine takes no part in the second."""
    expected = alone(folder)
    engines = []
    for _ in range(2):
        lend(2)
        engines.append(make(folder, max_model_len=96, tensor_parallel_size=2, **EXTERNAL))
    with pytest.raises(ConfigError, match="serve one engine"):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    for llm in reversed(engines):
        assert generate(llm) == expected
    engines[0].close()
    assert generate(engines[1]) == expected
    engines[1].close()


# ---- what cannot be ----------------------------------------------------------------------------


def test_another_checkpoint(folder, lend, tmp_path, monkeypatch):
    """Of a node: it changes after the driver has looked at it. `test_messages.py` has others."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    seen = launch.fingerprint

    def then_change(*given: Any) -> dict[str, str]:
        found = seen(*given)
        shutil.rmtree(own)
        return found

    monkeypatch.setattr(launch, "fingerprint", then_change)
    ranks = lend(2)
    with pytest.raises(CheckpointError, match=r"^Node \S+ does not have the driver's model: "):
        make(own, tensor_parallel_size=2, **EXTERNAL)
    assert isinstance(ranks[0].exception(LIMIT), CheckpointError)


@pytest.mark.slow
def test_ranks_that_do_not_come(folder, lend, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    lend(3, lent=2)
    with pytest.raises(NodeError, match=r"^Rank 2 of 3 did not start in 1 s; see that the same"):
        make(Tiny("llama", {"num_hidden_layers": 3}).write(folder.parent / "three").folder,
             pipeline_parallel_size=3, **EXTERNAL)  # fmt: skip


@pytest.mark.slow
def test_other_sizes_than_torchrun_has_and_a_store_that_is_not_there(folder, lend, monkeypatch):
    lend(3, lent=1)
    with pytest.raises(ConfigError, match=r"^torchrun has started 3 ranks, .* is 2;"):
        make(folder, tensor_parallel_size=2, **EXTERNAL)
    monkeypatch.setattr(meeting, "PATIENCE", 1.0)
    with pytest.raises(NodeError, match=r"^The store of the ranks at 127.0.0.1:9 cannot be reac"):
        Address("127.0.0.1", 9, "").open()
    with pytest.raises(NodeError, match=r"^The store of the ranks at no.such.host.invalid:9 "):
        Address("no.such.host.invalid", 9, "").open()


# ---- between two network namespaces ------------------------------------------------------------

PROGRAM = """
import json, sys
from minillm import LLM, SamplingParams
from minillm.errors import EngineDeadError
from minillm.parallel import processes

processes.STEP_PATIENCE = float(sys.argv[3])
prompts, sizes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
llm = LLM("tiny", dtype="float32", distributed_executor_backend="external", **sizes)
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
    ("sizes", "places", "number", "what"),
    [
        ({"tensor_parallel_size": 2}, "ab", signal.SIGKILL, "is gone .*connection has ended"),
        ({"pipeline_parallel_size": 2}, "ab", signal.SIGSTOP, "did not answer in time, so all"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "abba", signal.SIGKILL, "gone"),
    ],
)
def test_two_machines_and_a_rank_that_ends(sizes, places, number, what, namespaces):
    """Sums and boundaries cross the wire; the loopback would not do. The same program runs on both
    machines, with the variables of torchrun."""
    with LLM("tiny", dtype="float32") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = llm.generate(TEXTS, greedy, use_tqdm=False)
        expected = [list(each.outputs[0].token_ids) for each in found]
    there = dict(zip("ab", namespaces, strict=True))
    given = json.dumps(TEXTS), json.dumps(sizes), "6" if number == signal.SIGSTOP else "300"
    variables = {"MASTER_ADDR": "10.200.0.1", "MASTER_PORT": "29500"}
    variables |= {"WORLD_SIZE": str(len(places))}
    with contextlib.ExitStack() as stack:
        driver, *ranks = [
            python(stack, *there[place], sys.executable, "-c", PROGRAM, *given,
                   env=os.environ | variables | {"RANK": str(rank)})
            for rank, place in enumerate(places)
        ]  # fmt: skip
        assert json.loads(driver.stdout.readline()) == expected
        (first,) = children(driver.pid)
        ranks[0].send_signal(number)
        driver.stdin.write("\n")
        driver.stdin.flush()
        said = driver.stdout.readline()
        assert said.startswith(f"Rank 1 of {len(places)} ")
        assert re.search(what, said), said
        _, errors = driver.communicate(timeout=LIMIT)
        assert driver.returncode == 0, errors
        assert not os.path.exists(f"/proc/{first}")
        if number == signal.SIGSTOP:
            ranks[0].send_signal(signal.SIGCONT)
        for each in ranks:
            each.communicate(timeout=LIMIT)
            assert each.returncode != 0


@pytest.mark.slow
def test_torchrun_on_two_machines(namespaces):
    """One command on both; the first of them writes the text."""
    with LLM("tiny") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        expected = llm.generate([TEXTS[0]], greedy, use_tqdm=False)[0].outputs[0].text
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node"]
    command += ["1", "--master-addr", "10.200.0.1", "--master-port", "29500", "--node-rank"]
    generates = ["generate", TEXTS[0], "--temperature", "0", "--max-tokens", "12", "-tp", "2"]
    with contextlib.ExitStack() as stack:
        running = [
            python(stack, *place, *command, str(n), "-m", "minillm", *generates)
            for n, place in enumerate(namespaces)
        ]
        said = [each.communicate(timeout=LIMIT) for each in running]
    assert [each.returncode for each in running] == [0, 0], said
    assert said[0][0].strip() == expected.strip()
    assert said[1][0] == ""


@pytest.mark.slow
def test_torchrun_that_is_interrupted_while_it_serves():
    """All processes end, in the time that torchrun gives them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "minillm", "serve", "--model", "tiny", "-tp", "2", "--port", "0"]
    with contextlib.ExitStack() as stack:
        torchrun = python(stack, *command, stderr=subprocess.STDOUT)
        for line in torchrun.stdout:
            if "http://127.0.0.1" in line:
                break
        with_them = [torchrun.pid, *(c for p in children(torchrun.pid) for c in [p, *children(p)])]
        assert len(with_them) >= 4
        torchrun.send_signal(signal.SIGINT)
        torchrun.communicate(timeout=25)
        for each in with_them:
            assert not os.path.exists(f"/proc/{each}")


def test_removed_and_bad_commands():
    command = [sys.executable, "-m", "minillm", "node", "--connect", "10.0.0.1:1"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("error: 'minillm node' was removed; ")
    assert "torchrun --nnodes 2" in said.stderr
