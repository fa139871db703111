"""What each rank holds of a model, and what it refuses."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from minillm import LLM
from minillm.api.arguments import EngineArgs
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.layers.linear_methods import Matrix, PlainLinearMethod, WeightSlice
from minillm.models.checkpoint import open_model
from minillm.models.presets import preset
from minillm.parallel.place import Topology, thread_places
from minillm.parallel.rank import load_rank
from minillm.parallel.shard import VocabularyParallel
from minillm.parallel.split import Split, check_split, cut_layers
from tests.parallel.rank_groups import on_ranks

TINY = preset("smollm2-135m")


# ---- pure numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "heads"),
    [
        (4, 2, [(0, 1), (2, 3)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
        (3, 9, [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 3),
    ],
)
def test_kv_heads(num_kv_heads, size, heads):
    assert [tuple(Split(rank, size).kv_heads(num_kv_heads)) for rank in range(size)] == heads


@pytest.mark.parametrize("vocab_size", [1, 64, 101, 128, 1000, 49_152])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_vocabularies_of_any_size(vocab_size, size):
    """In whole blocks of 64, because the noise of a block is drawn together."""
    held = [Split(rank, size).vocabulary(vocab_size) for rank in range(size)]
    assert [token for each in held for token in each] == list(range(vocab_size))
    assert all(each.start % 64 == 0 or not each for each in held)
    assert max(map(len, held)) <= Split(0, size).most_tokens(vocab_size) < vocab_size / size + 64


@pytest.mark.parametrize(
    ("fields", "size", "what"),
    [
        ({}, 2, "9 attention heads"),
        ({"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 1537}, 2, "size 1537"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, "4 KV heads"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_those_that_do(fields, size, what):
    config = replace(TINY, **fields)
    with pytest.raises(ConfigError, match=f"{what}.*can be 1") as caught:
        check_split(config, size)
    assert "\n" not in str(caught.value)
    mixtral = replace(preset("mixtral-8x7b"), num_heads=48, num_kv_heads=24, intermediate_size=6)
    with pytest.raises(ConfigError, match=r"8 experts.*can be 1, 2, 4, 8"):
        check_split(mixtral, 3, whole_experts=True)


def ranges(lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [range(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def dearest(costs, output, cuts):
    sums = [sum(costs[layer] for layer in each) for each in cuts]
    return max(*sums[:-1], sums[-1] + output) if len(sums) > 1 else sums[0] + output


def test_no_cut_is_better():
    """Against all cuts there are."""
    generator = random.Random(0)
    for _ in range(60):
        costs = [generator.randint(1, 9) for _ in range(generator.randint(1, 8))]
        output, count = generator.randint(0, 12), generator.randint(1, len(costs))
        every = itertools.combinations(range(1, len(costs)), count - 1)
        cuts = [[b - a for a, b in itertools.pairwise((0, *c, len(costs)))] for c in every]
        best = min(dearest(costs, output, ranges(cut)) for cut in cuts)
        assert dearest(costs, output, cut_layers(costs, output, count)) == best


EXTERNAL = {"distributed_executor_backend": "external"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        *(({"tensor_parallel_size": each}, "^tensor_par") for each in (0, -1, 1.5, True, "2")),
        ({"tensor_parallel_size": 3}, "can be 1, 2, 4"),
        ({"pipeline_parallel_size": 0}, "^pipeline_parallel_size"),
        ({"pipeline_parallel_size": 8}, "at most 7, the layers"),
        ({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, "still in the pipeline"),
        ({"enable_expert_parallel": 1, "tensor_parallel_size": 2}, "enable_expert_parallel is 1"),
        ({"enable_expert_parallel": True}, "are 1; set one of them to 2"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "needs a model with experts"),
        ({"distributed_executor_backend": "mpi"}, "mp, threads, external, ray"),
        ({"distributed_executor_backend": "ray"}, "needs ranks; set tensor_parallel_size"),
        (EXTERNAL, "needs ranks; set tensor_parallel_size"),
        (EXTERNAL | {"tensor_parallel_size": 2}, "^distributed_executor_backend='external' needs"),
        ({"tensor_parallel_size": 2, "master_port": 70_000}, "from 0 to 65535"),
        ({"tensor_parallel_size": 2, "master_addr": ""}, "master_addr is ''"),
    ],
    ids=str,
)
def test_one_sentence_says_what_cannot_be(fields, what):
    with pytest.raises((ConfigError, UnsupportedFeatureError), match=what) as caught:
        LLM("tiny", **fields)
    assert "\n" not in str(caught.value)


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [5, 101, 300])
def test_each_rank_has_the_rows_of_its_token_ids(vocab_size, size):
    """Of 5 tokens, all ranks but the first have none."""
    weight, x = torch.randn(vocab_size, 16), torch.rand(3, 16)

    def logits(communicator):
        held = Split(communicator.rank, communicator.size).vocabulary(vocab_size)
        part = WeightSlice("", (vocab_size, 16), held, range(16))
        matrix = Matrix([part])
        matrix.create(torch.float32, "cpu")
        matrix.weight.copy_(weight[held.start : held.stop])
        method = VocabularyParallel(PlainLinearMethod(), held, communicator)
        ids = torch.tensor([0, vocab_size - 1, vocab_size // 2])
        assert torch.equal(method.lookup(matrix, ids), weight[ids])
        return method.apply(matrix, x, None)

    torch.testing.assert_close(torch.cat(on_ranks(size, logits), 1), x @ weight.T)


@pytest.mark.parametrize("name", ["tiny", "preset:smollm2-135m"])
def test_random_weights_are_slices_of_one_rank_s(name):
    """So that `load_format="dummy"` is the same model on any number of ranks."""
    source = open_model(name)
    config = replace(source.config, num_heads=4, num_kv_heads=2, num_layers=1, head_dim=24)
    config = replace(config, hidden_size=48, intermediate_size=64, vocab_size=101)
    source = replace(source, config=config)
    args = EngineArgs("tiny", load_format="dummy", seed=3)
    load = partial(load_rank, args, source, torch.float32, torch.device("cpu"), 64)
    (whole,) = map(load, thread_places(Topology()))
    left, right = map(load, thread_places(Topology(2)))
    mine = dict(whole.named_parameters())
    for name, one in left.named_parameters():
        other, all_of_it = dict(right.named_parameters())[name], mine[name]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat((one, other), 1), all_of_it)
        elif name.endswith("gate_up_proj.weight"):
            gate, up = all_of_it.chunk(2)
            assert torch.equal(one, torch.cat((gate.chunk(2)[0], up.chunk(2)[0])))
            assert torch.equal(other, torch.cat((gate.chunk(2)[1], up.chunk(2)[1])))
        elif name.endswith(("embedding.weight", "lm_head.weight")):
            assert torch.equal(torch.cat((one, other)), all_of_it)
        elif name.endswith("norm.weight"):
            assert torch.equal(one, all_of_it)
        else:
            assert name.endswith("qkv_proj.weight")
            q, k, v = all_of_it.split((96, 48, 48))
            assert torch.equal(one, torch.cat([each.chunk(2)[0] for each in (q, k, v)]))


def test_random_weights_of_stages_are_layers_of_one_rank_s():
    source = open_model("preset:smollm2-135m")
    config = replace(source.config, num_layers=3, hidden_size=48, num_heads=4, num_kv_heads=2)
    config = replace(config, head_dim=24, intermediate_size=64, vocab_size=101)
    args = EngineArgs("tiny", load_format="dummy", seed=3)
    parts = args, replace(source, config=config), torch.float32, torch.device("cpu"), 64
    (whole,) = (load_rank(*parts, place) for place in thread_places(Topology()))
    first, last = (load_rank(*parts, place) for place in thread_places(Topology(1, 2)))
    layers = [each.mlp.down_proj.weight for one in (first, last) for each in one.layers]
    for mine, right in zip(layers, whole.layers, strict=True):
        assert torch.equal(mine, right.mlp.down_proj.weight)
    assert torch.equal(first.embedding.weight, whole.embedding.weight)
    assert torch.equal(last.lm_head.weight, whole.embedding.weight)


def test_random_weights_of_whole_experts_are_those_of_one_rank():
    source = open_model("preset:mixtral-8x7b")
    config = replace(source.config, num_layers=1, hidden_size=48, num_heads=4, num_kv_heads=2)
    moe = replace(config.moe, intermediate_size=32)
    config = replace(config, head_dim=24, intermediate_size=32, vocab_size=101, moe=moe)
    args = EngineArgs("tiny", load_format="dummy", seed=3, tensor_parallel_size=2)
    args = replace(args, enable_expert_parallel=True)
    parts = args, replace(source, config=config), torch.float32, torch.device("cpu"), 64
    (whole,) = (load_rank(*parts, place) for place in thread_places(Topology()))
    ranks = [load_rank(*parts, place) for place in thread_places(Topology(2))]
    for name in ("gate_up", "down"):
        held = [getattr(each.layers[0].mlp.experts, name).weight for each in ranks]
        all_of_them = getattr(whole.layers[0].mlp.experts, name).weight
        assert [len(each) for each in held] == [4, 4]
        assert torch.equal(torch.cat(held), all_of_them)
