"""Deliberate mistakes in the C functions that read the keys of token trees; a test finds each."""

import pytest
import torch

from minillm.ops import c_library, cpu
from tests.ops import test_tails
from tests.ops.c_variants import Mixed, built
from tests.ops.test_c_mutants import build_with

FILES = {"decode_attention": ("decode.c", "tails.h"), "int8_attention": ("int8_cache.c", "tails.h")}
DECODE, CODES = FILES
BUGS = {
    "the mask is shifted by one": (DECODE, r"t\.order\[position - t\.start\]",
                                   "t.order[position - t.start] - 1"),
    "places follow each other": (DECODE, r"return count < 1 \? count : 1;", "return count;"),
    "the tail of the first sequence": (DECODE, r"all->order \+ sequence \* all->width",
                                       "all->order"),
    "codes of a neighbour": (CODES, r"b = target % 4", "b = (target + 1) % 4"),
    "scales are not copied": (CODES, r"to->value_scale\[target\] = from->value_scale\[source\];",
                              ""),
    "the first head's codes": (CODES, r"\(block \* heads \+ h\) \* size \+ at % size",
                               "(block * heads + t->head) * size + at % size"),
    "scales of the cache": (CODES, r"load_scales\(now, now->pages->key_scale",
                            "load_scales(now, p->pages->key_scale"),
    "tiles in order only": (CODES, r"tail\.start < at \+ found->count", "tail.start < at"),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_mistake_in_c_is_found(bug: str, tmp_path, monkeypatch) -> None:
    function, pattern, mistake = BUGS[bug]
    made = build_with(FILES[function], pattern, mistake, ["-DELEMENT_F32"], tmp_path)
    found = Mixed(built("native", "F32"), function, c_library.load(made))
    monkeypatch.setattr(cpu, "functions", lambda dtype: found if dtype == torch.float32 else None)
    kind = "int8" if function == CODES else "plain"

    def find() -> None:
        for seed in range(30):
            test_tails.check(test_tails.make_case(seed, kind, torch.float32, "fast", 20))

    with pytest.raises((AssertionError, IndexError)):
        find()
