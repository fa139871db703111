"""The worker threads of `c/threads.c`: each item of a job is processed exactly once, whatever the
threads do in the meantime; and deliberate mistakes in that file, each of which a test finds."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import CDLL, c_double, c_int64
from pathlib import Path

import pytest
import torch

from minillm.ops import c_library, cpu

PATIENCE = 30  # seconds until a job has failed
JOBS = Path(__file__).with_name("jobs.c")
STEPS = """
import os
import torch
from minillm import LLM, SamplingParams

torch.set_num_threads(1)
llm = LLM("tiny", num_gpu_blocks_override=64)
prompts = [{"prompt_token_ids": [5 + i] * 150} for i in range(3)]
for threads in (1, 2):
    torch.set_num_threads(threads)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True)
        llm.generate(prompts, sampling, use_tqdm=False)
    print(len(os.listdir("/proc/self/task")))
"""
DELAY = (  # between reading a job and taking a piece, where a thread may lose its processor
    r"(void \*context = atomic_load\(&pool.context\);\n)",
    r"\1    if (thread) nanosleep(&(struct timespec){0, 1000000}, 0);\n",
)


def build(place: Path, *changes: tuple[str, str]) -> CDLL:
    """threads.c with changes, and the jobs of this test."""
    place.mkdir(parents=True, exist_ok=True)
    text = (c_library.SOURCES / "threads.c").read_text()
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, f"{pattern} is there {count} times"
    if changes:  # a job that a mistake never ends would hold up every later fork of this process
        text = text.replace("!pthread_atfork(before_fork, after_fork, after_fork_in_child)", "1")
    (place / "threads.c").write_text(text)
    try:
        command = [str(c_library.find_compiler()), *c_library.FLAGS, f"-I{c_library.SOURCES}"]
        c_library.build(command, [place / "threads.c", JOBS], place / "jobs.so")
    except c_library.NoLibrary as reason:
        pytest.skip(str(reason))
    built = CDLL(str(place / "jobs.so"))
    built.set_threads.argtypes = [c_int64]
    built.wrong_items.argtypes = built.wrong_in_random_jobs.argtypes = [c_int64] * 3
    built.waits_in_first_item.argtypes = [c_int64, c_int64, c_double]
    wrong = "wrong_items wrong_in_random_jobs wrong_after_short_job"
    for name in (*wrong.split(), "waits_in_first_item", "sleeps_until_done", "num_threads"):
        getattr(built, name).restype = c_int64
    built.set_threads(4)
    return built


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    return build(tmp_path_factory.mktemp("jobs") / "jobs")


def random_jobs(c: CDLL) -> None:
    assert c.wrong_in_random_jobs(1, 500, 4) == 0


def late(c: CDLL) -> None:
    c.set_threads(2)
    for _ in range(20):
        assert c.wrong_after_short_job() == 0


def last_items(c: CDLL) -> None:
    for count in (1, 2, 7, 100, 65536):
        for piece in (1, 3, 64, count):
            assert c.wrong_items(count, piece, 2) == 0


def asleep(c: CDLL) -> None:
    """Each job begins when all threads have fallen asleep."""
    for _ in range(3):
        time.sleep(0.02)
        assert c.waits_in_first_item(50, 2, 0) == 0


def delayed(c: CDLL) -> None:
    """The thread of item 0 does not go on: the other one processes all other items."""
    c.set_threads(2)
    for _ in range(3):
        assert c.waits_in_first_item(200, 2, 1e-6) == 0


def ends(c: CDLL, patience: float = PATIENCE) -> None:
    thread = threading.Thread(target=c.sleeps_until_done, daemon=True)
    thread.start()
    thread.join(patience)
    assert not thread.is_alive()


def waits(c: CDLL) -> None:
    """The job is not over before a piece that sleeps."""
    for _ in range(5):
        assert c.sleeps_until_done() == 0


def does_not_wait_long(c: CDLL) -> None:
    ends(c, 1.0)


def test_every_item_is_processed_once(jobs):
    random_jobs(jobs)
    last_items(jobs)
    for threads in (1, 2, 3, 4):
        for count in (0, 1, 5, 64, 1000):
            assert jobs.wrong_items(count, 2, threads) == 0


@pytest.mark.parametrize("check", [asleep, delayed, ends])
def test_threads_that_sleep_or_are_delayed(jobs, check):
    check(jobs)
    jobs.set_threads(4)


def test_a_thread_that_is_late_takes_no_piece_of_the_next_job(tmp_path):
    late(build(tmp_path, DELAY))


def test_the_number_of_threads(jobs):
    try:
        for wanted, expected in ((1, 1), (3, 3), (0, 1), (-5, 1), (1000, 256)):
            jobs.set_threads(wanted)
            assert jobs.num_threads() == expected
        jobs.set_threads(1)
        assert jobs.wrong_items(1000, 2, 4) == 0
    finally:
        jobs.set_threads(4)


def test_two_threads_call_at_the_same_time(jobs):
    """One of them gets the workers, the other one computes alone."""
    found: dict[int, int] = {}

    def call(seed: int) -> None:
        found[seed] = jobs.wrong_in_random_jobs(seed, 300, 4)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(PATIENCE)
    assert found == {0: 0, 1: 0, 2: 0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_process_forked_while_another_thread_computes(jobs):
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            jobs.wrong_in_random_jobs(3, 20, 4)

    caller = threading.Thread(target=compute)
    caller.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(PATIENCE)  # a child that waits for ever ends with this signal
                wrong = jobs.wrong_in_random_jobs(4, 50, 4) + jobs.waits_in_first_item(50, 2, 0)
                os._exit(min(wrong, 1))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        caller.join()


MISTAKES: dict[str, tuple[tuple[tuple[str, str], ...], Callable[[CDLL], None]]] = {
    "a late thread takes pieces of the next job": (
        (DELAY, (r"word >> 32 != job \|\| ", "")),
        late,
    ),
    "the last piece is lost": (
        ((r"int64_t pieces = \(count \+ piece - 1\) / piece;\n    uint32_t",
          r"int64_t pieces = count / piece;\n    uint32_t"),),
        last_items,
    ),
    "a piece goes on behind the last item": (
        ((r"end < count \? end : count, thread", "end, thread"),),
        random_jobs,
    ),
    "no thread is woken": (
        ((r"for \(int64_t i = 1; i < threads; i\+\+\) wake_up\(&pool.members\[i\]\);", ""),),
        asleep,
    ),
    "the caller is not woken": (
        ((r"if \(atomic_fetch_sub\(&pool.left, 1\) == 1\) wake_up\(&pool.members\[0\]\);",
          "atomic_fetch_sub(&pool.left, 1);"),),
        does_not_wait_long,
    ),
    "no thread takes from another": (
        ((r"for \(int64_t i = 0, piece; i < threads", "for (int64_t i = 0, piece; i < 1"),),
        delayed,
    ),
    "a thread uses the memory of the piece's owner": (
        ((r"count, thread\);", "count, owner);"),),
        delayed,
    ),
    "all threads begin with the first share": (
        ((r"first = pieces \* owner / threads", "first = 0"),),
        random_jobs,
    ),
    "the caller does not wait for the last pieces": (
        ((r"    wait_until_ready\(0, job\);\n", ""),),
        waits,
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, jobs, tmp_path):
    changes, found_by = MISTAKES[name]
    found_by(jobs)
    jobs.set_threads(4)
    wrong = build(tmp_path, *changes)
    with pytest.raises(AssertionError):
        found_by(wrong)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="a system without /proc")
def test_torch_starts_no_threads_in_a_step():
    """With a second thread, prefill and decode steps start one worker of C, and none of torch."""
    if not cpu.panels_are_fast(torch.bfloat16):
        pytest.skip("layers are called one by one")
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = map(int, done.stdout.split())
    assert two == one + 1
