"""Experts that move between ranks change no token.

Ranks are threads, but for one test. Tokens are compared in float32 with those of one rank, weights
bit by bit with those of its experts.
"""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from minillm import LLM, EngineArgs, SamplingParams
from minillm.config import MoEConfig
from minillm.errors import (
    ConfigError,
    EngineDeadError,
    UnknownArgumentError,
    UnsupportedFeatureError,
)
from minillm.layers.moe import ExpertNames, Experts
from minillm.models.presets import preset
from minillm.parallel import balance
from minillm.parallel.balance import BalancedExperts, rebalance
from minillm.parallel.communicator import ThreadGroup
from minillm.parallel.experts import packed, share_experts, unpacked
from minillm.parallel.placement import Placement, first_placement, place
from minillm.parallel.split import largest_part
from minillm.plan.parameters import parameter_count
from tests.engine.small import make
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.parallel.rank_groups import on_all

# Six experts, and eight of which the router chooses in groups; one dense layer there.
MODELS = {
    "qwen3_moe": Tiny("qwen3_moe", {"num_hidden_layers": 2, "vocab_size": 101}, seed=2),
    "deepseek_v3": Tiny("deepseek_v3", seed=3),
}
INTERVAL = 4
PROMPTS = [[5 + i % 3 for i in range(30)], [60, 7, 99], [11] * 17, [5, 9, 3] * 4, [80, 2], [33] * 9]
PARAMS = [
    SamplingParams(temperature=[0, 0.9][i % 2], seed=i, max_tokens=8 + 2 * i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Of a model: its folder, the tokens of one rank, and its decoder."""
    known: dict[str, Any] = {}

    def get(name):
        if name not in known:
            folder = MODELS[name].write(tmp_path_factory.mktemp("model")).folder
            llm = engine(folder)
            known[name] = folder, tokens(llm), llm.engine.runner.model
        return known[name]

    return get


def engine(folder, **more: Any) -> LLM:
    return make(folder, max_num_seqs=4, enable_prefix_caching=False, **more)


def balanced(folder, size: int, num_redundant: int = 0, **more: Any) -> LLM:
    """An engine whose experts may move before every fourth step."""
    config = {"window_size": 6, "step_interval": INTERVAL, "num_redundant_experts": num_redundant}
    fields = {"tensor_parallel_size": size, "enable_expert_parallel": True, "enable_eplb": True}
    fields |= {"eplb_config": config, "distributed_executor_backend": "threads"}
    return engine(folder, **(fields | more))


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def layers_of(llm: LLM) -> list[list[BalancedExperts]]:
    """The layers with experts of each rank."""
    models = [runner.model for runner in llm.engine.runner.runners]
    return [[e for e in model.modules() if isinstance(e, BalancedExperts)] for model in models]


def check_weights(layers: list[BalancedExperts], whole: list[Experts]) -> None:
    """Each slot has the weights of the expert that it should."""
    for mine, right in zip(layers, whole, strict=True):
        held = list(mine.placement.slots[mine.communicator.rank])
        for name in ("gate_up", "down"):
            own, every = getattr(mine.held, name).weight, getattr(right, name).weight
            assert torch.equal(own, every[held])


QUICK = [
    ("qwen3_moe", 2, 1, 0, 1),
    ("qwen3_moe", 4, 1, 2, 1),  # alone, 6 experts do not go on 4 ranks
    ("deepseek_v3", 2, 2, 2, 1),
    ("deepseek_v3", 1, 1, 4, 3),
]
REST = [
    ("qwen3_moe", 2, 1, 2, 1),
    ("deepseek_v3", 4, 1, 0, 1),
    ("qwen3_moe", 1, 1, 0, 2),
    ("qwen3_moe", 1, 1, 2, 4),
]


@pytest.mark.parametrize(
    ("name", "size", "num_stages", "num_redundant", "num_copies"), some(QUICK, QUICK + REST)
)
def test_tokens_are_those_of_one_rank_while_experts_move(
    name, size, num_stages, num_redundant, num_copies, alone, monkeypatch
):
    moved: list[bool] = []
    monkeypatch.setattr(balance, "report", lambda now, found, _: moved.append(now != found))
    folder, wanted, model = alone(name)
    llm = balanced(
        folder,
        size,
        num_redundant,
        pipeline_parallel_size=num_stages,
        data_parallel_size=num_copies,
    )
    ranks = layers_of(llm)
    assert tokens(llm) == wanted
    num_rebalances = (len(list(llm.trace)) - 1) // INTERVAL
    assert len(moved) == num_rebalances * num_stages
    assert sum(moved) >= 3
    whole = [each for each in model.modules() if isinstance(each, Experts)]
    size *= num_copies  # of the ranks that share experts
    for stage in range(num_stages):
        group = ranks[stage * size : (stage + 1) * size]
        own, whole = whole[: len(group[0])], whole[len(group[0]) :]
        for layers in group:
            assert [layer.version for layer in layers] == [num_rebalances] * len(own)
            assert [layer.placement for layer in layers] == [e.placement for e in group[0]]
            check_weights(layers, own)
    assert not whole
    llm.close()


@pytest.mark.slow
def test_processes(alone, caplog):
    folder, wanted, _ = alone("qwen3_moe")
    with caplog.at_level(logging.INFO, "minillm"):
        llm = balanced(folder, 2, 2, distributed_executor_backend="mp")
        assert tokens(llm) == wanted
        llm.close()
    said = [each.getMessage() for each in caplog.records if "placed by load" in each.getMessage()]
    assert len(said) >= 3
    assert all(each.startswith("rank 0: ") for each in said)
    assert any(" 0 of 16 slots" not in each for each in said)


def test_choices_of_the_last_steps_are_counted(alone):
    llm = balanced(alone("qwen3_moe")[0], 2)
    tokens(llm)
    steps = list(llm.trace)[-6:]
    num_tokens = sum(each.num_prefill_tokens + each.num_decode_tokens for each in steps)
    assert [int(layer.loads().sum()) for each in layers_of(llm) for layer in each] == (
        [3 * num_tokens] * 4
    )
    llm.close()


# ---- without an engine -------------------------------------------------------------------------


def small_layer(placement: Placement, communicator, weights: dict[str, torch.Tensor]):
    """A rank's part of a layer with these weights [E, ..]."""
    moe = MoEConfig(num_experts=len(placement.copies), num_experts_per_token=2, intermediate_size=3)
    experts = Experts("x.", 4, moe, ExpertNames())
    held = placement.slots[communicator.rank]
    share_experts(experts, held)
    for name, values in weights.items():
        matrix = getattr(experts, name)
        matrix.create(values.dtype, "cpu")
        matrix.weight.copy_(values[list(held)])
    return BalancedExperts(experts, experts, placement, communicator, 5)


@pytest.mark.parametrize(("num_experts", "num_redundant"), [(6, 0), (6, 3), (4, 8), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loads_of_all_ranks_count_and_every_bit_moves(
    num_experts, num_redundant, dtype, monkeypatch
):
    """Each rank has other tokens, as with data parallelism; experts are sent in pieces."""
    monkeypatch.setattr(balance, "PIECE", 7)
    generator = torch.Generator().manual_seed(num_experts)
    shapes = {"gate_up": (num_experts, 6, 4), "down": (num_experts, 4, 3)}
    weights = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    weights["down"][0] = -0.0
    first = first_placement(num_experts, 3, num_redundant)
    layers = [small_layer(first, each, weights) for each in ThreadGroup(3).communicators()]
    whole = small_layer(first_placement(num_experts, 1), ThreadGroup(1).communicators()[0], weights)
    changed = 0
    for version in range(1, 6):
        chosen = [torch.randint(0, num_experts, (9, 2), generator=generator) for _ in layers]
        for layer, ids in zip(layers, chosen, strict=True):
            for _ in range(5):
                layer.count((ids * ids) // num_experts)  # the first ones more often
        loads = sum(layer.loads() for layer in layers).tolist()
        before = layers[0].placement
        calls = [lambda e=each, v=version: rebalance(nn.ModuleList([e]), v) for each in layers]
        assert on_all(calls) == [None] * 3
        found = {layer.placement for layer in layers}
        assert len(found) == 1
        best = place(loads, 3, num_redundant).balance(loads)
        assert found.pop().balance(loads) == pytest.approx(max(best, before.balance(loads)))
        changed += layers[0].placement != before
        for layer in layers:
            check_weights([layer], [whole.held])
    assert changed or (num_experts, num_redundant) == (4, 8)  # where every rank has all


def test_all_ranks_send_a_row_to_the_same_copy():
    placement = place([9, 1, 1, 1], 3, 5)
    weights = {"gate_up": torch.zeros(4, 6, 4), "down": torch.zeros(4, 4, 3)}
    layers = [small_layer(placement, each, weights) for each in ThreadGroup(3).communicators()]
    ids = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 1], [1, 0]])
    found = [layer.slots(ids).tolist() for layer in layers]
    assert found[0] == found[1] == found[2]
    for row, chosen in enumerate(ids.tolist()):
        for choice, expert in enumerate(chosen):
            rank, slot = placement.copy_of(expert, row)
            assert found[0][row][choice] == 3 * rank + slot


# ---- planted bugs ------------------------------------------------------------------------------


def old_ids(right):
    """Weights move, and rows go where their experts were."""

    def use(self, placement):
        if not self.version:
            right(self, placement)
        self.placement = placement

    return use


def counted_twice(right):
    """All ranks with a copy compute a row."""

    def slots(self, ids):
        found, rank, size = right(self, ids), self.communicator.rank, len(self.placement.slots[0])
        for expert, copies in enumerate(self.placement.copies):
            for mine in [slot for owner, slot in copies if owner == rank]:
                found[ids == expert] = rank * size + mine
        return found

    return slots


def no_move(right):
    return lambda *arguments: None


def by_own_loads(right):
    """Each rank places experts by what it has seen: here, one of them more."""

    def better(self, loads):
        loads[self.communicator.rank] += 1000
        return right(self, loads)

    return better


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (BalancedExperts, "use", old_ids),
        (BalancedExperts, "slots", counted_twice),
        (balance, "move", no_move),
    ],
    ids=["ids stay", "a copy counts twice", "weights stay"],
)
def test_a_planted_bug_changes_tokens(owner, name, bug, alone, monkeypatch):
    folder, wanted, _ = alone("qwen3_moe")
    monkeypatch.setattr(owner, name, bug(getattr(owner, name)))
    llm = balanced(folder, 2, 2)
    assert tokens(llm) != wanted
    llm.close()


def test_ranks_that_place_otherwise_are_noticed(alone, monkeypatch):
    monkeypatch.setattr(BalancedExperts, "better", by_own_loads(BalancedExperts.better))
    llm = balanced(alone("qwen3_moe")[0], 2)
    with pytest.raises(EngineDeadError, match="Rank 1 has placed experts otherwise than rank 0"):
        tokens(llm)
    llm.close()


def test_a_rank_that_missed_a_placement_is_noticed():
    first = first_placement(4, 2)
    weights = {"gate_up": torch.zeros(4, 6, 4), "down": torch.zeros(4, 4, 3)}
    layers = [small_layer(first, each, weights) for each in ThreadGroup(2).communicators()]
    layers[0].version = 1
    for error in on_all([lambda e=each: rebalance(nn.ModuleList([e]), 2) for each in layers]):
        assert isinstance(error, EngineDeadError)
        assert "Rank 1 has placed experts otherwise than rank 0 in placement 2" in str(error)


# ---- arguments and memory ----------------------------------------------------------------------

EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("fields", "error", "what"),
    [
        ({"enable_eplb": True}, ConfigError, "set enable_expert_parallel=True, too"),
        ({"enable_eplb": 1} | EXPERTS, ConfigError, "enable_eplb is 1; it must be a bool"),
        ({"eplb_config": {}} | EXPERTS, ConfigError, "set enable_eplb=True, or leave"),
        ({"eplb_config": 3}, ConfigError, "eplb_config is 3; it must be a dictionary"),
        ({"eplb_config": {"windowsize": 3}}, UnknownArgumentError, "Did you mean 'window_size'"),
        ({"eplb_config": {"step_interval": 0}}, ConfigError, "'step_interval' is 0; .* from 1 to"),
        ({"eplb_config": {"num_redundant_experts": -2}}, ConfigError, "is -2; .* from 0 to"),
        ({"eplb_config": {"window_size": True}}, ConfigError, "'s 'window_size' is True"),
        (
            {"enable_eplb": True, "deterministic": True} | EXPERTS,
            UnsupportedFeatureError,
            "cannot be used with deterministic",
        ),
    ],
)
def test_arguments(fields, error, what):
    with pytest.raises(error, match=what) as caught:
        EngineArgs("tiny", **fields)
    assert "\n" not in str(caught.value)


def test_redundant_experts_that_do_not_fit_are_refused_when_the_model_is_known(alone):
    with pytest.raises(ConfigError, match=r"is 1; for 6 experts on 2 ranks it can be 0, 2, 4, 6"):
        balanced(alone("qwen3_moe")[0], 2, 1)


def test_memory_of_redundant_experts_is_planned(alone):
    config = preset("mixtral-8x7b")
    parts = [largest_part(config, 2, 1, True, 1, spares) for spares in (0, 2, 8)]
    sizes = [parameter_count(part).total for part in parts]
    expert = 3 * config.hidden_size * config.moe.intermediate_size * config.num_layers
    assert [size - sizes[0] for size in sizes] == [0, expert, 4 * expert]
    few, more = (balanced(alone("qwen3_moe")[0], 2, spares) for spares in (0, 2))
    weights = [llm.engine.runner.stats()["weights"] for llm in (few, more)]
    config = few.engine.source.config
    expert = 3 * config.hidden_size * config.moe.intermediate_size * config.num_layers
    assert weights[1] - weights[0] == 2 * 4 * expert
    few.close()
    more.close()


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_rows_with_an_odd_number_of_choices_travel(num_rows):
    """Ids start where no number of 8 bytes may; a single row is contiguous even there."""
    columns = torch.randn(num_rows, 4), torch.rand(num_rows, 3), torch.arange(3).expand(num_rows, 3)
    found = unpacked(packed(*columns), *columns)
    assert all(torch.equal(*pair) for pair in zip(found, columns, strict=True))
