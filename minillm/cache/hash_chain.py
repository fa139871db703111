"""Prefix index by block hashes: the hash of a full block covers all tokens up to its end.

    name(0) = H(salt),   name(i + 1) = H(name(i), tokens of block i)

The index is one dictionary from hashes (names) to blocks, as in vLLM's automatic prefix caching. A
block whose predecessor was evicted is never found again. It stays in the dictionary until its
tokens are computed again, which replaces it, or until it is evicted.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from minillm.cache.prefix import Match

NAME_BYTES = 16

Place = int | str  # identifies a prefix: number of its last entry; if empty, the salt


class Cursor(NamedTuple):
    """The end of a prefix: its hash, and which entry it ends with."""

    name: bytes
    place: Place


class Entry(NamedTuple):
    """A cached block, with its tokens and parent, to detect hash collisions."""

    block: int
    parent: Place
    token_ids: tuple[int, ...]
    place: Place


class HashChain:
    """Looks up each block by its hash, then compares its tokens and its parent entry.

    Entry numbers are unique, so equal parents mean equal prefixes: a hash collision is a miss, and
    never a hit in another user's cache (GHSA-rm76-4mrf-v9r8).
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.lost: list[int] = []
        self._entries: dict[bytes, Entry] = {}
        self._names: dict[int, bytes] = {}  # block -> its name
        self._num_entries = 0  # number of the newest entry

    def start(self, salt: str) -> Cursor:
        """The cursor of an empty prefix. Not Python's `hash`: its collisions are easy to forge."""
        salted = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES)
        return Cursor(salted.digest(), salt)

    def name(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        """The hash of a block with these tokens, after a prefix with the hash `parent`."""
        return blake2b(array("q", token_ids).tobytes(), digest_size=NAME_BYTES, key=parent).digest()

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """The longest cached prefix of whole blocks."""
        size, cursor = self.block_size, self.start(salt)
        blocks: list[int] = []
        for end in range(size, limit + 1, size):
            tokens = tuple(token_ids[end - size : end])
            name = self.name(cursor.name, tokens)
            entry = self._entries.get(name)
            if entry is None or entry.token_ids != tokens or entry.parent != cursor.place:
                break
            blocks.append(entry.block)
            cursor = Cursor(name, entry.place)
        return Match(blocks, len(blocks) * size, cursor)

    def insert(self, cursor: Cursor, token_ids: tuple[int, ...], block: int) -> Cursor | None:
        """Cache a block, unless another block with the same tokens and prefix is cached."""
        if isinstance(cursor.place, int):
            before = self._entries.get(cursor.name)
            if before is None or before.place != cursor.place:
                return None
        name = self.name(cursor.name, token_ids)
        entry = self._entries.get(name)
        if entry is None or entry.token_ids != token_ids or entry.parent != cursor.place:
            if entry is not None:  # its predecessor was evicted, or the hashes collide
                del self._names[entry.block]
                self.lost.append(entry.block)
            self._num_entries += 1
            entry = Entry(block, cursor.place, token_ids, self._num_entries)
            self._entries[name], self._names[block] = entry, name
        return Cursor(name, entry.place)

    def forget(self, block: int) -> None:
        """Remove one block. The blocks after it stay in the index, but no match reaches them."""
        del self._entries[self._names.pop(block)]

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)
