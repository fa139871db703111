"""Ranks that are processes: the tokens of one, and what happens when one of all these ends.

A start takes seconds, so an engine serves several questions, and its last is how it ends. Numbers
such as B19 are those of the faults of other engines in the notes on parallelism.
"""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, EngineDeadError, UnsupportedFeatureError
from minillm.parallel import groups, processes, rank_process
from minillm.parallel.launch import environment
from minillm.scheduling.plan import NewSequence, Row, StepPlan
from tests.engine.small import make, tokens, write_model
from tests.matrix.cells import folder_of
from tests.pairs import some
from tests.serving.async_small import LONG, last, make_async, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
LIMIT = 60.0  # seconds; what takes longer hangs
OTHERS = set[int]()  # processes of tests of other folders, such as graders' servers
TWO = {"tensor_parallel_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
PROMPTS = [[5 + i % 7 for i in range(40)], [5 + i % 7 for i in range(30)] + [3, 9], [60, 7, 99]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=8, max_tokens=14, ignore_eos=True),
]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, no shared memory and no file descriptor, which ports are too."""
    before = open_files()
    OTHERS.update(children(os.getpid()))
    yield
    wait_until(lambda: not children(os.getpid()), "processes are left")
    wait_until(lambda: open_files() <= before, f"more than {before} files are open")
    assert not [each for each in os.listdir("/dev/shm") if "minillm" in each]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(holds: Callable[[], Any], otherwise: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    """Processes of this parent that have not ended, but for `OTHERS`."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, its_parent = (
                Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            )
            if int(its_parent) == parent and state != "Z" and int(name) not in OTHERS:
                found.append(int(name))
    return found


def runs(process: int) -> bool:
    """Whether a process, maybe of another parent, has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler; elsewhere ranks share memory."""
    monkeypatch.setattr(groups, "shared_memory_works", lambda: False)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give ranks a fault."""

    def choose(fault: str) -> None:
        monkeypatch.setattr(rank_process, "WORKER", "tests.parallel.odd_worker")
        monkeypatch.setenv("MINILLM_ODD", fault)

    return choose


def generate(llm: LLM) -> list[list[list[int]]]:
    return [tokens(each) for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@cache
def alone(folder: Path, **arguments: Any) -> list[list[list[int]]]:
    """What one rank gives."""
    with make(folder, max_model_len=96, **arguments) as llm:
        return generate(llm)


def assert_dead(llm: LLM, what: str) -> None:
    """Every further call says what has ended, and which rank, in one sentence."""
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=what) as caught:
            generate(llm)
        assert "\n" not in str(caught.value)


# ---- the tokens of one rank --------------------------------------------------------------------


def test_dense(folder, caplog):
    """With a prefix cache and chunks; and B22: a plan of 100,000 tokens."""
    expected = alone(folder)
    with caplog.at_level("INFO"):
        llm = make(folder, max_model_len=96, max_num_batched_tokens=16, **TWO)
    assert {"rank 0: loading the model", "rank 1: loading the model"} <= set(caplog.messages)
    assert any(each.startswith("rank 1: Weights: ") for each in caplog.messages)
    with llm:
        assert generate(llm) == expected
        assert generate(llm) == expected
        assert llm.engine.scheduler.counters.num_cached_tokens > 0
        assert llm.engine.allocated()["weights"] > 0
        ids = tuple(i % 200 for i in range(100_000))
        new = NewSequence(999, 0, len(ids), ids, SamplingParams(temperature=0), seed=1)
        plan = StepPlan(0, new=[new], rows=[Row(999, 0, 1, 1, 0, 0, (0,))])
        llm.engine.runner.reset()
        assert len(llm.engine.runner.launch(plan).collect().token_ids[999]) == 1


@pytest.mark.slow
def test_b19_mixture_of_experts_and_a_rank_that_is_killed_between_steps():
    folder = folder_of("qwen3_moe")
    expected = alone(folder)
    llm = make(folder, max_model_len=96, **TWO)
    assert generate(llm) == expected
    os.kill(llm.engine.runner.process_ids[0], signal.SIGKILL)
    assert_dead(
        llm,
        r"^Rank 0 of 2 was ended .*SIGKILL \(signal 9\); Linux sends it when memory runs out\.$",
    )
    llm.close()


@pytest.mark.slow
def test_drafts_and_two_engines(folder, sockets):
    expected = alone(folder)
    drafting = make(folder, max_model_len=96, speculative_config=NGRAM, **TWO)
    plain = make(folder, max_model_len=96, **TWO)
    assert generate(drafting) == expected
    assert drafting.engine.scheduler.counters.num_draft_tokens > 0
    os.kill(drafting.engine.runner.process_ids[1], signal.SIGTERM)
    assert_dead(drafting, r"^Rank 1 of 2 was ended .*SIGTERM \(signal 15\)\.$")
    assert generate(plain) == expected
    del plain, drafting  # without close
    gc.collect()


@pytest.mark.slow
def test_stages(folder):
    expected = alone(folder)
    with make(folder, max_model_len=96, pipeline_parallel_size=2, **TWO) as llm:
        assert len(llm.engine.runner.process_ids) == 4
        assert generate(llm) == expected
        os.kill(llm.engine.runner.process_ids[0], signal.SIGKILL)
        assert_dead(llm, "^Rank 0 of .*SIGKILL")


# ---- ranks that end ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "by"), [(0, "memory"), (1, "sockets")])
def test_b19_killed_in_a_step(killed, by, folder, odd, request):
    """Rank 1 computes for ever, rank 0 waits for it."""
    if by == "sockets":
        request.getfixturevalue("sockets")
    odd("1 sleeps")
    llm = make(folder, max_model_len=96, **TWO)

    def kill() -> None:
        wait_until(lambda: len(llm.trace) == 4, "no steps")
        time.sleep(0.3)
        os.kill(llm.engine.runner.process_ids[killed], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match=f"^Rank {killed} of 2 was ended in a step by SIGK"):
        generate(llm)
    killer.join()
    assert_dead(llm, f"Rank {killed} of 2")
    llm.close()


@pytest.mark.parametrize("killed", some([1], [0, 1]))
def test_b19_killed_while_it_loads(killed, folder, odd):
    odd("all never ready")

    def kill() -> None:
        wait_until(lambda: len(children(os.getpid())) == 2, "no ranks")
        os.kill(sorted(children(os.getpid()))[killed], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match=f"^Rank {killed} of 2 was ended .* by SIGKILL"):
        make(folder, **TWO)
    killer.join()


@pytest.mark.slow
def test_a_rank_that_is_stopped(folder, monkeypatch):
    monkeypatch.setattr(processes, "STEP_PATIENCE", 4.0)
    llm = make(folder, max_model_len=96, **TWO)
    os.kill(llm.engine.runner.process_ids[1], signal.SIGSTOP)
    assert_dead(llm, r"^Rank 1 of 2 did not answer in time \(the process is stopped\)")
    llm.close()


@pytest.mark.slow
def test_ranks_that_never_answer(folder, monkeypatch, odd):
    monkeypatch.setattr(processes, "STEP_PATIENCE", 4.0)
    odd("all sleeps")
    llm = make(folder, max_model_len=96, **TWO)
    assert_dead(llm, r"^Rank 0 and 1 of 2 did not answer in time, so all ranks were ended\.$")
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("1 raises", "^Rank 1 of 2 failed in a step: ValueError: planted$"),
        ("1 other tokens", "^Rank 1 chose other tokens than rank 0"),
        ("0 leaves", "^Rank 0 of 2 ended in a step with exit code 7: a library says goodbye.$"),
    ],
)
def test_a_rank_that_fails(fault, what, folder, odd):
    odd(fault)
    llm = make(folder, max_model_len=96, **TWO)
    assert_dead(llm, what)
    llm.close()


@pytest.mark.slow
def test_no_memory(folder, odd, monkeypatch, caplog):
    """On one rank; with more ranks than processors, of which one warning speaks."""
    monkeypatch.setattr("minillm.plan.machine.cpu_count", lambda: 1)
    odd("1 no memory")
    with pytest.raises(EngineDeadError, match=r"^Rank 1 of 2 failed loading the model: .*DefaultC"):
        make(folder, **TWO)
    (warning,) = [each for each in caplog.messages if "processor" in each]
    assert warning.startswith("2 ranks share 1 processor, so each step takes about 2.0 times")


def test_threads_of_a_rank(monkeypatch):
    """An equal share of the processors, unless the user has set a number."""
    monkeypatch.setattr("minillm.plan.machine.cpu_count", lambda: 7)
    assert environment(2)["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [environment(size)["OMP_NUM_THREADS"] for size in (2, 3, 8)] == ["3", "2", "1"]


@pytest.mark.slow
def test_a_damaged_checkpoint(tmp_path):
    """Is refused as it is with one rank."""
    folder = write_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as one:
        make(folder)
    with pytest.raises(CheckpointError) as two:
        make(folder, **TWO)
    assert str(two.value) == str(one.value)


@pytest.mark.slow
def test_b3_the_smallest_rank_counts(folder, odd):
    odd("1 fewer blocks")
    with make(folder, **TWO) as llm:
        assert llm.engine.scheduler.blocks.pool.num_blocks == 64 - 5


@pytest.mark.slow
def test_b19_an_asynchronous_engine_that_has_nothing_to_do(folder):
    async def check() -> None:
        engine = make_async(folder, **TWO)
        assert (await last(engine.generate(PROMPTS[2], LONG, "0"))).finished
        os.kill(engine._engine.runner.process_ids[1], signal.SIGKILL)
        while engine.is_running:
            await asyncio.sleep(0.02)
        assert engine.errored
        with pytest.raises(
            EngineDeadError, match=r"^Rank 1 of 2 was ended between two steps by SI"
        ):
            await engine.check_health()
        with pytest.raises(
            EngineDeadError, match=r"^Rank 1 of 2 was ended between two steps by SI"
        ):
            await last(engine.generate(PROMPTS[2], LONG, "1"))
        engine.shutdown()

    run(check())


# ---- a driver that ends ------------------------------------------------------------------------

# It imports nothing of the tests, whose imports take longer than its own.
DRIVER = """
import os, signal, sys
from minillm import LLM, SamplingParams
from minillm.parallel import rank_process

signal.alarm(300)  # should this test be killed
if "MINILLM_ODD" in os.environ:
    rank_process.WORKER = "tests.parallel.odd_worker"
sizes = {"max_model_len": 96, "num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 3}
llm = LLM(sys.argv[1], dtype="float32", tensor_parallel_size=2, **sizes)
params = SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=20, ignore_eos=True)

def generate():
    (output,) = llm.generate([[5, 60, 7, 99]], params, use_tqdm=False)
    return [each.token_ids for each in output.outputs]

expected = generate()
try:
    print("ready", flush=True)
    while True:
        generate()
except KeyboardInterrupt:
    print("interrupted", generate() == expected, flush=True)
while True:
    generate()
"""


@contextlib.contextmanager
def driver(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with an engine, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_b20_a_driver_that_is_interrupted_goes_on_and_one_that_is_killed_leaves_nothing(folder):
    with driver(folder) as process:
        assert process.stdout.readline() == "ready\n"
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted True\n"
        assert children(process.pid) == ranks
        process.kill()
        wait_until(lambda: not any(map(runs, ranks)), "ranks are left")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_b20_a_driver_that_ends_while_ranks_start(number, folder, odd):
    """Ranks that compute see neither Ctrl-C nor the end of the socket."""
    odd("all never ready")
    with driver(folder) as process:
        for _ in range(2):
            next(line for line in process.stderr if "this rank never gets ready" in line)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.killpg(process.pid, number)
        assert process.wait(LIMIT) == -number
        assert ("KeyboardInterrupt" in process.stderr.read()) == (number == signal.SIGINT)
        wait_until(lambda: not any(map(runs, ranks)), "ranks are left")


# ---- what cannot be ----------------------------------------------------------------------------


def test_a_proposer_that_cannot_be_sent(folder):
    class Own:
        def propose(self, *_: Any) -> list[int]:
            return []

    with pytest.raises(UnsupportedFeatureError, match=r"is a Own, which cannot be sent.*'threads'"):
        make(folder, speculative_config={"method": Own(), "num_speculative_tokens": 2}, **TWO)
