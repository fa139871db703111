"""Prefix cache as a chain of hashes: each full block is named by all tokens up to its end.

    name(0) = H(salt),   name(i + 1) = H(name(i), tokens of block i)

One dictionary from names to blocks is the whole index (vLLM's automatic prefix caching). A block
whose predecessor was evicted cannot be reached, but becomes reachable again, without any work,
when the predecessor is computed again: names depend on contents only.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from minillm.cache.prefix import Match

NAME_BYTES = 16


class Entry(NamedTuple):
    """A findable block. Parent and tokens are kept because names could collide."""

    block: int
    parent: bytes
    token_ids: tuple[int, ...]


class HashChain:
    """A cursor is the name of the tokens before it."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._entries: dict[bytes, Entry] = {}
        self._names: dict[int, bytes] = {}  # of each findable block

    def start(self, salt: str) -> bytes:
        """Python's own `hash` of a string differs between processes, and can be forged."""
        return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()

    def name(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        """The name of a block with these tokens after `parent`."""
        return blake2b(array("q", token_ids).tobytes(), digest_size=NAME_BYTES, key=parent).digest()

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """Whole blocks only. A hit is believed only after comparing the tokens: a collision must
        cost a miss, never show one user the cache of another (GHSA-rm76-4mrf-v9r8)."""
        size, cursor = self.block_size, self.start(salt)
        blocks: list[int] = []
        for end in range(size, limit + 1, size):
            tokens = tuple(token_ids[end - size : end])
            name = self.name(cursor, tokens)
            entry = self._entries.get(name)
            if entry is None or entry.token_ids != tokens or entry.parent != cursor:
                break
            blocks.append(entry.block)
            cursor = name
        return Match(blocks, len(blocks) * size, cursor)

    def insert(self, cursor: bytes, token_ids: tuple[int, ...], block: int) -> bytes:
        """Name a block, unless another has the name. Costs one hash."""
        name = self.name(cursor, token_ids)
        if name not in self._entries and block not in self._names:
            self._entries[name] = Entry(block, cursor, token_ids)
            self._names[block] = name
        return name

    def forget(self, block: int) -> None:
        """Remove one name; those that follow it stay."""
        del self._entries[self._names.pop(block)]

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)
