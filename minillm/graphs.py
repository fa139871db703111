"""Decode steps as CUDA graphs: one recording per number of rows, replayed with new contents.

Launching a kernel costs the host about 5 microseconds, and a decode step of 28 layers has over a
hundred; one replay costs as much as one launch. But a graph repeats addresses, not values: whatever
changes from step to step lies in tensors that stay where they are.

    host, one copy per step      [ positions | lengths | slots ]   of every row; padding elsewhere
    device, from step to step    [ last tokens ]                   written by the sampler's kernel,
                                                                   read by the next step's embedding
    replay                       embedding -> layers -> norm -> logits -> sampling

So no token passes through the host. Rows are those of the runner's persistent table, from 0 to the
size of the graph: a row that has no part in the step is padding, of length 0 and with slot -1,
which attends to nothing and writes nowhere; its token means nothing. Positions and slots come from
the host, which knows them before any token, in one copy of a few kilobytes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm import ops
from minillm.batches import DeviceRows, put
from minillm.device_sampler import DeviceSampler, choose_into
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch

SMALL = (1, 2, 4, 8)
FINE, COARSE, FINE_UP_TO = 8, 16, 64


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, for every number from 1 to `most`.

    A decode step reads all weights whatever the number of rows, so that padded rows cost hardly
    anything, while each graph costs memory and a moment when it is first needed. Powers of two up
    to 8, because there a row more is much; then every 8th, which is as many rows as one tile of a
    matrix unit has at least; above 64 every 16th, where fewer than one row in five is padding.
    """
    sizes = [*SMALL, *range(FINE, FINE_UP_TO, FINE), *range(FINE_UP_TO, most, COARSE)]
    return (*sorted({size for size in sizes if size < most}), most)


def bucket_of(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest size that holds so many rows."""
    return next(size for size in sizes if size >= num_rows)


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


def capture_for(device: torch.device, enforce_eager: bool) -> Capture | None:
    """What records graphs on this device; None where every step runs operation by operation.

    Only our kernels never ask the device for a number.
    """
    if enforce_eager or ops.backend_of(device).name != "triton":
        return None
    return CudaCapture(device)


def read_later(results: Tensor) -> Callable[[], NDArray]:
    """Copy results towards the host now, and wait for them when they are asked for.

    What comes after in the stream may overwrite `results`.
    """
    if results.device.type == "cpu":
        copy = results.clone()
        return copy.numpy
    pinned = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    pinned.copy_(results, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> NDArray:
        arrived.synchronize()
        return pinned.numpy()

    return read


class DecodeGraphs:
    """Decode steps of one model over one cache.

    `failed` says why there are no graphs any more, after a recording that was not possible.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        rows: DeviceRows,
        sampler: DeviceSampler,
        capture: Capture,
    ):
        self.model, self.kv, self.rows, self.sampler = model, kv, rows, sampler
        self.recorder = capture
        self.sizes = bucket_sizes(rows.num_rows)
        self.failed = ""
        # Positions, positions of the tokens to choose (which are the lengths), and slots.
        self._host = np.zeros((3, rows.num_rows), dtype=np.int64)
        self._inputs = torch.zeros(3, rows.num_rows, dtype=torch.int64, device=rows.device)
        self._lengths = torch.zeros(rows.num_rows, dtype=torch.int32, device=rows.device)
        self._bounds = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=rows.device)
        self._places = torch.arange(rows.num_rows, device=rows.device)
        self._replay: dict[tuple[int, bool], Callable[[], None]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of all recordings."""
        return self.recorder.num_bytes

    def launch(self, rows: Sequence[int], starts: Sequence[int], truncates: bool) -> int:
        """One token for each of these rows, at position `starts`; returns the size of the graph.

        The tokens to compute are in `DeviceRows.last`, and so are, after the replay, those chosen.
        """
        size = bucket_of(self.sizes, max(rows) + 1)
        replay = self._replay.get((size, truncates)) or self._record(size, truncates)
        place, start, host = np.array(rows), np.array(starts), self._host
        block_size = self.kv.block_size
        blocks = self.rows.tables.host[place, start // block_size]
        self._clear()
        host[0, place], host[1, place] = start, start + 1
        host[2, place] = blocks * block_size + start % block_size
        put(self._inputs, host)
        self.sampler.bring_up_to_date()
        replay()
        return size

    def _clear(self) -> None:
        """Nothing but padding."""
        self._host[:2], self._host[2] = 0, -1

    def record_all(self, progress: Callable[[int], None] = lambda size: None) -> None:
        """Record the graphs of every size now, the largest first, whose memory the others share."""
        for size in reversed(self.sizes):
            if (size, False) not in self._replay:
                self._record(size, False)
            progress(size)

    def _record(self, size: int, truncates: bool) -> Callable[[], None]:
        """The graph of a size; what the rows' last tokens are stays as it is."""
        kept = self.rows.results.clone()
        self._clear()
        put(self._inputs, self._host)
        try:
            replay = self.recorder.capture(lambda: self._run(size, truncates))
        finally:
            self.rows.results.copy_(kept)
        self._replay[size, truncates] = replay
        return replay

    def _run(self, size: int, truncates: bool) -> None:
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
        logits = self.model.logits(self.model(batch, self.kv))  # [size, V]
        self.rows.best[:size].copy_(logits.amax(dim=-1))
        choose_into(self.rows.last[:size], logits, self.sampler.of(size), ends, truncates)
