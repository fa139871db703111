"""Prefix indices: the same demands on both, what each does in its own way, and a brute-force model.

Blocks hold two tokens here. `put` offers a prompt's blocks as a table does, and ids of blocks are
chosen so that a reader sees whose they are.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.cache.hash_chain import HashChain
from minillm.cache.prefix import Cursor, PrefixIndex
from minillm.cache.radix import RadixTree

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2
KINDS = [HashChain, RadixTree]


@pytest.fixture(params=KINDS)
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    return request.param(SIZE)


def put(index: PrefixIndex, tokens: list[int], blocks: list[int], salt: str = "") -> Cursor:
    cursor = index.start(salt)
    for place, block in enumerate(blocks):
        cursor = index.insert(cursor, tuple(tokens[place * SIZE : (place + 1) * SIZE]), block)
    return cursor


def found(index: PrefixIndex, tokens: list[int], salt: str = "") -> list[int]:
    return index.match(tokens, len(tokens), salt).blocks


def shared_start(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are equal, the slow way."""
    return max(n for n in range(len(one) + 1) if one[:n] == other[:n])


# ---- both -------------------------------------------------------------------------------------


def test_of_duplicates_the_older_block_stays_and_no_table_is_rewritten(index: PrefixIndex) -> None:
    """mini-sglang merged them and left the second table with freed pages; nothing merges here."""
    put(index, [1, 2, 3, 4], [10, 11])
    put(index, [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert found(index, [1, 2, 3, 4, 5, 6]) == [10, 11, 22]
    assert 20 not in index
    assert 21 not in index
    assert len(index) == 3


# ---- hash chain -------------------------------------------------------------------------------


def test_hash_what_follows_a_forgotten_block_gives_its_name_to_who_computes_it_again() -> None:
    index = HashChain(SIZE)
    put(index, [1, 2, 3, 4], [10, 11])
    index.forget(10)
    assert (found(index, [1, 2, 3, 4]), 11 in index, len(index)) == ([], True, 1)
    put(index, [1, 2], [50])
    assert found(index, [1, 2, 3, 4]) == [50]  # 11 is not known to follow 50
    put(index, [1, 2, 3, 4], [50, 51])
    assert found(index, [1, 2, 3, 4]) == [50, 51]
    assert 11 not in index


class OneByte(HashChain):
    """All names are one of 256, so that collisions are everywhere."""

    def name(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return super().name(parent, token_ids)[:1]


def colliding(index: HashChain, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Other tokens with the same name at the start."""
    start = index.start("").name
    name = index.name(start, tokens)
    others = ((a, b) for a in range(100, 200) for b in range(100))
    return next(other for other in others if index.name(start, other) == name)


def test_hash_a_collision_costs_a_miss_and_never_gives_a_wrong_hit() -> None:
    index = OneByte(SIZE)
    twin = colliding(index, (1, 2))
    put(index, [1, 2], [10])
    assert found(index, [*twin]) == []  # this text was never cached
    put(index, [*twin], [20])
    assert found(index, [*twin]) == [20]  # and now it has the name
    assert found(index, [1, 2]) == []
    assert (10 in index, 20 in index, len(index)) == (False, True, 1)


def test_hash_the_same_tokens_and_name_after_another_block_are_a_miss() -> None:
    """Here not the texts before collide, but what follows them."""
    index = OneByte(SIZE)
    start, first = index.start("").name, {}
    for number in range(400):
        before = index.name(start, (number, 0))
        name = index.name(before, (7, 7))
        if first.setdefault(name, (number, before))[1] != before:
            break
    one, other = first[name][0], number
    put(index, [one, 0, 7, 7], [10, 11])
    put(index, [other, 0], [20])
    assert found(index, [one, 0, 7, 7]) == [10, 11]
    assert found(index, [other, 0, 7, 7]) == [20]
    put(index, [other, 0, 7, 7], [20, 21])  # takes the name of 11
    assert found(index, [one, 0, 7, 7]) == [10]
    assert found(index, [other, 0, 7, 7]) == [20, 21]


@pytest.mark.parametrize("evict", [False, True], ids=["both cached", "one after the other"])
def test_hash_a_collision_further_up_costs_a_miss(evict: bool) -> None:
    """The tokens that are compared are those of one block; who came before is compared, too."""
    index = OneByte(SIZE)
    twin = colliding(index, (1, 2))
    if evict:  # the other text was cached whole, and lost its first block to this one
        put(index, [*twin, 7, 7], [20, 21])
        index.forget(20)
        put(index, [1, 2], [10])
    else:  # the other text took the name, and this one takes it back
        put(index, [1, 2], [9])
        put(index, [*twin, 7, 7], [20, 21])
        assert found(index, [1, 2, 7, 7]) == []
        put(index, [1, 2], [10])
    assert found(index, [1, 2, 7, 7]) == [10]  # block 21 was computed after other tokens


def test_hash_names_are_the_same_in_every_process() -> None:
    code = (
        "from minillm.cache.hash_chain import HashChain as H;"
        "h = H(2); c = h.name(h.start('salt \\u00e9').name, (1, 2)); print(h.name(c, (3, 4)).hex())"
    )
    index = HashChain(SIZE)
    here = index.name(index.name(index.start("salt é").name, (1, 2)), (3, 4)).hex()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        there = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert (there.stdout.strip(), there.stderr) == (here, "")


# ---- radix tree -------------------------------------------------------------------------------


def test_an_insert_after_the_parent_was_evicted_is_told_to_start_again(index: PrefixIndex) -> None:
    cursor = put(index, [1, 2], [10])
    index.forget(10)
    assert index.insert(cursor, (3, 4), 11) is None
    assert 11 not in index
    put(index, [1, 2], [10])  # the same contents, in another place
    assert index.insert(cursor, (3, 4), 11) is None


def test_radix_finds_the_prefix_to_the_token_and_names_the_block_to_copy() -> None:
    index = RadixTree(4)
    cursor = index.insert(index.start(""), (1, 2, 3, 4), 10)
    index.insert(cursor, (5, 6, 7, 8), 11)
    index.insert(cursor, (5, 6, 0, 0), 12)
    match = index.match([1, 2, 3, 4, 5, 6, 7, 9], 8, "")
    assert (match.blocks, match.num_tokens, match.partial) == ([10], 7, 11)
    match = index.match([1, 2, 3, 9], 4, "")
    assert (match.blocks, match.num_tokens, match.partial) == ([], 3, 10)
    match = index.match([1, 2, 3, 4, 5, 6, 7, 8], 7, "")  # the limit is inside a known block
    assert (match.blocks, match.num_tokens, match.partial) == ([10], 7, 11)
    match = index.match([1, 2, 3, 4, 6], 5, "")
    assert (match.blocks, match.num_tokens, match.partial) == ([10], 4, None)


def test_radix_a_salt_leaves_nothing_behind() -> None:
    """Salts are made by clients, one per user or per request; memory must not grow with them."""
    index = RadixTree(SIZE)
    for user in range(100):
        put(index, [1, 2, 3, 4], [10, 11], salt=str(user))
        assert index.match([1, 2], 2, f"never put {user}").num_tokens == 0
        assert len(index._roots) == 1
        index.forget(10)
        assert (len(index._roots), len(index._nodes)) == (0, 0)


def test_radix_a_root_that_was_emptied_can_be_used_by_who_still_has_it() -> None:
    index = RadixTree(SIZE)
    root = index.start("salt")
    index.forget(index.insert(root, (1, 2), 10).block)
    index.insert(root, (1, 2), 20)
    assert found(index, [1, 2], "salt") == [20]
    other = index.start("salt")
    assert other is root


# ---- both, against a dictionary ---------------------------------------------------------------


class Model:
    """What an index should do, by a dictionary from (salt, all tokens up to the end) to blocks."""

    def __init__(self, forgets_followers: bool):
        self.blocks: dict[tuple[str, tuple[int, ...]], int] = {}
        self.before: dict[int, int] = {}  # the block that each was put after
        self.forgets_followers = forgets_followers

    def put(self, salt: str, tokens: tuple[int, ...], blocks: list[int]) -> None:
        before = -1
        for place, block in enumerate(blocks, 1):
            key = (salt, tokens[: place * SIZE])
            if key not in self.blocks or self.before[self.blocks[key]] != before:
                self.blocks[key], self.before[block] = block, before
            before = self.blocks[key]

    def forget(self, block: int) -> None:
        (gone,) = [key for key, value in self.blocks.items() if value == block]
        del self.blocks[gone]
        for salt, tokens in list(self.blocks) if self.forgets_followers else ():
            if salt == gone[0] and tokens[: len(gone[1])] == gone[1]:
                del self.blocks[salt, tokens]

    def prefixes(self, salt: str, tokens: tuple[int, ...]) -> Iterator[int]:
        before = -1
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = self.blocks.get((salt, tokens[:end]))
            if block is None or self.before[block] != before:
                return
            yield block
            before = block

    def longest(self, salt: str, tokens: tuple[int, ...]) -> int:
        """Tokens in common with any cached block whose predecessors are cached, too."""
        whole = len(list(self.prefixes(salt, tokens))) * SIZE
        return max(
            [whole]
            + [
                shared_start(key, tokens)
                for other, key in self.blocks
                if other == salt and key[:whole] == tokens[:whole] and len(key) == whole + SIZE
            ]
        )


texts = st.lists(st.integers(0, 2), max_size=8).map(tuple)
salts = st.sampled_from(["", "x"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), salts, texts),
        st.tuples(st.just("forget"), st.integers(0, 99), st.none()),
        st.tuples(st.just("match"), salts, st.tuples(texts, st.integers(0, 8))),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kind", KINDS)
@given(operations)
def test_an_index_does_what_a_dictionary_of_all_prefixes_does(kind: type, ops: list) -> None:
    index, model, fresh = kind(SIZE), Model(kind is RadixTree), iter(range(10**6))
    for what, first, second in ops:
        if what == "put":
            blocks = [next(fresh) for _ in range(len(second) // SIZE)]
            put(index, list(second), blocks, first)
            model.put(first, second, blocks)
        elif what == "forget":
            if model.blocks:
                block = sorted(model.blocks.values())[first % len(model.blocks)]
                index.forget(block)
                model.forget(block)
        else:
            tokens, limit = second[0], min(second[1], len(second[0]))
            match = index.match(list(tokens), limit, first)
            assert match.blocks == list(model.prefixes(first, tokens[:limit]))
            if kind is RadixTree:
                assert match.num_tokens == model.longest(first, tokens[:limit])
            else:
                assert match.num_tokens == SIZE * len(match.blocks)
        assert len(index) == len(model.blocks)
        assert all(block in index for block in model.blocks.values())
