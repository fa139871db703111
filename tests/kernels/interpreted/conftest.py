"""Every test here runs in a process with TRITON_INTERPRET=1, its interpreter mended."""

from collections.abc import Iterator

import pytest
from triton.runtime.interpreter import GridExecutor

from minillm.ops import dispatch
from minillm.ops.dispatch import Backend
from minillm_kernels import interpreter, launch

interpreter.install()


@pytest.fixture(autouse=True)
def own_counters() -> Iterator[None]:
    """A planted bug may leave counters of arrivals behind."""
    yield
    launch._counters.cache_clear()


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
    return ran
