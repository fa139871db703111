"""e11: kernels that strangers wrote, right and wrong ones, and what the checks say of them."""

import os
import subprocess
import sys

import pytest
from submissions import Graded, failed, said

from minillm_exercises.manifest import load_manifest

pytest.importorskip("triton")
EXERCISES = ("e11.1", "e11.2")  # for the fixture `graded`


HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
ONE_PROGRAM = """
@triton.jit
def all_rows(x, lengths, out, xs, os, rows, columns, temperature, N: tl.constexpr):
    i = tl.arange(0, N)
    for r in range(rows):
        n = tl.load(lengths + r)
        ok = i < n
        v = tl.load(x + r * xs + i, mask=ok, other=0).to(tl.float32) / temperature
        ok = ok & (v > float("-inf"))
        m = tl.max(tl.where(ok, v, -3e38), 0)
        e = tl.where(ok, tl.exp(v - m), 0.0)
        s = tl.sum(e, 0)
        if s > 0:
            e = e / s
        tl.store(out + r * os + i, e, mask=i < columns)


def softmax(x, lengths, temperature, out):
    n = triton.next_power_of_2(x.shape[1])
    all_rows[1, 1](x, lengths, out, x.stride(0), out.stride(0), *x.shape, temperature, N=n)
"""
IN_PIECES = """
@triton.jit
def row_kernel(x, lengths, out, xs, os, columns, temperature, N: tl.constexpr):
    r = tl.program_id(0)
    n = tl.load(lengths + r)
    m = float("-inf")
    s = 0.0
    for start in range(0, n, N):
        i = start + tl.arange(0, N)
        v = tl.load(x + r * xs + i, mask=i < n, other=float("-inf")).to(tl.float32) / temperature
        new = tl.maximum(m, tl.max(v, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        s = s * tl.exp(m - base) + tl.sum(tl.exp(v - base), 0)
        m = new
    base = tl.where(m == float("-inf"), 0.0, m)
    for start in range(0, columns, N):
        i = start + tl.arange(0, N)
        v = tl.load(x + r * xs + i, mask=i < n, other=float("-inf")).to(tl.float32) / temperature
        share = tl.exp(v - base) / tl.where(s == 0.0, 1.0, s)
        tl.store(out + r * os + i, share, mask=i < columns)


def softmax(x, lengths, temperature, out):
    rows, columns = x.shape
    row_kernel[(rows,)](x, lengths, out, x.stride(0), out.stride(0), columns, temperature, N=32)
"""


def test_one_program_may_do_all_rows(graded: Graded) -> None:
    assert graded("e11.1", source=HEAD + ONE_PROGRAM).status == "pass"


def test_a_row_in_pieces_is_right_and_read_twice(graded: Graded) -> None:
    verdict = graded("e11.1", source=HEAD + IN_PIECES)
    assert failed(verdict) == ["test_traffic"]
    assert "each of the 62 numbers that count is loaded once, 248 bytes, but it was" in said(
        verdict
    )
    assert verdict.mutant == "read_twice"


KEYS = "        keys = tl.load(k_cache + at, mask=here[:, None], other=0.0)\n"
WHOLE = "        keys = tl.load(k_cache + at)\n"
VALUES = "        rows_of_v = tl.load(v_cache + at, mask=here[:, None], other=0.0)\n"
CLEARED = "        rows_of_v = tl.where(here[:, None], tl.load(v_cache + at), 0.0)\n"
LOOP = "for page in range(split, tl.cdiv(length, PAGE), SPLITS):"
RUNS = (
    "each = tl.cdiv(tl.cdiv(length, PAGE), SPLITS)\n"
    "    for page in range(split * each, tl.minimum((split + 1) * each, tl.cdiv(length, PAGE))):"
)


def test_whoever_reads_whole_pages_and_clears_them_is_right(graded: Graded) -> None:
    assert graded("e11.2", KEYS, WHOLE, VALUES, CLEARED).status == "pass"


def test_a_part_may_be_a_run_of_pages(graded: Graded) -> None:
    assert graded("e11.2", LOOP, RUNS).status == "pass"


def test_a_program_that_reads_another_groups_pages_is_told(graded: Graded) -> None:
    verdict = graded("e11.2", "+ kv_head)[:, None] * DIM", "+ 0)[:, None] * DIM")
    assert {"test_groups", "test_traffic"} <= set(failed(verdict))
    assert "4 query heads and 2 KV heads" in said(verdict)


def test_the_grid_is_as_the_readme_asks(graded: Graded) -> None:
    verdict = graded("e11.2", "part_kernel[(sequences, kv_heads, splits)]",
                     "part_kernel[(sequences, kv_heads, splits + 1)]")  # fmt: skip
    assert "test_traffic" in failed(verdict)


LOAD = 'mask=at < length, other=float("-inf")'
SCORES = '        scores = tl.where(here[None, :], scores, float("-inf"))\n'
OTHER_WORDS = [
    ("e11.1", (LOAD, "mask=at < tl.maximum(length, columns), other=float('-inf')"), "whole_width"),
    ("e11.1", (LOAD, "mask=at < length, other=0"), "other_zero"),
    ("e11.1", ("    logits = logits / temperature\n", "    temperature = 1.0\n"),
     "temperature_forgotten"),
    ("e11.1", ("out + row * out_stride + at", "out + (row * columns + at)"), "out_packed"),
    ("e11.1", ("tl.store(out + row * out_stride + at, share, mask=at < columns)",
               "tl.store(out + row * out_stride + at, share, mask=logits > float('-inf'))"), ""),
    ("e11.2", ("l = l * rescale + tl.sum(weights, axis=1)", "l += tl.sum(weights, axis=1)"),
     "sum_not_rescaled"),
    ("e11.2", ("tl.load(tables + sequence * table_stride + page).to(tl.int64)", "page + 0"),
     "logical_page"),
    ("e11.2", (SCORES, "        scores = scores + 0.0\n"), "last_page_whole"),
    ("e11.2", ("other=0.0) * scale", "other=0.0) * (scale / scale)"), "scale_forgotten"),
    ("e11.2", ("tl.where(m == float(\"-inf\"), 0.0, tl.exp(m - whole))",
               "tl.where(m > float(\"-inf\"), 1.0, 0.0)"), "combined_evenly"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "swap", "mutant"), OTHER_WORDS)
def test_a_mistake_in_other_words_is_named(
    graded: Graded, exercise_id: str, swap: tuple[str, ...], mutant: str
) -> None:
    verdict = graded(exercise_id, *swap)
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


GATHERED = """
@triton.jit
def attend(q, k, v, lengths, out, scale, T, N: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    s, h = tl.program_id(0), tl.program_id(1)
    hkv = tl.num_programs(1) // GROUP
    t, d = tl.arange(0, N), tl.arange(0, D)
    ok = t < tl.load(lengths + s)
    row = s * tl.num_programs(1) + h
    at = ((s * T + t) * hkv + h // GROUP)[:, None] * D + d
    keys = tl.load(k + at, mask=ok[:, None], other=0.0)
    score = tl.sum(keys * tl.load(q + row * D + d), 1) * scale
    score = tl.where(ok, score, -1e30)
    p = tl.where(ok, tl.exp(score - tl.max(score, 0)), 0.0)
    values = tl.load(v + at, mask=ok[:, None], other=0.0)
    total = tl.maximum(tl.sum(p, 0), 1e-30)
    tl.store(out + row * D + d, tl.sum(p[:, None] * values, 0) / total)


def paged_decode(q, k_cache, v_cache, block_tables, seq_lens, scale, splits, out):
    k, v = k_cache[block_tables], v_cache[block_tables]
    T = k.shape[1] * k.shape[2]
    grid = q.shape[:2]
    attend[grid](q, k, v, seq_lens, out, scale, T, N=triton.next_power_of_2(T), D=q.shape[2],
                 GROUP=q.shape[1] // k.shape[3])
"""


def test_pages_gathered_on_the_host_are_no_paged_kernel(graded: Graded) -> None:
    verdict = graded("e11.2", source=HEAD + GATHERED)
    assert verdict.status == "fail"
    assert "torch's index runs outside of your kernels" in said(verdict)


COMPILED = """
import sys, types, torch
from importlib.machinery import SourceFileLoader
from minillm_kernels.offline import compile_for

def load(path):
    module = types.ModuleType("solution")
    module.__file__ = path
    SourceFileLoader("solution", path).exec_module(module)
    return module

def run():
    softmax, decode = (load(path) for path in sys.argv[1:])
    ones = torch.ones(3, dtype=torch.int32)
    softmax.softmax(torch.zeros(3, 300, dtype=torch.bfloat16), ones, 0.7, torch.zeros(3, 300))
    q, cache, tables = torch.zeros(3, 6, 32), torch.zeros(9, 8, 2, 32), ones[:, None].repeat(1, 5)
    decode.paged_decode(q, cache, cache, tables, ones, 0.25, 3, torch.zeros_like(q))

for found in compile_for(80, run):
    print(found.kernel, found.spills, found.fits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["solution", "alternate"])
def test_solutions_become_machine_code_without_spills(kind: str) -> None:
    """What the checks ask of the compiler is its first pass; here it is all of it."""
    answers = [load_manifest()[key].answers / f"{kind}.py" for key in ("e11.1", "e11.2")]
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, *map(str, answers)], capture_output=True, text=True,
        check=False, env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert all(line.endswith(" False True") for line in lines), lines


@pytest.mark.parametrize("exercise_id", ["e11.1", "e11.2"])
def test_a_tensor_of_ones_own_kind_helps_nobody(graded: Graded, exercise_id: str) -> None:
    """Results are read from the checks' own tensors, whatever a function returns."""
    own = "class Yes(torch.Tensor):\n    def __eq__(self, other): return True\n\n\n@triton.jit\n"
    first = "@triton.jit\ndef softmax_kernel" if exercise_id == "e11.1" else "@triton.jit\ndef part"
    kernel = own + first.split("\n")[1]
    anchor = "    rows, columns = x.shape\n" if exercise_id == "e11.1" else "    _, page, kv_heads"
    lost = f"    return torch.empty(3).as_subclass(Yes)\n{anchor}"
    verdict = graded(exercise_id, first, kernel, anchor, lost)
    assert verdict.status == "fail"
    assert len(failed(verdict)) == len(verdict.checks)
