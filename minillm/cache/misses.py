"""Why prompt tokens missed the prefix cache: a bounded history of what was cached before.

The report is `RequestOutput.metrics.prefix`. It reveals whether *another* salt has cached the same
tokens, which salts exist to hide: a server must not return the report to its clients. Offline,
client and operator are the same person.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from minillm.api.outputs import PrefixReport

REMEMBERED_PER_BLOCK = 8  # prefix hashes kept per block of the pool


class PrefixHistory:
    """Remembers the hashes (names) of recently cached blocks, also after their eviction.

    Names are Python's hashes of integer tuples: fast, and the same in every process. A collision
    only makes a report wrong.
    """

    def __init__(self, block_size: int, num_blocks: int):
        self.block_size = block_size
        self._capacity = REMEMBERED_PER_BLOCK * num_blocks
        # Keys (name, salt), and (name, None) for any salt, in order of their last record; values:
        # number of the first record.
        self._seen: OrderedDict[tuple[int, str | None], int] = OrderedDict()
        self._num_records = 0

    def record(self, name: int, token_ids: tuple[int, ...], salt: str) -> int:
        """Record a cached block whose prefix has `name` (0 if empty); returns the block's name."""
        name = hash((name, token_ids))
        self._num_records += 1
        for key in ((name, salt), (name, None)):
            self._seen.setdefault(key, self._num_records)
            self._seen.move_to_end(key)
        while len(self._seen) > 2 * self._capacity:
            self._seen.popitem(last=False)
        return name

    def name(self, token_ids: Sequence[int], num_blocks: int) -> int:
        """The name of the first `num_blocks` blocks of `token_ids`."""
        size, name = self.block_size, 0
        for end in range(size, num_blocks * size + 1, size):
            name = hash((name, tuple(token_ids[end - size : end])))
        return name

    def report(
        self, token_ids: Sequence[int], num_cached: int, num_known: int, salt: str
    ) -> PrefixReport:
        """Assign a reason to every prompt token that was not read from the cache.

        The first `num_cached` tokens were read; the cache held the first `num_known`. The report is
        computed when it is first read, for the state at this call: later records are ignored, but
        names that the history drops in between count as new.
        """
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
        """Why a block missed, as known after the first `now` records."""
        if self._seen.get((name, salt), now + 1) <= now:
            return "evicted"
        return "salt" if self._seen.get((name, None), now + 1) <= now else "new"
