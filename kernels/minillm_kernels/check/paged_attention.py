"""Cases of `minillm_kernels.paged_attention`: flat batches of decode rows and chunks of prompts."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import paged_attention, reference
from minillm_kernels.check.case import Launch, Mismatch, compare, generator, guarded, normal
from minillm_kernels.check.pages import Paged, paged, poisoned_memory
from minillm_kernels.paged_config import Config, Tiles

# Ways to cut the work, small, so that short sequences have many tiles; "chosen" is the launcher's.
FORMS = ("chosen", "rows", "swap", "bulk")
BLOCK_N = 32


@dataclass(frozen=True)
class Case:
    """One call: sequences as (query_len, seq_len), sizes, and how it is to be computed.

    `form` and `splits` choose the configuration; `padding` counts rows behind the last sequence,
    `strided` gives q and the caches gaps and another order in memory.
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
    # Sizes of Llama-3.1-8B (a quarter of its heads) and Qwen3-0.6B (an eighth).
    Case(((1, 300), (20, 120)), 8, 2, 128, dtype=BRAIN, seed=25),
    Case(((1, 300), (70, 70)), 2, 1, 128, dtype=HALF, block_size=64, seed=26),
)  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """Any call: up to four sequences of any mix of lengths, on the edge of a block too."""
    block_size = rng.choice((1, 3, 16, 64, 100, 256))
    edges = (max(block_size - 1, 1), block_size, block_size + 1)
    sequences = []
    for _ in range(rng.randint(1, 4)):
        seq_len = rng.choice((0, 1, *edges, rng.randint(2, 40), rng.randint(41, 250)))
        most = min(seq_len, rng.choice((16, 90))) if seq_len else 3
        sequences.append((rng.choice((1, 1, rng.randint(0, most))), seq_len))
    longest = max(query_len for query_len, _ in sequences)
    room = rng.choice((max(longest, 1), paged_attention.FEW))  # of a graph, which may be more
    num_kv_heads = rng.choice((1, 1, 2))
    return Case(
        sequences=tuple(sequences),
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
        max_query_len=room if longest <= room and rng.random() < 0.7 else None,
        strided=rng.random() < 0.2,
        seed=rng.randrange(2**31),
    )


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case."""

    q: Tensor
    pages: Paged
    query_start: Tensor
    num_tokens: int
    scale: float

    def run(self, case: Case, kernels: Any, **options: Any) -> Tensor:
        """One call of the launcher of `kernels`."""
        given = {"batch_invariant": case.batch_invariant, "config": case.config}
        with poisoned_memory():
            k_cache, v_cache = self.pages.caches
            out: Tensor = kernels.paged_attention(
                self.q,
                k_cache,
                v_cache,
                self.query_start,
                self.pages.seq_lens,
                self.pages.block_tables,
                self.scale,
                case.window,
                case.soft_cap,
                **given | {"max_query_len": case.max_query_len} | options,
            )
        return out


def spread(x: Tensor) -> Tensor:
    """The same numbers with gaps between rows and the first two dimensions swapped in memory."""
    wide = torch.full((x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 8), math.nan)
    view = wide.to(x.dtype).to(x.device).transpose(0, 1)[..., : x.shape[-1]]
    view.copy_(x)
    return view


def inputs(case: Case, device: str) -> Inputs:
    """Queries, caches full of poison around what may be read, and where sequences begin."""
    rng = generator(case.seed)
    query_lens = [query_len for query_len, _ in case.sequences]
    seq_lens = [seq_len for _, seq_len in case.sequences]
    pages = paged(rng, seq_lens, case.block_size, case.num_kv_heads, case.dims, case.dtype, device)
    num_tokens = sum(query_lens)
    shape = (num_tokens + case.padding, case.num_heads, case.head_dim)
    q = normal(rng, shape, case.dtype, device)
    q[num_tokens:] = math.nan
    tables = pages.block_tables.to(torch.int32 if case.seed % 2 else torch.int64)
    caches = pages.caches
    if case.strided:
        q, caches = spread(q), tuple(map(spread, caches))
    query_start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(device)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return Inputs(
        q, replace(pages, caches=caches, block_tables=tables), query_start, num_tokens, scale
    )


def verify(case: Case, device: str = "cpu", kernels: Any = paged_attention) -> None:
    """Mismatch if the launcher of `kernels` computes something else than the reference."""
    given = inputs(case, device)
    out = guarded((len(given.q), case.num_heads, case.dims[1]), case.dtype, device)
    got = given.run(case, kernels, out=out.view)
    out.check(written=False)
    if got is not out.view:
        raise Mismatch("the result is not in out")
    k_cache, v_cache = (cache.cpu().double() for cache in given.pages.caches)
    expected = reference.paged_attention(
        given.q.cpu().double(),
        k_cache,
        v_cache,
        given.query_start.cpu(),
        given.pages.seq_lens.cpu(),
        given.pages.block_tables.cpu(),
        given.scale,
        case.window,
        case.soft_cap,
    )
    begin = 0
    for query_len, seq_len in case.sequences:  # each by its own scale
        rows = slice(begin, begin + query_len)
        begin += query_len
        compare(got[rows], expected[rows], f"attention of {query_len} rows, length {seq_len},")
    padding = got[given.num_tokens :]
    if case.batch_invariant and bool((padding != 0).any()):
        raise Mismatch("padding rows are not 0")
    if not case.batch_invariant and not bool(padding.isnan().all()):
        raise Mismatch("padding rows were written")


# ---- the batch-invariant mode -----------------------------------------------------------------


def verify_invariant(case: Case, device: str = "cpu", kernels: Any = paged_attention) -> None:
    """Mismatch if a row's bits depend on more than its query, its position and its keys.

    The rows of the case together; each of its sequences alone, in chunks of 1 and of 7 (splits in
    registers and apart) and as a whole; in other block sizes, with wider tables and with padding
    behind.
    """
    case = replace(case, batch_invariant=True, max_query_len=None)
    given = inputs(case, device)
    together = given.run(case, kernels)[: given.num_tokens]
    begin = 0
    for row, (query_len, seq_len) in enumerate(case.sequences):
        rows = slice(begin, begin + query_len)
        begin += query_len
        if not query_len or not seq_len:
            continue
        for chunk, block_size in ((1, 16), (7, 1), (query_len, 64)):
            alone = _in_chunks(case, given, kernels, row, rows, chunk, block_size)
            _same_bits(together[rows], alone, f"sequence {row} in chunks of {chunk}")


def _same_bits(found: Tensor, wanted: Tensor, what: str) -> None:
    """Of every number, but for the sign of zero, which no sum can tell."""
    if not torch.equal(found, wanted):
        place = [int(i) for i in (found != wanted).nonzero()[0]]
        raise Mismatch(f"{what} has other bits than in its batch, at {place}")


def _in_chunks(
    case: Case, given: Inputs, kernels: Any, row: int, rows: slice, chunk: int, block_size: int
) -> Tensor:
    """The rows of one sequence, `chunk` at a time, from a cache of another block size.

    Chunks of a few rows are one batch of decode rows, sequences which share their blocks.
    """
    seq_len = case.sequences[row][1]
    first = seq_len - (rows.stop - rows.start)  # position of the first query
    caches = tuple(
        _repaged(cache, given.pages.block_tables[row], seq_len, block_size)
        for cache in given.pages.caches
    )
    count = -(-seq_len // block_size)
    table = torch.full((count + 3,), 10**6, dtype=torch.int32)
    table[:count] = torch.arange(count - 1, -1, -1)
    ends = [*range(first + chunk, seq_len, chunk), seq_len]
    query_lens = [end - begin for begin, end in pairwise([first, *ends])]
    device = given.q.device
    alone = Inputs(
        given.q[rows],
        Paged(
            caches,
            table.expand(len(ends), -1).contiguous().to(device),
            torch.tensor(ends, dtype=torch.int32, device=device),
        ),
        torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32),
        rows.stop - rows.start,
        given.scale,
    )
    longest = max(query_lens)
    if longest > paged_attention.FEW:
        return alone.run(case, kernels)
    config = case.config
    apart = None if config is None else replace(config, splits=2)
    inside = None if config is None else replace(config, splits=1)
    out = alone.run(case, kernels, max_query_len=longest, config=apart)
    same = alone.run(case, kernels, max_query_len=longest, config=inside)
    _same_bits(out, same, f"sequence {row} with splits apart")
    return out


def _repaged(cache: Tensor, table: Tensor, seq_len: int, block_size: int) -> Tensor:
    """One sequence's positions in a new cache, blocks in descending order, NaN behind its end."""
    positions = reference.gather_blocks(cache, table, seq_len)  # [Hkv, S, D]
    count = -(-seq_len // block_size)
    room = positions.new_full(
        (positions.shape[0], count * block_size, positions.shape[2]), math.nan
    )
    room[:, :seq_len] = positions
    return room.unflatten(1, (count, block_size)).transpose(0, 1).flip(0).contiguous()


# ---- compiled only ----------------------------------------------------------------------------


def _launch(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    query_len: int = 1,
    num_sequences: int = 64,
    **options: Any,
) -> None:
    """A call with these sizes, on memory that is never accessed."""
    q = torch.empty(num_sequences * query_len, num_heads, head_dim, dtype=dtype)
    k = torch.empty(64, num_kv_heads, block_size, head_dim, dtype=dtype)
    start = torch.empty(num_sequences + 1, dtype=torch.int32)
    tables = torch.empty(num_sequences, 8192 // block_size, dtype=torch.int32)
    lengths = torch.empty(num_sequences, dtype=torch.int32)
    paged_attention.paged_attention(
        q, k, torch.empty_like(k), start, lengths, tables, head_dim**-0.5, **options
    )


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
                    yield Launch(name, partial(call, **more), old_and_new, copies)
    llama = partial(_launch, 32, 8, 128, 16, HALF)
    yield Launch("mixed with a window", partial(llama, query_len=32, window=4096), old_and_new)
    many = partial(_launch, 32, 8, 128, 64, BRAIN, num_sequences=1, **longest)
    yield Launch("verify 16 with a window", partial(llama, window=4096, **longest), old_and_new)
    yield Launch("verify 16 of one long row", many, old_and_new, (90, 100))
    large = partial(_launch, 8, 4, 256, 64, BRAIN, num_sequences=1, **longest | cap)
    yield Launch("verify 16 of one long row, 256", large, old_and_new, (90, 100))
    together = partial(many, batch_invariant=True)
    yield Launch("verify 16 of one long row, batch-invariant", together, old_and_new, (90,))
    one = partial(llama, num_sequences=1, max_query_len=1)
    yield Launch("one long row", one, old_and_new)
    yield Launch("one long row, batch-invariant", partial(one, batch_invariant=True), old_and_new)
    exact = partial(_launch, 16, 8, 128, 16, torch.float32, query_len=2)
    yield Launch("float32", exact)
    yield Launch("float32, batch-invariant", partial(exact, batch_invariant=True))


LAUNCHES = tuple(_launches())
