"""Consistency checks of the block pools, for tests: run after every step."""

from collections import Counter
from collections.abc import Iterable, Sequence

from minillm.cache.blocks import AccountingError, BlockPool
from minillm.cache.manager import BlockManager, BlockTable


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Compare reference counts and free list with `tables`, which must be all block tables.

    Raises:
        AccountingError: a reference count is not the number of tables that contain the block, a
            block in a table is free, or a table contains a block twice or an unknown block.
    """
    holders: Counter[int] = Counter()
    for table in tables:
        holders.update(table)
        if len(set(table)) < len(table):
            raise AccountingError(f"A table contains a block twice: {list(table)}.")
    for block, count in enumerate(pool.ref_counts):
        if count != holders[block]:
            raise AccountingError(
                f"Block {block} has reference count {count}, but is in {holders[block]} tables."
            )
        if (count == 0) != (block in pool._free):
            raise AccountingError(
                f"Block {block} has reference count {count}, but free is {count > 0}."
            )
    unknown = set(holders) - set(range(pool.num_blocks))
    if unknown:
        raise AccountingError(f"Tables contain blocks that do not exist: {sorted(unknown)}.")


def check_tables(blocks: BlockManager, tables: Iterable[BlockTable]) -> None:
    """Compare the pools with `tables`, which must be all tables, and check that each shared
    block has one position; raises AccountingError."""
    tables = list(tables)
    check_pool(blocks.pool, [table.blocks for table in tables])
    check_pool(blocks.host, [table.host_blocks for table in tables])
    places: dict[int, int] = {}
    for table in tables:
        for place, block in enumerate(table.blocks):
            if places.setdefault(block, place) != place:
                raise AccountingError(
                    f"Block {block} is shared at table positions {places[block]} and {place}."
                )
