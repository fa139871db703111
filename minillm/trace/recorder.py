"""`llm.trace`: the records of the last steps, for reading, saving and drawing.

Recording is always on: a record is made of lists that the plan has anyway, so that it costs next to
nothing, and old ones fall off, so that memory is bounded. Beside the records stands the state
before the first of them: the requests that ran then, and about 170 bytes for each block they held.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from minillm.scheduling.record import StepRecord
from minillm.trace.replay import (
    Replay,
    RequestSummary,
    SequenceState,
    finished_requests,
    token_times,
)

CAPACITY = 35_000_000  # bytes: 3,300 steps of 64 sequences, 28,000 steps of one
# Bytes of a record without events, of a row or another event, and of a block that a row names.
RECORD_BYTES, ROW_BYTES, BLOCK_BYTES = 1100, 150, 8


@dataclass(frozen=True)
class TraceSettings:
    """What engine was recorded. `clock` and `wall` are one moment on the engine's clock and in
    seconds since 1970; a simulation has no model and no date."""

    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    policy: str | None = None
    admission: str | None = None
    preemption: str | None = None
    prefix_cache: str | None = None
    block_size: int | None = None
    num_blocks: int = 0
    num_host_blocks: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    clock: float | None = field(default_factory=time.perf_counter)
    wall: float | None = field(default_factory=time.time)


class Trace(Sequence[StepRecord]):
    """A list of the last step records, the newest last.

    >>> llm.trace[-1].blocked                      # why is the next request waiting?
    >>> print(llm.trace.table(last=20))            # a text table
    >>> llm.trace.save("run.jsonl")                # then: minillm trace view run.jsonl
    >>> llm.trace.requests()                       # times and counts of finished requests

    All records but the last take at most `capacity` bytes. `num_dropped` older steps fell off; who
    ran at that time is still known. It may be read in one thread while another one records.
    """

    def __init__(self, settings: TraceSettings | None = None, capacity: int = CAPACITY):
        self.settings = settings or TraceSettings()
        self.num_dropped = 0
        self._capacity = capacity
        self._num_bytes = 0  # of all records but the last, which may still grow,
        self._sizes: deque[int] = deque()  # and of each of them
        self._records: deque[StepRecord] = deque()
        self._before = Replay()  # the state before the first record, but for `_hidden`
        self._hidden: StepRecord | None = None  # the last one, cleared but maybe not complete
        self._lock = threading.Lock()

    def append(self, record: StepRecord) -> None:
        """Add the record of a step; the one that is the last already is not added twice."""
        with self._lock:
            latest = self._records[-1] if self._records else self._hidden
            if record.step < 1 or latest is record:
                return
            self._forget_hidden()
            if self._records:
                self._sizes.append(size_of(self._records[-1]))
                self._num_bytes += self._sizes[-1]
            self._records.append(record)
            while self._num_bytes > self._capacity and len(self._records) > 1:
                self._drop()

    def clear(self) -> None:
        """Forget all steps so far, as before a measurement."""
        with self._lock:
            while len(self._records) > 1:
                self._drop()
            if self._records:  # a step may be running, and aborts until the next belong to this one
                self._forget_hidden()
                self._hidden = self._records.popleft()
                self._num_bytes = 0
                self._sizes.clear()
                self.num_dropped += 1

    def _forget_hidden(self) -> None:
        if self._hidden is not None:
            hidden, self._hidden = self._hidden, None
            self._forget(hidden)

    def _forget(self, record: StepRecord) -> None:
        try:
            self._before.apply(record)
        except BaseException:  # Ctrl-C in the middle: the engine ends all requests, too
            self._before = Replay()
            raise

    def _drop(self) -> None:
        oldest = self._records.popleft()
        self._num_bytes -= self._sizes.popleft()
        self.num_dropped += 1
        self._forget(oldest)

    def restore(self, states: list[SequenceState]) -> None:
        """Say who was there before the first record, for a trace that is read from a file."""
        self._before = Replay(states)

    def snapshot(self) -> tuple[Replay, list[StepRecord]]:
        """The state before the first record, and the records to apply to it."""
        with self._lock:
            before = copy.deepcopy(self._before)
            if self._hidden is not None:
                before.apply(self._hidden)
            return before, list(self._records)

    def requests(self) -> list[RequestSummary]:
        """Requests that ended in the recorded steps: the numbers of their metrics."""
        return finished_requests(*self.snapshot())

    def token_times(self) -> dict[str, list[float]]:
        """When each new token of each completion was there, in the recorded steps; a completion
        is named by its request, with " #1" and so on behind the first."""
        return token_times(*self.snapshot())

    # ---- forms -------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write JSON lines: the settings, then one line per step."""
        from minillm.trace.file import save_trace

        save_trace(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `save` wrote; TraceFileError says what is wrong with a file."""
        from minillm.trace.file import load_trace

        return load_trace(Path(path))

    def table(self, last: int | None = 40) -> str:
        """The last steps as text, one line each; None takes all."""
        return drawing("table").step_table(self, last)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Events for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        return drawing("chrome").chrome_events(self)

    def save_chrome(self, path: str | Path) -> None:
        """Write the events as a JSON file that Perfetto opens."""
        drawing("chrome").save_chrome(self, Path(path))

    def html(self) -> str:
        """One self-contained page: requests and blocks over the steps, with every record."""
        return drawing("page").page(self._timeline(), self.settings.model or "trace")

    def save_html(self, path: str | Path) -> None:
        """Write the page."""
        Path(path).write_text(self.html(), "utf-8")

    def figure(self, **options: Any) -> Any:
        """The same drawing as a matplotlib figure; options: `lab/drawings/figure.py`."""
        return drawing("figure").figure(self._timeline(), **options)

    def widget(self, **options: Any) -> Any:
        """The page as a notebook widget; options are those of `lab/drawings/figure.py`."""
        return drawing("figure").widget(self._timeline(), **options)

    def _timeline(self) -> Any:
        return drawing("timeline").timeline(self)

    # ---- a sequence --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(list(self._records))

    def __repr__(self) -> str:
        first, last = (self[0].step, self[-1].step) if self else (0, 0)
        steps = f"steps {first:,} to {last:,}" if self else "no step yet"
        return f"<Trace of {self.settings.model or 'a simulation'}: {steps}>"


def drawing(module: str) -> Any:
    """A module of `lab/drawings/`, imported when a drawing is asked for: recording needs none."""
    return import_module(f"minillm.lab.drawings.{module}")


def size_of(record: StepRecord) -> int:
    """Bytes that a record keeps in memory, rounded up; block tables are most of a long prompt's."""
    moves = len(record.copies) + len(record.swap_out) + len(record.swap_in)
    others = len(record.admitted) + len(record.preempted) + len(record.stalled) + len(record.void)
    others += len(record.drafted) + len(record.ranks)
    ends = 2 * (len(record.added) + len(record.ended)) + len(record.forked)  # with names and times
    blocks = sum([len(row.blocks) for row in record.rows])
    events = len(record.rows) + moves + others + ends
    return RECORD_BYTES + ROW_BYTES * events + BLOCK_BYTES * blocks
