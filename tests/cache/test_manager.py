"""Block tables: growing, sharing, copying before writing, moving to host memory and back.

Blocks hold four tokens. `device` plays the memory: what was written where, so that a copy that
comes too late or a write into a shared block shows.
"""

import pytest

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockCopy, BlockManager, BlockTable
from tests.cache.books import check_tables

PREFIX_CACHES = ("hash", "radix")
TEXT = list(range(1, 21))


def manager(num_blocks: int = 8, cache: str | None = "hash", host: int = 0) -> BlockManager:
    return BlockManager(num_blocks, 4, cache, num_host_blocks=host)


def computed(blocks: BlockManager, tokens: list[int], salt: str = "") -> BlockTable:
    """The table of a sequence that computed all its tokens and offered its full blocks."""
    table = BlockTable(salt)
    assert blocks.grow(table, 0, len(tokens)) is None
    blocks.index_blocks(table, tokens, len(tokens))
    return table


# ---- growing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, count: int) -> None:
    assert manager().blocks_for(tokens) == count


def test_a_table_grows_at_its_end_and_only_when_a_block_is_full() -> None:
    blocks, table = manager(), BlockTable()
    assert blocks.num_needed(table, 0, 3) == 1
    blocks.grow(table, 0, 3)
    assert table.blocks == [0]
    assert blocks.num_needed(table, 3, 4) == 0
    blocks.grow(table, 3, 4)
    assert table.blocks == [0]
    assert blocks.num_needed(table, 4, 13) == 3
    blocks.grow(table, 4, 13)
    assert table.blocks == [0, 1, 2, 3]
    check_tables(blocks, [table])


def test_growing_beyond_the_pool_is_an_error_of_the_books() -> None:
    blocks, table = manager(2), BlockTable()
    with pytest.raises(AccountingError, match="3 blocks were requested, but 2 are free"):
        blocks.grow(table, 0, 9)
    check_tables(blocks, [table])


# ---- forks and copies -------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, *PREFIX_CACHES])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_n_holders_of_a_partly_filled_block_make_n_minus_1_copies(n: int, cache: str) -> None:
    blocks = manager(12, cache)
    first = computed(blocks, TEXT[:6])  # [full, two of four]
    tables = [first, *(blocks.fork(first) for _ in range(n - 1))]
    assert blocks.pool.ref_counts[:2] == [n, n]
    check_tables(blocks, tables)

    needed = [blocks.num_needed(table, 6, 7) for table in tables]
    assert needed == [1] * n  # each alone would copy
    copies = []
    for table in tables:
        copies.append(blocks.grow(table, 6, 7))
        check_tables(blocks, tables)
    assert [copy.source for copy in copies[:-1]] == [1] * (n - 1)
    assert copies[-1] is None  # the last one has the block for itself
    assert blocks.num_copies == n - 1
    assert [table.blocks[0] for table in tables] == [0] * n  # the full block stays shared
    assert len({table.blocks[1] for table in tables}) == n
    assert [copy.target for copy in copies[:-1]] == [table.blocks[1] for table in tables[:-1]]


def test_a_fork_goes_on_indexing_where_its_parent_was() -> None:
    blocks = manager()
    first = computed(blocks, TEXT[:6])
    second = blocks.fork(first)
    blocks.grow(second, 6, 8)
    blocks.index_blocks(second, TEXT[:8], 8)
    assert blocks.match(TEXT, 20, "").blocks == [0, second.blocks[1]]


# ---- prefixes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_a_hit_shares_the_blocks_and_costs_those_that_were_free(cache: str) -> None:
    blocks = manager(8, cache)
    old = computed(blocks, TEXT[:8])
    blocks.release(old)
    match = blocks.match(TEXT[:10], 9, "")
    assert (match.blocks, match.num_tokens) == ([0, 1], 8)
    assert blocks.cost_of(match, 3) == 3  # one new block, and two that leave the free list
    first = BlockTable()
    blocks.adopt(first, match, TEXT)
    assert blocks.pool.num_revived == 2
    assert blocks.cost_of(match, 3) == 1  # now they are held: a second reader pays its own block
    second = BlockTable()
    blocks.adopt(second, match, TEXT)
    assert blocks.pool.ref_counts[:2] == [2, 2]
    check_tables(blocks, [first, second])


def test_a_partly_fitting_block_is_copied_and_stays_cached_as_it_was() -> None:
    blocks = manager(8, "radix")
    old = computed(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.release(old)
    match = blocks.match([1, 2, 3, 4, 5, 6, 9, 9], 7, "")
    assert (match.blocks, match.partial, match.num_tokens) == ([0], 1, 6)
    assert blocks.cost_of(match, 2) == 3  # block 0, the source, the copy
    table = BlockTable()
    blocks.adopt(table, match, [1, 2, 3, 4, 5, 6, 9, 9])
    assert table.num_indexed == 1  # what is shared need not be offered again
    copy = blocks.grow(table, 6, 8)
    assert copy == BlockCopy(1, table.blocks[1])
    assert table.blocks[1] != 1
    blocks.index_blocks(table, [1, 2, 3, 4, 5, 6, 9, 9], 8)
    check_tables(blocks, [table])
    assert blocks.pool.is_free(1)  # only cached again, and with its own contents:
    assert blocks.match([1, 2, 3, 4, 5, 6, 7, 8], 8, "").blocks == [0, 1]
    assert blocks.match([1, 2, 3, 4, 5, 6, 9, 9], 8, "").blocks == table.blocks


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_full_blocks_are_offered_once_they_are_full_and_no_sooner(cache: str) -> None:
    blocks, table = manager(8, cache), BlockTable()
    blocks.grow(table, 0, 9)
    blocks.index_blocks(table, TEXT, 3)
    assert len(blocks.index) == 0
    blocks.index_blocks(table, TEXT, 4)
    assert (len(blocks.index), table.num_indexed) == (1, 1)
    blocks.index_blocks(table, TEXT, 9)
    assert (len(blocks.index), table.num_indexed) == (2, 2)
    assert 2 not in blocks.index


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_a_sequence_that_lost_its_place_in_the_index_offers_its_blocks_again(cache: str) -> None:
    """Two compute the same text at once; the first one's blocks are cached, freed and evicted,
    while the second runs on."""
    blocks = manager(6, cache)
    first, second = computed(blocks, TEXT[:4]), computed(blocks, TEXT[:4])
    assert (first.blocks, second.blocks) == ([0], [1])
    blocks.release(first)
    thief = BlockTable()
    blocks.grow(thief, 0, 20)  # takes all five others, block 0 too
    assert 0 not in blocks.index
    blocks.release(thief)
    blocks.grow(second, 4, 8)
    blocks.index_blocks(second, TEXT[:8], 8)
    assert blocks.match(TEXT[:8], 8, "").blocks == second.blocks
    assert second.num_indexed == 2
    check_tables(blocks, [second])


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_what_was_computed_before_a_reset_is_never_found_again(cache: str) -> None:
    """Neither what a sequence that runs on has computed, nor what it computes from that later."""
    blocks = manager(cache=cache)
    table = computed(blocks, TEXT[:9])
    child = blocks.fork(table)
    blocks.reset_prefix_cache()
    blocks.grow(table, 9, 17)
    for one in (table, child):
        blocks.index_blocks(one, TEXT[:17], len(one.blocks) * 4 - 3)
    assert blocks.match(TEXT, 20, "").num_tokens == 0
    assert len(blocks.index) == 0
    # The same sequence preempted, and computed again: these blocks are of the new time.
    blocks.release(table)
    blocks.adopt(table, blocks.match(TEXT, 16, ""), TEXT)
    blocks.grow(table, 0, 9)
    blocks.index_blocks(table, TEXT, 9)
    assert blocks.match(TEXT, 20, "").blocks == table.blocks[:2]
    check_tables(blocks, [table, child])


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_what_was_in_host_memory_at_a_reset_is_not_offered_again(cache: str) -> None:
    blocks = manager(cache=cache, host=4)
    table = computed(blocks, TEXT[:9])
    blocks.swap_out(table)
    blocks.reset_prefix_cache()
    blocks.swap_in(table)
    blocks.index_blocks(table, TEXT[:9], 9)
    assert blocks.match(TEXT, 20, "").num_tokens == 0


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_a_block_that_is_still_to_be_written_is_shared_and_not_copied(cache: str) -> None:
    blocks, table = manager(cache=cache), BlockTable()
    blocks.grow(table, 0, 9)
    blocks.index_blocks(table, TEXT, 9, step=3)
    other = [*TEXT[:6], 99, 98, 97]
    match = blocks.match(other, 8, "")
    assert (match.blocks, match.num_tokens, match.partial) == ([0], 4, None)
    assert blocks.is_written_by(3, match)
    blocks.mark_written(2)
    assert blocks.is_written_by(3, blocks.match(TEXT, 20, ""))
    blocks.mark_written(3)
    assert not blocks.is_written_by(3, blocks.match(TEXT, 20, ""))
    assert blocks.match(other, 8, "").num_tokens == (6 if cache == "radix" else 4)


@pytest.mark.parametrize("cache", PREFIX_CACHES)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_reader_does_not_leave_blocks_in_the_index_whose_writer_is_in_doubt(
    cache: str, swapped: bool
) -> None:
    blocks, reader = manager(cache=cache, host=8), BlockTable()
    writer = computed(blocks, TEXT[:8])
    blocks.adopt(reader, blocks.match(TEXT, 8, ""), TEXT)
    blocks.forget(writer)
    blocks.grow(reader, 8, 16)
    if swapped:
        blocks.swap_out(reader)
        blocks.swap_in(reader)
    blocks.index_blocks(reader, TEXT, 16)
    if swapped:  # these are copies, which go with it when it fails in its turn
        blocks.forget(reader)
    assert len(blocks.index) == 0
    check_tables(blocks, [writer, reader])


def test_without_a_cache_nothing_is_indexed_and_freed_blocks_are_reused_at_once() -> None:
    blocks = manager(8, None)
    table = computed(blocks, TEXT[:8])
    assert table.num_indexed == 0
    blocks.release(table)
    assert blocks.match(TEXT, 20, "").num_tokens == 0
    assert blocks.pool.allocate(2) == [0, 1]


# ---- host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, *PREFIX_CACHES])
def test_a_table_goes_to_host_memory_and_comes_back(cache: str) -> None:
    blocks = manager(4, cache, host=3)
    table = computed(blocks, TEXT[:10])
    assert blocks.can_swap_out(table)
    out = blocks.swap_out(table)
    assert out == [(0, 0), (1, 1), (2, 2)]
    assert (table.blocks, table.host_blocks) == ([], [0, 1, 2])
    assert (blocks.pool.num_free, blocks.host.num_free) == (4, 0)
    check_tables(blocks, [table])

    other = BlockTable()
    blocks.grow(other, 0, 4)  # somebody took a block meanwhile
    back = blocks.swap_in(table)
    assert [copy.source for copy in back] == [0, 1, 2]
    assert [copy.target for copy in back] == table.blocks
    assert table.host_blocks == []
    assert blocks.host.num_free == 3
    check_tables(blocks, [table, other])


@pytest.mark.parametrize("cache", PREFIX_CACHES)
def test_what_came_back_is_offered_to_the_index_again(cache: str) -> None:
    blocks = manager(2, cache, host=2)
    table = computed(blocks, TEXT[:8])
    blocks.swap_out(table)
    thief = BlockTable()
    blocks.grow(thief, 0, 8)  # evicts both
    blocks.release(thief)
    assert len(blocks.index) == 0
    blocks.swap_in(table)
    blocks.index_blocks(table, TEXT[:8], 8)
    assert blocks.match(TEXT[:8], 8, "").blocks == table.blocks


def test_a_table_that_host_memory_cannot_hold_is_not_swapped() -> None:
    blocks = manager(8, None, host=2)
    three, none = computed(blocks, TEXT[:9]), BlockTable()
    assert not blocks.can_swap_out(three)
    assert not blocks.can_swap_out(none)
    assert blocks.can_swap_out(computed(blocks, TEXT[:8]))


def test_of_a_shared_block_each_holder_keeps_a_copy_in_host_memory() -> None:
    blocks = manager(8, None, host=4)
    first = computed(blocks, TEXT[:8])
    second = blocks.fork(first)
    blocks.swap_out(first)
    assert blocks.pool.ref_counts[:2] == [1, 1]  # the other still reads them
    blocks.swap_out(second)
    assert (blocks.pool.num_free, blocks.host.num_free) == (8, 0)
    check_tables(blocks, [first, second])


# ---- letting go -------------------------------------------------------------------------------


def test_a_block_at_two_places_is_caught() -> None:
    blocks = manager()
    first = computed(blocks, TEXT[:8])
    second = BlockTable(blocks=[1, 0])
    blocks.pool.share([0, 1])
    with pytest.raises(AccountingError, match="Block 1 is shared at table positions 1 and 0"):
        check_tables(blocks, [first, second])


def test_a_lost_host_block_is_caught() -> None:
    blocks = manager(8, None, host=2)
    table = computed(blocks, TEXT[:4])
    blocks.swap_out(table)
    with pytest.raises(AccountingError, match="Block 0 has reference count 1, but is in 0 tables"):
        check_tables(blocks, [])
