"""Deliberate mistakes in the C sources, each of which a test beside this file must find.

None of them reads or writes far outside: that would end this process, not fail a test.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from minillm.ops import c_library, cpu
from tests.ops import c_variants, small_decoders
from tests.ops import test_c_decode as decode
from tests.ops import test_c_halves as halves
from tests.ops import test_c_layers as layers
from tests.ops import test_c_linear as linear
from tests.ops import test_c_rows as rows
from tests.ops import test_c_sums as sums
from tests.ops.c_variants import DIVIDED, ELEMENTS, Mixed, built, use, with_threads

QUICKLY = "-O1"


@dataclass(frozen=True)
class Mutant:
    """A pattern that the sources have once, what takes its place, and who should notice."""

    pattern: str
    mistake: str
    found_by: Callable
    function: str
    element: c_library.Element = "F32"
    path: str = "native"  # of PRODUCT_PATHS, where not all of them come this way

    @property
    def file(self) -> str:
        """What has to be compiled to see it."""
        if "panel" in self.function:
            return "linear.c"
        return "decode.c" if self.function == "decode_attention" else "rows.c"


def on(kind: Callable, test: Callable, *arguments: object) -> Callable:
    """The test of what `kind` makes of a library and its element type."""
    return lambda c: test(kind(*c), *arguments)


norm = partial(rows.test_norm, d=17)
total = partial(rows.test_sum_and_norm, d=33, in_place=False)
head = partial(rows.test_query_and_cache, d=24, normed=True, interleaved=False)
pairs = partial(rows.test_query_and_cache, d=24, normed=False, interleaved=True)
tiles = on(decode.Attend, decode.test_lengths_around_vectors_and_tiles, 129)
maxima = on(decode.Attend, decode.test_the_maximum_is_carried_from_tile_to_tile)
minus = on(decode.Attend, decode.test_a_tile_of_scores_of_minus_infinity_weighs_nothing)
parts = on(decode.Attend, decode.test_few_heads_and_long_sequences_are_divided, None, 3)
windows = on(decode.Attend, decode.test_windows, 65)
groups = on(decode.Attend, decode.test_every_number_of_query_heads, 9)
empty = on(decode.Attend, decode.test_rows_of_length_zero_are_zero)
refused = decode.test_what_points_outside_is_refused_and_nothing_is_written
outside = on(decode.Attend, refused, "a negative length")
gated = linear.test_a_gated_product_is_the_product_and_then_the_gate
gates = on(linear.Panels, gated, 32, True)
embedded = on(linear.Panels, linear.test_an_embedding_s_rows)
chunks = on(linear.Panels, linear.test_rows_in_several_chunks, 150, 8192, 40)
pieces = on(linear.Panels, linear.test_products, 576, 33, True)


def products(c):
    """With one thread, so that a thread has two panels and takes them as a pair."""
    with with_threads(c[0], 1):
        linear.test_products(linear.Panels(*c), 96, 33, biased=True)


def tree(c):
    for count in (8, 60):
        sums.check_parts(sums.Sums(*c), count, 32, 33, 8)


N, A, S, W, D, L = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "norm_rope_write",
    "decode_attention",
    "panel_product",
)
MUTANTS = {
    "the end of a row is not squared": Mutant(
        r"i < d; i\+\+\) lanes", "i + 1 < d; i++) lanes", norm, N
    ),
    "eps is forgotten": Mutant(r" \+ eps\);\n(    for .* out)", r");\n\1", rows.test_eps_counts, N),
    "rows are thought to touch": Mutant(
        r"x \+ row \* c->stride", "x + row * c->d", rows.test_norm_of_rows_that_lie_apart, N
    ),
    "the norm is that of x alone": Mutant(r"norm_row\(s, c->w", "norm_row(a, c->w", total, A),
    "the sum is not stored": Mutant(
        r"s\[i\] = store\(load\(a\[i\]\)", "s[i] = store(0.f", total, A
    ),
    "bits are cut off": Mutant(
        r" \+ 0x7fff \+ \(\(bits >> 16\) & 1\)",
        "",
        rows.test_sums_are_rounded_to_the_nearest_even,
        A,
        "BF16",
    ),
    "huge negatives": Mutant(
        r"\w < -88\.f \? \w \* 0\.f : (\w+)", r"\1", rows.test_the_gate_of_extreme_numbers, S
    ),
    "a coefficient of exp": Mutant(
        r"1\.f / 120", "1.f / 121", rows.test_the_gate_is_exact_to_a_few_units_of_the_last_place, S
    ),
    "the halves of the gate change places": Mutant(
        r"\*up = gate \+ c->size",
        "*up = gate, *unused = gate + c->size",
        lambda c: rows.test_gate(c, 17),
        S,
    ),
    "rotation backwards": Mutant(r"x\[i\] \* cos\[i\] - x", "x[i] * cos[i] + x", head, W),
    "pairs are halves": Mutant(r"x\[2 \* i\] \* cos", "x[i] * cos", pairs, W),
    "keys get the queries' norm": Mutant(
        r"(?<=rotate\(k, p->)k(?=_weight, p->eps, c, s, p->k_cache)", "q", head, W
    ),
    "values from the keys": Mutant(r"\*v = k \+ kv_heads \* d", "*v = k", head, W),
    "every head in the first's place": Mutant(
        r"v_cache \+ at,", "v_cache + at - h * p->head_stride,", head, W
    ),
    "wrong slots are not counted": Mutant(
        r"if \(slot >= p->all_slots\) p->wrong\+\+;",
        "",
        rows.test_a_slot_that_does_not_exist_is_counted_and_not_written,
        W,
    ),
    "a maximum of its own for each tile": Mutant(
        r"best = state\[dim\] > best \? state\[dim\] : best;", "", maxima, D
    ),
    "minus infinity less itself": Mutant(r"best == -INFINITY \? 0\.f : best", "best", minus, D),
    "old values do not shrink": Mutant(r"if \(shrink != 1\.f\)", "if (0)", maxima, D),
    "exp of -infinity": Mutant(r"x < -87\.f \? -87\.f : x", "x", maxima, D),
    "what is behind a tile's end counts": Mutant(
        r"(seen.end; i % LANES; i\+\+\) scores\[i\]) = -INFINITY", r"\1 = 0", tiles, D
    ),
    "keys of a run's first position": Mutant(r"key \+ j \* p->k\.row", "key", tiles, D),
    "columns behind the first ones": Mutant(  # both branches: which one runs depends on LANES
        r"first \+ j, 2(, sums \+ j, stride\);\s*\\\s*else add_values\(n, .*, )first \+ j, 1,",
        r"first, 2\1first, 1,",
        groups,
        D,
    ),
    "the first head's keys": Mutant(
        r"1, q \+ r, at, head \* p->k\.head", "1, q + r, at, 0", tiles, D
    ),
    "a window of one less": Mutant(r"end - p->window : 0", "end - p->window + 1 : 0", windows, D),
    "more than 4 heads": Mutant(r"weights \+ g \* TILE \+ seen", "weights + seen", groups, D),
    "parts are not weighted": Mutant(r"\+ part\[dim \+ 1\] \* new", "+ part[dim + 1]", parts, D),
    "parts overlap": Mutant(
        r"end = part_begin\(part \+ 1\)", "end = part_begin(part + 1) + (part == 0)", parts, D
    ),
    "rows of length 0 are left": Mutant(
        r"if \(seen_by\(p, query\)\.end == 0\)", "if (0)", empty, D
    ),
    "negative lengths": Mutant(r"length < 0 \|\| used", "used", outside, D),
    "the last panel is whole": Mutant(
        r"gated \|\| out - first > PANEL \? PANEL : out - first", "PANEL", products, L
    ),
    "the bias is forgotten": Mutant(
        r"floats\[j\] = load\(bias\[j\]\)", "floats[j] = 0", products, L
    ),
    "neighbouring pairs are swapped": Mutant(
        r"j \* TWO, line \+ i,", "j * TWO, line + (i ^ 2),", products, "pack_panels"
    ),
    "a gate is its own partner": Mutant(r"at \+ num_panels : at", "at : at", gates, L),
    "the other panel of a pair is not written": Mutant(r"i <= other - at", "i <= 0", products, L),
    "the row beside the embedding's": Mutant(
        r"id % PANEL \* TWO", "(id + 1) % PANEL * TWO", embedded, "panel_rows"
    ),
    "chunks begin at 0": Mutant(r"= task / num_panels \* p->chunk", "= 0", chunks, L),
    "parts are added from left to right": Mutant(
        r"; part & 1; part >>= 1\)", "; part > 0; part = 0)", tree, "panel_sums"
    ),
    "every part reads the first inputs": Mutant(
        r"multiply_rows\(p, x \+ k / PAIR,", "multiply_rows(p, x,", tree, "panel_sums"
    ),
    "the other panel's parts are not added": Mutant(
        r"if \(other != panel\) join", "if (0) join", tree, "panel_sums"
    ),
    "the next part overwrites the sum": Mutant(  # without leaving the array
        r"(part & 1)(; part >>= 1\)[\s\S]*?return height) \+ 1;",
        r"\1 && height\2 + (part < 1);",
        tree,
        "panel_sums",
    ),
    "sums begin in the first row": Mutant(
        r"write_totals\(sums\[0\], p->totals \+ to",
        "write_totals(sums[0], p->totals + first",
        tree,
        "panel_sums",
    ),
    "the second tile has the first's rows": Mutant(
        r"x \+ 16 \* stride \+ k, ", "x + k, ", products, L, "BF16", "tiles in C"
    ),
    "the same panel twice": Mutant(
        r"_tile_loadd\(6, c, ", "_tile_loadd(6, b, ", products, L, "BF16", "tiles in C"
    ),
    "the second vector has the first's outputs": Mutant(
        r"weights\(panel \+ TWO \* LANES \* c, step\)",
        "weights(panel, step)",
        products,
        L,
        "BF16",
        "no tiles",
    ),
    "the second half of a panel is not computed": Mutant(
        r"first < PANEL; first", "first < 2 * LANES; first", products, L, "BF16", "AVX2"
    ),
    "the upper half of a word comes first": Mutant(
        r"both & 0xffff0000", "both << 16", products, L, "BF16", "AVX2"
    ),
    "even weights twice": Mutant(r"panel \+ step \* PANEL", "panel", products, L, "F32", "AVX2"),
    "every piece is the first": Mutant(
        r"panel \+= PIECE \* PANEL", "panel += 0", pieces, L, "BF16", "AVX2"
    ),
    "the first rows are copied again": Mutant(
        r"x \+= p\.n \* x_stride\)", "x += 0)", chunks, L, "BF16", "AVX2"
    ),
    "a key's sum is another's": Mutant(
        r"\(0, 1, 8, 9, 4, 5, 12, 13\), \(2",
        "(0, 1, 8, 9, 12, 13, 4, 5), (2",
        tiles,
        D,
        "F32",
        "AVX2",
    ),
}


def mutated(mutant: Mutant, folder: Path) -> Path:
    """A library of the one file that matters, with the mistake."""
    options = [*c_variants.PRODUCT_PATHS[mutant.path], f"-DELEMENT_{mutant.element}"]
    names = mutant.file, "common.h", "lanes.h", "panels.h"
    return build_with(names, mutant.pattern, mutant.mistake, options, folder)


def build_with(
    names: tuple[str, ...],
    pattern: str,
    mistake: str,
    options: list[str],
    folder: Path,
    called: tuple[str, ...] = (),
) -> Path:
    """The first of some files and those that it calls, where a pattern that the former have once is
    replaced, as a library."""
    shutil.copytree(c_library.SOURCES, folder / "c")
    count = 0
    for name in names:
        file = folder / "c" / name
        text, changes = re.subn(pattern, mistake, file.read_text())
        file.write_text(text)
        count += changes
    assert count == 1, f"{pattern} is there {count} times"
    command = [str(c_library.find_compiler()), *c_library.FLAGS, *c_library.for_this_cpu(), QUICKLY]
    called = (*called, "int8_cache.c") if names[0] == "rows.c" else called
    sources = [folder / "c" / name for name in (names[0], "threads.c", *called)]
    c_library.build([*command, *options, *DIVIDED], sources, folder / "mutant.so")
    return folder / "mutant.so"


def with_mistake(mutant: Mutant, folder: Path) -> c_library.Library:
    """The functions of its path, one of which is mistaken."""
    wrong = c_library.load(mutated(mutant, folder))
    return Mixed(built(mutant.path, mutant.element), mutant.function, wrong)


@cache
def passes_without_a_mistake(test: Callable, path: str, element: c_library.Element) -> None:
    """So what fails below is the mistake. Once for all mistakes that the same test finds."""
    test((built(path, element), ELEMENTS[element]))


def check_found(mutant: Mutant, folder: Path) -> None:
    """Whoever should notice a mistake does, and nothing without it."""
    passes_without_a_mistake(mutant.found_by, mutant.path, mutant.element)
    wrong = with_mistake(mutant, folder)  # outside: a pattern that is not there is no finding
    with pytest.raises(AssertionError):
        mutant.found_by((wrong, ELEMENTS[mutant.element]))


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path):
    check_found(MUTANTS[name], tmp_path)


# ---- layers.c ------------------------------------------------------------------------------------


def on_layers(test: Callable, name: str) -> Callable:
    """The test of one of the small decoders."""
    return lambda: test(small_decoders.build(small_decoders.CONFIGS[name], dtype=F32))


F32 = torch.float32
one_call = on_layers(layers.test_one_call_is_the_layers_one_by_one, "biases everywhere")
windowed = on_layers(layers.test_one_call_is_the_layers_one_by_one, "a window in some layers")
by_halves = on_layers(halves.test_halves_are_the_outputs_of_attention_and_mlp, "biases everywhere")
LAYER_MUTANTS = {  # pattern, mistake, and who notices
    "the output's bias is dropped": (r"l->o, l->o_bias", "l->o, 0", one_call),
    "the other norm": (r"now->residual, l->mlp_norm", "now->residual, l->input_norm", one_call),
    "the residual takes up x twice": (
        r"now->x, now->residual, l->mlp_norm", "now->x, now->x, l->mlp_norm", one_call
    ),
    "the sum goes nowhere": (
        r"l->mlp_norm, now->normed, now->residual", "l->mlp_norm, now->normed, now->wide", one_call
    ),
    "the residual does not begin": (r"if \(is_first\)", "if (is_first && 0)", one_call),
    "no rotation": (r"now->sin(?=,\s+s->interleaved, l->k_cache)", "now->cos", one_call),
    "decoding sees everything": (
        r"(?<=tables, now->table_stride, s->scale, )l->window", "0", windowed
    ),
    "the last layer is left out": (r"i < last; i\+\+", "i + 1 < last; i++", one_call),
    "the first layer again": (r"mlp_half\(&layers\[i\]", "mlp_half(&layers[0]", one_call),
    "every layer is the first": (r"now, i == 0", "now, i == first", by_halves),
    "attention in both halves": (r"halves & ATTENTION", "halves", by_halves),
    "the halves change places": (r"ATTENTION = 1, MLP = 2", "ATTENTION = 2, MLP = 1", by_halves),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", LAYER_MUTANTS)
def test_a_mistake_in_the_layers_is_found(name, tmp_path, monkeypatch):
    """The other functions are the right ones, with which the mistaken file is linked."""
    pattern, mistake, found_by = LAYER_MUTANTS[name]
    monkeypatch.setenv(cpu.PANELS, "1")
    if cpu.functions(F32) is None:
        pytest.skip(cpu.describe(F32))
    found_by()
    others = "-Wl,--no-as-needed", str(c_library.find_or_build("F32"))
    options = ["-DELEMENT_F32", *others]
    wrong = c_library.load(build_with(("layers.c",), pattern, mistake, options, tmp_path))
    use(monkeypatch, wrong, F32)
    with pytest.raises(AssertionError):
        found_by()
