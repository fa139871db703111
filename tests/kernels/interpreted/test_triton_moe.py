"""`moe.moe_experts` interpreted: every case against float64, bits in the batch-invariant mode, bad
input, and deliberate bugs that `verify` must find."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_kernels import moe, moe_plan, moe_route
from minillm_kernels.check.case import Mismatch
from minillm_kernels.check.moe import (
    BF16,
    CASES,
    SMALL,
    SMALL_DESCRIBED,
    SMALL_DIRECT,
    Case,
    inputs_of,
    verify,
    verify_invariant,
    verify_route,
)
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from minillm_kernels.moe_config import Config, choose_config
from minillm_kernels.moe_plan import make_plan, max_blocks
from tests.kernels.mutants import convicted, mutant

# SiLU of -1e4 divides by an exponential that is infinite, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
THREE = Case(2, 24, 16, 3, 3, config=SMALL)


# ---- the plan ------------------------------------------------------------------------------------


@settings(max_examples=6, derandomize=True, deadline=None)
@given(st.data())
def test_plan_has_each_pair_once_with_its_expert(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, num_experts))
    tokens = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    ids = torch.tensor(data.draw(st.lists(tokens, min_size=1, max_size=40)))
    block_m = data.draw(st.sampled_from((1, 2, 16)))
    experts, pairs = make_plan(ids, num_experts, block_m)

    assert len(experts) == len(pairs) == max_blocks(ids.numel(), num_experts, block_m)
    used = experts >= 0
    assert sorted(used.tolist(), reverse=True) == used.tolist(), "unused blocks are the last"
    seen = pairs[used]
    assert sorted(seen[seen >= 0].tolist()) == list(range(ids.numel()))
    for expert, block in zip(experts[used].tolist(), seen, strict=True):
        rows = block[block >= 0]
        assert len(rows), "no block is empty"
        assert (ids.flatten()[rows.long()] == expert).all()
        assert rows.tolist() == sorted(rows.tolist()), "the order is fixed"


def test_plan_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.rand(100, 3, generator=torch.Generator().manual_seed(1)).topk(2).indices
    whole = make_plan(ids, 3, 16)
    monkeypatch.setattr(moe_plan, "MAX_CHUNK", 64)
    cut = make_plan(ids, 3, 16)
    used = whole[0] >= 0
    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1][used], whole[1][used])


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "block_m", "blocks"),
    [(8, 128, 16, 8), (3, 128, 16, 3), (32768, 128, 128, 383), (16, 1, 16, 1), (17, 1, 16, 2)],
)
def test_most_blocks(num_pairs: int, num_experts: int, block_m: int, blocks: int) -> None:
    assert max_blocks(num_pairs, num_experts, block_m) == blocks


# ---- batch invariance ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [THREE, Case(18, 24, 16, 1, 1, BF16, config=SMALL_DESCRIBED), Case(3, 32, 24, 3, 2)],
    ids=["several tiles", "descriptors", "launcher's choice"],
)
def test_bits_of_a_token_are_its_own(case: Case) -> None:
    with ordered_dots():
        verify_invariant(case)


@pytest.mark.mutation
def test_a_sum_in_another_order_has_other_bits(tmp_path: Path) -> None:
    old = "(token * TOP_K + choice) * d"
    broken = mutant(moe, old, "(token * TOP_K + (choice + token) % TOP_K) * d", tmp_path)
    verify(THREE, kernels=broken)
    with ordered_dots(), pytest.raises(Mismatch, match="other bits"):
        verify_invariant(THREE, kernels=broken)


def test_tiles_of_the_invariant_mode_do_not_depend_on_the_batch() -> None:
    for target in (80, 90, 100):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            configs = {
                choose_config(target, dtype, num_tokens, 8, 128, batch_invariant=True)
                for num_tokens in (1, 4, 64, 512, 16384)
            }
            assert len(configs) == 1


# ---- bad input -----------------------------------------------------------------------------------

GOOD = Case(3, 32, 24, 4, 2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.half(), "x is torch.float16 and gate_up torch.float32"),
        ("down", lambda down: down.int(), "down is torch.int32; it must be float32"),
        ("weights", lambda w: w.half(), "weights is torch.float16; it must be float32"),
        ("ids", lambda ids: ids.float(), "ids is torch.float32; it must be int32 or int64"),
        ("x", lambda x: x[0], r"x is \[32\]; it must be \[N, d\]"),
        ("x", lambda x: x.t().contiguous().t(), "its last dimension must be contiguous"),
        ("gate_up", lambda w: w[..., :16], r"gate_up is \[4, 48, 16\]; it must be \[E, 2 I, 32\]"),
        ("gate_up", lambda w: w[:, :47].contiguous(), "its second size must be even"),
        ("gate_up", lambda w: w.mT.contiguous().mT, "gate_up has shape .* must be contiguous"),
        ("down", lambda w: w[:3], r"down is \[3, 32, 24\]; it must be \[4, 32, 24\]"),
        ("weights", lambda w: w[:, :1], r"weights is \[3, 1\]; it must be \[3, 2\]"),
        ("ids", lambda ids: ids[:2], r"ids is \[2, 2\]; it must be \[3, k\]"),
        ("ids", lambda ids: ids.repeat(1, 3), "6 experts per token; with 4 experts"),
        ("ids", lambda ids: ids[:, :0], "0 experts per token"),
        ("ids", lambda ids: ids.fill_(4), r"ids\[0, 0\] is 4; there are experts 0 to 3"),
        ("ids", lambda ids: ids.fill_(-1), r"ids\[0, 0\] is -1"),
        ("x", lambda x: x.to("meta"), "x is on meta"),
    ],
)
def test_bad_input(name: str, change, message: str) -> None:
    inputs = inputs_of(GOOD, "cpu")._asdict()
    inputs[name] = change(inputs[name])
    if name == "ids" and "experts per token" in message:
        inputs["weights"] = torch.ones(inputs["ids"].shape)
    with pytest.raises(KernelError, match=message):
        moe.moe_experts(**inputs)


def test_bad_output() -> None:
    inputs = inputs_of(GOOD, "cpu")
    with pytest.raises(KernelError, match=r"out is \[3, 31\]; it must be \[3, 32\]"):
        moe.moe_experts(*inputs, out=torch.empty(3, 31))
    with pytest.raises(KernelError, match=r"out is torch\.float16"):
        moe.moe_experts(*inputs, out=torch.empty(3, 32, dtype=torch.float16))


def test_experts_without_columns() -> None:
    with pytest.raises(KernelError, match="no size of an expert may be 0"):
        moe.moe_experts(*inputs_of(GOOD, "cpu")[:1], torch.empty(4, 0, 32), torch.empty(4, 32, 0),
                        torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64))  # fmt: skip


@pytest.mark.parametrize("config", [SMALL, SMALL_DIRECT], ids=["sorted", "direct"])
def test_an_id_that_is_not_looked_at_hurts_its_token_only(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without debugging nobody waits for the ids: memory stays safe, neighbours right."""
    monkeypatch.setattr(moe_plan, "INTERPRETED", False)
    x, gate_up, down, weights, ids = inputs_of(Case(2, 32, 24, 3, 3), "cpu")
    right = moe.moe_experts(x, gate_up, down, weights, ids, config=config)
    ids[1] = torch.tensor([-5, 2**40, 1])
    got = moe.moe_experts(x, gate_up, down, weights, ids, config=config)
    assert torch.equal(got[0], right[0])
    assert not torch.equal(got[1], right[1])


# ---- deliberate bugs -----------------------------------------------------------------------------

FEW = Case(3, 32, 24, 4, 2)
TAILS = Case(3, 40, 24, 3, 2, config=SMALL, gaps=True)
BLOCKS = Case(18, 40, 24, 4, 3, config=SMALL)
DESCRIBED = Case(18, 40, 24, 2, 2, torch.float16, config=SMALL_DESCRIBED)
DIRECT = Case(1, 72, 40, 5, 3, config=SMALL_DIRECT)
BUGS = {
    "gate and up swapped": ("silu * up)", "up / (1 + tl.exp2(-up * LOG2_E)) * gate)", FEW),
    "no SiLU": ("(silu * up)", "(gate * up)", FEW),
    "up begins a row late": ("gate_row + intermediate\n", "gate_row + intermediate + 1\n", FEW),
    "no routing weight": ("product * routing[:, None]", "product", FEW),
    "weight of another choice": ("load(weights + pair,", "load(weights + pair // 2 * 2,", FEW),
    "expert of the next block": (
        "expert = tl.load(expert_of_block + block)\n    if",
        "expert = tl.load(expert_of_block + block + 1)\n    if",
        FEW,
    ),
    "the last group as large as others": ("num_blocks - first, g", "group, g", BLOCKS),
    "padding rows stored": (
        "mask = valid[:, None] & (columns < d)[None, :]",
        "mask = (row >= 0)[:, None] & (columns < d)[None, :]",
        FEW,
    ),
    "a pair taken for a token": ("pair // top_k, 0", "pair, 0", FEW),
    "x beyond its row": (
        "mask = valid[:, None] & (columns < K)[None, :]",
        "mask = valid[:, None] & (columns >= 0)[None, :]",
        TAILS,
    ),
    "weight beyond its row": (
        "inside = (rows < num_rows)[:, None] & (columns < K)[None, :]",
        "inside = (rows < num_rows)[:, None] & (columns >= 0)[None, :]",
        TAILS,
    ),
    "weight beyond its matrix": (
        "(rows < num_rows)[:, None] & (columns < K)", "(rows >= 0)[:, None] & (columns < K)", TAILS
    ),
    "columns of hidden beyond its row": (
        "stored[:, None] & (columns < intermediate)", "stored[:, None] & (columns >= 0)", TAILS
    ),
    "columns of a contribution beyond its row": (
        "mask = valid[:, None] & (columns < d)[None, :]",
        "mask = valid[:, None] & (columns >= 0)[None, :]",
        TAILS,
    ),
    "a choice missing in the sum": ("static_range(TOP_K)", "static_range(TOP_K - 1)", FEW),
    "hidden of another block": ("hidden.load([block * BLOCK_M", "hidden.load([block", DESCRIBED),
    "up of the first expert": ("up_row = gate_row + inter", "up_row = inter", DESCRIBED),
    "direct: one weight for all": (
        "tl.sum(tl.where(choices == choice, routing, 0.0))", "tl.max(routing)", DIRECT
    ),
    "direct: the first choice's expert": (
        "tl.sum(tl.where(choices == choice, experts, 0))",
        "tl.sum(tl.where(choices == 0, experts, 0))",
        DIRECT,
    ),
    "direct: the last tile missing": ("top_k * num_tiles)", "top_k * num_tiles - 1)", DIRECT),
    "direct: all rows stored": ("block + row, pair >= 0", "block + row, row >= 0", DIRECT),
}  # fmt: skip
PLAN_BUGS = {
    "blocks rounded down": ("(counts + BLOCK_M - 1) // BLOCK_M", "counts // BLOCK_M", FEW),
    "blocks begin late": ("experts < expert, blocks", "experts <= expert, blocks", FEW),
    "rank off by one": ("tl.cumsum(mine.to(tl.int32)) - 1", "tl.cumsum(mine.to(tl.int32))", FEW),
    "unused blocks unmarked": ("expert == NUM_EXPERTS - 1, num", "expert < 0, num", BLOCKS),
    "padding unmarked": ("padding < num_own_blocks * BLOCK_M", "padding < 0", FEW),
    "expert of a block off by one": ("own_end, expert, -1", "own_end, expert - 1, -1", FEW),
    "pairs behind the last counted": (
        "tl.where(pairs < num_pairs, existing_expert(experts, NUM_EXPERTS), NUM_EXPERTS)",
        "existing_expert(experts, NUM_EXPERTS)",
        FEW,
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    old, new, case = BUGS[bug]
    assert convicted(verify, [case], mutant(moe, old, new, tmp_path))


@pytest.mark.mutation
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bug", PLAN_BUGS)
def test_a_bug_of_the_plan_is_found(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, case = PLAN_BUGS[bug]
    broken = mutant([moe, moe_plan], old, new, tmp_path)
    # Memory of an earlier call may hold what a broken plan forgets to write.
    fresh = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fresh(*a, **k).fill_(7))
    assert convicted(verify, [case], broken)


@pytest.mark.mutation
@pytest.mark.parametrize(("old", "new"), [
    ("scores - tl.max(scores, axis=0)", "scores"),
    ("choice += tl.load", "scores += tl.load"),
    ("choice = scores\n", "choice = 0.0 * scores\n"),
    ("EXPERTS - 1), axis=0)", "EXPERTS - 1), axis=0) * 0"),
    ("choice = tl.where(expert == best", "scores = tl.where(expert == best"),
    ("if NORMALIZE", "if not NORMALIZE"), ("weights * factor", "weights"),
    ("logits_ptr + token * EXPERTS", "logits_ptr + token * BLOCK"),
    ("inside, other=float(\"-inf\")", "inside, other=0.0"),
    ("tl.where(inside, choice", "tl.where(expert >= 0, choice"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bug_of_the_router_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert convicted(verify_route, CASES[1:8], mutant(moe_route, old, new, tmp_path))


def test_bugs_are_found_by_cases_that_are_tried_everywhere() -> None:
    assert {case for _, _, case in [*BUGS.values(), *PLAN_BUGS.values()]} <= set(CASES)
