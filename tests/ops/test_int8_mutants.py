"""Deliberate mistakes in the KV cache of 8 bits, in torch, in C and around both. A test must find
each; several are bugs that other engines shipped."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minillm.cache.spec import CacheSpec
from minillm.execution import setup
from minillm.layers.kv_cache import KVCache
from minillm.ops import c_library, cpu
from minillm_kernels import int8_cache
from tests.engine import test_int8_pages as engines
from tests.layers import test_kv_cache as caches
from tests.ops import test_int8_cache as pages
from tests.ops.c_variants import PRODUCT_PATHS, Mixed, built
from tests.ops.test_c_mutants import build_with

BF16 = torch.bfloat16
Patch = pytest.MonkeyPatch


def bounds() -> None:
    for seed in range(4):
        pages.test_every_element_is_within_its_bound(seed, "usual")


def bits() -> None:
    pages.test_the_bits_of_a_query_do_not_depend_on_the_others(129, 70)


def engine(tmp: Path) -> None:
    engines.test_engine_and_trace_say_the_kind_and_the_bytes(tmp)


def wrapped(owner: object, name: str, change: Callable) -> Callable[[Patch], None]:
    """The function `change(right, ..)` in the place of `right`."""
    right = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *a, **k: change(right, *a, **k))


def scales_of_the_next_position(right, cache, *rest):
    found = right(cache, *rest)
    return found.roll(1, 1) if cache.dtype == torch.float16 else found


def unrounded_scale_divides(right, x):
    codes, scale = right(x)
    exact = x.float().abs().amax(-1, keepdim=True) / 127
    return torch.where(codes == 0, 0.0, (x.float() / exact).round()), scale


def scale_rounded_to_nearest(right, x):
    wanted = x.float().abs().amax(-1) / 127
    scale = wanted.half()
    return (x.float() / scale.float().unsqueeze(-1)).round().nan_to_num(0), scale


def chunks_with_other_tiles(right, q, k, *rest):
    first = 16 if len(q) > 1 else 64
    with Patch.context() as patch:
        patch.setattr(int8_cache, "TILE", first)
        patch.setattr(int8_cache, "tree_sum", lambda x: x.sum(-1))
        return right(q, k, *rest)


def only_decode_rounds_queries(right, q):
    return (q.float() * 1000, torch.full(q.shape[:-1], 1e-3)) if len(q) > 1 else right(q)


def stale_scales(right, key, value, k_cache, v_cache, k_scale, v_scale, slots):
    old = k_scale.clone()
    right(key, value, k_cache, v_cache, k_scale, v_scale, slots)
    k_scale.copy_(torch.where(old.isfinite(), old, k_scale))


def hidden_nan(right, x):
    return right(x.nan_to_num(0, 0, 0))


def values_in_another_order(right, cache, *rest):
    found = right(cache, *rest)
    return found.unflatten(1, (-1, 4)).flip(2).flatten(1, 2) if cache.dtype == torch.int8 else found


def without_scales(right, kv, copies, target):
    kept, kv.tensors = kv.tensors, kv.tensors[:2]
    theirs, target.tensors = target.tensors, target.tensors[:2]
    try:
        right(kv, copies, target)
    finally:
        kv.tensors, target.tensors = kept, theirs


PLANTED: dict[str, tuple[Callable[[Patch], None], Callable]] = {
    "scales are read by another position": (
        wrapped(int8_cache, "gather", scales_of_the_next_position), bounds
    ),
    "the unrounded scale divides": (
        wrapped(int8_cache, "quantize", unrounded_scale_divides),
        pages.test_each_number_is_within_half_a_step,
    ),
    "scales are rounded to nearest": (
        wrapped(int8_cache, "quantize", scale_rounded_to_nearest),
        pages.test_each_number_is_within_half_a_step,
    ),
    "decode and prefill have other tiles": (
        wrapped(int8_cache, "attend", chunks_with_other_tiles), bits
    ),
    "only decode rounds its queries": (
        wrapped(int8_cache, "quantize_query", only_decode_rounds_queries), bits
    ),
    "a slot keeps the scale of its last owner": (
        wrapped(int8_cache, "write_cache", stale_scales),
        pages.test_a_slot_that_is_written_again_is_as_new,
    ),
    "NaN becomes 0": (
        wrapped(int8_cache, "quantize", hidden_nan),
        lambda: pages.test_what_is_not_finite_is_nan_for_all_who_see_it_and_nobody_else(math.nan),
    ),
    "values are read in another order": (
        wrapped(int8_cache, "gather", values_in_another_order), bounds
    ),
    "copies leave the scales out": (
        wrapped(KVCache, "copy_blocks", without_scales),
        lambda: caches.test_scales_move_with_their_codes(True),
    ),
    "a value takes two bytes": (
        wrapped(CacheSpec, "block_bytes", lambda right, spec, n, each: 2 * spec.block_values(n)),
        engines.test_a_token_takes_a_code_per_number_and_a_scale_per_head,
    ),
    "the option is ignored": (
        wrapped(setup, "cache_spec", lambda right, config, kv_dtype="auto": right(config)), engine
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_around_the_pages_is_found(name: str, monkeypatch, tmp_path) -> None:
    plant, found_by = PLANTED[name]
    given = (tmp_path,) if found_by is engine else ()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        found_by(*given)


# ---- in C ---------------------------------------------------------------------------------------


def random_cases() -> None:
    for seed in range(8):
        for sizes in pages.SIZES:
            pages.check_bits(pages.random_case(seed + 100, sizes, BF16, "plain"))


def threads() -> None:
    pages.check_threads(cpu.functions(BF16), BF16)


IN_C: dict[str, tuple[str, str, Callable, str]] = {  # pattern, mistake, who notices, path
    "the 128 in keys stays": (r"128 \* sum", "0", random_cases, "no tiles"),
    "parts are not weighted": (r"\(vec\)\{0\} \+ new", "(vec){0} + 1.f", threads, "native"),
    "what is hidden is seen": (
        r"if \(!is_whole\) hide\(x, seen, -INFINITY\);", "", random_cases, "native"
    ),
    "scales of unused slots count": (
        r"if \(!is_whole\) hide\(w, seen, 0\);", "", random_cases, "native"
    ),
    "a window is too wide": (
        r"end - p->window : 0", "end - p->window - 1 : 0", random_cases, "native"
    ),
    "a query sees the next": (
        r"row / p->group \+ 1;", "row / p->group + 2;", random_cases, "native"
    ),
    "values with the scales of keys": (
        r"now, now->pages->value_scale", "now, now->pages->key_scale", random_cases, "native"
    ),
    "the first head's codes": (
        r"offset = h \* p->pages->block_size \* d", "offset = 0", random_cases, "native"
    ),
    "values do not shrink": (r"old \* shrinks\[r\]", "old", random_cases, "native"),
    "keys of tiles stay unsigned": (
        r" \^ \(int32_t\)0x80808080", "", random_cases, "tiles in C"
    ),
    "lanes see what is hidden": (
        r"if \(!is_whole\) x\[i\] = where", "if (0) x[i] = where", random_cases, "tiles in C"
    ),
    "lanes of the next query": (r"left = p->group;", "left = p->group + 1;", random_cases,
                                "tiles in C"),
    "four weights in falling order": (
        r"int i = 3; i >= 0; i--", "int i = 0; i < 4; i++", random_cases, "tiles in C"
    ),
    "lanes are added in another order": (
        r"int half = TILE / 2; half > 0; half /= 2", "int half = 1; half < TILE; half *= 2",
        random_cases, "tiles in C"
    ),
    "a tile of one position is left out": (
        r"\.end <= now->at\) continue", ".end <= now->at + 1) continue", random_cases, "native"
    ),
    "the second tile is the first": (
        r"4 \* j \+ 64, 4 \* n", "4 * j, 4 * n", random_cases, "tiles in C"
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", IN_C)
def test_a_mistake_in_c_is_found(name: str, tmp_path, monkeypatch) -> None:
    pattern, mistake, found_by, path = IN_C[name]
    options = [*PRODUCT_PATHS[path], "-DELEMENT_BF16"]
    wrong = c_library.load(build_with(("int8_cache.c",), pattern, mistake, options, tmp_path))
    found = Mixed(built(path, "BF16"), "int8_attention", wrong)
    monkeypatch.setattr(cpu, "functions", lambda dtype: found if dtype == BF16 else None)
    with pytest.raises(AssertionError):
        found_by()
