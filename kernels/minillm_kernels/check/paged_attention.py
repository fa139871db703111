"""Cases of `minillm_kernels.paged_attention`: flat batches of decode rows and chunks of prompts."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import paged_attention, reference
from minillm_kernels.check.case import Launch, blank
from minillm_kernels.check.pages import (
    UNTOUCHED,
    Inputs,
    inputs_of,
    poisoned_memory,
    random_sequences,
    verify_bits,
    verify_rows,
)
from minillm_kernels.paged_config import Config, Tiles

# Ways to cut the work, small, so that short sequences have many tiles; "chosen" is the launcher's.
FORMS = ("chosen", "rows", "swap", "bulk")
BLOCK_N = 32


@dataclass(frozen=True)
class Case:
    """One call: sequences as (query_len, seq_len), sizes, and how it is to be computed.

    `form` and `splits` choose the configuration; `padding` counts rows behind the last sequence,
    `strided` gives q and the caches gaps and another order in memory. With `tree`, sequences of one
    query are paths of token trees.
    """

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    value_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    padding: int = 0
    form: str = "chosen"
    splits: int | None = None
    batch_invariant: bool = False
    max_query_len: int | None = None
    strided: bool = False
    tree: bool = False
    seed: int = 0

    @property
    def config(self) -> Config | None:
        """The tiles of `form`, None for the launcher's own."""
        if self.form == "chosen":
            return None
        swap, bulk = self.form in ("swap", "bulk"), self.form == "bulk"
        tiles = Tiles(BLOCK_N, num_warps=4, num_stages=2, block_m=32, swap=swap, bulk=bulk)
        return Config(tiles, tiles, tiles, self.splits, min_split_tiles=2, split_size=2 * BLOCK_N)

    @property
    def dims(self) -> tuple[int, int]:
        """Of a key and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def scaling(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


HALF, BRAIN = torch.float16, torch.bfloat16
MIXED = ((1, 37), (7, 7), (0, 20), (1, 48), (40, 90))
EDGES = tuple((1, length) for length in (0, 1, 31, 32, 33))
CASES = (
    # Decode rows and chunks side by side, each form and many groups.
    Case(MIXED),
    Case(MIXED, 3, 1, 80, form="rows", dtype=HALF, padding=3, seed=1),
    Case(((1, 70), (3, 50)), 8, 1, 96, form="swap", dtype=BRAIN, seed=2),
    Case(MIXED, form="bulk", head_dim=64, dtype=HALF, block_size=32, seed=3),
    Case(((1, 40), (35, 40)), 2, 2, form="rows", block_size=1, strided=True, seed=4),
    Case(((1, 70), (3, 50)), 40, 1, form="swap", block_size=3, seed=5),
    # Lengths around a tile and a page; a decode batch under a CUDA graph has padding in it.
    Case(EDGES, max_query_len=1, padding=2, dtype=HALF, form="rows", num_kv_heads=1, seed=6),
    Case(EDGES, 1, 1, 128, 64, max_query_len=1, form="bulk", dtype=BRAIN, seed=7),
    Case(EDGES, num_kv_heads=1, max_query_len=1, block_size=5, form="swap", splits=3, seed=8),
    Case(((3, 0), (1, 0), (16, 16), (33, 65)), form="rows", num_kv_heads=1, dtype=HALF, seed=9),
    # A long sequence in many splits; beside it short ones, which leave most of theirs empty.
    Case(((1, 1200), (1, 30), (1, 0)), 1, 1, form="rows", splits=19, block_size=64, seed=10),
    Case(((1, 333), (2, 333)), num_kv_heads=1, form="swap", splits=4, dtype=BRAIN, block_size=256,
         seed=11),
    Case(((1, 300),), 8, 1, max_query_len=1, dtype=HALF, seed=12),
    # Several queries of a sequence, 1 to 16 mixed; a graph's rows, of which some are not used.
    Case(((5, 37), (1, 70), (3, 3), (2, 0), (0, 9)), max_query_len=5, splits=3, form="rows",
         padding=2, seed=27),
    Case(((5, 37), (16, 100), (4, 64)), 2, 1, 64, 32, max_query_len=16, splits=2, form="bulk",
         dtype=BRAIN, seed=28),
    Case(((9, 70), (1, 33), (16, 16)), 8, 1, 96, max_query_len=16, splits=3, form="swap",
         dtype=HALF, block_size=5, seed=29),
    Case(((16, 150), (7, 40)), 3, 3, 16, max_query_len=16, window=20, splits=4, form="rows",
         soft_cap=4.0, seed=30),
    Case(((5, 90), (2, 31)), 40, 1, 24, max_query_len=5, window=3, form="swap", seed=31),
    Case(((3, 80), (30, 60), (1, 50)), 4, 2, form="rows", splits=2, seed=33),  # beside a chunk
    # Windows inside a tile, over pages, wider than the sequence; soft caps; logits of 1e4.
    Case(((1, 200), (40, 150)), 2, 1, window=33, form="rows", splits=3, seed=13),
    Case(((1, 90), (9, 90)), 2, 1, window=1, form="swap", block_size=5, dtype=HALF, seed=14),
    Case(((1, 40), (9, 23)), window=1000, block_size=7, soft_cap=30.0, seed=15),
    Case(((1, 90), (9, 70)), 4, 1, window=24, soft_cap=2.0, form="bulk", block_size=32,
         dtype=BRAIN, seed=16),
    Case(((1, 90), (6, 60)), 4, 1, scale=1200.0, dtype=HALF, form="rows", splits=3, seed=17),
    Case(((1, 90), (6, 60)), 4, 1, scale=1200.0, soft_cap=50.0, dtype=BRAIN, form="swap", seed=18),
    Case(((1, 1),), 1, 1, 8, block_size=1, dtype=BRAIN, seed=19),
    Case(((2, 40), (1, 40)), head_dim=48, value_dim=24, form="swap", strided=True, seed=20),
    # The batch-invariant mode: splits in registers, and a program each.
    Case(((1, 70), (7, 7), (40, 90)), 4, 1, batch_invariant=True, form="rows", padding=5, seed=21),
    Case(((1, 0), (1, 64), (1, 65)), 4, 1, batch_invariant=True, form="rows", splits=2,
         max_query_len=1, padding=40, seed=22),
    Case(((1, 150), (1, 40)), 8, 1, 16, 32, form="bulk", splits=2, window=50, dtype=HALF,
         batch_invariant=True, max_query_len=1, seed=23),
    Case(((1, 90), (30, 70)), batch_invariant=True, dtype=BRAIN, window=20, soft_cap=5.0, seed=24),
    Case(((5, 150), (1, 40), (16, 70)), 4, 1, 16, form="rows", splits=2, dtype=HALF, padding=3,
         batch_invariant=True, max_query_len=16, seed=34),
    Case(((5, 150), (9, 9)), 3, 1, form="bulk", splits=2, window=40, block_size=32,
         batch_invariant=True, max_query_len=9, seed=35),
    # Paths of token trees, beside chunks, over tiles, pages, splits and windows.
    Case(((1, 37), (1, 70), (5, 40), (1, 0), (1, 33), (40, 90)), tree=True, padding=2, seed=36),
    Case(EDGES, 8, 1, 64, 32, max_query_len=1, form="bulk", tree=True, dtype=BRAIN, seed=37),
    Case(((1, 150), (1, 90)), 4, 1, block_size=5, form="swap", splits=3, window=40, tree=True,
         dtype=HALF, seed=38),
    Case(((1, 300), (1, 1)), 2, 1, block_size=256, max_query_len=1, soft_cap=9.0, tree=True,
         seed=39),
    # Sizes of Llama-3.1-8B (a quarter of its heads) and Qwen3-0.6B (an eighth).
    Case(((1, 300), (20, 120)), 8, 2, 128, dtype=BRAIN, seed=25),
    Case(((1, 300), (70, 70)), 2, 1, 128, dtype=HALF, block_size=64, seed=26),
)  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """Any call."""
    block_size = rng.choice((1, 3, 16, 64, 100, 256))
    num_kv_heads = rng.choice((1, 1, 2))
    case = Case(
        **random_sequences(rng, block_size, 90),
        num_heads=num_kv_heads * rng.choice((1, 2, 3, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((8, 64, 80, 96, 128)),
        block_size=block_size,
        dtype=rng.choice((torch.float32, HALF, BRAIN)),
        window=rng.choice((None, None, rng.randint(1, 200))),
        soft_cap=rng.choice((None, None, 20.0)),
        padding=rng.choice((0, 0, 2)),
        form=rng.choice(FORMS),
        splits=rng.choice((None, 2, 5)),
        batch_invariant=rng.random() < 0.3,
        strided=rng.random() < 0.2,
        seed=rng.randrange(2**31),
    )
    return replace(case, tree=not case.batch_invariant and rng.random() < 0.4)


def spread(x: Tensor) -> Tensor:
    """The same numbers with gaps between rows and the first two dimensions swapped in memory."""
    wide = torch.full((x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 8), math.nan)
    view = wide.to(x.dtype).to(x.device).transpose(0, 1)[..., : x.shape[-1]]
    view.copy_(x)
    return view


def inputs(case: Case, device: str) -> Inputs:
    """The tensors of a case."""
    given = inputs_of(case, case.num_kv_heads, case.dims, case.head_dim, device)
    if not case.strided:
        return given
    pages = replace(given.pages, caches=tuple(map(spread, given.pages.caches)))
    return replace(given, q=spread(given.q), pages=pages)


def run(case: Case, kernels: Any, given: Inputs, **options: Any) -> Tensor:
    """One call of the launcher of `kernels`."""
    names = ("batch_invariant", "config", "max_query_len")
    with poisoned_memory():
        found: Tensor = kernels.paged_attention(
            *(given.q, *given.pages.caches, *given.tensors),
            *(case.scaling, case.window, case.soft_cap),
            **{name: getattr(case, name) for name in names} | {"tails": given.tails} | options,
        )
    return found


def verify(case: Case, device: str = "cpu", kernels: Any = paged_attention) -> None:
    """Mismatch if the launcher of `kernels` computes something else than the reference."""
    given = inputs(case, device)
    q, k_cache, v_cache = (x.cpu().double() for x in (given.q, *given.pages.caches))
    starts, lengths, tables = (tensor.cpu() for tensor in given.tensors)
    expected = reference.paged_attention(
        q, k_cache, v_cache, starts, lengths, tables, case.scaling, case.window, case.soft_cap
    )
    if case.tree:
        given = given.repaged(case.block_size, case.seed)
    padding = 0.0 if case.batch_invariant else UNTOUCHED
    verify_rows(case, given, case.dims[1], partial(run, case, kernels), expected, padding)


def verify_invariant(case: Case, device: str = "cpu", kernels: Any = paged_attention) -> None:
    """Mismatch if a row's bits depend on more than its query, its position and its keys; splits are
    computed in registers and by programs of their own."""
    case = replace(case, batch_invariant=True, max_query_len=None, padding=0)
    config = case.config
    ways: dict[str, dict[str, Any]] = {
        what: {"config": None if config is None else replace(config, splits=splits)}
        for what, splits in (("splits apart", 2), ("splits in registers", 1))
    }
    verify_bits(inputs(case, device), partial(run, case, kernels), (1, 7), ways)


# ---- compiled only ----------------------------------------------------------------------------


def _launch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    query_len: int = 1,
    num_sequences: int = 64,
    tree: bool = False,
    **options: Any,
) -> None:
    """A call with these sizes."""
    integers = partial(blank, dtype=torch.int32)
    if tree:
        options["tails"] = integers(num_sequences), integers(num_sequences, 16)
    cache = blank(64, num_kv_heads, block_size, head_dim, dtype=dtype)
    paged_attention.paged_attention(
        blank(num_sequences * query_len, num_heads, head_dim, dtype=dtype), cache, cache,
        integers(num_sequences + 1), integers(num_sequences),
        integers(num_sequences, 8192 // block_size), head_dim**-0.5, **options,
    )  # fmt: skip


def _launches() -> Iterator[Launch]:
    old_and_new = (80, 90, 100)
    forms: dict[str, dict[str, Any]] = {
        "decode": {"max_query_len": 1},
        "verify 5": {"query_len": 5, "max_query_len": 5},
        "prefill": {"query_len": 2048, "num_sequences": 1, "max_query_len": 2048},
        "batch-invariant": {"batch_invariant": True},
    }
    cap = {"soft_cap": 50.0}
    longest: dict[str, Any] = {"query_len": 16, "max_query_len": 16}
    models: tuple[tuple[str, tuple[int, int, int], tuple[int, ...], str, dict[str, Any]], ...] = (
        ("Llama-3.1-8B", (32, 8, 128), (16, 64), "dvpb", {}),
        ("Llama-3.2-1B", (32, 8, 64), (16,), "dvpb", {}),
        ("Gemma-2-2b", (8, 4, 256), (16, 64), "dvpb", cap),
        ("Qwen3-0.6B", (16, 8, 128), (64,), "d", {}),
        ("Qwen2.5-3B, groups of 8", (16, 2, 128), (16,), "dvp", {}),
        ("ChatGLM3-6B, groups of 16", (32, 2, 128), (64,), "dvp", {}),
        ("Phi-3-mini, no groups", (32, 32, 96), (64,), "dvpb", {}),
    )
    for model, sizes, block_sizes, letters, options in models:
        for block_size in block_sizes:
            call = partial(_launch, *sizes, block_size, BRAIN, **options)
            for form, more in forms.items():
                if form[0] in letters:
                    # The batch-invariant kernel reads by pointers on Blackwell (paged_config.py).
                    bulk = (90, 100)[: 1 if form == "batch-invariant" else 2]
                    name = f"{form}, {model}, pages of {block_size}"
                    copies = bulk if block_size == 64 else ()
                    # Heads of 256 on Ampere: 24 bytes, since the kernel merges its parts itself.
                    spills = (80,) if sizes[2] == 256 else ()
                    yield Launch(name, partial(call, **more), old_and_new, copies, spills)
    llama = partial(_launch, 32, 8, 128, 16, HALF)
    yield Launch("mixed with a window", partial(llama, query_len=32, window=4096), old_and_new)
    many = partial(_launch, 32, 8, 128, 64, BRAIN, num_sequences=1, **longest)
    yield Launch("verify 16 with a window", partial(llama, window=4096, **longest), old_and_new)
    yield Launch("verify 16 of one long row", many, old_and_new, (90, 100))
    large = partial(_launch, 8, 4, 256, 64, BRAIN, num_sequences=1, **longest | cap)
    yield Launch("verify 16 of one long row, 256", large, old_and_new, (90, 100))
    together = partial(many, batch_invariant=True)
    yield Launch("verify 16 of one long row, batch-invariant", together, old_and_new, (90,))
    tree = partial(_launch, 32, 8, 128, 64, BRAIN, tree=True, max_query_len=1)
    yield Launch("token trees", tree, old_and_new)
    one = partial(llama, num_sequences=1, max_query_len=1)
    yield Launch("one long row", one, old_and_new)
    yield Launch("one long row, batch-invariant", partial(one, batch_invariant=True), old_and_new)
    exact = partial(_launch, 16, 8, 128, 16, torch.float32, query_len=2)
    yield Launch("float32", exact)
    yield Launch("float32, batch-invariant", partial(exact, batch_invariant=True))


LAUNCHES = tuple(_launches())
