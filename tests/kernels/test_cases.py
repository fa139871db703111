"""What the kernels' cases stand on: it has to see every mistake that it is there for."""

import math

import pytest
import torch

pytest.importorskip("triton")

from minillm_kernels.check.case import (
    GUARD,
    TOLERANCE,
    Mismatch,
    compare,
    generator,
    guarded,
    normal,
    poisoned,
)
from minillm_kernels.check.pages import SPARE, paged

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_guarded_output(dtype):
    out = guarded((3, 5), dtype, "cpu")
    with pytest.raises(Mismatch, match=r"left its output at \[0, 0\] unwritten \(or NaN\)"):
        out.check()
    out.check(written=False)
    out.view.fill_(1)
    out.check()
    out.view[2, 3] = poisoned(1, dtype, "cpu")[0]
    with pytest.raises(Mismatch, match=r"left its output at \[2, 3\] unwritten"):
        out.check()
    for place, side in ((GUARD - 1, "before"), (GUARD + 15, "behind"), (0, "before")):
        out.view.fill_(1)
        kept = out.buffer[place].clone()
        out.buffer[place] = 3
        with pytest.raises(Mismatch, match=f"the kernel wrote {side} its output"):
            out.check()
        out.buffer[place] = kept
    out.check()


def test_comparing():
    right = torch.tensor([0.0, 100.0, -50.0], dtype=torch.float64)
    compare(right.float(), right, "x")
    compare(right.float() + 100 * 1.9e-5, right, "x")
    with pytest.raises(Mismatch, match=r"^x at \[2\] is -49\.99, not -50 \(error 0\.0001 of the"):
        compare(right.float() + torch.tensor([0, 0, 0.01]), right, "x")
    with pytest.raises(Mismatch, match=r"x is \[2\]; it must be \[3\]"):
        compare(right[:2], right, "x")
    compare(torch.zeros(0), torch.zeros(0, dtype=torch.float64), "x")


def test_each_dtype_has_its_tolerance():
    right = torch.ones(4, dtype=torch.float64)
    for dtype, limit in TOLERANCE.items():
        compare((right * (1 + limit / 2)).to(dtype), right, "x")
        with pytest.raises(Mismatch):
            compare((right * (1 + 2 * limit)).to(dtype), right, "x")
    compare(right.float() * 1.4, right, "x", tolerance=0.5)


def test_nan_and_infinity_never_pass():
    right = torch.tensor([1.0, math.inf, -math.inf], dtype=torch.float64)
    compare(right.float(), right, "x")
    for place, value in ((0, math.nan), (0, math.inf), (1, 1e30), (1, -math.inf), (2, math.nan)):
        wrong = right.float().clone()
        wrong[place] = value
        with pytest.raises(Mismatch, match=rf"x at \[{place}\]"):
            compare(wrong, right, "x")
    with pytest.raises(Mismatch, match=r"x at \[0\] is 1\.5, not 1"):  # infinity is no scale
        compare(torch.tensor([1.5, math.inf, -math.inf]), right, "x")


def test_small_numbers_are_compared_on_the_floor():
    right = torch.full((3,), 1e-9, dtype=torch.float64)
    compare(torch.zeros(3), right, "x")
    with pytest.raises(Mismatch):
        compare(torch.zeros(3), right, "x", floor=1e-9)


def test_random_numbers_are_the_same_on_every_device_and_already_rounded():
    a = normal(generator(3), (4, 5), torch.bfloat16, "cpu")
    assert torch.equal(a, normal(generator(3), (4, 5), torch.bfloat16, "cpu"))
    assert not torch.equal(a, normal(generator(4), (4, 5), torch.bfloat16, "cpu"))
    assert a.dtype == torch.bfloat16


def test_a_paged_cache_is_poison_wherever_it_must_not_be_read():
    lengths = (5, 0, 16, 17)
    cache = paged(generator(1), lengths, 16, 2, (8, 4), torch.float32, "cpu")
    used = [cache.block_tables[0, :1], cache.block_tables[2, :1], cache.block_tables[3, :2]]
    used = torch.cat(used).tolist()
    assert len(set(used)) == 4, "a block is used twice"
    assert cache.num_blocks == 4 + SPARE
    assert used != sorted(used), "the blocks are in order, so a kernel may ignore the table"
    keys, values = cache.caches
    assert (keys.shape, values.shape) == ((7, 2, 16, 8), (7, 2, 16, 4))
    for each in cache.caches:
        for row, length in enumerate(lengths):
            table = cache.block_tables[row, : -(-length // 16)]
            positions = each[table].transpose(1, 2).flatten(0, 1)  # [positions, Hkv, D]
            assert positions[:length].isfinite().all()
            assert positions[length:].isnan().all()
        unused = [block for block in range(7) if block not in used]
        assert each[unused].isnan().all()
    for row, length in enumerate(lengths):
        behind = cache.block_tables[row, -(-length // 16) :]
        assert (behind >= cache.num_blocks).all()
        assert len(behind) >= 2
    assert cache.seq_lens.tolist() == list(lengths)
