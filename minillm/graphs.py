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
are those of the runner's persistent table, from 0 to the
size of the graph: a row that has no part in the step is padding, of length 0 and with slot -1,
which attends to nothing and writes nowhere; its token means nothing. Positions and slots come from
the host, which knows them before any token, in one copy of a few kilobytes.
"""

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from minillm import ops
from minillm.batches import DeviceRows, put
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch

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
    """The forward pass of decode steps of one model over one cache.

    `sizes` are the numbers of rows that have a graph; `missing` says why others have none.
    """

    def __init__(self, model: Decoder, kv: KVCache, rows: DeviceRows, capture: Capture):
        self.model, self.kv, self.rows, self.recorder = model, kv, rows, capture
        self.sizes: tuple[int, ...] = ()
        self.missing = ""
        self.seconds = 0.0  # that recording took
        # Positions, lengths and slots.
        self._host = np.zeros((3, rows.num_rows), dtype=np.int64)
        self._inputs = torch.zeros(3, rows.num_rows, dtype=torch.int64, device=rows.device)
        self._lengths = torch.zeros(rows.num_rows, dtype=torch.int32, device=rows.device)
        self._bounds = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=rows.device)
        self._places = torch.arange(rows.num_rows, device=rows.device)
        shape = rows.num_rows, model.config.hidden_size
        self.hidden = torch.zeros(shape, dtype=kv.key.dtype, device=rows.device)
        self._replay: dict[int, Callable[[], None]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of all recordings and of what they read and write."""
        own = (self._inputs, self._lengths, self._bounds, self._places, self.hidden)
        return self.recorder.num_bytes + sum(each.nbytes for each in own)

    def launch(self, rows: Sequence[int], starts: Sequence[int]) -> int | None:
        """One token for each of these rows, at position `starts`; returns the size of the graph,
        None if there is none for so many rows.

        The tokens are in `DeviceRows.last`; after the replay their hidden states are in `hidden`.
        """
        size = bucket_of(self.sizes, max(rows) + 1)
        if size is None:
            return None
        place, start, host = np.array(rows), np.array(starts), self._host
        block_size = self.kv.block_size
        blocks = self.rows.tables.host[place, start // block_size]
        self._clear()
        host[0, place], host[1, place] = start, start + 1
        host[2, place] = blocks * block_size + start % block_size
        put(self._inputs, host)
        self._replay[size]()
        return size

    def _clear(self) -> None:
        """Nothing but padding."""
        self._host[:2], self._host[2] = 0, -1

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
                "CUDA graphs: %d sizes up to %d rows, %.1f s, %.0f MB.",
                len(self.sizes),
                self.sizes[-1],
                self.seconds,
                self.num_bytes / 1e6,
            )

    def _record(self, size: int) -> Callable[[], None]:
        self._clear()
        put(self._inputs, self._host)
        return self.recorder.capture(lambda: self._run(size))

    def _run(self, size: int) -> None:
        """What is recorded: every tensor that it reads first or writes last stays in its place."""
        positions, ends, slots = self._inputs[:, :size].unbind()
        lengths = self._lengths[:size]
        lengths.copy_(ends)
        batch = Batch(
            input_ids=self.rows.last[:size],
            positions=positions,
            slot_mapping=slots,
            query_start=self._bounds[: size + 1],
            seq_lens=lengths,
            block_tables=self.rows.tables.device[:size],
            logits_indices=self._places[:size],
            max_query_len=1,
        )
        self.hidden[:size].copy_(self.model(batch, self.kv))
