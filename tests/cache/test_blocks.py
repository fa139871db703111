"""Blocks: which one is reused next, and books that notice when they do not add up."""

from collections.abc import Iterable

import pytest

from minillm.cache.blocks import AccountingError, BlockPool
from tests.cache.books import check_pool


class Findable(set):
    """The least a prefix index must be for a pool: a set of blocks, which can be forgotten."""

    def __init__(self, cached: Iterable[int]):
        super().__init__(cached)
        self.lost: list[int] = []

    def forget(self, block: int) -> None:
        self.remove(block)


def pool_of(num_blocks: int, *cached: int) -> BlockPool:
    return BlockPool(num_blocks, Findable(cached))


def test_a_free_block_that_the_index_lost_is_used_first() -> None:
    pool = pool_of(4, 0, 1, 2)
    pool.release(pool.allocate(1))
    index = pool._index
    index.remove(2)
    index.lost.append(2)
    pool.use_lost_first()
    assert index.lost == []
    assert pool.allocate(2) == [2, 0]  # and 0 is uncached since it was allocated


# ---- the order of reuse -----------------------------------------------------------------------


def test_uncached_blocks_are_reused_first_and_cached_ones_last() -> None:
    pool = pool_of(4)
    pool.allocate(4)
    pool._index |= {0, 1}  # computed and cached while they were held
    for block in (0, 2, 1, 3):
        pool.release([block])
    assert pool.allocate(4) == [3, 2, 0, 1]
    assert pool.num_evicted == 2


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = pool_of(3)
    table = pool.allocate(3)
    pool._index |= set(table)
    pool.release(table)
    assert pool.allocate(3) == [2, 1, 0]


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = pool_of(3)
    pool.allocate(3)
    pool._index |= {0, 1, 2}
    for block in (1, 2, 0):
        pool.release([block])
    pool.share([1])  # used again
    pool.release([1])
    assert pool.allocate(3) == [2, 0, 1]


def test_an_evicted_block_cannot_be_found_any_more() -> None:
    pool = pool_of(2, 1)
    assert pool.allocate(1) == [0]
    assert 1 in pool._index
    assert pool.allocate(1) == [1]
    assert 1 not in pool._index
    assert pool.num_evicted == 1


# ---- sharing ----------------------------------------------------------------------------------


def test_a_cached_block_is_revived_from_the_middle_of_the_free_list() -> None:
    pool = pool_of(5)
    pool.allocate(5)
    pool._index |= {0, 1, 2, 3, 4}
    for block in range(5):
        pool.release([block])
    pool.share([2])
    assert (pool.num_free, pool.num_revived) == (4, 1)
    assert pool.ref_counts == [0, 0, 1, 0, 0]
    assert pool.allocate(4) == [0, 1, 3, 4]  # without 2
    check_pool(pool, [[2], [0, 1, 3, 4]])


def test_a_block_that_somebody_holds_is_shared_without_being_revived() -> None:
    pool = pool_of(2)
    table = pool.allocate(1)
    pool.share(table)
    assert (pool.ref_counts, pool.num_free, pool.num_revived) == ([2, 0], 1, 0)
    pool.release(table)
    assert (pool.ref_counts, pool.num_free) == ([1, 0], 1)
    pool.release(table)
    assert (pool.ref_counts, pool.num_free) == ([0, 0], 2)


# ---- misuse -----------------------------------------------------------------------------------


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool = pool_of(3)
    with pytest.raises(AccountingError, match=r"4 blocks were requested, but 3 are free\."):
        pool.allocate(4)
    assert pool.num_free == 3
    check_pool(pool, [])


def test_a_second_release_is_an_error() -> None:
    pool = pool_of(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AccountingError, match="Block 0 was released, but its reference count is 0"):
        pool.release(table)


# ---- check_invariants catches -----------------------------------------------------------------


def test_a_table_that_names_a_free_block_is_caught() -> None:
    """The published bug of mini-sglang: a live page table pointed at freed pages."""
    pool = pool_of(3)
    table = pool.allocate(2)
    pool.release(table[1:])
    with pytest.raises(AccountingError, match="Block 1 has reference count 0, but is in 1 tables"):
        check_pool(pool, [table])


@pytest.mark.parametrize("tables", [[], [[0], [0]]], ids=["too few", "too many"])
def test_a_wrong_number_of_references_is_caught(tables: list[list[int]]) -> None:
    pool = pool_of(2)
    pool.allocate(1)
    with pytest.raises(
        AccountingError, match=f"Block 0 has reference count 1, but is in {len(tables)} tables"
    ):
        check_pool(pool, tables)


def test_a_table_that_holds_a_block_twice_is_caught() -> None:
    pool = pool_of(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    with pytest.raises(AccountingError, match=r"contains a block twice: \[0, 0\]"):
        check_pool(pool, [[block, block]])


@pytest.mark.parametrize("unknown", [2, -1])
def test_a_block_that_does_not_exist_is_caught(unknown: int) -> None:
    with pytest.raises(AccountingError, match=rf"do not exist: \[{unknown}\]"):
        check_pool(pool_of(2), [[unknown]])


def test_a_held_block_in_the_free_list_is_caught() -> None:
    pool = pool_of(2)
    table = pool.allocate(1)
    pool._free[0] = None
    with pytest.raises(AccountingError, match="Block 0 has reference count 1, but free is True"):
        check_pool(pool, [table])


def test_a_block_that_nobody_holds_and_nobody_can_get_is_caught() -> None:
    pool = pool_of(2)
    del pool._free[1]
    with pytest.raises(AccountingError, match="Block 1 has reference count 0, but free is False"):
        check_pool(pool, [])
