"""Deterministic mode gives a request the same bits on any number of ranks: every logprob is equal.

The ranks are threads. What each request gets alone, from one rank with two torch threads, is
compared with what 2, 4 and 8 ranks with one thread each give it in batches, in chunks, from a
prefix cache and after preemption.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minillm import LLM
from minillm.errors import UnsupportedFeatureError
from minillm.models import deterministic, fixed_sums
from minillm.models.fixed_sums import FixedDecoder, FixedSumMethod
from minillm.ops import cpu, cpu_sums
from minillm.parallel import communicator, rank, shard
from tests.engine.bitwise import (
    DTYPES,
    PAIRWISE,
    Cell,
    Job,
    Reference,
    everything,
    generate,
    jobs,
    open_engine,
    run_cell,
)
from tests.models.tiny import Tiny
from tests.parallel.test_shard import on_ranks

SHORT = {"num_hidden_layers": 2}
# Biases; tied weights and a vocabulary of which the last of four ranks has nothing; one KV head for
# all ranks; a window; and heads for eight ranks.
MODELS = {
    "llama": Tiny("llama", SHORT | {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "qwen2": Tiny("qwen2", SHORT | {"tie_word_embeddings": True, "vocab_size": 137}, seed=1),
    "qwen3": Tiny(
        "qwen3", SHORT | {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 149}, seed=2
    ),
    "mistral": Tiny("mistral", SHORT | {"num_key_value_heads": 4}, seed=3),
    "eight heads": Tiny(
        "llama", SHORT | {"num_attention_heads": 8, "hidden_size": 128, "mlp_bias": True}, seed=4
    ),
}
OTHERS = {  # models whose bits are promised on the same number of ranks only
    "three KV heads": Tiny(
        "llama",
        SHORT | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    ),
    "uneven": Tiny("llama", SHORT | {"intermediate_size": 100}),
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"vocab_size": 149}, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", SHORT, seed=1),
}
SIZES = {name: (2, 4) for name in MODELS} | {"eight heads": (8,)}
ENGINES = [(name, dtype, size) for name in MODELS for dtype in DTYPES for size in SIZES[name]]
CELLS = [(*each, PAIRWISE[(5 * i + 3) % len(PAIRWISE)]) for i, each in enumerate(ENGINES)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch, for this thread and those that it starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named(cells: list[tuple[str, str, int, Cell]]) -> list[object]:
    return [pytest.param(*each, id="-".join(map(str, each))) for each in cells]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model; written when first asked for."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = (MODELS | OTHERS)[name].write(tmp_path_factory.mktemp("m")).folder
        return written[name]

    return get


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str, str], Reference]:
    """What each request gets alone from one rank; computed when first asked for."""
    known: dict[tuple[str, str], Reference] = {}

    def get(name: str, dtype: str) -> Reference:
        skip_without_c(dtype)
        if (name, dtype) not in known:
            with threads(2):
                known[name, dtype] = Reference(folder_of(name), dtype)
        return known[name, dtype]

    return get


def skip_without_c(dtype: str) -> None:
    if cpu.functions(getattr(torch, dtype)) is None:
        pytest.skip(cpu.describe(getattr(torch, dtype)))


def on(size: int) -> dict[str, object]:
    """The arguments of an engine of so many ranks."""
    return {"tensor_parallel_size": size, "distributed_executor_backend": "threads"}


# ---- the promise -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "size", "cell"), named(CELLS))
def test_ranks_have_every_bit_of_one_alone(name, dtype, size, cell, folder_of, reference_of):
    reference = reference_of(name, dtype)
    assert isinstance(reference.llm.engine.runner.model, FixedDecoder)
    llm = cell.open(folder_of(name), dtype, **on(size))
    try:
        with threads(1):
            assert not reference.differences(run_cell(llm, cell))
    finally:
        llm.close()


def test_so_many_ranks_as_threads_want(folder_of, reference_of):
    """Ranks of several threads each, on requests one by one."""
    reference, some = reference_of("llama", "bfloat16"), jobs()[:4]
    with threads(3):
        llm = open_engine(folder_of("llama"), "bfloat16", **on(2))
        assert [everything(generate(llm, [job])[0]) for job in some] == reference.numbers[:4]
        llm.close()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "float32"), ("llama", "bfloat16")])
def test_stages_have_every_bit_of_one_stage(name, dtype, size, folder_of, reference_of):
    """What crosses a boundary is rounded as the norm of the next layer would round it."""
    reference = reference_of(name, dtype)
    cell = [each for each in PAIRWISE if each.pool == "ample" and each.chunk][size - 1]
    llm = cell.open(folder_of(name), dtype, **on(size), pipeline_parallel_size=2)
    try:
        assert not reference.differences(run_cell(llm, cell))
    finally:
        llm.close()


def test_stages_of_a_model_that_needs_tiles_are_refused(folder_of):
    with pytest.raises(UnsupportedFeatureError, match="only layers of grouped attention"):
        open_engine(folder_of("qwen3_moe"), "float32", **on(1), pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes that share memory")
@pytest.mark.parametrize("dtype", DTYPES)
def test_processes_have_every_bit_of_one_too(dtype, folder_of, reference_of):
    """Whose sums are those of shared_sum.c."""
    reference = reference_of("llama", dtype)
    llm = open_engine(folder_of("llama"), dtype, tensor_parallel_size=4)
    try:
        assert [everything(each) for each in generate(llm, jobs())] == reference.numbers
    finally:
        llm.close()


def test_a_bias_is_added_before_the_only_rounding():
    dtype = torch.bfloat16
    total = torch.tensor([[1.0 + 2**-9, 1.0 + 2**-8, -3.0]])
    bias = torch.tensor([2**-9, 2**-9, 2**-20]).to(dtype)
    expected = (total.double() + bias.double()).float().to(dtype)
    assert torch.equal(shard.finished(total, bias, dtype), expected)
    assert not torch.equal(total.to(dtype) + bias, expected)


@pytest.mark.parametrize(
    ("name", "size"),
    [("three KV heads", 3), ("uneven", 2), ("qwen3_moe", 4), ("deepseek_v2", 2)],
)
def test_other_models_have_the_same_bits_on_the_same_number_of_ranks(name, size, folder_of, caplog):
    """Alone and in a batch; and one sentence says that this is all."""
    llm = open_engine(folder_of(name), "float32", **on(size))
    alone = [everything(generate(llm, [job])[0]) for job in jobs()]
    assert [everything(each) for each in generate(llm, jobs())] == alone
    llm.close()
    said = [each.message for each in caplog.records if "number of ranks, because" in each.message]
    assert len(said) == 1


def test_ranks_without_c_are_cut_into_tiles(folder_of, monkeypatch, caplog):
    monkeypatch.setenv(cpu.PANELS, "0")
    llm = open_engine(folder_of("qwen2"), "float32", **on(4))
    assert all(each.model.tiles for each in llm.engine.runner.runners)
    assert "because our C functions are not used" in caplog.text
    some = jobs()[:6]
    alone = [everything(generate(llm, [job])[0]) for job in some]
    assert [everything(each) for each in generate(llm, some)] == alone
    llm.close()


def test_nothing_is_said_where_the_bits_are_those_of_one(folder_of, caplog):
    open_engine(folder_of("llama"), "float32", **on(2)).close()
    assert not [each for each in caplog.records if "number of ranks" in each.message]


# ---- what is summed ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 10))
def test_sums_are_balanced_trees(size):
    parts = torch.randn(size, 50, generator=torch.Generator().manual_seed(size)) * 1e3
    left = list(parts)
    while len(left) > 1:
        rest = left[len(left) // 2 * 2 :]
        left = [left[2 * i] + left[2 * i + 1] for i in range(len(left) // 2)] + rest
    assert torch.equal(communicator.tree_sum(parts), left[0])
    assert communicator.tree_sum(parts.bfloat16()).dtype == torch.float32
    for total in on_ranks(size, lambda each: each.sum(parts[each.rank].clone())):
        assert torch.equal(total, left[0])


@pytest.mark.parametrize(("size", "parts"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_each_rank_has_its_share_of_eight_parts(size, parts, folder_of):
    skip_without_c("float32")
    llm = open_engine(folder_of("eight heads"), "float32", **(on(size) if size > 1 else {}))
    executor = llm.engine.runner
    for runner in executor.runners if size > 1 else [executor]:
        found = [
            each.inner.parts if isinstance(each, shard.RowParallel) else each.parts
            for layer in runner.model.model.layers
            for each in (layer.attention.o_proj.method, layer.mlp.down_proj.method)
        ]
        assert found == [parts] * 4
    llm.close()


# ---- tiles -------------------------------------------------------------------------------------


def test_ranks_use_the_tiles_that_all_of_them_can_use(folder_of, monkeypatch):
    finds = iter([(8, 16, 32), (16, 32, 64), (16, 32), (16, 32, 128)])
    real = deterministic.find_tiles

    def find(model):
        real(model)
        return next(finds)

    monkeypatch.setattr(rank, "find_tiles", find)
    llm = open_engine(folder_of("qwen3_moe"), "float32", **on(4))
    assert [each.model.tiles for each in llm.engine.runner.runners] == [(16, 32)] * 4
    llm.close()
    finds = iter([(8,), (16,)])
    llm = open_engine(folder_of("qwen3_moe"), "float32", **on(2))
    assert [each.model.tiles for each in llm.engine.runner.runners] == [(1,)] * 2
    llm.close()


def test_all_ranks_try_out_tiles_with_the_same_calls(folder_of, monkeypatch):
    """Also the one without a token of the vocabulary, and those for which a size is wrong."""
    probe = deterministic.probe

    def wrong_on_one(model, size):
        found = probe(model, size)
        held = model.embedding.parts[0].rows
        return None if size == 32 and held.start == 64 else found

    monkeypatch.setattr(deterministic, "probe", wrong_on_one)
    llm = open_engine(folder_of("qwen3_moe"), "float32", **on(4))
    runners = llm.engine.runner.runners
    first, *others = [each.traffic for each in llm.engine.runner.places]
    assert first["sum"].calls >= 5 * 2 * 5
    assert all(each == first for each in others)
    assert all(32 not in each.model.tiles for each in runners)
    llm.close()


# ---- what would go wrong -----------------------------------------------------------------------


def agrees(folder: Path, dtype: str, size: int) -> bool:
    """Whether some requests get from several ranks, together, what one gives each alone."""
    some: list[Job] = jobs()[:6]

    def numbers(llm: LLM) -> list[object]:
        try:
            return [everything(each) for each in generate(llm, some)]
        finally:
            llm.close()

    one = numbers(open_engine(folder, dtype))
    return numbers(open_engine(folder, dtype, **on(size))) == one


def left_to_right(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each
    return total


def ring(parts: Tensor) -> Tensor:
    """Each value's sum begins at another rank, as in a ring."""
    flat = parts.float().flatten(1)
    totals = torch.stack([left_to_right(flat.roll(-first, 0)) for first in range(len(flat))])
    chunk = torch.arange(flat.shape[1]) * len(flat) // flat.shape[1]
    return totals.gather(0, chunk[None])[0].view(parts.shape[1:])


def rounded_parts(self: FixedSumMethod, matrix, x: Tensor) -> Tensor:
    sums = cpu_sums.panel_sums(x, matrix.weight, self.out_features, self.parts)
    return sums.to(x.dtype).float()


def as_many_as_ranks(matrix) -> int:
    """One part on each rank; one rank is right, as it has all eight."""
    (part,) = matrix.parts
    return 8 if len(part.columns) == part.shape[1] else 1


def last_bias(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return total.to(dtype) if bias is None else total.to(dtype) + bias


PLANTED = {
    "sums from left to right": ("float32", 4, (communicator, "tree_sum", left_to_right)),
    "sums in the order of a ring": ("float32", 4, (communicator, "tree_sum", ring)),
    "parts are rounded": ("bfloat16", 2, (FixedSumMethod, "partial", rounded_parts)),
    "as many parts as ranks": ("float32", 2, (fixed_sums, "num_parts", as_many_as_ranks)),
    "the bias comes after the rounding": ("bfloat16", 2, (shard, "finished", last_bias)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug, folder_of, monkeypatch):
    dtype, size, (owner, name, wrong) = PLANTED[bug]
    skip_without_c(dtype)
    monkeypatch.setattr(owner, name, wrong)
    assert not agrees(folder_of("llama"), dtype, size)
