"""Whatever ends the step thread of an AsyncLLMEngine, everybody who waits is told at once."""

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncLLMEngine
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.errors import ConfigError, EngineDeadError, ModelNotFoundError
from minillm.scheduling.scheduler import Scheduler
from minillm.serving.step_thread import THIS_THREAD, StepThread
from tests.serving.async_small import (
    GREEDY,
    LIMIT,
    LONG,
    Gate,
    hold_tokeniser,
    last,
    make_async,
    run,
)

PROMPTS = [[5 + i, 60, 7, 99 - i, 12 + 2 * i] for i in range(8)]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Python swallows what is thrown into a callback of its garbage collector (Hypothesis sets
    one), so a kill that strikes there kills nobody."""
    gc.disable()
    yield
    gc.enable()


class Planted(Exception):
    """Thrown by the tests only."""


Kill = Callable[[AsyncLLMEngine, pytest.MonkeyPatch], None]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


def inject(engine: AsyncLLMEngine) -> None:
    """An exception out of nowhere, as a debugger or a library may throw it."""
    ident = ctypes.c_ulong(engine._steps._thread.ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1


def at(owner: type, name: str, kind: type[BaseException]) -> Kill:
    """The method raises such an error instead."""
    return lambda engine, patch: patch.setattr(owner, name, raising(kind("planted")))


def in_the_step(engine: AsyncLLMEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine._engine, "step", raising(MemoryError("planted")))


def in_a_command(engine: AsyncLLMEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepThread, "_enter", raising(MemoryError("planted")))
    entering = engine.generate(PROMPTS[7], LONG, "the last straw")
    asyncio.get_running_loop().create_task(read_dead(entering))


def and_in_the_first_cleanup(engine: AsyncLLMEngine, patch: pytest.MonkeyPatch) -> None:
    """A second kill while the waiting calls are told of the first."""
    fail_waiting, calls = StepThread._fail_waiting, []

    def killed(steps: StepThread) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise SystemExit("again")
        fail_waiting(steps)

    patch.setattr(StepThread, "_fail_waiting", killed)
    in_the_step(engine, patch)


def and_cannot_be_closed(engine: AsyncLLMEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine._engine, "close", raising(Planted("its books are damaged")))
    in_the_step(engine, patch)


ENDED = "The engine's thread ended:"
KILLS: dict[str, tuple[Kill, str]] = {
    "schedule": (at(Scheduler, "schedule", Planted), "The engine stopped: Planted: planted"),
    "step": (in_the_step, f"{ENDED} MemoryError: planted"),
    "commit": (at(Scheduler, "commit", SystemExit), f"{ENDED} SystemExit: planted"),
    "output": (at(LiveRequest, "output", MemoryError), f"{ENDED} MemoryError: planted"),
    "command": (in_a_command, f"{ENDED} MemoryError: planted"),
    "between": (at(StepThread, "_drop_closed_loops", SystemExit), f"{ENDED} SystemExit: planted"),
    "injected": (lambda engine, patch: inject(engine), f"{ENDED} SystemExit"),
    "twice": (and_in_the_first_cleanup, f"{ENDED} MemoryError: planted"),
    "not closed": (and_cannot_be_closed, f"{ENDED} MemoryError: planted"),
}


async def read_dead(stream: Any) -> EngineDeadError:
    """What ends the stream, which has no last output."""
    outputs = []

    async def read() -> None:
        async for output in stream:
            outputs.append(output)

    with pytest.raises(EngineDeadError) as caught:
        await read()
    assert not any(output.finished for output in outputs)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return caught.value


async def every_call(engine: AsyncLLMEngine) -> list[EngineDeadError]:
    """All that can be asked of an engine, which is dead."""
    calls = (
        last(engine.generate(PROMPTS[0], GREEDY, "new")), engine.abort("0"),
        engine.abort("unknown"), engine.drain(), engine.drain(0), engine.check_health(),
        engine.reset_prefix_cache(),
    )  # fmt: skip
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results), results
    return results


@pytest.mark.parametrize("kill", KILLS)
async def test_a_killed_thread_tells_everybody(folder, monkeypatch, kill):
    engine = make_async(folder, max_num_requests=3, max_num_seqs=2)
    gate, (strike, message) = Gate(engine, monkeypatch), KILLS[kill]
    _, release = hold_tokeniser(monkeypatch, "tokenising")
    # Running, queued, outside, tokenising; one that nobody reads at the moment, and a drain.
    streams = [engine.generate(p, LONG, str(i)) for i, p in enumerate(PROMPTS[:5])]
    streams.append(engine.generate("long", LONG, "tokenising"))
    gate.pace = asyncio.get_running_loop()
    unread = engine.generate(PROMPTS[6], LONG, "unread")
    await anext(unread)
    waiting = [asyncio.create_task(read_dead(stream)) for stream in streams]
    await asyncio.sleep(0)
    gate.pace = None
    gate.shut()
    await gate.reached()
    waiting.append(asyncio.create_task(dead_call(engine.drain())))
    with monkeypatch.context() as patch:
        strike(engine, patch)
        await asyncio.sleep(0)
        gate.open()
        errors = [await asyncio.wait_for(task, LIMIT) for task in waiting]
    errors.append(await read_dead(unread))
    release.set()
    errors += await every_call(engine)
    engine._steps._thread.join(LIMIT)
    assert not engine._steps._thread.is_alive()
    assert {str(error) for error in errors} == {message}
    assert len({id(error) for error in errors}) == len(errors), "an error was shared"
    assert (engine.is_running, engine.errored) == (False, True)
    assert str(engine.dead_error) == message
    assert engine.dead_error.__cause__ is not None
    assert engine.num_unfinished == 0
    engine.shutdown()
    assert (engine.is_running, engine.errored) == (False, True)


async def dead_call(call: Any) -> EngineDeadError:
    with pytest.raises(EngineDeadError) as caught:
        await call
    return caught.value


async def test_a_thread_that_is_killed_while_idle_tells_the_next_one(folder):
    """It is noticed with the next command, which the thread has already taken."""
    engine = make_async(folder)
    await last(engine.generate(PROMPTS[0], GREEDY, "a"))
    inject(engine)
    results = await asyncio.gather(
        *(last(engine.generate(p, GREEDY, str(i))) for i, p in enumerate(PROMPTS)),
        engine.reset_prefix_cache(),
        return_exceptions=True,
    )
    assert {str(result) for result in results} == {"The engine's thread ended: SystemExit"}


def test_a_kill_at_any_moment_leaves_nobody_waiting(folder):
    """Struck wherever the thread happens to be, again and again."""

    async def one(pause: float) -> None:
        engine = make_async(folder, max_num_requests=4)
        tasks = [
            asyncio.create_task(last(engine.generate(p, LONG, str(i))))
            for i, p in enumerate(PROMPTS)
        ]
        await asyncio.sleep(pause)
        inject(engine)
        await asyncio.wait_for(asyncio.wait(tasks), LIMIT)
        for task in tasks:
            ended = task.exception() or task.result()
            assert isinstance(ended, EngineDeadError) or ended.finished
        while await asyncio.gather(engine.drain(), return_exceptions=True) == [True]:
            inject(engine)  # the first one struck in a finaliser, and Python swallowed it

    for milliseconds in range(0, 25, 2):
        run(one(milliseconds / 1000))


FORK = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
from minillm import AsyncEngineArgs, AsyncLLMEngine, EngineDeadError

async def one(engine):
    async for output in engine.generate([1, 2, 3], None, "a"):
        pass

engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(sys.argv[1], dtype="float32"))
if (child := os.fork()) == 0:
    code = 1
    try:
        assert engine.errored and not engine.is_running
        asyncio.run(asyncio.wait_for(one(engine), 200))
    except EngineDeadError as error:
        code = 0 if "was forked" in str(error) else 2
    finally:
        os._exit(code)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
asyncio.run(one(engine))  # the parent's is as it was
engine.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_it_has_no_engine(folder: Path) -> None:
    command = [sys.executable, "-c", FORK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr


# ---- how it begins -----------------------------------------------------------------------------


def test_all_of_the_engine_happens_in_one_thread(folder: Path, monkeypatch: Any) -> None:
    """A second one that computes would make each step several times slower (OpenMP)."""
    names = set()
    for what in ("__init__", "step", "close"):
        works = getattr(Engine, what)

        def noted(self: Engine, *args: Any, works: Any = works) -> Any:
            names.add(threading.current_thread().name)
            return works(self, *args)

        monkeypatch.setattr(Engine, what, noted)
    engine = make_async(folder)
    assert run(last(engine.generate(PROMPTS[0], GREEDY, "a"))).finished
    if THIS_THREAD.exists():  # the system shows names of threads
        shown = {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}
        assert "minillm-steps" in shown
    engine.shutdown()
    assert names == {"minillm-steps"}


def test_an_engine_that_cannot_be_made_says_why_and_leaves_no_thread(folder: Path) -> None:
    before = threading.active_count()
    with pytest.raises(ModelNotFoundError):
        make_async(folder / "none")
    with pytest.raises(ConfigError, match="max_model_len"):
        make_async(folder, max_model_len=10**6)
    assert threading.active_count() == before


def test_ctrl_c_while_it_loads_ends_the_thread(folder: Path, monkeypatch: Any) -> None:
    threads: list[threading.Thread] = []
    before = set(threading.enumerate())

    def interrupted(self: Any, timeout: float | None = None) -> None:
        new = set(threading.enumerate()) - before
        threads.extend(each for each in new if each.name == "minillm-steps")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_async(folder)
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert threads
