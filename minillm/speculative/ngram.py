"""Drafts from the sequence itself: what followed the last tokens when they stood there before.

    ... f o r   i   i n   r ... f o r   i          the last n tokens, found once more
            `-----> i n   r                        what followed them there is the draft

Prompt lookup (Saxena, 2023): nothing is computed, and it pays where a text repeats itself, as when
a program is edited or a document is summarised.
"""

from collections.abc import Sequence

from minillm.speculative.proposer import DraftRow


class NGrams:
    """Looks up n-grams of `shortest` to `longest` tokens, the longest first and of these the most
    recent.

    For each length, a dictionary has where the n-gram ended last. It grows by one entry per token,
    so that a step costs the same however long a sequence is.
    """

    def __init__(self, shortest: int, longest: int):
        self.lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[int, Index] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """What followed the last tokens of each row the last time."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        index = self._indexes.get(row.new.seq_id)
        if index is None:
            index = self._indexes[row.new.seq_id] = Index(self.lengths)
        return index.propose(row.token_ids, row.num_drafts)

    def forget(self, seq_id: int) -> None:
        """The sequence is gone, or comes back as a new one."""
        self._indexes.pop(seq_id, None)


class Index:
    """The n-grams of one sequence, all but the one at its end."""

    def __init__(self, lengths: Sequence[int]):
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in lengths]
        self._size = 0  # tokens that are indexed: n-grams that end before the last one

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """`count` tokens that followed the last n-gram, or none. Where fewer followed, the text
        repeats with that period, and so does the draft."""
        total = len(token_ids)
        for length, ends in self._ends:
            for end in range(max(self._size, length), total):
                ends[tuple(token_ids[end - length : end])] = end
        self._size = total
        for length, ends in self._ends:
            found = ends.get(tuple(token_ids[total - length :])) if length < total else None
            if found is not None:
                return [token_ids[found + i % (total - found)] for i in range(count)]
        return []
