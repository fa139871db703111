"""Hidden states of the target model, in pages beside its KV cache.

Draft heads predict from hidden states. The state of a position is in the slot of its keys and
values, so prefix cache hits, forks, copies and swaps need no rule of their own. What a rejected
draft left is overwritten when its position is computed again, as in the KV cache.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from minillm.cache.spec import CacheSpec
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import BlockTables
from minillm.ops.transfers import upload
from minillm.scheduling.plan import StepPlan


class Features:
    """Hidden states of all cached positions.

    Args:
        like: the target's KV cache, whose blocks, dtype and device this has.
        host: the target's swap space.
        tables: block tables shared with the target.
        size: values of a position: d, or several times d.
    """

    def __init__(self, like: KVCache, host: KVCache | None, tables: BlockTables, size: int):
        self.tables, self.size, self.device = tables, size, like.key.device
        spec, self.host = CacheSpec(1, size, size, value_in_key=True), None
        self.pages = KVCache(spec, 1, like.num_blocks, like.block_size, like.dtype, self.device)
        if host is not None:
            shape = host.num_blocks, host.block_size, like.dtype
            self.host = KVCache(spec, 1, *shape, swap_space_of=self.device)
        self.states = self.pages.key.view(-1, size)  # [slots, size]

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's swaps and copies, in the order of the target."""
        if self.host is not None and plan.swap_out:
            self.pages.copy_blocks(plan.swap_out, self.host)
        if plan.copies:
            self.pages.copy_blocks(plan.copies, self.pages)
        if self.host is not None and plan.swap_in:
            self.host.copy_blocks(plan.swap_in, self.pages)

    def keep(self, spans: Sequence[tuple[int, int, int]], hidden: Tensor) -> None:
        """Store hidden states [N, d] of (row of the tables, first position, count)."""
        self.states.index_copy_(0, self._slots(spans), hidden)

    def read(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """Hidden states [N, d] of (row of the tables, first position, count)."""
        return self.states[self._slots(spans)]

    def _slots(self, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        row, start, count = np.array(spans, dtype=np.int64).T
        first = count.cumsum() - count
        positions = np.arange(count.sum()) + (start - first).repeat(count)
        block, offset = np.divmod(positions, self.pages.block_size)
        slots = self.tables.host[row.repeat(count), block] * self.pages.block_size + offset
        return upload(self.device, slots)[0]
