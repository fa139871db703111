"""`llm.trace`: the records of the latest steps, for reading, saving and drawing.

Recording is always on. It costs almost no time, because a record refers to lists of the step plan,
and little memory, because old records are dropped. The trace also keeps the state before the first
record: the unfinished requests, with about 170 bytes for each block that they hold.
"""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, overload

from msgspec import Meta

from minillm.cache.manager import Count
from minillm.scheduling.record import Number, StepRecord
from minillm.trace.replay import (
    Replay,
    RequestSummary,
    SequenceState,
    finished_requests,
    token_times,
)

CAPACITY = 35_000_000  # bytes: 3,300 steps of 64 sequences, 28,000 steps of one
MAX_BLOCKS = 2**24
# Bytes of a record without events, of a row or another event, and of a block number in a row.
RECORD_BYTES, ROW_BYTES, BLOCK_BYTES = 1100, 150, 8


@dataclass(frozen=True)
class TraceSettings:
    """The settings of the recorded engine. `clock` and `wall` are the same moment, on the engine's
    clock and in seconds since 1970. A simulation has no model and no date."""

    model: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    kv_bytes_per_token: Count | None = None
    device: str | None = None
    policy: str | None = None
    admission: str | None = None
    preemption: str | None = None
    prefix_cache: str | None = None
    block_size: Count | None = None
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    num_host_blocks: Count = 0
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    clock: Number | None = field(default_factory=time.perf_counter)
    wall: Number | None = field(default_factory=time.time)


class Trace(Sequence[StepRecord]):
    """A sequence of the latest step records, the newest last.

    >>> llm.trace[-1].blocked                      # why is the next request waiting?
    >>> print(llm.trace.table(last=20))            # a text table
    >>> llm.trace.save("run.jsonl")                # then: minillm trace view run.jsonl
    >>> llm.trace.requests()                       # times and counts of finished requests

    Records, without the newest one, take at most `capacity` bytes. `num_dropped` older records were
    dropped; their effect on unfinished requests is kept. A trace may be read in one thread while
    another thread records.
    """

    def __init__(self, settings: TraceSettings | None = None, capacity: int = CAPACITY):
        self.settings = settings or TraceSettings()
        self.num_dropped = 0
        self._capacity = capacity
        self._num_bytes = 0  # of all records without the newest, which may still grow
        self._sizes: deque[int] = deque()  # of each of these records
        self._records: deque[StepRecord] = deque()
        self._before = Replay()  # the state before the first record, without `_hidden`
        self._hidden: StepRecord | None = None  # the newest record at `clear`; may be incomplete
        self._lock = threading.Lock()
        self.listeners: list[Callable[[StepRecord], None]] = []  # called with each new record

    def append(self, record: StepRecord) -> None:
        """Add the record of a step, unless it is already the newest."""
        with self._lock:
            latest = self._records[-1] if self._records else self._hidden
            if record.step < 1 or latest is record:
                return
            self._forget_hidden()
            if self._records:
                self._sizes.append(size_of(self._records[-1]))
                self._num_bytes += self._sizes[-1]
            self._records.append(record)
            for listener in self.listeners:
                listener(record)
            while self._num_bytes > self._capacity and len(self._records) > 1:
                self._drop()

    def clear(self) -> None:
        """Remove all records so far."""
        with self._lock:
            while len(self._records) > 1:
                self._drop()
            if self._records:  # its step may be running, and aborts are added to it until the next
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
        except BaseException:  # Ctrl-C: the engine ends all requests, too
            self._before = Replay()
            raise

    def _drop(self) -> None:
        oldest = self._records.popleft()
        self._num_bytes -= self._sizes.popleft()
        self.num_dropped += 1
        self._forget(oldest)

    def restore(self, states: list[SequenceState]) -> None:
        """Set the state before the first record, for a trace that is read from a file."""
        self._before = Replay(states)

    def snapshot(self) -> tuple[Replay, list[StepRecord]]:
        """The state before the first record, and the records to apply to it."""
        with self._lock:
            before = copy.deepcopy(self._before)
            if self._hidden is not None:
                before.apply(self._hidden)
            return before, list(self._records)

    def requests(self) -> list[RequestSummary]:
        """Metrics of the requests that finished in the recorded steps."""
        return finished_requests(*self.snapshot())

    def token_times(self) -> dict[str, list[float]]:
        """The time of each new token in the recorded steps, by completion. Names are request ids,
        with " #1", " #2", ... for further completions."""
        return token_times(*self.snapshot())

    # ---- forms -------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a JSON lines file: the settings, then one line per step."""
        from minillm.trace.file import save_trace

        save_trace(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a file written by `save`; raises TraceFileError if the file is invalid."""
        from minillm.trace.file import load_trace

        return load_trace(Path(path))

    def table(self, last: int | None = 40) -> str:
        """The last steps as text, one line each; None: all steps."""
        return drawing("table").step_table(self, last)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Events for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        return drawing("chrome").chrome_events(self)

    def save_chrome(self, path: str | Path) -> None:
        """Write a JSON file for Perfetto."""
        drawing("chrome").save_chrome(self, Path(path))

    def html(self) -> str:
        """A self-contained HTML page: requests and blocks over the steps, with every record."""
        return drawing("page").page(self._timeline(), self.settings.model or "trace")

    def save_html(self, path: str | Path) -> None:
        """Write the HTML page."""
        Path(path).write_text(self.html(), "utf-8")

    def figure(self, **options: Any) -> Any:
        """A matplotlib figure; options are those of `lab/drawings/figure.py`."""
        return drawing("figure").figure(self._timeline(), **options)

    def widget(self, **options: Any) -> Any:
        """The HTML page as a notebook widget; options are those of `lab/drawings/figure.py`."""
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
    """A module of `lab/drawings/`, imported when a drawing is requested."""
    return import_module(f"minillm.lab.drawings.{module}")


def size_of(record: StepRecord) -> int:
    """Upper estimate of the memory of a record in bytes; for long prompts mostly block tables."""
    moves = len(record.copies) + len(record.swap_out) + len(record.swap_in)
    others = len(record.admitted) + len(record.preempted) + len(record.stalled) + len(record.void)
    others += len(record.drafted) + len(record.ranks)
    ends = 2 * (len(record.added) + len(record.ended)) + len(record.forked)  # with names and times
    blocks = sum([len(row.blocks) for row in record.rows])
    events = len(record.rows) + moves + others + ends
    return RECORD_BYTES + ROW_BYTES * events + BLOCK_BYTES * blocks
