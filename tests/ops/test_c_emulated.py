"""The C functions on Arm processors, with and without BF16 instructions, emulated by qemu: the
checks of the other tests of C, against torch and float64, with bands around every tensor."""

import shutil
from collections.abc import Iterator
from ctypes import c_int64

import pytest
import torch

from minillm.ops import c_library, cpu
from tests.ops import emulated, small_decoders
from tests.ops import test_c_decode as decode
from tests.ops import test_c_experts as experts
from tests.ops import test_c_layers as layers
from tests.ops import test_c_linear as linear
from tests.ops import test_c_prefill as prefill
from tests.ops import test_c_rope as rope
from tests.ops import test_c_rows as rows
from tests.ops import test_c_sampling as sampling
from tests.ops import test_c_sums as sums
from tests.ops import test_int8_cache as int8
from tests.ops.c_variants import ELEMENTS, use, with_threads
from tests.ops.sparse_decoders import SPARSE

CELLS = [(name, element) for name in emulated.MACHINES for element in ELEMENTS]
FAST = ("neon_bf16", "BF16")
BF16 = torch.bfloat16
DECODERS = small_decoders.CONFIGS | SPARSE


class Library:
    """The functions of an emulated library for one element type."""

    def __init__(self, built: emulated.Emulated, element: c_library.Element):
        self.built, self.dtype = built, ELEMENTS[element]
        self.both = built, self.dtype


@pytest.fixture(
    scope="module",
    params=[pytest.param(cell, marks=() if cell == FAST else pytest.mark.slow) for cell in CELLS],
    ids=" ".join,
)
def library(request) -> Iterator[Library]:
    """The library of one machine; the fast one is compiled without much optimisation."""
    name, element = request.param
    machine = emulated.MACHINES[name]
    emulated.skip_without_tools()
    program = emulated.kept(machine, element, ("-O1",) if request.param == FAST else ())
    built = emulated.Emulated(program, machine)
    yield Library(built, element)
    built.close()


@pytest.fixture
def c(library: Library) -> Iterator[Library]:
    """The same, with the memory of this test."""
    with library.built.memory.recorded():
        yield library


def test_rows(c):
    rows.test_norm(c.both, 33)
    rows.test_sum_and_norm(c.both, 100, in_place=True)
    rows.test_gate(c.both, 33)
    rows.test_query_and_cache(c.both, 24, normed=True, interleaved=False)
    rows.test_query_and_cache(c.both, 24, normed=False, interleaved=True)


def test_angles(c, monkeypatch):
    monkeypatch.setattr(cpu, "functions", lambda dtype: c.built)
    rope.test_angles_are_those_of_float64(33)


def test_products(c):
    panels = linear.Panels(*c.both)
    for n in linear.COUNTS:
        panels.check(n, 96, 33, biased=True)
    linear.test_a_gated_product_is_the_product_and_then_the_gate(panels, 32, biased=True)
    linear.test_an_embedding_s_rows(panels)
    linear.test_sums_are_rounded_to_the_nearest_even(panels)
    sums.check_parts(sums.Sums(*c.both), 17, 32, 33, 8)


def test_decode_attention(c):
    attend = decode.Attend(*c.both)
    for length in (1, 17, 129):
        decode.test_lengths_around_vectors_and_tiles(attend, length)
    decode.test_every_number_of_query_heads(attend, 9)
    decode.test_few_heads_and_long_sequences_are_divided(attend, 600, 3)
    decode.test_what_points_outside_is_refused_and_nothing_is_written(attend, "a negative length")


def test_prefill_attention(c):
    attend = prefill.Attend(c.built, c.dtype)
    attend.check(prefill.make_batch(c.dtype, [70, 9], [40, 9], d=48, block_size=16, window=50))


def test_int8_pages(c, monkeypatch):
    use(monkeypatch, c.built, c.dtype)
    for seed, sizes in enumerate(int8.SIZES):
        int8.check_bits(int8.random_case(100 + seed, sizes, c.dtype, "plain"))
    int8.check_bits(int8.make_case(1, [300, 70], [40, 3], 64, window=70, dtype=c.dtype, steep=3))
    int8.check_prologue(c.dtype, normed=True)
    int8.test_c_rounds_as_torch(c.dtype)


def test_sampling(c):
    found = c.built
    for dtype in sampling.DTYPES:
        sampling.test_the_tokens_are_torch_s(found, dtype, 1003)
    sampling.test_shards_choose_what_the_whole_row_chooses(found, 129)
    sampling.test_logprobs_are_those_of_float64(found, BF16, 1003, 5)


def all_layers(c, monkeypatch, name: str, quick: bool = False) -> None:
    """A decoder in one call is near to float64, and has the bits of layer by layer."""
    use(monkeypatch, c.built, c.dtype)
    monkeypatch.setenv(cpu.PANELS, "1")
    if name in SPARSE:
        experts.check_one_call(name, c.dtype)
        return
    model = small_decoders.build(DECODERS[name], dtype=c.dtype)
    if not quick:
        layers.test_one_call_is_the_layers_one_by_one(model)
    layers.test_one_call_is_near_to_float64(model)


def test_all_layers(c, monkeypatch):
    all_layers(c, monkeypatch, "qwen3, with norms of heads", quick=True)


def test_threads(c):
    """Four threads, many small jobs: always the bits of one thread."""
    panels = linear.Panels(*c.both)
    x, weight = panels.draw(5, 64), panels.pack(panels.draw(320, 64, seed=1))
    expected = panels.product(x, weight, None, 320)
    with with_threads(c.built, 4):
        for _ in range(100):
            assert torch.equal(panels.product(x, weight, None, 320), expected)
        for seed in range(5):
            assert call(c, "wrong_in_random_jobs", seed, 100, 4) == 0
        assert call(c, "wrong_after_short_job") == 0
        assert call(c, "sleeps_until_done") == 0


def call(c, name: str, *numbers: int) -> int:
    """A function of numbers."""
    function = getattr(c.built, name)
    function.restype, function.argtypes = c_int64, [c_int64] * len(numbers)
    return function(*numbers)


MISTAKES = {  # in the code of NEON: file, text, and what takes its place
    "one operand of dot products": (
        "neon.h", "vreinterpretq_bf16_u32(a)", "vreinterpretq_bf16_u32(b)"
    ),
    "odd lanes from the even ones": ("neon.h", "bf16_f32(odd)", "bf16_f32(even)"),
    "transposed lanes": (
        "transpose.h", "SHUFFLE(b[i], b[i + 1], 1, 5, 3, 7)", "SHUFFLE(b[i], b[i + 1], 1, 5, 7, 3)"
    ),
    "sums of lanes": ("lanes.h", "(0, 4, 2, 6), (1, 5, 3, 7)", "(0, 4, 2, 6), (1, 5, 3, 6)"),
    "two positions change places": (
        "int8_cache.c", "return a[0];", "return SHUFFLE(a[0], a[0], 1, 0, 2, 3);"
    ),
}  # fmt: skip


def products_and_attention(c, monkeypatch) -> None:
    test_products(c)
    test_decode_attention(c)
    test_prefill_attention(c)
    test_int8_pages(c, monkeypatch)


@pytest.mark.mutation
@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    file, text, mistake = MISTAKES[name]
    sources = tmp_path / "sources"
    shutil.copytree(c_library.SOURCES, sources)
    right = (sources / file).read_text()
    assert right.count(text) == 1
    (sources / file).write_text(right.replace(text, mistake))
    machine = emulated.MACHINES[FAST[0]]
    program = emulated.build(machine, "BF16", tmp_path / "made", sources, ("-O1",))
    built = emulated.Emulated(program, machine)
    try:
        with built.memory.recorded(), pytest.raises(AssertionError):
            products_and_attention(Library(built, "BF16"), monkeypatch)
    finally:
        built.close()


@pytest.mark.slow
def test_more_products(c):
    panels = linear.Panels(*c.both)
    for size, out in ((32, 1), (576, 100)):
        linear.test_products(panels, size, out, biased=False)
    linear.test_rows_in_several_chunks(panels, 65, 16384, 33)
    linear.test_nan_stays_in_its_row_or_its_output(panels)
    linear.test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(panels)
    for parts in (1, 2, 4):
        sums.test_parts_are_added_as_a_tree(sums.Sums(*c.both), parts, 96, 100)


@pytest.mark.slow
def test_more_rows(c):
    rows.test_norm_of_rows_that_lie_apart(c.both)
    rows.test_the_gate_of_extreme_numbers(c.both)
    rows.test_the_gate_is_exact_to_a_few_units_of_the_last_place(c.both)
    rows.test_sums_are_rounded_to_the_nearest_even(c.both)
    rows.test_a_slot_that_does_not_exist_is_counted_and_not_written(c.both)


@pytest.mark.slow
def test_more_attention(c):
    attend, prompts = decode.Attend(*c.both), prefill.Attend(c.built, c.dtype)
    for seed in range(8):
        decode.test_it_is_attention(attend, seed)
        prefill.test_it_is_attention(prompts, seed)
    decode.test_the_maximum_is_carried_from_tile_to_tile(attend)
    decode.test_a_tile_of_scores_of_minus_infinity_weighs_nothing(attend)
    decode.test_rows_of_length_zero_are_zero(attend)
    prefill.test_values_may_be_a_part_of_the_keys(prompts, (48, 32))
    prefill.test_a_row_has_the_same_bits_however_its_prompt_is_cut(prompts, 50)


@pytest.mark.slow
def test_more_sampling(c):
    found = c.built
    sampling.test_random_truncation_is_torch_s(found)
    sampling.test_ties_at_the_edge(found)
    sampling.test_the_noise_has_torch_s_bits(found)
    sampling.test_a_row_is_drawn_alone_as_among_others_and_by_any_number_of_threads(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_all_layers_of_every_decoder(c, monkeypatch, name):
    all_layers(c, monkeypatch, name)
