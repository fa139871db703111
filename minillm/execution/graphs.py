"""Decode steps as CUDA graphs: one recording per number of rows, replayed with new contents.

Launching a kernel costs the host about 5 microseconds, and a decode step of 28 layers has over a
hundred; one replay costs as much as one launch. But a graph repeats addresses, not values: whatever
changes from step to step lies in tensors that stay where they are.

    host, one copy per step      [ positions | lengths | slots ]   of every row; padding elsewhere
    device, from step to step    [ last tokens ]                   written after sampling,
                                                                   read by the next step's embedding
    replay                       embedding -> layers -> norm -> hidden states

Logits and sampling are launched after the replay, for the rows of the step only: what one request
asks of its tokens does not keep the others from their graph. No token passes through the host. Rows
are those of the runner's persistent table, from 0 to the size of the graph: a row that has no part
in the step is padding, of length 0 and with slot -1, which attends to nothing and writes nowhere;
its token means nothing. Positions and slots come from the host, which knows them before any token,
in one copy of a few kilobytes.

Verification of k drafts is the same with `query_len` = k + 1 tokens per row, which come from the
host too. A row with fewer has padding before them, so that its last token ends the row:

    query_len 4      | -  -  t  d1 | t  d1 d2 d3 | -  -  -  - |      - is padding, with slot -1
"""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from minillm import ops
from minillm.execution.state import DeviceRows
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch
from minillm.ops.transfers import put, upload

logger = logging.getLogger(__name__)

MAX_SECONDS = 120.0  # of recording: an engine that starts must not seem to hang
SMALL = (1, 2, 4, 8)
FINE, COARSE, FINE_UP_TO = 8, 16, 64


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, for every number from 1 to `most`.

    A decode step reads all weights whatever the number of rows, so that padded rows cost hardly
    anything, while each graph costs memory and a moment when it is first needed. Powers of two up
    to 8, because there one row more is much; then every 8th, which is as many rows as one tile of a
    matrix unit has at least; above 64 every 16th, where fewer than one row in five is padding.
    """
    sizes = [*SMALL, *range(FINE, FINE_UP_TO, FINE), *range(FINE_UP_TO, most, COARSE)]
    return (*sorted({size for size in sizes if size < most}), most)


def bucket_of(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest size that holds so many rows; None if none does."""
    return next((size for size in sizes if size >= num_rows), None)


class Capture(Protocol):
    """Records what a function launches; the answer launches it again, on the same memory."""

    num_bytes: int  # of device memory that all recordings hold

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """May call `run` any number of times before it is recorded."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory: only one of them runs at a time."""

    WARM_UP = 2  # the first call compiles kernels and fills caches, which a recording must not

    def __init__(self, device: torch.device):
        self.device, self.num_bytes = device, 0
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a stream beside the others, then record."""
        current = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                run()
        current.wait_stream(side)
        torch.cuda.empty_cache()  # else what the recording takes might be what the warm-up left
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self.num_bytes += max(torch.cuda.memory_reserved(self.device) - before, 0)
        return graph.replay


def has_graphs(device: torch.device) -> bool:
    """Whether decode steps can be recorded on this device: a GPU with our kernels."""
    return ops.backend_of(device).name == "triton"


class DecodeGraphs:
    """The forward pass of decode steps of one model over one cache, `query_len` tokens per row.

    `sizes` are the numbers of rows that have a graph; `missing` says why others have none.
    """

    def __init__(
        self, model: Decoder, kv: KVCache, rows: DeviceRows, capture: Capture, query_len: int = 1
    ):
        self.model, self.kv, self.rows, self.recorder = model, kv, rows, capture
        self.query_len = query_len
        self.sizes: tuple[int, ...] = ()
        self.missing = ""
        self.num_rows = 0  # of the graph that was replayed last
        self.seconds = 0.0  # that recording took
        count, device = rows.num_rows, rows.device
        # Positions, slots and tokens of all rows, in as many columns as a row has tokens; lengths.
        self._host = np.zeros((3 * query_len + 1, count), dtype=np.int64)
        self._inputs = torch.zeros(3 * query_len + 1, count, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(count, dtype=torch.int32, device=device)
        self._bounds = torch.arange(count + 1, dtype=torch.int32, device=device) * query_len
        self._ids = torch.zeros(count, query_len, dtype=torch.int64, device=device)
        shape = count * query_len, model.config.hidden_size
        self.hidden = torch.zeros(shape, dtype=kv.key.dtype, device=device)
        self._replay: dict[int, Callable[[], None]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of all recordings and of what these read and write."""
        return self.recorder.num_bytes + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Device memory of what these read and write."""
        own = (self._inputs, self._lengths, self._bounds, self._ids, self.hidden)
        return sum(each.nbytes for each in own)

    def launch(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        input_ids: Sequence[int] = (),
        on_device: Sequence[int] = (),
    ) -> list[int] | None:
        """Tokens of these rows, `counts` of them each, from position `starts` on.

        Args:
            input_ids: the tokens, one row after another; with a `query_len` of 1 none, because they
                are in `DeviceRows.last`.
            on_device: rows whose last token is in `DeviceRows.last`.

        Returns:
            Where in `hidden` the hidden states of the tokens are after the replay; None if there is
            no graph for so many rows.
        """
        size = bucket_of(self.sizes, max(rows) + 1)
        if size is None:
            return None
        width, block_size = self.query_len, self.kv.block_size
        row, start, count = (np.array(each) for each in (rows, starts, counts))
        place, position, column = row, start, np.zeros_like(row)
        if width > 1:
            place, ends = row.repeat(count), count.cumsum()
            offset = np.arange(len(place)) - (ends - count).repeat(count)  # of a token in its row
            position = start.repeat(count) + offset
            column = offset + (width - count).repeat(count)
        blocks = self.rows.tables.host[place, position // block_size]
        self._clear()
        host = self._host
        host[column, place] = position
        host[width + column, place] = blocks * block_size + position % block_size
        if width > 1:
            host[2 * width + column, place] = input_ids
        host[-1, row] = start + count
        put(self._inputs, host)
        if width > 1:
            self._set_tokens(on_device)
        self._replay[size]()
        self.num_rows = size
        return (place * width + column).tolist()

    def _set_tokens(self, on_device: Sequence[int]) -> None:
        """Tokens of the step in `_ids`, the last ones of some rows from the device."""
        self._ids.copy_(self._inputs[2 * self.query_len : -1].T)
        if on_device:
            (where,) = upload(self.rows.device, np.array(on_device, dtype=np.int64))
            self._ids[where, -1] = self.rows.last[where]

    def _clear(self) -> None:
        """Nothing but padding."""
        self._host.fill(0)
        self._host[self.query_len : 2 * self.query_len] = -1

    def record_all(self, max_bytes: int | None = None, max_seconds: float = MAX_SECONDS) -> None:
        """Record the graphs of all sizes now, the largest first, whose memory the others share.

        A size that cannot be recorded has none, and its batches take the next larger graph. Where
        time or memory run out, the smaller sizes have none.
        """
        began, sizes = perf_counter(), bucket_sizes(self.rows.num_rows)[::-1]
        for size in tqdm(sizes, "Recording CUDA graphs", delay=2, disable=None):
            if perf_counter() - began > max_seconds or (max_bytes and self.num_bytes > max_bytes):
                logger.warning(
                    "CUDA graphs were recorded for %d rows and more only: they took %.0f s and "
                    "%.0f MB; smaller batches are padded.",
                    min(self._replay, default=0),
                    perf_counter() - began,
                    self.num_bytes / 1e6,
                )
                self.missing = self.missing or "no graph: recording was stopped"
                break
            try:
                self._replay[size] = self._record(size)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                self.missing = f"no graph: {type(error).__name__}: {text}"
                logger.warning("Batches of %d rows have no CUDA graph of their own: %s", size, text)
        self.sizes, self.seconds = tuple(sorted(self._replay)), perf_counter() - began
        if self.sizes:
            logger.info(
                "CUDA graphs: %d sizes up to %d rows of %d tokens, %.1f s, %.0f MB.",
                len(self.sizes),
                self.sizes[-1],
                self.query_len,
                self.seconds,
                self.num_bytes / 1e6,
            )

    def _record(self, size: int) -> Callable[[], None]:
        self._clear()
        put(self._inputs, self._host)
        return self.recorder.capture(lambda: self._run(size))

    def _run(self, size: int) -> None:
        """What is recorded: every tensor that it reads first or writes last stays in its place."""
        width, total = self.query_len, size * self.query_len
        inputs, lengths = self._inputs[:, :size], self._lengths[:size]
        lengths.copy_(inputs[-1])
        batch = Batch(
            input_ids=self.rows.last[:size] if width == 1 else self._ids[:size].flatten(),
            positions=inputs[:width].T.flatten(),  # [size, width], one row after another
            slot_mapping=inputs[width : 2 * width].T.flatten(),
            query_start=self._bounds[: size + 1],
            seq_lens=lengths,
            block_tables=self.rows.tables.device[:size],
            logits_indices=self._bounds[:size],
            max_query_len=width,
        )
        self.hidden[:total].copy_(self.model(batch, self.kv))
