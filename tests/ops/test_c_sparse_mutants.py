"""Deliberate mistakes in the C sources of experts and latent attention, each of which
`test_c_experts.py` must find."""

from pathlib import Path

import pytest
import torch

from minillm.ops import c_library, cpu
from tests.ops import test_c_experts as tests
from tests.ops.c_variants import use
from tests.ops.test_c_mutants import build_with

V2, V3, QWEN = "deepseek v2", "deepseek v3", "experts in some layers"
ODD, PIECES = "latent, low-rank queries, biases", "pieces"
MUTANTS = {  # file, pattern, mistake, and the decoder that shows it
    "the expert before's gate": (
        "experts.c", r"w->gate_up, e \* 2", "w->gate_up, (e ? e - 1 : 0) * 2", QWEN
    ),
    "the weight of another choice": (
        "experts.c", r"b->weights\[i\];", "b->weights[token * chosen];", QWEN
    ),
    "the first token's rows": ("experts.c", r"i / chosen \* hidden", "0", QWEN),
    "shared experts are dropped": ("experts.c", r"    if \(j->shared\)", "    if (0)", V2),
    "panels of a piece begin at 0": (
        "experts.c", r"begin - first, stop - first", "0, stop - begin", PIECES
    ),
    "weights are not normalised": ("routing.c", r"s->normalize \?", "0 ?", QWEN),
    "the bias has weight": (
        "routing.c", r"weights\[i\] = scores\[ids\[i\]\]", "weights[i] = values[ids[i]]", V3
    ),
    "the bias is dropped": ("routing.c", r"bias \? scores\[e\]", "0 ? scores[e]", V3),
    "all groups": ("routing.c", r"if \(s->groups > 1\)", "if (0)", V2),
    "groups by their best": ("routing.c", r"best_two \? score", "0 ? score", V3),
    "ids are sorted without weights": ("routing.c", r", weights\[j\] = weights\[j - 1\]", "", QWEN),
    "softmax for sigmoid": ("routing.c", r"if \(s->sigmoid\)", "if (0)", V3),
    "the rotated part comes first": (
        "rows.c", r"w->q \+ h \* from \+ s->nope", "w->q + h * from", "latent"
    ),
    "keys are not rotated": (
        "rows.c",
        r"norm_and_rotate\(latent \+ s->rank, [^;]*\)(?=;)",
        "memcpy(row + s->rank, latent + s->rank, (size_t)s->rope * sizeof(element))",
        "latent",
    ),
    "latents have no norm": (
        "rows.c",
        r"norm_row\(latent, w->weight, row, s->rank, s->eps\)",
        "memcpy(row, latent, (size_t)s->rank * sizeof(element))",
        "latent",
    ),
    "the latent of the row before": (
        "rows.c", r"w->kv \+ token \* to", "w->kv + (token ? token - 1 : 0) * to", "latent"
    ),
    "every slot is its block's first": (
        "rows.c", r"slot % w->block_size \* w->row_stride", "0", "latent"
    ),
    "the first head's matrix": (
        "latent.c", r"p\.panels \+= h \* p\.out \* p\.in;", "", "latent"
    ),
    "queries without their norm": (
        "latent.c", r"product_of\(normed, w->q,", "product_of(b->q_low, w->q,", ODD
    ),
    "the output's bias": ("latent.c", r"l->o_bias", "0", ODD),
}  # fmt: skip


def mutated(file: str, pattern: str, mistake: str, folder: Path) -> Path:
    """A library of the layers and the mistaken file; the other functions are the right ones."""
    options = ["-DELEMENT_F32", "-Wl,--no-as-needed", str(c_library.find_or_build("F32"))]
    # Those between the mistake and `run_layers`, so that it is not the right library's they call.
    between = {"layers.c", "latent.c", "experts.c"} - {file}
    return build_with((file,), pattern, mistake, options, folder, tuple(sorted(between)))


def check(name: str) -> None:
    """The test that should find a mistake."""
    if name == PIECES:
        tests.check_pieces()
    else:
        tests.check_one_call(name, torch.float32)


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    file, pattern, mistake, decoder = MUTANTS[name]
    monkeypatch.setenv(cpu.PANELS, "1")
    if cpu.functions(torch.float32) is None:
        pytest.skip(cpu.describe(torch.float32))
    check(decoder)
    wrong = c_library.load(mutated(file, pattern, mistake, tmp_path))
    use(monkeypatch, wrong, torch.float32)
    with pytest.raises(AssertionError):
        check(decoder)
