"""The report of a prompt: where each token went, by hand-made cases. Blocks hold four tokens."""

import dataclasses
import random

import pytest

from minillm.api.outputs import PrefixReport
from minillm.cache.manager import BlockManager, BlockTable
from minillm.cache.misses import REMEMBERED_PER_BLOCK
from minillm.cache.radix import RadixTree

PREFIX_CACHES = ("hash", "radix")
TEXT = list(range(1, 21))


@pytest.fixture(params=PREFIX_CACHES)
def blocks(request: pytest.FixtureRequest) -> BlockManager:
    return BlockManager(6, 4, request.param)


def cache(blocks: BlockManager, tokens: list[int], salt: str = "") -> None:
    """Compute a text, offer it to the index, and let it go."""
    table = BlockTable(salt)
    blocks.grow(table, 0, len(tokens))
    blocks.index_blocks(table, tokens, len(tokens))
    blocks.release(table)


def evict_all(blocks: BlockManager) -> None:
    table = BlockTable()
    blocks.grow(table, 0, blocks.pool.num_blocks * blocks.block_size)
    blocks.release(table)


def report(blocks: BlockManager, tokens: list[int], salt: str = "") -> PrefixReport:
    """What a first admission would be told."""
    match = blocks.match(tokens, len(tokens) - 1, salt)
    told = blocks.report(tokens, match.num_tokens, salt)
    assert sum(dataclasses.asdict(told).values()) == len(tokens)
    return told


def test_the_last_token_of_a_known_prompt_is_computed_again(blocks: BlockManager) -> None:
    """Whole blocks cost four tokens for it, a tree costs one."""
    cache(blocks, TEXT[:8])
    told = report(blocks, TEXT[:8])
    if isinstance(blocks.index, RadixTree):
        assert told == PrefixReport(cached=7, last_token=1)
    else:
        assert told == PrefixReport(cached=4, last_token=4)


def test_a_tree_finds_the_tokens_of_a_partial_block_too() -> None:
    blocks = BlockManager(6, 4, "radix")
    cache(blocks, TEXT[:8])
    assert report(blocks, [*TEXT[:6], 90, 91, 92]) == PrefixReport(cached=6, new=2, partial_block=1)
    assert report(blocks, TEXT[:7]) == PrefixReport(cached=6, last_token=1)
    assert report(blocks, [*TEXT[:6], 90]) == PrefixReport(cached=6, partial_block=1)


def test_what_was_evicted_is_remembered(blocks: BlockManager) -> None:
    cache(blocks, TEXT[:8])
    evict_all(blocks)
    assert report(blocks, TEXT[:12]) == PrefixReport(evicted=8, new=4)


def test_a_tail_that_was_evicted_before_its_head(blocks: BlockManager) -> None:
    cache(blocks, TEXT[:8])
    taken = blocks.pool.allocate(5)  # four that were never used, then the tail
    assert report(blocks, TEXT[:9]) == PrefixReport(cached=4, evicted=4, partial_block=1)
    blocks.pool.release(taken)


def test_what_only_another_salt_has_cached(blocks: BlockManager) -> None:
    cache(blocks, TEXT[:8], salt="alice")
    assert report(blocks, TEXT[:9], salt="bob") == PrefixReport(salt=8, partial_block=1)
    assert report(blocks, TEXT[:9], salt="alice") == PrefixReport(cached=8, partial_block=1)
    cache(blocks, TEXT[:4], salt="bob")
    evict_all(blocks)
    told = report(blocks, TEXT[:9], salt="bob")  # its own loss comes before another's luck
    assert told == PrefixReport(evicted=4, salt=4, partial_block=1)


def test_the_same_block_after_another_start_is_new(blocks: BlockManager) -> None:
    cache(blocks, TEXT[:8])
    assert report(blocks, [90, 91, 92, 93, *TEXT[4:8]]) == PrefixReport(new=8)


def test_memory_of_evicted_texts_is_bounded_and_the_oldest_become_new() -> None:
    blocks = BlockManager(2, 4, "hash")
    capacity = REMEMBERED_PER_BLOCK * 2
    for first in range(capacity + 1):
        cache(blocks, [first, 0, 0, 0])
    assert report(blocks, [0, 0, 0, 0, 5]) == PrefixReport(new=4, partial_block=1)
    assert report(blocks, [1, 0, 0, 0, 5]) == PrefixReport(evicted=4, partial_block=1)
    assert len(blocks._history._seen) == 2 * capacity


def test_nothing_is_read_without_a_cache_or_where_nobody_looks() -> None:
    assert BlockManager(6, 4).report(TEXT[:9], 0, "") == PrefixReport(unread=9)
    blocks = BlockManager(6, 4, "hash")
    cache(blocks, TEXT[:8])
    assert blocks.report(TEXT[:9], 0, "", reads=False) == PrefixReport(unread=9)


def test_the_fields_add_up_for_any_prompt(blocks: BlockManager) -> None:
    """`report` above checks the sum; here over texts that overlap in every way."""
    rng = random.Random(5)
    seen = set()
    for _ in range(400):
        tokens = rng.choices([1, 2], weights=[4, 1], k=rng.randint(1, 17))
        told = report(blocks, tokens, salt=rng.choice(["", "x"]))
        seen |= {name for name, value in dataclasses.asdict(told).items() if value}
        assert min(dataclasses.asdict(told).values()) >= 0
        cache(blocks, tokens, salt=rng.choice(["", "x"]))
    assert seen >= {"cached", "partial_block", "last_token", "evicted", "salt", "new"}
