"""Every test here runs in a process with TRITON_INTERPRET=1, its interpreter mended."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest
from triton.runtime.interpreter import GridExecutor, interpreter_builder

from minillm.ops import cpu_int8_cache, dispatch
from minillm.ops.dispatch import Backend
from minillm_kernels import interpreter, launch

interpreter.install()


@pytest.fixture(autouse=True)
def own_counters() -> Iterator[None]:
    """A planted bug may leave counters of arrivals behind."""
    yield
    launch._counters.cache_clear()


@contextmanager
def programs_in(order: str) -> Iterator[None]:
    """Run the programs of a launch backwards, or those of all tiles for one split after another, as
    a GPU may."""
    place = interpreter_builder.set_grid_idx

    def moved(*at: int) -> None:
        x, y, z = interpreter_builder.grid_dim
        if order == "backwards":
            place(x - 1 - at[0], y - 1 - at[1], z - 1 - at[2])
            return
        number = (at[0] * y + at[1]) * z + at[2]
        if z == 1:  # splits are the second dimension
            place(number % x, number // x, 0)
        else:
            place(number % x, number // x % y, number // (x * y))

    with patch.object(interpreter_builder, "set_grid_idx", moved):
        yield


@pytest.fixture(params=["backwards", "by splits"])
def another_order(request) -> AbstractContextManager[None]:
    """A block in which the programs of a launch run in another order."""
    return programs_in(request.param)


@pytest.fixture
def kernels(monkeypatch) -> set[str]:
    """Send everything to kernels from now on; the names of those that ran."""
    ran: set[str] = set()
    call = GridExecutor.__call__

    def counted(self, *args, **kwargs):
        ran.add(self.fn.__name__)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", "interpreted"))
    monkeypatch.setattr(cpu_int8_cache, "takes", lambda *others: False)  # else C comes first
    return ran
