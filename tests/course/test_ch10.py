"""Chapter 10's own functions, and the claims about FlashAttention that are arithmetic."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from notebook_chapter import NOTEBOOKS, Chapter

from minillm.models.presets import preset
from minillm.plan.hardware import DATASHEET
from minillm_exercises.chapters import ch10, ch10_pictures, ch10_tables
from minillm_exercises.errors import ExerciseError

H100, LLAMA = DATASHEET["h100-sxm"], preset("llama-3.1-8b")


def read(state, score, value):
    """The chapter's online softmax of one row."""
    m, z, o = state
    new = max(m, score)
    shrink, weight = math.exp(m - new), math.exp(score - new)
    return (new, z * shrink + weight, o * shrink + weight * value), shrink


def test_slow_memory_counts_what_comes_and_what_goes():
    slow = ch10.Slow(*ch10.inputs(5, 4))
    assert slow.moved == 0
    assert [(rows.start, rows.stop) for rows in slow.tiles("Q", 2)] == [(0, 2), (2, 4), (4, 5)]
    tile = slow.read("Q", slice(4, 9))
    slow.write("O", 2 * tile, slice(4, 5))
    slow.write("S", torch.ones(5, 5))
    assert slow.of == {"Q": 4, "O": 4, "S": 25}
    assert slow.moved == 33
    assert torch.equal(slow.tensors["O"][4], 2 * slow.tensors["Q"][4])
    assert slow.tensors["O"][:4].eq(0).all()


def test_run_hands_over_the_block_and_returns_the_memory():
    slow = ch10.run(lambda slow, block: slow.read("K", slice(0, block)), 8, 3, 10)
    assert slow.moved == 24


# claims I1, I4, I8, I17 ----------------------------------------------------------------------


def test_standard_attention_moves_what_claim_i1_says_and_the_value_reads_it_forgets():
    n, d = 4096, 128
    listed = n * d * 2 + n * n + n * n + n * n + n * n + n * d  # Q, K; S out, in; P out, in; O
    assert ch10.moved("standard", d, 64, n) == listed + n * d


@pytest.mark.parametrize(
    ("width", "block", "keys_outside", "queries_outside"),
    [
        (128, 64, "1.50", "0.98"),
        (128, 96, "1.02", "0.67"),
        (128, 128, "0.77", "0.50"),
        (128, 256, "0.40", "0.26"),
        (64, 64, "0.77", "0.50"),
    ],
)
def test_the_ratios_of_claim_i4(width, block, keys_outside, queries_outside):
    found = [f"{float(ch10.ratio(loop, width, block, 4096)):.2f}" for loop in ch10.LOOPS]
    assert found == ["1.00", keys_outside, queries_outside]


@pytest.mark.parametrize(("loop", "least"), [("keys outside", 97), ("queries outside", 64)])
def test_the_block_from_which_tiles_save_elements(loop, least):
    """For long texts: below it more than the tables, above it fewer."""
    long = 2**24 * 97  # a multiple of the blocks
    assert ch10.ratio(loop, 128, least - 1, long) > 1
    assert ch10.ratio(loop, 128, least + 1, long) < 1


def test_traffic_is_quadratic_and_falls_with_the_fast_memory_as_claim_i3_says():
    long = 2**20
    doubled = Fraction(*(ch10.moved("queries outside", 128, 128, n) for n in (2 * long, long)))
    larger = Fraction(*(ch10.moved("queries outside", 128, block, long) for block in (128, 256)))
    wider = Fraction(
        ch10.moved("queries outside", 128, 64, long), ch10.moved("queries outside", 64, 128, long)
    )  # the same fast memory 4 B d
    assert [round(float(each), 2) for each in (doubled, larger, wider)] == [4, 2, 4]


def test_an_unknown_loop_is_refused():
    with pytest.raises(ExerciseError, match="'rows'; it must be one of standard"):
        ch10.moved("rows", 1, 1, 1)
    with pytest.raises(ExerciseError, match="'standard'; it must be one of keys outside"):
        ch10_pictures.visits("standard", 3)


# claims I9, I10, I11, I12, I6 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "outcome"),
    [
        ("MATH", "runs"),
        ("FLASH_ATTENTION", "runs"),
        ("EFFICIENT_ATTENTION", "raises"),
        ("CUDNN_ATTENTION", "raises"),
    ],
)
def test_what_runs_on_a_cpu(backend, outcome):
    heads = [x[None] for x in ch10.inputs(4, 8)]
    assert ch10.outcome(lambda: ch10.forced(backend, *heads)) == outcome


def test_forced_attention_is_attention():
    heads = [x[None] for x in ch10.inputs(4, 8)]
    right = ch10.sdpa(*ch10.inputs(4, 8))
    assert ch10.worst(ch10.forced("FLASH_ATTENTION", *heads)[0], right) < 1e-6


def test_outcome_lets_other_errors_through():
    with pytest.raises(ZeroDivisionError):
        ch10.outcome(lambda: 1 / 0)


def test_claim_i18s_twin_on_a_cpu():
    errors, least = ch10.errors({"SDPA": ch10.sdpa}, 512, 64)
    assert 2e-5 < errors["float16"]["SDPA"] < 2e-3
    assert errors["float32"]["SDPA"] < 1e-5
    assert least["float32"] < least["float16"] < least["bfloat16"]


# the rest of the numbers ---------------------------------------------------------------------


def test_masked_is_causal_attention():
    q, k, v = ch10.inputs(9, 8, dtype=torch.float64)
    assert ch10.worst(ch10.masked(q, k, v), ch10.sdpa(q, k, v, is_causal=True)) < 1e-12


def test_widened_attention_takes_and_returns_half_precision():
    seen = []

    def attend(q, k, v):
        seen.append(q.dtype)
        return q

    q, k, v = ch10.inputs(2, 4, dtype=torch.bfloat16)
    assert ch10.widened(attend)(q, k, v).dtype == torch.bfloat16
    assert seen == [torch.float32]


def test_new_maxima_by_hand_and_on_average():
    assert ch10.new_maxima([3, 1, 3, 4, 4, 9]) == 3
    assert ch10.new_maxima([]) == 0
    assert ch10.new_maxima([-math.inf]) == 0
    assert ch10.expected_maxima(3) == pytest.approx(11 / 6)
    rows = ch10.shuffled(3, 600)
    assert sum(map(ch10.new_maxima, rows)) / 600 == pytest.approx(11 / 6, abs=0.1)
    assert all(sorted(row) == [0, 1, 2] for row in rows)


def test_worst_keeps_what_is_not_a_number():
    assert math.isnan(ch10.worst(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])))


def test_attention_share_is_amdahls_law_over_the_bounds():
    share = ch10.attention_share(LLAMA, 2048, H100)
    elements = 32 * 32 * (4 * 2048**2 + 4 * 2048 * 128)
    assert share.tables == pytest.approx(elements * 2 / 3.35e12)
    assert share.attention == pytest.approx(4 * 32 * 32 * 128 * 2048 * 2049 / 2 / 989e12)
    assert share.gain(1) == 1
    assert share.gain(math.inf) == pytest.approx((share.tables + share.rest) / share.rest)
    assert f"{100 * share.share:.0f} {share.gain(4):.2f}" == "27 1.26"
    assert f"{ch10.attention_share(LLAMA, 131072, H100).gain(4):.2f}" == "3.55"  # claim I16


def test_a_short_prompt_costs_at_least_the_reading_of_the_weights():
    share = ch10.attention_share(LLAMA, 1, H100)
    assert share.rest == pytest.approx(15.0e9 / 3.35e12, rel=0.02)


def test_decode_share_is_small_behind_a_short_context():
    assert f"{100 * float(ch10.decode_share(LLAMA, 2048)):.1f}" == "1.8"  # claim I13
    assert ch10.decode_share(LLAMA, 131072) > Fraction(1, 2)


# tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (2, 9), (1, 9), (5, 3)])
def test_the_engine_aligns_the_last_query_with_the_last_key(queries, keys):
    q, k, v = ch10.inputs(queries, 16, keys)
    by, found = ch10_tables.engine(q, k, v, causal=True, block=16)
    assert by in ("kernel", "reference")
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    scores = (q @ k.T / 4).masked_fill(~seen, -math.inf)
    right = scores.softmax(-1).nan_to_num(0) @ v
    assert ch10.worst(found, right) < 1e-5


def test_without_triton_the_reference_is_asked(monkeypatch):
    monkeypatch.setattr(ch10_tables, "find_spec", lambda name: None)
    q, k, v = ch10.inputs(9, 16)
    by, found = ch10_tables.engine(q, k, v, causal=True, block=16)
    assert by == "reference"
    assert ch10.worst(found, ch10.masked(q, k, v)) < 1e-5


def test_the_kernel_runs_where_kernels_run(monkeypatch):
    """Interpreted on the CPU; compiled on a GPU, on the device of the query if that is one."""
    from minillm_kernels import launch

    q = torch.ones(2, 16)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert ch10_tables.kernel_device(q) == torch.device("cpu")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ch10_tables.kernel_device(q) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ch10_tables.kernel_device(q) == torch.device("cuda")
    there = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    assert ch10_tables.kernel_device(there) == torch.device("cuda:1")


def test_on_a_gpu_the_kernel_gets_tensors_of_the_gpu(monkeypatch):
    """The device is fake: "meta" has shapes and no numbers."""
    from minillm_kernels import flash_attention

    seen = []

    def kernel(*arguments, block):
        seen.append((arguments, block))
        return torch.full((9, 1, 16), 7.0)

    monkeypatch.setattr(ch10_tables, "kernel_device", lambda q: torch.device("meta"))
    monkeypatch.setattr(flash_attention, "flash_attention", kernel)
    by, found = ch10_tables.engine(*ch10.inputs(9, 16), causal=True, block=32)
    ((*tensors, scale, causal), block) = seen[0]
    assert [tuple(each.shape) for each in tensors] == [(9, 1, 16)] * 3 + [(2,)] * 2
    assert {each.device.type for each in tensors} == {"meta"}
    assert (scale, causal, block) == (0.25, True, 32)
    assert by == "kernel"
    assert torch.equal(found, torch.full((9, 16), 7.0))


def test_times_are_taken_on_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("MINILLM_QUICK", "1")
    seen = set()
    ch10_tables.times(lambda *tensors: seen.update(t.device.type for t in tensors), (2,), 8, "meta")
    assert seen == {"meta"}


def test_the_table_and_sdpa_work_on_another_device():
    tensors = ch10.inputs(4, 8, device="meta")
    assert ch10.masked(*tensors).device.type == "meta"
    assert ch10.sdpa(*tensors, is_causal=True).device.type == "meta"


# pictures ------------------------------------------------------------------------------------


def test_both_walks_visit_the_tiles_on_and_below_the_diagonal():
    by_keys, by_queries = (ch10_pictures.visits(order, 3) for order in ch10.LOOPS[1:])
    assert by_keys == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert by_queries == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]


def test_transfers_count_the_tiles_of_a_walk():
    walks = [ch10_pictures.visits(order, 3) for order in ch10.LOOPS[1:]]
    first, second = (
        ch10_pictures.transfers(order, walk)
        for order, walk in zip(ch10.LOOPS[1:], walks, strict=True)
    )
    assert first == {"K, V in": 6, "Q in": 6, "O in": 6, "O out": 6}
    assert second == {"K, V in": 12, "Q in": 3, "O in": 0, "O out": 3}
    part = ch10_pictures.transfers(ch10.LOOPS[2], walks[1][:3])
    assert part == {"K, V in": 6, "Q in": 2, "O in": 0, "O out": 2}


def test_the_chapter_s_attention_works_on_another_device():
    """Its own functions, from the committed cells, on a device that has shapes and no numbers."""
    cells = Chapter.load(NOTEBOOKS / "10_flash_attention.ipynb").cells
    space = {"torch": torch, "math": math}
    wanted = ("def plain(", "def part(", "def tiled(", "def causal(")
    for cell in cells:
        if cell["cell_type"] == "code" and any(name in cell["source"] for name in wanted):
            exec(cell["source"], space)
    tensors = ch10.inputs(70, 8, 100, device="meta")
    for name in ("plain", "tiled", "causal"):
        found = space[name](*tensors)
        assert (found.device.type, tuple(found.shape)) == ("meta", (70, 8))
