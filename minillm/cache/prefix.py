"""What a prefix cache can do: find the blocks in which the start of a prompt was computed before.

Two implementations, `hash_chain.py` and `radix.py`, share this interface; `NoPrefixCache` is the
third, for an engine that caches nothing. Indices know blocks, never who holds them: a block stays
findable while it is in use and after it was freed, until `BlockPool` needs it for other contents.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# A place in an index, after some tokens from the start. What it is, only the index knows.
Cursor = Any


class Match(NamedTuple):
    """The part of a prompt that need not be computed.

    `blocks` are full and can be shared as they are. `partial` is a block whose first tokens fit
    too, but not its last ones: its new owner must copy it before writing.
    """

    blocks: list[int]
    num_tokens: int
    cursor: Cursor
    partial: int | None = None

    @property
    def held(self) -> list[int]:
        """The blocks that a table beginning so holds: the partial one until it is copied."""
        return list(self.blocks) if self.partial is None else [*self.blocks, self.partial]


class PrefixIndex(Protocol):
    """From token ids to the blocks that hold their keys and values.

    `lost` collects blocks that the index gave up by itself, for `BlockPool.use_lost_first`.
    """

    lost: list[int]

    def start(self, salt: str) -> Cursor:
        """The place before the first token. Prompts with different salts never share blocks."""
        ...

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """The longest known start of `token_ids`, at most `limit` tokens of it."""
        ...

    def insert(self, cursor: Cursor, token_ids: tuple[int, ...], block: int) -> Cursor:
        """Make one full block findable at `cursor`; returns the place after it.

        Where these tokens are known already, the older block stays the one that is found: tables
        are never rewritten. None means that the place is gone, because a block before it was
        evicted; start again from the first block.
        """
        ...

    def forget(self, block: int) -> None:
        """The block gets other contents."""
        ...

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found."""
        ...

    def __len__(self) -> int:
        """How many blocks can be found, or could if those before them were there."""
        ...


class NoPrefixCache:
    """Finds nothing and keeps nothing."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def start(self, salt: str) -> Cursor:
        """There is one place only."""
        return ()

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """Never anything."""
        return Match([], 0, ())

    def insert(self, cursor: Cursor, token_ids: tuple[int, ...], block: int) -> Cursor:
        """Nothing to do."""
        return ()

    def forget(self, block: int) -> None:
        """Nothing to do."""

    def __contains__(self, block: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0
