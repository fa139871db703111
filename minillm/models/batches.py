"""Builds the input tensors of a step from persistent block tables and token counts.

The host computes positions, slots and lengths with numpy (decode steps with lists), because an
operation takes about 0.5 microseconds in numpy, and 2 to 10 or more in torch. On a GPU all inputs
are uploaded in one asynchronous copy from pinned memory, which is reused only after the copy.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm.ops.batch import Batch
from minillm.ops.transfers import upload

Numbers = NDArray[np.int64]


class BlockTables:
    """Block tables of all rows, [rows, blocks of the longest sequence], on host and device.

    Entries past the end of a row's table are stale.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device):
        self.host: Numbers = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self.numbers = self.host.data  # the same memory; reading one entry is faster
        self.device = torch.from_numpy(self.host).to(device)  # on a CPU the same memory, too

    def write(self, changes: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """For each (row, start, blocks): write the blocks to the row's table from index `start`."""
        for row, start, blocks in changes:
            self.host[row, start : start + len(blocks)] = blocks
        if self.device.device.type == "cpu" or not changes:
            return
        rows = np.repeat([row for row, *_ in changes], [len(blocks) for *_, blocks in changes])
        columns = [start + i for _, start, blocks in changes for i in range(len(blocks))]
        blocks = [block for *_, blocks in changes for block in blocks]
        table = np.array([rows, columns, blocks], dtype=np.int64)
        row, column, block = upload(self.device.device, table)[0]
        self.device[row, column] = block

    def of(self, rows: Numbers, num_blocks: int, on_device: Tensor) -> Tensor:
        """The first `num_blocks` entries of some rows: [B, M]."""
        if self.device.device.type == "cpu":
            return torch.from_numpy(self.host[rows, :num_blocks])
        return self.device[on_device, :num_blocks]


def make_batch(
    tables: BlockTables,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    input_ids: Sequence[int],
) -> Batch:
    """The flat batch of positions `starts` to `starts + counts` of the sequences in `rows`."""
    if max(counts) == 1:
        return decode_batch(tables, block_size, rows, starts, input_ids)
    row, start, count = np.array((rows, starts, counts), dtype=np.int64)
    ends = start + count
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    count.cumsum(out=query_start[1:])
    # Token t of the batch has position t - (end of its sequence in the batch) + seq_len.
    positions = np.arange(len(input_ids)) + (ends - query_start[1:]).repeat(count)
    slots = tables.host[row.repeat(count), positions // block_size] * block_size
    slots += positions % block_size
    last = query_start[1:].astype(np.int64) - 1
    longs = [np.array(input_ids, dtype=np.int64), positions, slots, last, row]
    arrays = [*longs, query_start, ends.astype(np.int32)]
    return _uploaded(tables, block_size, arrays, int(count.max()), (query_start, ends))


def decode_batch(
    tables: BlockTables,
    block_size: int,
    rows: Sequence[int],
    starts: Sequence[int],
    input_ids: Sequence[int],
) -> Batch:
    """The flat batch of a decode step: one token per sequence, at position `start`.

    This is the usual step. On a CPU, reading the weights evicts numpy's code and data from the
    caches: after a step a numpy call takes 20 microseconds, a list comprehension much less.
    """
    size, count, blocks = block_size, len(rows), tables.numbers
    slots = [
        blocks[row, start // size] * size + start % size
        for row, start in zip(rows, starts, strict=True)
    ]
    ends = [start + 1 for start in starts]
    longs = (input_ids, starts, slots, range(count), rows)
    arrays: list[NDArray] = [np.frombuffer(array("q", values), np.int64) for values in longs]
    arrays += [np.frombuffer(array("i", some), np.int32) for some in (range(count + 1), ends)]
    return _uploaded(tables, block_size, arrays, 1, (range(count + 1), ends))


def _uploaded(
    tables: BlockTables, block_size: int, arrays: list[NDArray], most: int, on_host: tuple[Any, Any]
) -> Batch:
    """The batch of ids, positions, slots, indices of last tokens, rows, query starts, lengths."""
    ids, positions, slots, last, row, starts, lengths = upload(tables.device.device, *arrays)
    return Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_start=starts,
        seq_lens=lengths,
        block_tables=tables.of(arrays[4], -(-int(max(on_host[1])) // block_size), row),
        logits_indices=last,
        max_query_len=most,
        on_host=on_host,
    )
