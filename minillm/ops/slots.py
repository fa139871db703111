"""Single slots of KV pages of any kind: plain tensors, codes of 8 bits, scales."""

from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from minillm.ops.batch import Batch, Pages
from minillm_kernels.int8_cache import keys_of, values_of

# Of codes, of which four positions are interleaved.
VIEWS = MappingProxyType({torch.uint8: keys_of, torch.int8: values_of})


def slots_of(cache: Tensor, block: Tensor | slice, offset: Tensor | int) -> tuple[Tensor, tuple]:
    """A view of pages [blocks, Hkv, block_size(, D)], and the index of these slots in it."""
    whole = slice(None)
    if cache.dtype in VIEWS:
        return VIEWS[cache.dtype](cache), (block, whole, offset // 4, whole, offset % 4)
    return cache, (block, whole, offset)


def move_slot(cache: Tensor, source: int, target: int) -> None:
    """Copy a slot of all layers of pages [layers, blocks, Hkv, block_size(, D)]."""
    num_blocks, size = cache.shape[1], cache.shape[3]
    pages = cache.flatten(0, 1)
    (_, read), (view, write) = (
        slots_of(pages, slice(slot // size, None, num_blocks), slot % size)
        for slot in (source, target)
    )
    view[write] = view[read]


def untangled(pages: Pages, batch: Batch) -> tuple[Pages, Batch]:
    """Copies of the pages of each sequence, with all positions in order, for attention that does
    not know `Batch.tails`. Its cost is that of reading all keys and values once more."""
    if batch.tails is None:
        return pages, batch
    tables, size, (starts, order) = batch.block_tables, pages.key.shape[2], batch.tails
    count, width = tables.shape
    offsets = torch.arange(size, device=tables.device).repeat(count * width)
    place = torch.arange(width * size, device=tables.device)
    tail = place - starts[:, None]  # [B, M * block_size]
    moved = starts[:, None] + order.gather(1, tail.clamp(0, order.shape[1] - 1)).long()
    place = torch.where((tail >= 0) & (tail < order.shape[1]), moved, place)
    place = place.clamp(max=width * size - 1)
    block, offset = tables.gather(1, place // size).flatten(), (place % size).flatten()
    own = torch.arange(count * width, device=tables.device)

    def copied(cache: Tensor) -> Tensor:
        new = cache.new_empty(count * width, *cache.shape[1:])
        to, where = slots_of(new, own.repeat_interleave(size), offsets)
        view, source = slots_of(cache, block, offset)
        to[where] = view[source]
        return new

    key, scales = copied(pages.key), [page if page is None else copied(page) for page in pages[2:]]
    mla = pages.value.data_ptr() == pages.key.data_ptr()  # a value is the first part of its key
    found = Pages(key, key[..., : pages.value.shape[-1]] if mla else copied(pages.value), *scales)
    return found, replace(batch, block_tables=own.view(count, width), tails=None)
