"""N-gram proposer (prompt lookup): drafts are copied from earlier in the same sequence.

    ... f o r   i   i n   r ... f o r   i          the last n tokens occur earlier
            `-----> i n   r                        the tokens that followed them are the draft

It needs no model (Saxena, 2023) and helps where text repeats, such as code editing and
summarisation.
"""

from collections.abc import Sequence

from minillm.speculative.proposer import DraftRow


class NGrams:
    """Looks up n-grams of `shortest` to `longest` tokens: the longest match, and of several the
    most recent.

    Each length has a dictionary from n-gram to the end of its last occurrence. Each new token adds
    one entry, so the cost of a step does not grow with the sequence.
    """

    def __init__(self, shortest: int, longest: int):
        self.lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[int, Index] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Drafts of each row; none if no n-gram matches."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        index = self._indexes.get(row.new.seq_id)
        if index is None:
            index = self._indexes[row.new.seq_id] = Index(self.lengths)
        return index.propose(row.token_ids, row.num_drafts)

    def forget(self, seq_id: int) -> None:
        """Remove a sequence."""
        self._indexes.pop(seq_id, None)


class Index:
    """The n-grams of one sequence, except those at its end."""

    def __init__(self, lengths: Sequence[int]):
        self._ends: list[tuple[int, dict[tuple[int, ...], int]]] = [(n, {}) for n in lengths]
        self._size = 0  # n-grams that end before this position are indexed

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """`count` tokens that followed the last n-gram, or none. If fewer than `count` followed,
        they are repeated."""
        total = len(token_ids)
        for length, ends in self._ends:
            for end in range(max(self._size, length), total):
                ends[tuple(token_ids[end - length : end])] = end
        self._size = total
        for length, ends in self._ends:
            place = ends.get(tuple(token_ids[total - length :])) if length < total else None
            if place is not None:
                return [token_ids[place + i % (total - place)] for i in range(count)]
        return []
