"""Norms, SwiGLU, embedding, rotation and the KV write: interpreted, against float64."""

from pathlib import Path

import pytest
import torch

from minillm_kernels import fused, rope_cache
from minillm_kernels.check import fused as check
from minillm_kernels.check import rope_cache as rope_check
from minillm_kernels.check.case import generator
from minillm_kernels.launch import KernelError
from tests.kernels.mutants import convicted, mutant

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("overflow", "divide by zero", "invalid value")
]
WRITES = [case for case in check.CASES if isinstance(case, rope_check.Write)]
BF16 = torch.bfloat16


# ---- a row's bits do not depend on what is beside it ------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "size"), [(BF16, 40), (torch.float32, 2048), (torch.float16, 17000)], ids=str
)
def test_norms_are_batch_invariant(dtype: torch.dtype, size: int) -> None:
    rng = generator(size)
    x, residual = (torch.randn(41, size, generator=rng).to(dtype) for _ in "xr")
    weight = torch.randn(size, generator=rng).to(dtype)
    together = fused.add_rms_norm(x, residual, weight, 1e-6)[0]
    for row in (0, 40):
        one = slice(row, row + 1)
        alone = fused.add_rms_norm(x[one], residual[one], weight, 1e-6)[0]
        assert torch.equal(together[one], alone)
        assert torch.equal(fused.rms_norm((x + residual)[one], weight, 1e-6), alone)


def test_projections_are_batch_invariant() -> None:
    rng = generator(1)
    qkv, weight = torch.randn(50, 7, 64, generator=rng), torch.randn(64, generator=rng)
    turns = torch.rand(50, 32, generator=rng) * 6
    slots = torch.randperm(50, generator=rng)

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        caches = torch.zeros(2, 4, 2, 16, 64).unbind()
        angles = turns[rows].cos(), turns[rows].sin()
        norm = (weight, weight, 1e-6)
        q = rope_cache.norm_rope_write(qkv[rows], *norm, *angles, False, *caches, slots[rows])
        return q, *caches

    q, k, v = run(slice(0, 50))
    for row in (0, 17, 49):
        block, offset = divmod(int(slots[row]), 16)
        alone = run(slice(row, row + 1))
        assert torch.equal(alone[0], q[row : row + 1])
        assert torch.equal(alone[1][block, :, offset], k[block, :, offset])
        assert torch.equal(alone[2][block, :, offset], v[block, :, offset])


def test_a_result_may_replace_its_input() -> None:
    rng = generator(2)
    x, weight = torch.randn(6, 80, generator=rng), torch.randn(80, generator=rng)
    expected = fused.rms_norm(x, weight, 1e-6)
    assert fused.rms_norm(x, weight, 1e-6, out=x) is x
    assert torch.equal(x, expected)


# ---- views -------------------------------------------------------------------------------------


def wider(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same numbers as a part of wider rows (of wider heads, too), NaN beside them."""
    sizes = [*x.shape[:1], *(size + gap for size in x.shape[1:])]
    part = torch.full(sizes, torch.nan)[tuple(slice(0, size) for size in x.shape)]
    return part.copy_(x)


@pytest.mark.parametrize("size", [24, 17000])
def test_every_tensor_of_a_norm_has_strides_of_its_own(size: int) -> None:
    rng = generator(size)
    x, residual, out, total = (torch.randn(3, size, generator=rng) for _ in range(4))
    weight = torch.randn(size, generator=rng)
    expected = fused.add_rms_norm(x, residual, weight, 1e-6)
    views = {"out": wider(out, 3), "residual_out": wider(total, 4)}
    found = fused.add_rms_norm(wider(x, 1), wider(residual, 2), weight, 1e-6, **views)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_every_tensor_of_the_small_operations_has_strides_of_its_own() -> None:
    rng = generator(3)
    x = torch.randn(5, 48, generator=rng)
    product, ids = wider(torch.zeros(5, 24), 2), torch.tensor([4, 0, 3])
    fused.silu_mul(wider(x, 1), out=product)
    assert torch.equal(product, fused.silu_mul(x))
    vectors = wider(torch.zeros(3, 48), 2)
    fused.embedding(ids, wider(x, 1), out=vectors)
    assert torch.equal(vectors, x[ids])


def test_every_tensor_of_a_projection_has_strides_of_its_own() -> None:
    rng = generator(4)
    qkv, k, v = (torch.randn(shape, generator=rng) for shape in ((3, 7, 16), *[(4, 2, 8, 16)] * 2))
    cos, sin = torch.randn(2, 3, 8, generator=rng).unbind()
    slots = torch.tensor([9, 30, 2])
    views = wider(k, 3), wider(v, 4)
    out = wider(torch.zeros(3, 3, 16), 5)
    norm = torch.randn(16, generator=rng), torch.randn(16, generator=rng), 1e-6
    turned = wider(cos, 1), wider(sin, 2)
    rope_cache.norm_rope_write(wider(qkv, 6), *norm, *turned, False, *views, slots, out=out)
    expected = rope_cache.norm_rope_write(qkv, *norm, cos, sin, False, k, v, slots)
    for one, other in zip((out, *views), (expected, k, v), strict=True):
        assert torch.equal(one, other)


# ---- bad input ---------------------------------------------------------------------------------


def good(**changed: object) -> dict[str, object]:
    """Arguments of `norm_rope_write` that fit."""
    fine = {
        "qkv": torch.ones(3, 4, 16),
        "q_weight": torch.ones(16),
        "k_weight": torch.ones(16),
        "eps": 1e-6,
        "cos": torch.ones(3, 8),
        "sin": torch.ones(3, 8),
        "interleaved": False,
        "k_cache": torch.ones(2, 1, 4, 16),
        "v_cache": torch.ones(2, 1, 4, 16),
        "slot_mapping": torch.tensor([0, 5, -1]),
    }
    return fine | changed


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"qkv": torch.ones(3, 64)}, "qkv is [3, 64]; it must be [N, H + 2 Hkv, D]."),
        ({"qkv": torch.ones(3, 4, 16, dtype=BF16)}, "qkv is torch.bfloat16 and k_cache"),
        ({"qkv": torch.ones(3, 4, 12)}, "qkv has a head_dim of 12; it must be a multiple of 8"),
        ({"qkv": torch.ones(3, 2, 16)}, "qkv has 2 heads and the caches 1 KV heads"),
        ({"qkv": torch.ones(3, 16, 4).transpose(1, 2)}, "qkv has strides (64, 1, 4)"),
        ({"q_weight": None}, "only one of q_weight and k_weight is given"),
        ({"k_weight": torch.ones(8)}, "k_weight is [8]; it must be [16]."),
        ({"q_weight": torch.ones(32)[::2]}, "q_weight has shape [16] and strides (2,)"),
        ({"cos": torch.ones(3, 16)}, "cos is [3, 16]; it must be [3, 8]."),
        ({"sin": torch.ones(2, 8)}, "sin is [2, 8]; it must be [3, 8]."),
        ({"cos": torch.ones(3, 8, dtype=BF16)}, "cos is torch.bfloat16; it must be float32."),
        ({"k_cache": torch.ones(2, 4, 16)}, "k_cache is [2, 4, 16]"),
        ({"v_cache": torch.ones(2, 1, 8, 16)}, "v_cache is [2, 1, 8, 16]"),
        ({"v_cache": torch.ones(2, 1, 4, 8)}, "v_cache is [2, 1, 4, 8]; it must be [2, 1, 4, 16]"),
        ({"slot_mapping": torch.ones(3)}, "slot_mapping is torch.float32; it must be int32 or"),
        ({"slot_mapping": torch.tensor([[0, 1]])}, "slot_mapping is [1, 2]; it must be [N]."),
        ({"slot_mapping": torch.arange(6)[::2]}, "slot_mapping has shape [3] and strides (2,)"),
        ({"out": torch.ones(3, 3, 16)}, "out is [3, 3, 16]; it must be [3, 2, 16]."),
        ({"out": torch.ones(3, 2, 16, dtype=BF16)}, "out is torch.bfloat16 on cpu"),
        ({"qkv": torch.ones(3, 4, 16, device="meta")}, "qkv is on meta and k_cache on cpu"),
    ],
)
def test_a_projection_that_does_not_fit(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(KernelError) as error:
        rope_cache.norm_rope_write(**good(**changed))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, w: fused.rms_norm(x, w[:8], 1e-6), "weight is [8]; it must be [16]."),
        (lambda x, w: fused.rms_norm(x[0, 0], w, 1e-6), "x has no dimensions"),
        (lambda x, w: fused.rms_norm(x.double(), w, 1e-6), "x is torch.float64; it must be float"),
        (lambda x, w: fused.rms_norm(x, w.half(), 1e-6), "x is torch.float32 and weight torch."),
        (lambda x, w: fused.rms_norm(x.T, x[:, 0], 1e-6), "x has strides (1, 16)"),
        (lambda x, w: fused.rms_norm(x, w, 1e-6, out=x[:2]), "out is [2, 16]; it must be [4, 16]."),
        (
            lambda x, w: fused.rms_norm(x.view(2, 1, 2, 16).transpose(0, 2), w, 1e-6),
            "with other than two or three dimensions it must be contiguous",
        ),
        (lambda x, w: fused.add_rms_norm(x, x[:2], w, 1e-6), "residual is [2, 16]"),
        (lambda x, w: fused.add_rms_norm(x[None], x[None], w, 1e-6), "x is [1, 4, 16]; it must"),
        (lambda x, w: fused.add_rms_norm(x, x, w, 1e-6, residual_out=x.half()), "residual_out is"),
        (lambda x, w: fused.silu_mul(x[:, :7]), "gate_up is [4, 7]; its last dimension must be ev"),
        (lambda x, w: fused.silu_mul(x.T), "gate_up has strides (1, 16)"),
        (lambda x, w: fused.embedding(w, x), "token_ids is torch.float32; it must be int32 or"),
        (lambda x, w: fused.embedding(torch.arange(4)[None], x), "token_ids is [1, 4]; it must be"),
        (lambda x, w: fused.embedding(torch.arange(4), w), "weight is [16]; it must be [V, d]."),
        (lambda x, w: fused.rotate(x, x, x), "x is [4, 16]; it must be [N, H, D]."),
        (lambda x, w: fused.rotate(x[..., None], x, x), "rows of 1 numbers have no pairs"),
        (
            lambda x, w: fused.write_cache(x, x, x, x, torch.arange(4)),
            "key is [4, 16]; it must be [N, Hkv, D].",
        ),
    ],
)
def test_bad_input_is_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(KernelError) as error:
        call(torch.ones(4, 16), torch.ones(16))  # type: ignore[operator]
    assert sentence in str(error.value)


def test_values_of_keys_and_values_fit_the_caches() -> None:
    key, cache, slots = torch.ones(3, 2, 8), torch.ones(2, 2, 4, 8), torch.arange(3)
    with pytest.raises(KernelError, match=r"value is \[3, 2, 4\]; it must be \[3, 2, 8\]"):
        fused.write_cache(key, key[..., :4], cache, cache, slots)
    with pytest.raises(KernelError, match=r"k_cache is \[2, 2, 4, 8\]; it must be \[blocks, 1,"):
        fused.write_cache(key[:, :1], None, cache, cache, slots)


def test_debugging_names_the_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEBUG", True)
    monkeypatch.setattr(rope_cache, "DEBUG", True)
    with pytest.raises(KernelError, match=r"token_ids\[1\] is 4; the table has rows 0 to 3"):
        fused.embedding(torch.tensor([3, 4]), torch.ones(4, 16))
    with pytest.raises(KernelError, match=r"slot_mapping\[2\] is 8; the cache has slots 0 to 7"):
        rope_cache.norm_rope_write(**good(slot_mapping=torch.tensor([0, -1, 8])))


# ---- mutations ---------------------------------------------------------------------------------

FUSED_BUGS = [
    (check.Norm, "no eps", "axis=1) / SIZE + eps)", "axis=1) / SIZE)"),
    (check.Norm, "no eps in the loop", "squares) / SIZE + eps)", "squares) / SIZE)"),
    (check.Norm, "a mean over the padded width", "axis=1) / SIZE", "axis=1) / BLOCK"),
    (check.Norm, "nothing squared", "tl.sum(x * x, axis=1)", "tl.sum(tl.abs(x), axis=1)"),
    (check.Norm, "unguarded columns", "(row < num_rows)[:, None] & (column < SIZE)",
     "(row < num_rows)[:, None] & (column < BLOCK)"),
    (check.Norm, "unguarded rows", "(row < num_rows)[:, None] & (column < SIZE)",
     "(row >= 0)[:, None] & (column < SIZE)"),
    (check.Norm, "no weight", "x * scale[:, None] * weight", "x * scale[:, None]"),
    (check.Norm, "heads of a wider row confused", "(row // inner)", "(row % inner)"),
    (check.Norm, "the tail of a long row forgotten", "for start in range(0, SIZE, BLOCK)",
     "for start in range(0, SIZE - SIZE % BLOCK, BLOCK)"),
    (check.AddNorm, "the residual forgotten", " + residual.to(tl.float32)", ""),
    (check.AddNorm, "the sum not stored", "tl.store(sum_ptr + sum_row + column, x, mask=mask)",
     "pass"),
    (check.AddNorm, "a long row's norm of what was added",
     "x_ptr = sum_ptr + row.to(tl.int64) * sum_stride", "pass"),
    (check.Swiglu, "gate and up exchanged", "gate32 = gate.to(tl.float32)",
     "gate, up = up, gate\n    gate32 = gate.to(tl.float32)"),
    (check.Swiglu, "a sigmoid alone", "(gate32 / (1.0", "(1.0 / (1.0"),
    (check.Swiglu, "another tile's rows", "(program // blocks) * ROWS",
     "(program // blocks) * BLOCK"),
    (check.Embedding, "ids below 0 read", "(token_id >= 0) & (token_id < num_rows)",
     "token_id < num_rows"),
    (check.Embedding, "ids behind the table read", "(token_id >= 0) & (token_id < num_rows)",
     "token_id >= 0"),
]  # fmt: skip
ROPE_BUGS = [
    ("the sign of the sine", "first * cos - second * sin", "first * cos + second * sin"),
    ("the wrong half", "second * cos + first * sin", "second * cos + second * sin"),
    ("interleaved exchanged", "    if INTERLEAVED:", "    if not INTERLEAVED:"),
    ("interleaved written so", "tl.store(place + DIM // 2 + pair", "tl.store(place + HALF + pair"),
    ("unguarded columns", "inside = mask & (pair < DIM // 2)", "inside = mask & (pair < HALF)"),
    ("slot -1 written", "kept = (slot >= 0) & (", "kept = (slot >= -1) & ("),
    ("a slot behind the cache written", "& (slot // BLOCK_SIZE < num_blocks)", ""),
    ("a padding row written", "mask=live & (token < num_slots), other=-1",
     "mask=live & (token < num_slots), other=0"),
    ("slots behind the mapping read", "mask=live & (token < num_slots)", "mask=live"),
    ("a padding row without a query", "q_ptr, eps, num_tokens,\n            qkv",
     "q_ptr, eps, num_slots,\n            qkv"),
    ("k taken from q", "place = token_place + (NUM_HEADS + head) * qkv_head_stride",
     "place = token_place + (NUM_HEADS - 1 + head) * qkv_head_stride"),
    ("v taken from k", "(NUM_HEADS + NUM_KV_HEADS + head)", "(NUM_HEADS + head)"),
    ("the head map of q", "row // NUM_HEADS, (row % NUM_HEADS).to(tl.int64)\n    live",
     "row % num_tokens, row // num_tokens\n    live"),
    ("q's weight for k", "place, token, kept, k_weight_ptr", "place, token, kept, q_weight_ptr"),
    ("no eps", "squares / DIM + eps", "squares / DIM"),
    ("a mean over the padded width", "squares / DIM + eps", "squares / (2 * HALF) + eps"),
    ("one token's angle for all", "cos_ptr + token.to(tl.int64) * cos_stride", "cos_ptr"),
    ("block and offset exchanged", "return slot // BLOCK_SIZE, slot % BLOCK_SIZE, kept",
     "return slot % BLOCK_SIZE, slot // BLOCK_SIZE, kept"),
    ("values written as keys", "copy_rows(source, target, kept, VALUE_DIM, BLOCK)",
     "copy_rows(source, target, kept, DIM, BLOCK)"),
    ("heads not normed", "    if weight_ptr is not None:\n", "    if False:\n"),
]  # fmt: skip


def named(value: object) -> str:
    """The first word of each parameter is enough to find it."""
    return getattr(value, "__name__", str(value)[:30])


@pytest.mark.mutation
@pytest.mark.parametrize(("kind", "bug", "old", "new"), FUSED_BUGS, ids=named)
def test_a_bug_in_fused_is_found(kind: type, bug: str, old: str, new: str, tmp_path: Path) -> None:
    cases = [case for case in check.CASES if isinstance(case, kind)]
    assert convicted(check.verify, cases, mutant(fused, old, new, tmp_path))


@pytest.mark.mutation
@pytest.mark.parametrize(("bug", "old", "new"), ROPE_BUGS, ids=named)
def test_a_bug_in_rope_cache_is_found(bug: str, old: str, new: str, tmp_path: Path) -> None:
    assert convicted(check.verify, WRITES, mutant(rope_cache, old, new, tmp_path))


@pytest.mark.mutation
def test_a_norm_after_the_rotation_is_found(tmp_path: Path) -> None:
    source = Path(str(rope_cache.__file__)).read_text("utf-8")
    start = source.index("    if weight_ptr is not None:\n")
    norm = source[start : source.index("    pair = tl.arange", start)]
    turn = "first * cos - second * sin, second * cos + first * sin\n"
    end = source.index("    return " + turn) + len("    return " + turn)
    late = source[start:end].replace(norm, "")
    late = late.replace("return " + turn, "first, second = " + turn + norm)
    broken = mutant(rope_cache, source[start:end], late + "    return first, second\n", tmp_path)
    assert convicted(check.verify, WRITES, broken)
