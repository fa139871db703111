"""Deterministic mode gives a request the same bits on any number of ranks: every logprob is equal.

The ranks are threads. `tests/matrix` compares them in batches, in chunks, from a prefix cache and
after preemption; here are numbers of threads, of ranks and of parts, and models that need tiles.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from minillm.errors import UnsupportedFeatureError
from minillm.layers.linear_methods import Matrix, WeightSlice
from minillm.models import deterministic
from minillm.models.fixed_sums import FixedDecoder, num_parts
from minillm.ops import cpu
from minillm.parallel import communicator, rank, shard
from minillm.parallel.split import Split
from tests.engine.small import make
from tests.engine.test_deterministic import open_engine
from tests.matrix.cells import Cell, Reference, folder_of, reference_of, run_cell
from tests.matrix.jobs import everything, generate
from tests.ops.c_variants import torch_threads
from tests.pairs import one_in
from tests.parallel.rank_groups import on_ranks

DTYPES = ("float32", "bfloat16")


def skip_without_c(dtype: str) -> None:
    if cpu.functions(getattr(torch, dtype)) is None:
        pytest.skip(cpu.describe(getattr(torch, dtype)))


def on(size: int) -> dict[str, object]:
    """The arguments of an engine of so many ranks."""
    return {"tensor_parallel_size": size, "distributed_executor_backend": "threads"}


# ---- the promise -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", one_in(2, DTYPES))
def test_ranks_and_threads_of_any_number(dtype, size, caplog):
    """What one rank with two threads gives alone, ranks of one and of three threads give; and
    nothing is said about the number of ranks."""
    skip_without_c(dtype)
    cell = Cell("llama", f"exact {dtype}", chunk=7, cache="radix")
    with torch_threads(2):
        reference = Reference(cell.alone())
        assert reference.outputs
    assert isinstance(reference.llm.engine.runner.model, FixedDecoder)
    for count in (1, 3):
        with torch_threads(count):
            llm = make(folder_of("llama"), **cell.fields() | on(size))
            outputs = generate(llm, reference.jobs[:4]) if count > 1 else run_cell(llm, reference)
            llm.close()
        jobs = reference.jobs[: len(outputs)]
        assert not reference.differences(outputs, jobs, exact=True)
    assert "number of ranks" not in caplog.text


def test_stages_of_a_model_that_needs_tiles_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="only layers of grouped attention"):
        open_engine("qwen3_moe", "float32", **on(1), pipeline_parallel_size=2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes that share memory")
@pytest.mark.parametrize("dtype", DTYPES)
def test_processes_have_every_bit_of_one_too(dtype):
    """Whose sums are those of shared_sum.c."""
    skip_without_c(dtype)
    reference = reference_of(Cell("llama", f"exact {dtype}"))
    with open_engine("llama", dtype, tensor_parallel_size=4) as llm:
        outputs = generate(llm, reference.jobs)
    assert not reference.differences(outputs, exact=True)


def test_a_bias_is_added_before_the_only_rounding():
    dtype = torch.bfloat16
    total = torch.tensor([[1.0 + 2**-9, 1.0 + 2**-8, -3.0]])
    bias = torch.tensor([2**-9, 2**-9, 2**-20]).to(dtype)
    expected = (total.double() + bias.double()).float().to(dtype)
    assert torch.equal(shard.finished(total, bias, dtype), expected)
    assert not torch.equal(total.to(dtype) + bias, expected)


MODELS = [
    *(("uneven", 2, ""), ("three KV heads", 3, ""), ("qwen2", 2, "0")),
    *(("qwen3_moe", 4, ""), ("deepseek_v2", 2, ""), ("qwen2", 4, "0")),
]


@pytest.mark.parametrize(("name", "size", "panels"), one_in(6, MODELS))
def test_other_models_have_the_same_bits_on_the_same_number_of_ranks(
    name, size, panels, monkeypatch, caplog
):
    """Alone and in a batch; and one sentence says that this is all, and why."""
    monkeypatch.setenv(cpu.PANELS, panels)
    some = Reference(Cell(name)).jobs[:6]
    llm = open_engine(name, "float32", **on(size))
    assert not panels or all(each.model.tiles for each in llm.engine.runner.runners)
    alone = [everything(generate(llm, [job])[0]) for job in some]
    assert [everything(each) for each in generate(llm, some)] == alone
    llm.close()
    said = [each.message for each in caplog.records if "number of ranks, because" in each.message]
    assert len(said) == 1
    assert ("because our C functions are not used" in said[0]) == bool(panels)


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


@pytest.mark.parametrize("width", [8, 64, 100, 1536])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_rank_has_its_share_of_eight_parts(size, width):
    """Or 0, where they are no whole ones."""
    for rank_ in range(size if width % size == 0 else 0):
        held = Split(rank_, size).share(width)
        parts = num_parts(Matrix([WeightSlice("", (4, width), range(4), held)]))
        assert parts == (0 if size == 3 or width % 8 else 8 // size)


# ---- tiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finds", "common"),
    [(((8, 16, 32), (16, 32, 64), (16, 32), (16, 32, 128)), (16, 32)), (((8,), (16,)), (1,))],
)
def test_ranks_use_the_tiles_that_all_of_them_can_use(finds, common, monkeypatch):
    monkeypatch.setattr(rank, "find_tiles", lambda model: finds[model])
    used = []

    def agree(own):
        tiled = SimpleNamespace(model=own.rank, tiles=(1,), obstacle="", use=used.append)
        rank.agree(tiled, own)

    on_ranks(len(finds), agree)
    assert list(map(tuple, used)) == [common] * len(finds)


def test_all_ranks_try_out_tiles_with_the_same_calls(monkeypatch):
    """Also the one without a token of the vocabulary, and those for which a size is wrong."""
    probe = deterministic.probe

    def wrong_on_one(model, size):
        found = probe(model, size)
        held = model.embedding.parts[0].rows
        return None if size == 32 and held.start == 64 else found

    monkeypatch.setattr(deterministic, "probe", wrong_on_one)
    llm = open_engine("qwen3_moe", "float32", **on(4))
    runners = llm.engine.runner.runners
    first, *others = [each.traffic for each in llm.engine.runner.places]
    assert first["sum"].calls >= 5 * 2 * 5
    assert all(each == first for each in others)
    assert all(32 not in each.model.tiles for each in runners)
    llm.close()
