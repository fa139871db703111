"""Philox4x32-10 against its published vectors and Triton's, and what is built on it."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from minillm.ops.philox import (
    Purpose,
    philox,
    random_words,
    random_words_of_vocabulary,
    to_gumbel,
    to_uniform,
)

# "philox4x32 10" of kat_vectors in Random123 1.09 (Salmon et al.): counter, key, result.
VECTORS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter, key, result):
    counter, key, result = (
        [int(word, 16) for word in text.split()] for text in (counter, key, result)
    )
    words = philox((column(key[0]), column(key[1])), tuple(column(word) for word in counter))
    assert [int(word) for word in words] == result


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(out, seed, position, sample_index, purpose, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS).to(tl.uint32)
    zero = block * 0
    words = tl.philox(seed, block, zero + position, zero + sample_index, zero + purpose)
    for lane in tl.static_range(4):
        tl.store(out + 4 * block + lane, words[lane])

from minillm.ops.philox import Purpose, random_words_of_vocabulary

for seed in (0, 7, 2**40 + 3, 2**63 - 1, -5):
    out = torch.zeros(64, dtype=torch.uint32)
    kernel[(1,)](out, seed, 1000, 3, int(Purpose.ACCEPT), BLOCKS=16)
    stream = [torch.tensor([value]) for value in (seed, 3, 1000)]
    ours = random_words_of_vocabulary(*stream, Purpose.ACCEPT, 64)[0]
    assert out.to(torch.int64).tolist() == ours.tolist(), seed
"""


@pytest.mark.slow
def test_triton_draws_the_same_words(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "philox_in_triton.py"
    script.write_text(TRITON)
    code = (
        f"import os, runpy; os.environ['TRITON_INTERPRET'] = '1'; runpy.run_path({str(script)!r})"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_noise_of_a_token_depends_on_nothing_else():
    seeds, samples, positions = column(5, -9, 2**62), column(0, 1, 7), column(3, 4, 100000)
    whole = random_words_of_vocabulary(seeds, samples, positions, Purpose.SAMPLE, 1003)
    wider = random_words_of_vocabulary(seeds, samples, positions, Purpose.SAMPLE, 4001)
    alone = random_words_of_vocabulary(
        seeds[1:2], samples[1:2], positions[1:2], Purpose.SAMPLE, 1003
    )
    ids = torch.tensor([[0, 3, 1002], [5, 5, 4], [999, 1, 2]])
    some = random_words(seeds, samples, positions, Purpose.SAMPLE, ids)
    assert torch.equal(wider[:, :1003], whole)
    assert torch.equal(alone[0], whole[1])
    assert torch.equal(some, whole.gather(1, ids))


@pytest.mark.parametrize("axis", ["token", "position", "sample_index", "seed"])
def test_uniform_along_every_axis(axis):
    count = torch.arange(20_000)
    zero = torch.zeros(20_000, dtype=torch.int64)
    if axis == "token":
        words = random_words_of_vocabulary(column(11), column(0), column(0), Purpose.SAMPLE, 20_000)
    else:
        stream = [count if axis == name else zero for name in ("seed", "sample_index", "position")]
        words = random_words(*stream, Purpose.SAMPLE, column(0))
    uniform = to_uniform(words).flatten().double().numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(uniform[:-1], uniform[1:], bins=10)[0].flatten()
    assert stats.chisquare(pairs).pvalue > 1e-3
    gumbel = to_gumbel(words).flatten().double().numpy()
    assert stats.kstest(gumbel, "gumbel_r").pvalue > 1e-3


def test_extreme_words_stay_finite_and_inside():
    words = column(0, 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1)
    uniform = to_uniform(words)
    assert bool((uniform > 0).all())
    assert bool((uniform < 1).all())
    assert uniform.dtype == torch.float32
    assert uniform[0] == 2.0**-33
    exact = -np.log(-np.log1p(-uniform.double().numpy()))
    assert np.allclose(to_gumbel(words).numpy(), exact, rtol=1e-7)
    assert bool(to_gumbel(words).isfinite().all())


def test_neighbouring_words_at_the_top_have_different_noise():
    """The winner among 150,000 tokens has a word near 2^15; equal noise would favour small ids."""
    noise = to_gumbel(torch.arange(2**18))
    assert bool((noise[:-1] > noise[1:]).all())
