"""Prefix cache as a chain of hashes: each full block is named by all tokens up to its end.

    name(0) = H(salt),   name(i + 1) = H(name(i), tokens of block i)

One dictionary from names to blocks is the whole index (vLLM's automatic prefix caching). A block
whose predecessor was forgotten cannot be reached; it gives its name to whoever computes the same
tokens again, or is evicted in its turn.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from minillm.cache.prefix import Match

NAME_BYTES = 16

Place = int | str  # of an entry: its number; of the start: the salt


class Cursor(NamedTuple):
    """The name of the tokens so far, and the entry that has it now."""

    name: bytes
    place: Place


class Entry(NamedTuple):
    """A findable block. Names could collide, so what they stand for is kept beside them."""

    block: int
    parent: Place
    token_ids: tuple[int, ...]
    place: Place


class HashChain:
    """Names find entries; tokens and parents are compared before one is believed.

    So a collision costs a miss, and never shows one user the cache of another
    (GHSA-rm76-4mrf-v9r8): no place is used twice, so a chain of places stands for one text.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.lost: list[int] = []
        self._entries: dict[bytes, Entry] = {}
        self._names: dict[int, bytes] = {}  # of each findable block
        self._num_entries = 0  # so far

    def start(self, salt: str) -> Cursor:
        """Python's own `hash` of a string differs between processes, and can be forged."""
        salted = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES)
        return Cursor(salted.digest(), salt)

    def name(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        """The name of a block with these tokens after `parent`."""
        return blake2b(array("q", token_ids).tobytes(), digest_size=NAME_BYTES, key=parent).digest()

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """Whole blocks only."""
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
        """Name a block, unless another with the same text before it has the name."""
        if isinstance(cursor.place, int):
            before = self._entries.get(cursor.name)
            if before is None or before.place != cursor.place:
                return None
        name = self.name(cursor.name, token_ids)
        entry = self._entries.get(name)
        if entry is None or entry.token_ids != token_ids or entry.parent != cursor.place:
            if entry is not None:  # of a text that cannot be reached, or has the same name
                del self._names[entry.block]
                self.lost.append(entry.block)
            self._num_entries += 1
            entry = Entry(block, cursor.place, token_ids, self._num_entries)
            self._entries[name], self._names[block] = entry, name
        return Cursor(name, entry.place)

    def forget(self, block: int) -> None:
        """Remove one name; those that follow it stay, and cannot be reached."""
        del self._entries[self._names.pop(block)]

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)
