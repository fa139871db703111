"""CUDA graphs of decode steps: one graph per batch size, captured once and replayed every step.

Launching a kernel costs the host about 5 microseconds, and a decode step of 28 layers launches over
a hundred; replaying a graph costs about one launch. A graph replays fixed addresses, so everything
that changes between steps is written to tensors at fixed addresses.

    host, one copy per step      [ positions | slots | lengths ]   of every row, or padding
    device, persistent           [ last tokens ]                   written by sampling,
                                                                   read by the next step's embedding
    replay                       embedding -> layers -> norm -> hidden states

Logits and sampling run after the replay, outside the graph: sampling parameters of a request do not
prevent the replay. A graph of size n runs rows 0 to n - 1 of the persistent batch. Rows that are
not in the step are padding, with length 0 and slot -1: they attend to nothing and write nothing,
and their output is ignored. The host copies positions and slots, a few kilobytes; tokens stay on
the device.

Verification of k drafts uses `query_len` = k + 1 tokens per row, which come from the host. A row
with fewer tokens is padded on the left:

    query_len 4      | -  -  t  d1 | t  d1 d2 d3 | -  -  -  - |      - is padding, with slot -1
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from math import inf
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minillm import ops
from minillm.execution.state import DeviceRows, RowStates
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch
from minillm.ops.transfers import put, upload
from minillm.speculative.draft_model import DraftModel
from minillm.speculative.speculator import Speculator

logger = logging.getLogger(__name__)

MAX_SECONDS = 120.0  # limit on capture time at startup
SMALL = (1, 2, 4, 8)
FINE, COARSE, FINE_UP_TO = 8, 16, 64


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture, for batches of 1 to `most` rows.

    A decode step reads all weights at any batch size, so padded rows cost little, while each graph
    costs memory and capture time. Sizes are powers of two up to 8, where one more row is a large
    fraction; then multiples of 8, the smallest tile of a matrix unit; above 64 multiples of 16,
    where padding is below a fifth.
    """
    sizes = [*SMALL, *range(FINE, FINE_UP_TO, FINE), *range(FINE_UP_TO, most, COARSE)]
    return (*sorted({size for size in sizes if size < most}), most)


def bucket_of(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest size >= `num_rows`; None if there is none."""
    return next((size for size in sizes if size >= num_rows), None)


class Capture(Protocol):
    """Captures the kernels that a function launches."""

    num_bytes: int  # device memory of all captured graphs

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up and capture `run`, which may be called several times. Returns its replay, which
        reads and writes the same memory."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: only one of them runs at a time."""

    WARM_UP = 2  # the first call compiles kernels and fills caches, which cannot be captured

    def __init__(self, device: torch.device):
        self.device, self.num_bytes = device, 0
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: cuBLAS keeps a workspace for each stream that it was called on.
        self._side = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warm up on a side stream, then capture on it. If that fails, the current stream is as it
        was: torch leaves the capturing one (`graph.__exit__` raises before it restores)."""
        current, side = torch.cuda.current_stream(self.device), self._side
        began = torch.cuda.memory_reserved(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                run()
        current.wait_stream(side)
        torch.cuda.empty_cache()  # so that memory left by the warm-up is not reused uncounted
        # What stays of the warm-up are workspaces.
        self.num_bytes += max(torch.cuda.memory_reserved(self.device) - began, 0)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        how: Any = {"pool": self._pool, "stream": side, "capture_error_mode": "thread_local"}
        try:
            with torch.cuda.graph(graph, **how):
                run()
        except BaseException:
            torch.cuda.set_stream(current)
            torch.cuda.synchronize(self.device)
            raise
        self.num_bytes += max(torch.cuda.memory_reserved(self.device) - before, 0)
        return graph.replay


def has_graphs(device: torch.device) -> bool:
    """Whether decode steps can be captured on this device: a GPU with the Triton kernels."""
    return ops.backend_of(device).name == "triton"


class DecodeGraphs:
    """CUDA graphs of the forward pass of one model and KV cache, `query_len` tokens per row.

    `sizes` are the captured batch sizes; `missing` says why other sizes have no graph.
    """

    def __init__(
        self, model: Decoder, kv: KVCache, rows: DeviceRows, capture: Capture, query_len: int = 1
    ):
        self.model, self.kv, self.rows, self.recorder = model, kv, rows, capture
        self.query_len = query_len
        self.sizes: tuple[int, ...] = ()
        self.missing = ""
        self.num_rows = 0  # size of the graph that was replayed last
        self.seconds = 0.0  # capture time
        count, device = rows.num_rows, rows.device
        # Lines of positions, slots and tokens (`query_len` each) and of lengths; a column per row.
        self._host = np.zeros((3 * query_len + 1, count), dtype=np.int64)
        self._inputs = torch.zeros(3 * query_len + 1, count, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(count, dtype=torch.int32, device=device)
        self._bounds = torch.arange(count + 1, dtype=torch.int32, device=device) * query_len
        self._ids = torch.zeros(count, query_len, dtype=torch.int64, device=device)
        shape = count * query_len, model.config.hidden_size
        self.hidden = torch.zeros(shape, dtype=model.dtype, device=device)
        self._replay: dict[int, Callable[[], None]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs, and of their inputs and outputs."""
        return self.recorder.num_bytes + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Device memory of the inputs and outputs."""
        own = (self._inputs, self._lengths, self._bounds, self._ids, self.hidden)
        return sum(tensor.nbytes for tensor in own)

    def launch(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        input_ids: Sequence[int] = (),
        on_device: Sequence[int] = (),
    ) -> list[int] | None:
        """Replay the graph for `counts` tokens of each row, from position `starts` on.

        Args:
            input_ids: the tokens, concatenated in row order; unused if `query_len` is 1, where they
                are read from `DeviceRows.last`.
            on_device: rows whose last token is read from `DeviceRows.last`.

        Returns:
            Index in `hidden` of each token's hidden state; None if there is no graph for so many
            rows.
        """
        size = bucket_of(self.sizes, max(rows) + 1)
        if size is None:
            return None
        width, block_size = self.query_len, self.kv.block_size
        row, start, count = (np.array(each) for each in (rows, starts, counts))
        place, position, column = row, start, np.zeros_like(row)
        if width > 1:
            place, ends = row.repeat(count), count.cumsum()
            offset = np.arange(len(place)) - (ends - count).repeat(count)  # index within its row
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

    def replay(
        self, states: RowStates, input_ids: list[int], pending: list[tuple[int, int]]
    ) -> Tensor | None:
        """Hidden states [N, d] of the tokens of these rows, valid until the next replay; None if
        there is no graph for so many rows. `input_ids` and `pending` as of `Runner._input_ids`."""
        if self.query_len == 1:
            self._upload_last_tokens(states)
        starts, counts = zip(*((row.start, row.num_tokens) for row, _ in states), strict=True)
        on_device = [source for _, source in pending]
        row_ids = [state.row for _, state in states]
        indices = self.launch(row_ids, starts, counts, input_ids, on_device)
        return None if indices is None else self.hidden_of(indices)

    def _upload_last_tokens(self, states: RowStates) -> None:
        """Upload last tokens that are only on the host to `DeviceRows.last`, which graphs read."""
        new = [(state.row, state.token_ids[row.start]) for row, state in states if not state.is_fed]
        if new:
            place, token = upload(self.rows.device, *np.array(new, dtype=np.int64).T)
            self.rows.last.index_copy_(0, place, token)
            for _, state in states:
                state.is_fed = True

    def decode(self, rows: Sequence[int], starts: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Hidden states [R, d] of one token, int64 [R], of each row at position `starts`; None if
        there is no graph for so many rows. They are valid until the next replay."""
        (where,) = upload(self.rows.device, np.array(rows, dtype=np.int64))
        self.rows.last.index_copy_(0, where, tokens)
        indices = self.launch(rows, starts, [1] * len(rows))
        return None if indices is None else self.hidden_of(indices)

    def hidden_of(self, indices: list[int]) -> Tensor:
        """The hidden states that `launch` points to, valid until the next replay."""
        if indices == list(range(len(indices))):
            return self.hidden[: len(indices)]
        return self.hidden[upload(self.rows.device, np.array(indices, dtype=np.int64))[0]]

    def _set_tokens(self, on_device: Sequence[int]) -> None:
        """Write the step's tokens to `_ids`, with the last token of `on_device` rows from the
        device."""
        self._ids.copy_(self._inputs[2 * self.query_len : -1].T)
        if on_device:
            (where,) = upload(self.rows.device, np.array(on_device, dtype=np.int64))
            self._ids[where, -1] = self.rows.last[where]

    def _clear(self) -> None:
        """Fill the host inputs with padding."""
        self._host.fill(0)
        self._host[self.query_len : 2 * self.query_len] = -1

    def record_all(self, max_bytes: float = inf, max_seconds: float = MAX_SECONDS) -> None:
        """Capture all sizes, the largest first: smaller graphs reuse its memory.

        If capturing a size fails, its batches use the next larger graph. When time or memory run
        out, the remaining smaller sizes are not captured.
        """
        began, sizes = perf_counter(), bucket_sizes(self.rows.num_rows)[::-1]
        for size in tqdm(sizes, "Capturing CUDA graphs", delay=2, disable=None):
            if perf_counter() - began > max_seconds or self.num_bytes > max_bytes:
                logger.warning(
                    "CUDA graphs were captured only for batches of at least %d rows, in %.0f s and "
                    "%.0f MB; smaller batches are padded.",
                    min(self._replay, default=0),
                    perf_counter() - began,
                    self.num_bytes / 1e6,
                )
                self.missing = self.missing or "no graph: capture was stopped"
                break
            try:
                self._replay[size] = self._record(size)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                self.missing = f"no graph: {type(error).__name__}: {text}"
                logger.warning("Capturing a CUDA graph of %d rows failed: %s", size, text)
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
        """The captured function. Its inputs and outputs are at fixed addresses."""
        width, total = self.query_len, size * self.query_len
        inputs, lengths = self._inputs[:, :size], self._lengths[:size]
        lengths.copy_(inputs[-1])
        batch = Batch(
            input_ids=self.rows.last[:size] if width == 1 else self._ids[:size].flatten(),
            # [size, width], one row after another; of one row, `flatten` alone would be a view.
            positions=inputs[:width].T.contiguous().flatten(),
            slot_mapping=inputs[width : 2 * width].T.contiguous().flatten(),
            query_start=self._bounds[: size + 1],
            seq_lens=lengths,
            block_tables=self.rows.tables.device[:size],
            logits_indices=self._bounds[:size],
            max_query_len=width,
        )
        self.hidden[:total].copy_(self.model(batch, self.kv))


def record_draft(
    speculator: Speculator | None, rows: DeviceRows, capture: Capture, *limits: float
) -> None:
    """Capture the decode steps of a draft model, if there is one: one step for each draft of a row
    but the first. `limits` are those of `record_all`."""
    proposer = None if speculator is None else speculator.proposer
    if isinstance(proposer, DraftModel) and isinstance(proposer.model, Decoder):
        own = copy(rows)  # the same block tables, other last tokens
        own.last = torch.zeros_like(rows.last)
        graphs = DecodeGraphs(proposer.model, proposer.shadow.kv, own, capture)
        graphs.record_all(*limits)
        proposer.replay = graphs.decode
