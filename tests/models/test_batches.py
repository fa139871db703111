"""Rows of a plan as tensors, against the definition of each; and one copy for all of them."""

import inspect
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from minillm.execution import graphs
from minillm.execution.graphs import CudaCapture
from minillm.execution.state import DeviceRows
from minillm.models.batches import BlockTables, make_batch
from minillm.ops import transfers

CPU = torch.device("cpu")


def tables_of(num_rows: int, num_blocks: int) -> BlockTables:
    tables = BlockTables(num_rows, num_blocks, CPU)
    tables.host[:] = (
        np.random.default_rng(0).permutation(num_rows * num_blocks).reshape(num_rows, num_blocks)
    )
    return tables


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 1], [7], [1], [1, 1, 9]])
def test_a_batch_is_what_its_docstring_says(counts):
    tables, size = tables_of(6, 8), 4
    rows, starts = [4, 0, 2][: len(counts)], [9, 3, 16][: len(counts)]
    ids = list(range(100, 100 + sum(counts)))
    batch = make_batch(tables, size, rows, starts, counts, ids)
    positions, slots = [], []
    for row, start, count in zip(rows, starts, counts, strict=True):
        for position in range(start, start + count):
            positions.append(position)
            slots.append(tables.host[row, position // size] * size + position % size)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    bounds = [0, *np.cumsum(counts).tolist()]
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start.tolist() == bounds
    assert batch.seq_lens.tolist() == ends
    assert batch.logits_indices.tolist() == [bound - 1 for bound in bounds[1:]]
    assert batch.max_query_len == max(counts)
    width = -(-max(ends) // size)
    assert batch.block_tables.tolist() == tables.host[rows, :width].tolist()
    dtypes = {name: getattr(batch, name).dtype for name in ("query_start", "seq_lens", "positions")}
    assert dtypes == {"query_start": torch.int32, "seq_lens": torch.int32, "positions": torch.int64}


def test_tables_are_written_where_they_change():
    tables = tables_of(4, 6)
    want = tables.host.copy()
    want[2, 1:4], want[0, 5:6] = [70, 71, 72], [80]
    tables.write([(2, 1, (70, 71, 72)), (0, 5, (80,))])
    tables.write([])
    assert tables.host.tolist() == want.tolist() == tables.device.tolist()


def test_a_row_moves_with_all_it_has():
    rows = DeviceRows(4, 3, CPU)
    rows.tables.write([(3, 0, (5, 6, 7))])
    rows.last[3] = 42
    rows.move(3, 1)
    assert rows.tables.device[1].tolist() == [5, 6, 7]
    assert rows.last.tolist() == [0, 42, 0, 42]


def test_one_copy_holds_them_all():
    turned, empty = np.arange(6, dtype=np.float32).reshape(2, 3).T, np.zeros((3, 0), np.int64)
    arrays = [np.arange(5, dtype=np.int32), turned, empty, np.array([1.5]), np.arange(3)[::-1]]
    together, starts = transfers.pack(arrays)
    assert [start % 8 for start in starts] == [0] * 5
    for i, tensor in enumerate(transfers.unpack(torch.from_numpy(together), arrays, starts)):
        np.testing.assert_array_equal(tensor.numpy(), arrays[i], strict=True)


# ---- what only a GPU runs: the calls exist, and come in the right order --------------------------


class FakeCuda:
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reserved = 1_000

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: Any) -> Any:
        return self.Stream(device, "current")

    def Stream(self, device: Any, name: str = "side") -> Any:
        stream = lambda: None  # noqa: E731
        stream.name = name
        stream.wait_stream = lambda other: self.calls.append(f"{name} waits for {other.name}")
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    @contextmanager
    def graph(self, graph: Any, pool: Any, **how: Any) -> Any:
        inspect.signature(torch.cuda.graph.__init__).bind(None, graph, pool=pool, **how)
        assert how["stream"].name == "side"
        self.calls.append(f"record into {pool}")
        yield
        self.reserved += 500
        self.calls.append("recorded")

    def empty_cache(self) -> None:
        self.reserved -= 100

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    def CUDAGraph(self) -> Any:
        graph = lambda: None  # noqa: E731
        graph.replay = lambda: self.calls.append("replayed")
        return graph


def test_a_recording_is_warmed_up_beside_the_stream(monkeypatch):
    fake = FakeCuda()
    for name in ("graph_pool_handle", "current_stream", "Stream", "stream", "graph", "CUDAGraph"):
        assert hasattr(torch.cuda, name)
    for name in ("empty_cache", "memory_reserved", "Event"):
        assert hasattr(torch.cuda, name)
    assert hasattr(torch.cuda.CUDAGraph, "replay")
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    capture = CudaCapture(torch.device("cuda:0"))
    replay = capture.capture(lambda: fake.calls.append("run"))
    assert fake.calls == [
        "side waits for current",
        "on side",
        "run",
        "run",
        "off side",
        "current waits for side",
        "record into pool",
        "run",
        "recorded",
    ]
    assert capture.num_bytes == 500
    replay()
    assert fake.calls[-1] == "replayed"


def test_tensors_of_one_memory_are_copied_without_the_rest_of_it(monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(transfers, "_start_copy", lambda x: sizes.append(x.nbytes) or x + 0)
    ids, best = transfers.together(99, CPU, torch.int64, torch.float32)
    own = [ids.copy_(torch.arange(99))[90:], best.copy_(torch.arange(99) / 2)[:3]]
    assert all(map(torch.equal, transfers._copy_together(own), own))
    assert sizes[0] <= 9 * 8 + 3 * 4 + 8
