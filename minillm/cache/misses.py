"""Why a prompt was not found in the prefix cache: a memory of what was once cached.

A `RequestOutput` has the report, in `metrics.prefix`. It says whether *another* salt has cached the
same tokens, which is what a salt hides: offline the sender of a request and the reader of its
report are the same person, but a server must not pass the report on to the sender.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from minillm.api.outputs import PrefixReport

REMEMBERED_PER_BLOCK = 8  # names kept, as a multiple of the pool's blocks


class PrefixHistory:
    """Remembers names of cached blocks after their eviction, the latest ones.

    Names are Python's hashes of tuples of integers: fast, the same in every process, and good
    enough here, where a collision makes a report wrong and nothing else.
    """

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size = block_size
        self._capacity = REMEMBERED_PER_BLOCK * num_blocks
        # When a name was recorded first, as a number of records; the latest record comes last.
        self._seen: OrderedDict[tuple[int, str | None], int] = OrderedDict()
        self._num_records = 0

    def record(self, name: int, token_ids: tuple[int, ...], salt: str) -> int:
        """A block was cached after `name` (0 at the start); returns its own name."""
        name = hash((name, token_ids))
        self._num_records += 1
        for key in ((name, salt), (name, None)):
            self._seen.setdefault(key, self._num_records)
            self._seen.move_to_end(key)
        while len(self._seen) > 2 * self._capacity:
            self._seen.popitem(last=False)
        return name

    def name(self, token_ids: Sequence[int], num_blocks: int) -> int:
        """The name of the first blocks of a text."""
        size, name = self.block_size, 0
        for end in range(size, num_blocks * size + 1, size):
            name = hash((name, tuple(token_ids[end - size : end])))
        return name

    def report(
        self, token_ids: Sequence[int], num_cached: int, num_known: int, salt: str
    ) -> PrefixReport:
        """Account for every token of a prompt: the first `num_cached` were read from the cache,
        which knew the first `num_known`. The names are made when the report is read: it says what
        was known now, but names that are dropped from this memory until then count as new."""
        explain = partial(self._explain, token_ids, num_cached, num_known, salt, self._num_records)
        return PrefixReport.when_asked(num_cached, explain)

    def _explain(
        self, token_ids: Sequence[int], num_cached: int, num_known: int, salt: str, now: int
    ) -> PrefixReport:
        size, name = self.block_size, 0
        report = PrefixReport(cached=num_cached, last_token=num_known - num_cached)
        whole = len(token_ids) // size * size
        for end in range(size, whole + 1, size):
            name = hash((name, tuple(token_ids[end - size : end])))
            missed = min(end - num_known, size)
            if missed > 0:
                reason = self._reason(name, salt, now)
                setattr(report, reason, getattr(report, reason) + missed)
        report.partial_block = len(token_ids) - max(whole, num_known)
        return report

    def _reason(self, name: int, salt: str, now: int) -> str:
        """What was known of a name after so many records."""
        if self._seen.get((name, salt), now + 1) <= now:
            return "evicted"
        return "salt" if self._seen.get((name, None), now + 1) <= now else "new"
