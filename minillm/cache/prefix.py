"""Prefix index: finds the cached blocks that hold the KV of a prompt's first tokens.

`hash_chain.py` and `radix.py` implement the interface `PrefixIndex`. A block stays cached while it
is in use and after it is freed, until `BlockPool` allocates it for other contents.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# A position in an index: the end of a cached prefix. Its type depends on the index.
Cursor = Any


class Match(NamedTuple):
    """The longest cached prefix of a prompt: `num_tokens` tokens that need not be computed.

    `blocks` match completely and are shared. Of the next block, `partial`, only the first tokens
    match: it must be copied before the sequence writes to it.
    """

    blocks: list[int]
    num_tokens: int
    cursor: Cursor
    partial: int | None = None

    @property
    def held(self) -> list[int]:
        """The blocks that a new table starts with: `blocks`, and `partial` until it is copied."""
        return list(self.blocks) if self.partial is None else [*self.blocks, self.partial]


class PrefixIndex(Protocol):
    """Maps token ids to the blocks that hold their keys and values.

    `lost` collects blocks that the index drops although `forget` was not called for them;
    `BlockPool.use_lost_first` empties it.
    """

    lost: list[int]

    def start(self, salt: str) -> Cursor:
        """The cursor before the first token. Prompts with different salts never share blocks."""

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """The longest cached prefix of `token_ids`, at most `limit` tokens."""

    def insert(self, cursor: Cursor, token_ids: tuple[int, ...], block: int) -> Cursor:
        """Cache one full block after `cursor`; returns the cursor behind it.

        If the same tokens are already cached there, the older block stays cached and `block` does
        not enter the index. Returns None if an earlier block of the prefix was evicted: the caller
        starts again from the first block.
        """

    def forget(self, block: int) -> None:
        """Remove the block: its contents will change, or may be wrong."""

    def __contains__(self, block: int) -> bool:
        """Whether the block is cached."""

    def __len__(self) -> int:
        """Number of cached blocks, including those after an evicted block."""
