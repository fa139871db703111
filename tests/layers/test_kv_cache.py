"""The cache's tensors: which slots a step writes, and how blocks move."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.cache.spec import CacheSpec
from minillm.layers.kv_cache import KVCache
from minillm.ops.batch import Batch

GQA, MLA = CacheSpec(2, 4, 4), CacheSpec(1, 6, 4, value_in_key=True)
LAYERS, BLOCKS, SIZE = 3, 4, 4


def cache_of(spec: CacheSpec, num_blocks: int = BLOCKS, **options: Any) -> KVCache:
    """A cache in which every number differs."""
    kv = KVCache(spec, LAYERS, num_blocks, SIZE, torch.float32, **options)
    for tensor in (kv.key,) if spec.value_in_key else (kv.key, kv.value):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(num_blocks)))
    return kv


def batch_of(slots: list[int], rows: int) -> Batch:
    """Rows of which the first have these slots; nothing else of it matters to writing."""
    ids, ints = torch.zeros(rows, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    return Batch(ids, ids, torch.tensor(slots), ints, ints[:1], ids[None, :1], ids, 1)


def changed(before: Tensor, after: Tensor) -> set[tuple[int, int, int]]:
    """(layer, block, offset) of the slots in which any head has another number."""
    differs = (before != after).any(-1).any(2)  # [layers, blocks, block_size]
    return {(layer, block, at) for layer, block, at in differs.nonzero().tolist()}


@pytest.mark.parametrize("spec", [GQA, MLA])
def test_padding_is_written_nowhere(spec):
    """Slot -1 is the padding of a graph, rows behind the last slot that of a tile."""
    kv = cache_of(spec)
    before = kv.key.clone(), kv.value.clone()
    key = torch.randn(3, spec.num_kv_heads, spec.key_dim)
    value = None if spec.value_in_key else torch.randn(3, spec.num_kv_heads, spec.value_dim)
    kv.write(1, key, value, batch_of([6, -1], rows=3))
    assert changed(before[0], kv.key) == {(1, 1, 2)}
    assert changed(before[1], kv.value) == {(1, 1, 2)}
    assert torch.equal(kv.key[1, 1, :, 2], key[0])
    expected = key[..., : spec.value_dim] if value is None else value
    assert torch.equal(kv.value[1, 1, :, 2], expected[0])


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("copies", [[(0, 3)], [(0, 2), (2, 0), (1, 3)]])
@pytest.mark.parametrize("spec", [GQA, MLA])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_blocks_are_copied_as_if_all_at_once(spec, copies, elsewhere):
    """Two blocks may change places; a block beside them stays."""
    kv = cache_of(spec)
    target = cache_of(spec, 7, swap_space_of=kv.key.device) if elsewhere else kv
    before, expected = kv.key.clone(), [target.key.clone(), target.value.clone()]
    values = kv.value.clone()
    for source, block in copies:
        expected[0][:, block], expected[1][:, block] = before[:, source], values[:, source]
    kv.copy_blocks(copies, target)
    assert torch.equal(target.key, expected[0])
    assert torch.equal(target.value, expected[1])
    if elsewhere:  # and back, to other places
        back = [(block, 3 - source) for source, block in copies]
        for source, block in back:
            before[:, block], values[:, block] = expected[0][:, source], expected[1][:, source]
        target.copy_blocks(back, kv)
        assert torch.equal(kv.key, before)
        assert torch.equal(kv.value, values)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_scales_move_with_their_codes(elsewhere):
    """A swap that forgets them gives codes a stranger's size."""
    spec = CacheSpec(2, 4, 4, int8=True)
    kv, host = (KVCache(spec, LAYERS, BLOCKS, SIZE, torch.float32,
                        swap_space_of=torch.device("cpu") if swaps else None)
                for swaps in (False, True))  # fmt: skip
    for each in kv.tensors:
        each.copy_(
            torch.arange(each.numel()).view(each.shape) % 251 - 128 * (each.dtype == torch.int8)
        )
    wanted = [each[:, 1].clone() for each in kv.tensors]
    if elsewhere:
        kv.copy_blocks([(1, 2)], host)
        host.copy_blocks([(2, 3)], kv)
    else:
        kv.copy_blocks([(1, 3)], kv)
    assert len(kv.tensors) == 4
    assert all(torch.equal(each[:, 3], old) for each, old in zip(kv.tensors, wanted, strict=True))


@pytest.mark.parametrize(("spec", "tensors"), [(GQA, 2), (MLA, 1)])
def test_copies_take_one_index_and_two_operations_per_tensor(spec, tensors):
    """An index that is a Python list travels to a GPU by itself, and the host waits for it."""
    kv = cache_of(spec)
    with Operations() as operations:
        kv.copy_blocks([(0, 2), (2, 0), (1, 3)], kv)
    seen = operations.seen
    assert seen["index_select"] == seen["index_copy_"] == tensors
    assert not seen.keys() & {"index", "index_put_", "_index_put_impl_", "_to_copy", "copy_"}


def test_the_swap_space_of_a_gpu_is_pinned(monkeypatch):
    pinned, empty = [], torch.empty

    def watched(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", watched)
    for device, expected in (("cuda:0", [True, True]), ("cpu", [False, False])):
        KVCache(GQA, LAYERS, 2, SIZE, torch.float32, swap_space_of=torch.device(device))
        assert pinned == expected
        pinned.clear()


def test_indices_reach_a_gpu_pinned_and_without_waiting(monkeypatch):
    """On another device, for which `meta` stands in: nothing but the way of the indices is real."""
    way = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: way.append("pinned") or self)
    move = Tensor.to

    def watched(self: Tensor, *where: Any, **options: Any) -> Tensor:
        way.append(options)
        return move(self, *where, **options)

    monkeypatch.setattr(Tensor, "to", watched)
    kv = KVCache(GQA, LAYERS, BLOCKS, SIZE, torch.float32, "meta")
    kv.copy_blocks([(0, 2), (2, 0)], kv)
    assert way == ["pinned", {"non_blocking": True}]
