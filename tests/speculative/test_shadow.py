"""Marks of a shadow cache against a dictionary of what is in each position of each block."""

import random

import numpy as np
import pytest
import torch

from minillm.cache.manager import BlockCopy
from minillm.cache.spec import CacheSpec
from minillm.layers.kv_cache import KVCache
from minillm.scheduling.plan import Row, StepPlan
from minillm.speculative.shadow import Shadow

SIZE, BLOCKS = 4, 12


def shadow_of(num_host_blocks: int = 6) -> Shadow:
    spec, shape = CacheSpec(1, 2, 2), (SIZE, torch.float32)
    kv = KVCache(spec, 1, BLOCKS, *shape)
    host = KVCache(spec, 1, num_host_blocks, *shape, swap_space_of=torch.device("cpu"))
    for cache, first in ((kv, 0), (host, 100)):
        numbers = torch.arange(first, first + cache.num_blocks, dtype=torch.float32)
        for tensor in cache.tensors:
            tensor.copy_(numbers[None, :, None, None, None].expand_as(tensor))
    return Shadow(kv, host)


def row(seq_id: int, start: int, end: int, blocks: tuple[int, ...], num_kept: int = 0) -> Row:
    return Row(seq_id, start, end - start, 1, 0, num_kept, blocks)


def contents(cache: KVCache) -> list[int]:
    """The number that each block was filled with."""
    return [int(block.flatten()[0]) for block in cache.key[0]]


def test_what_moves_takes_its_mark_along():
    """In the order of a plan: block 3 is freed by a swap and is the target of a copy, whose source
    block 5 is the target of another swap."""
    shadow = shadow_of()
    shadow.filled[:] = np.arange(BLOCKS) % (SIZE + 1)
    shadow.filled_on_host[:] = [4, 3, 2, 1, 0, 4]
    marks = shadow.filled.copy()
    moves = [BlockCopy(3, 0)], [BlockCopy(5, 3), BlockCopy(6, 7)], [BlockCopy(1, 5)]
    shadow.follow(StepPlan(1, [], [], *moves))
    assert contents(shadow.host) == [3, 101, 102, 103, 104, 105]
    assert contents(shadow.kv) == [0, 1, 2, 5, 4, 101, 6, 6, 8, 9, 10, 11]
    assert shadow.filled_on_host.tolist() == [marks[3], 3, 2, 1, 0, 4]
    marks[[3, 7]] = marks[[5, 6]]
    marks[5] = 3
    assert shadow.filled.tolist() == marks.tolist()


def test_a_mark_ends_where_the_target_writes():
    shadow = shadow_of()
    shadow.filled[:] = SIZE
    shadow.follow(StepPlan(1, rows=[row(7, 6, 13, (2, 9, 4, 1))]))
    assert shadow.num_computed(7) == 6
    assert [int(shadow.filled[block]) for block in (2, 9, 4, 1, 0)] == [4, 2, 0, 0, 4]
    shadow.mark(7, 6, 12)
    assert shadow.num_computed(7) == 12
    shadow.follow(StepPlan(2, rows=[row(7, 9, 14, (), 4)]))
    assert shadow.num_computed(7) == 9
    shadow.follow(StepPlan(3, rows=[row(7, 2, 3, (), 4)]))  # never in an engine
    assert shadow.num_computed(7) == 2


@pytest.mark.parametrize("seed", range(20))
def test_computed_positions_are_those_up_to_the_first_that_is_not(seed):
    """Rows that grow, are marked and are cut, over blocks of which two sequences share some."""
    choose, shadow = random.Random(seed), shadow_of()
    tables = {0: [0, 1, 2, 3, 4, 5], 1: [0, 1, 6, 7, 8, 9]}  # 8 positions are shared
    right = np.zeros((BLOCKS, SIZE), dtype=bool)
    for step in range(60):
        seq_id = choose.randrange(2)
        start = choose.randrange(8, 22)
        end = choose.randrange(start + 1, 24)
        shadow.follow(StepPlan(step, rows=[row(seq_id, start, end, tuple(tables[seq_id]))]))
        for position in range(start, end):
            right[tables[seq_id][position // SIZE], position % SIZE] = False
        for block in range(BLOCKS):  # a mark is a number: behind a gap nothing counts
            right[block, int(right[block].argmin()) if not right[block].all() else SIZE :] = False
        expected = right[tables[seq_id]].reshape(-1)
        computed = int(expected.argmin()) if not expected.all() else len(expected)
        assert shadow.num_computed(seq_id) == computed
        if choose.random() < 0.7 and computed < end:
            until = choose.randrange(computed, end) + 1
            shadow.mark(seq_id, computed, until)
            for position in range(computed, until):
                right[tables[seq_id][position // SIZE], position % SIZE] = True
