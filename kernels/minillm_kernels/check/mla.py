"""Cases of `minillm_kernels.mla`: attention over a paged latent cache."""

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import launch, mla, reference
from minillm_kernels.check.case import Launch, blank
from minillm_kernels.check.pages import (
    UNTOUCHED,
    Inputs,
    inputs_of,
    random_sequences,
    verify_bits,
    verify_rows,
)
from minillm_kernels.mla_config import Config, Tile, choose
from minillm_kernels.paged_config import FEW

# Small tiles, so that short sequences have many of them; "chosen" is what the launcher takes.
FORMS = ("chosen", "swap", "rows", "descriptors")
BLOCK_N = 32


@dataclass(frozen=True)
class Case:
    """One call: sequences as (query_len, seq_len), sizes, and how it is to be computed.

    `form`, `split` and `tokens` choose tiles (see `config`); `padding` counts rows behind the last
    sequence; `max_query_len` is passed on.
    """

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    value_dim: int = 32
    rope_dim: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    scale: float = 0.15
    padding: int = 0
    form: str = "chosen"
    split: int = 0
    tokens: int = 0
    batch_invariant: bool = False
    max_query_len: int | None = None
    seed: int = 0

    @property
    def config(self) -> Config | None:
        """The tiles of `form`, None for the launcher's own; decode's with `tokens`, if given."""
        if self.form == "chosen":
            return None
        tile = Tile(
            block_h=16,
            block_q=1,
            block_n=BLOCK_N,
            swap=self.form == "swap",
            num_warps=4,
            descriptors=self.form == "descriptors",
        )
        heads = 1 << (min(self.num_heads, 16) - 1).bit_length()
        prefill = replace(tile, block_h=heads, block_q=max(2, 16 // heads))
        several = replace(tile, block_h=heads, block_q=max(self.tokens, 16 // heads))
        return Config(several if self.tokens else tile, prefill, self.split)


HALF, BRAIN = torch.float16, torch.bfloat16
MIXED = ((1, 37), (7, 7), (1, 1), (5, 70), (0, 20), (1, 64))
CASES = (
    Case(MIXED),
    Case(MIXED, form="rows", num_heads=3, dtype=HALF, padding=3, seed=1),
    Case(MIXED, form="swap", num_heads=5, dtype=BRAIN, rope_dim=4, value_dim=24, seed=2),
    Case(
        ((1, 64), (2, 95), (1, 5), (0, 9)),
        form="descriptors", rope_dim=16, dtype=HALF, num_heads=33, block_size=32, padding=1,
        seed=3,
    ),
    Case(  # two tiles in a page
        ((1, 200), (2, 70)), form="descriptors", rope_dim=16, dtype=BRAIN, block_size=64, seed=19,
    ),
    # Lengths around a page, and rows of padding in a decode batch under a CUDA graph.
    Case(
        tuple((1, length) for length in (0, 1, 15, 16, 17, 33, 0)),
        max_query_len=1, padding=2, dtype=HALF, form="rows", seed=4,
    ),
    Case(((3, 0), (1, 0), (2, 2), (1, 100)), form="swap", dtype=BRAIN, seed=5),
    # One long sequence, cut into splits of which the last is short; beside it, empty splits.
    Case(((1, 270), (1, 30), (1, 0), (1, 129)), form="rows", block_size=1, seed=6),
    Case(((1, 260), (2, 200)), form="swap", block_size=256, num_heads=2, dtype=HALF, seed=7),
    Case(((1, 530), (1, 64), (1, 65), (1, 0)), dtype=BRAIN, num_heads=20, seed=8),
    # More splits than are combined at a time.
    Case(
        ((1, 4300),), form="rows", num_heads=1, value_dim=16, rope_dim=4, block_size=256,
        dtype=HALF, seed=18,
    ),
    # Windows: in a tile, over pages, wider than the sequence.
    Case(((1, 150), (5, 90), (1, 12)), window=33, form="rows", seed=9),
    Case(((1, 150), (5, 40), (3, 3)), window=1, form="swap", block_size=5, dtype=HALF, seed=10),
    Case(((1, 40), (9, 23)), window=1000, block_size=7, seed=11),
    # Logits of 1e4, and one token in a batch.
    Case(((1, 90), (6, 60)), scale=1200.0, dtype=HALF, form="rows", seed=12),
    Case(((1, 1),), num_heads=1, value_dim=16, rope_dim=4, block_size=1, dtype=BRAIN, seed=13),
    # Splits at absolute places: partial results, and one after another.
    Case(MIXED, form="rows", split=32, batch_invariant=True, seed=14),
    Case(
        ((1, 150), (4, 130), (1, 0), (1, 31)),
        form="swap", split=64, window=50, dtype=HALF, batch_invariant=True, seed=15,
    ),
    Case(((1, 90), (3, 70)), batch_invariant=True, dtype=BRAIN, seed=16),
    # Several queries of a sequence, 1 to 16 mixed; a graph's rows, of which some are not used; the
    # last ones on both sides of the end of a tile (32 keys) and of a split (128).
    Case(((5, 37), (1, 70), (3, 3), (2, 0), (0, 9)), form="rows", max_query_len=5, padding=2,
         seed=40),
    Case(((5, 130), (16, 259), (4, 128), (9, 64)), form="swap", max_query_len=16, tokens=4,
         num_heads=3, dtype=HALF, block_size=5, seed=41),
    Case(((16, 200), (3, 129), (1, 33)), form="descriptors", max_query_len=16, tokens=2,
         rope_dim=16, num_heads=19, block_size=32, dtype=BRAIN, seed=42),
    Case(((7, 530), (16, 65), (2, 64)), max_query_len=16, num_heads=8, seed=43),
    Case(((16, 150), (7, 40)), max_query_len=16, num_heads=1, dtype=BRAIN, padding=1, seed=44),
    Case(((5, 180), (3, 70), (8, 9)), window=20, form="rows", max_query_len=8, seed=45),
    Case(((5, 320), (16, 300), (1, 320)), window=126, form="swap", max_query_len=16, tokens=8,
         dtype=HALF, seed=46),  # the splits begin where the window of the first query does
    Case(((3, 80), (30, 60), (1, 50), (4, 200)), dtype=HALF, seed=47),  # beside a chunk
    Case(((5, 150), (1, 40), (16, 70)), form="rows", split=64, dtype=HALF, padding=3,
         batch_invariant=True, max_query_len=16, seed=48),
    Case(((5, 66), (9, 9), (3, 0)), form="swap", split=32, window=40, tokens=1,
         batch_invariant=True, max_query_len=9, seed=49),
    # The sizes of DeepSeek-V2 and V3.
    Case(((1, 70), (3, 40)), 16, 512, 64, 64, BRAIN, scale=0.07, seed=17),
    Case(((5, 70), (2, 40)), 16, 512, 64, 64, BRAIN, scale=0.07, max_query_len=5, seed=50),
)  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """Any call."""
    form = rng.choice(FORMS)
    block_size = rng.choice((32, 64) if form == "descriptors" else (1, 3, 8, 16, 64, 256))
    dims = ((16, 16), (32, 16)) if form == "descriptors" else ((16, 4), (24, 8), (32, 8), (48, 20))
    value_dim, rope_dim = rng.choice(dims)
    split = rng.choice((0, 0, 32, 64)) if form != "chosen" else 0
    return Case(
        **random_sequences(rng, block_size, 24),
        num_heads=rng.choice((1, 2, 3, 4, 8, 16, 19)),
        value_dim=value_dim,
        rope_dim=rope_dim,
        block_size=block_size,
        dtype=rng.choice((torch.float32, HALF, BRAIN)),
        window=rng.choice((None, None, rng.randint(1, 200))),
        padding=rng.choice((0, 0, 2)),
        form=form,
        split=split,
        tokens=rng.choice((0, 1, 4)),
        batch_invariant=split > 0 or rng.random() < 0.3,
        seed=rng.randrange(2**31),
    )


def inputs(case: Case, device: str) -> Inputs:
    """The tensors of a case."""
    width = case.value_dim + case.rope_dim
    return inputs_of(case, 1, (width,), width, device)


def run(case: Case, kernels: Any, given: Inputs, **options: Any) -> Tensor:
    """One call of the launcher of `kernels`."""
    found: Tensor = kernels.mla_attention(
        *(given.q, given.pages.caches[0], case.value_dim, *given.tensors, case.scale, case.window),
        **{"batch_invariant": case.batch_invariant, "config": case.config} | options,
    )
    return found


def verify(case: Case, device: str, kernels: Any = mla) -> None:
    """Mismatch if the launcher of `kernels` computes something else than the reference."""
    given = inputs(case, device)
    starts, lengths, tables = (tensor.cpu() for tensor in given.tensors)
    q, cache = given.q.cpu().double(), given.pages.caches[0].cpu().double()
    expected = reference.mla_attention(
        q, cache, case.value_dim, starts, lengths, tables.long(), case.scale, case.window
    )
    call = partial(run, case, kernels, max_query_len=case.max_query_len)
    verify_rows(case, given, case.value_dim, call, expected, UNTOUCHED)


def verify_invariant(case: Case, device: str, kernels: Any = mla) -> None:
    """Mismatch if the bits of a token depend on what it is computed with (`batch_invariant`);
    splits are computed by programs of their own and one after another."""
    if case.form == "descriptors":  # they need large pages, and the bits are those of any pages
        case = replace(case, form="chosen")
    call = partial(run, case, kernels, batch_invariant=True)
    tiles = case.config or choose(launch.arch(), case.dtype, case.num_heads, case.block_size, True)
    ways = {"decoded": {}, "without a workspace": {"config": replace(tiles, max_workspace=0)}}
    verify_bits(inputs(replace(case, padding=0), device), call, (1, 3, 5, FEW), ways)


INVARIANT_CASES = (
    Case(
        ((4, 68), (1, 70), (1, 0)),
        form="rows", split=64, dtype=HALF, value_dim=16, rope_dim=4, num_heads=3, seed=30,
    ),
    Case(((4, 69),), form="swap", split=32, window=37, value_dim=16, rope_dim=4, seed=31),
    Case(((2, 514),), dtype=BRAIN, value_dim=16, rope_dim=4, num_heads=8, seed=32),
    Case(
        ((16, 131), (5, 66), (9, 9)),
        form="swap", split=64, tokens=4, window=40, value_dim=16, rope_dim=4, num_heads=3, seed=33,
    ),
    Case(((6, 515), (16, 64)), dtype=HALF, value_dim=16, rope_dim=4, num_heads=16, seed=34),
    Case(((2, 40),), form="descriptors", value_dim=16, rope_dim=16, block_size=32, seed=35),
)  # fmt: skip


# ---- shapes of real models ---------------------------------------------------------------------


def _launch(
    num_heads: int,
    rows: int,
    num_tokens: int,
    dtype: torch.dtype = BRAIN,
    block_size: int = 64,
    value_dim: int = 512,
    rope_dim: int = 64,
    window: int | None = None,
    invariant: bool = False,
    few: int | None = None,
) -> Tensor:
    width, integers = value_dim + rope_dim, partial(blank, dtype=torch.int32)
    return mla.mla_attention(
        blank(num_tokens, num_heads, width, dtype=dtype),
        blank(rows, 1, block_size, width, dtype=dtype), value_dim, integers(rows + 1),
        integers(rows), integers(rows, 32768 // block_size), (128 + 64) ** -0.5, window,
        max_query_len=1 if num_tokens == rows else few, batch_invariant=invariant,
    )  # fmt: skip


ALL = (80, 90, 100)
LAUNCHES = (
    Launch("V2-Lite decode, 16 heads, bf16", partial(_launch, 16, 64, 64), ALL, (90,)),
    Launch("V2-Lite decode, one long row", partial(_launch, 16, 1, 1), ALL, (90,)),
    Launch("V2-Lite prefill, one row", partial(_launch, 16, 1, 2048), ALL, (90,)),
    Launch("V3 prefill, one row, window", partial(_launch, 128, 1, 2048, window=4096), ALL, (90,)),
    Launch("V2-Lite mixed, 16 heads, fp16", partial(_launch, 16, 64, 2048, HALF), ALL, (90,)),
    Launch("V2-Lite mixed, pages of 16", partial(_launch, 16, 64, 2048, block_size=16), ALL),
    Launch("V3 split over 4 GPUs, 32 heads", partial(_launch, 32, 64, 64), ALL, (90,)),
    Launch("V3 mixed, 128 heads, bf16", partial(_launch, 128, 64, 2048), ALL, (90,)),
    Launch("V3 mixed, pages of 1", partial(_launch, 128, 64, 2048, block_size=1), ALL),
    Launch("V2-Lite, window", partial(_launch, 16, 64, 2048, window=4096), ALL, (90,)),
    Launch("V2-Lite, batch-invariant", partial(_launch, 16, 8, 2048, invariant=True), ALL),
    Launch("V3, batch-invariant", partial(_launch, 128, 8, 2048, HALF, invariant=True), ALL),
    Launch("V2-Lite verify 5, 16 heads", partial(_launch, 16, 64, 320, few=5), ALL, (90,)),
    Launch("V2-Lite verify 2", partial(_launch, 16, 64, 128, few=2), ALL, (90,)),
    Launch("V2-Lite verify 16 of one long row", partial(_launch, 16, 1, 16, few=16), ALL, (90,)),
    Launch("V2-Lite verify 5, pages of 16", partial(_launch, 16, 8, 40, few=5, block_size=16), ALL),
    Launch("V2-Lite verify 5, window", partial(_launch, 16, 64, 320, few=5, window=4096), ALL),
    Launch("V3 verify 5, 128 heads", partial(_launch, 128, 64, 320, few=5), ALL, (90,)),
    Launch(
        "V2-Lite verify 5, batch-invariant", partial(_launch, 16, 8, 40, few=5, invariant=True), ALL
    ),
    Launch(
        "tiny model, fp16",
        partial(_launch, 4, 8, 64, HALF, block_size=16, value_dim=24, rope_dim=4),
        ALL,
    ),
    Launch(
        "tiny model, float32",
        partial(_launch, 4, 8, 64, torch.float32, block_size=16, value_dim=32, rope_dim=8),
    ),
)
