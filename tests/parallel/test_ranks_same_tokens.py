"""Several ranks give the tokens of one, in every family and under everything an engine does.

The ranks are threads (`ThreadGroup`), so that many engines fit into a test; processes are tested in
`test_processes.py`. Tokens are compared in float32 with those of one rank alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, EngineDeadError
from minillm.ops import cpu
from minillm.parallel import shard
from minillm.parallel.communicator import Traffic
from minillm.parallel.executor import Ranks
from minillm.parallel.experts import OwnExperts
from minillm.parallel.split import Split, Stage
from minillm.parallel.stages import Sent
from tests.engine.small import make, write_model
from tests.models.tiny import Tiny
from tests.speculative.cells import CELLS, KINDS, Cell, Reference, open_cell, run_cell

WITHOUT_TEXT = tuple(kind for kind in KINDS if "text" not in kind and "bad" not in kind)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SHORT = {"num_hidden_layers": 2}
# Sizes that make mistakes visible: vocabularies that no number of ranks divides, one to three KV
# heads, biases wherever a family can have them.
MODELS = {
    "llama": Tiny("llama", SHORT | {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "mistral": Tiny("mistral", SHORT | {"sliding_window": 20, "num_key_value_heads": 4}),
    "qwen2": Tiny("qwen2", SHORT | {"tie_word_embeddings": True, "vocab_size": 127}, seed=1),
    "qwen3": Tiny("qwen3", SHORT | {"num_key_value_heads": 1, "vocab_size": 149}, seed=1),
    "mixtral": Tiny("mixtral", SHORT, seed=2),
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"vocab_size": 101, "attention_bias": True}, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", SHORT | {"attention_bias": True}, seed=1),
    "deepseek_v3": Tiny("deepseek_v3", SHORT | {"vocab_size": 113}, seed=3),
    "three KV heads": Tiny(
        "llama",
        SHORT
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
        | {"vocab_size": 103},
    ),
}
# Ranks per stage, and stages.
SIZES = {
    name: ((3, 1), (6, 1), (3, 2)) if name == "three KV heads" else ((2, 1), (4, 1), (1, 2), (2, 2))
    for name in MODELS
}
ENGINES = [(name, sizes) for name in MODELS for sizes in SIZES[name]]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What each request gets alone from one rank; computed when first asked for."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            folder = MODELS[name].write(tmp_path_factory.mktemp("model")).folder
            known[name] = Reference(folder, WITHOUT_TEXT)
        return known[name]

    return get


def ranks(reference: Reference, sizes: tuple[int, int], **more: Any) -> Reference:
    """The same reference, for engines of several ranks."""
    made = object.__new__(Reference)
    made.__dict__.update(reference.__dict__)
    more |= {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    more |= {"distributed_executor_backend": "threads"}
    made.arguments = reference.arguments | more
    return made


def check(
    reference: Reference,
    sizes: tuple[int, int],
    cell: Cell,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> LLM:
    """An engine of this many ranks gives what one rank gives."""
    llm = open_cell(ranks(reference, sizes, **more), cell, config)
    try:
        outputs = run_cell(reference, llm)
        assert not reference.differences(outputs)
        counters = llm.engine.scheduler.counters
        preempted = counters.num_preemptions_recompute, counters.num_preemptions_swap
        assert [count > 0 for count in preempted] == [cell.pool == "recompute", cell.pool == "swap"]
        assert (counters.num_cached_tokens > 0) == (cell.cache != "off")
        assert (counters.num_draft_tokens > 0) == (config is not None)
    finally:
        llm.close()
    return llm


# Each engine with one cell, so that the cells of all together meet every setting.
USUAL = [
    (name, sizes, CELLS[(7 * i + 5) % len(CELLS)])
    for i, (name, sizes) in enumerate(ENGINES)
    if sizes != ((4, 1), (1, 2), (2, 2))[i // 4 % 3]
]
REST = [(*engine, cell) for engine in ENGINES for cell in CELLS]
REST = [each for each in REST if each not in USUAL]


def named(cells: list[tuple[str, tuple[int, int], Cell]]) -> list[Any]:
    return [
        pytest.param(name, sizes, cell, id=f"{name}-tp{sizes[0]}-pp{sizes[1]}-{cell}")
        for name, sizes, cell in cells
    ]


@pytest.mark.parametrize(("name", "sizes", "cell"), named(USUAL))
def test_ranks_give_the_tokens_of_one(name, sizes, cell, reference_of):
    check(reference_of(name), sizes, cell)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "cell"), named(REST))
def test_the_rest_of_the_matrix(name, sizes, cell, reference_of):
    check(reference_of(name), sizes, cell)


MIXTURES = "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"
WITH_EXPERTS = [
    (name, sizes, CELLS[(11 * i + 3) % len(CELLS)])
    for i, (name, sizes) in enumerate(zip(MIXTURES, ((2, 1), (2, 1), (2, 2), (4, 1)), strict=True))
]
SIX_EXPERTS = "qwen3_moe", (4, 1)  # 4 ranks cannot hold whole experts of its 6: refused below
OTHER_EXPERTS = [
    each
    for each in (
        (name, sizes, cell)
        for name in MIXTURES
        for sizes in ((2, 1), (4, 1), (2, 2))
        for cell in CELLS
    )
    if each not in WITH_EXPERTS and each[:2] != SIX_EXPERTS
]


def test_experts_that_do_not_divide_are_refused(reference_of):
    name, sizes = SIX_EXPERTS
    with pytest.raises(ConfigError, match=r"which does not divide 6 experts .* it can be 1, 2"):
        check(reference_of(name), sizes, CELLS[0], enable_expert_parallel=True)


@pytest.mark.parametrize(("name", "sizes", "cell"), named(WITH_EXPERTS))
def test_ranks_with_whole_experts_give_the_tokens_of_one(name, sizes, cell, reference_of):
    check(reference_of(name), sizes, cell, enable_expert_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "cell"), named(OTHER_EXPERTS))
def test_the_rest_of_the_matrix_of_experts(name, sizes, cell, reference_of):
    check(reference_of(name), sizes, cell, enable_expert_parallel=True)


# ---- drafts ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of bytes, whose tokens have text."""
    return write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def bytes_reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize("config", [None, NGRAM, "draft model"], ids=["none", "n-grams", "draft"])
@pytest.mark.parametrize("cell", [CELLS[8], CELLS[29]], ids=str)
def test_texts_and_drafts(cell, config, bytes_reference, folder):
    """Stop strings, bad words and drafts: the draft model is whole on every rank."""
    if config == "draft model":
        config = {"model": str(folder), "num_speculative_tokens": 3}
    check(bytes_reference, (2, 1), cell, config)


# ---- what it costs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "gathers", "num_bytes"),
    [
        ({"temperature": 0.0}, 1, lambda most: 16),
        ({"temperature": 0.9, "min_p": 0.01}, 2, lambda most: 16),
        ({"temperature": 0.9, "top_p": 0.9}, 1, lambda most: 4 * most),
    ],
    ids=["greedy", "min-p", "top-p"],
)
@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("qwen3_moe", 4), ("deepseek_v3", 2)])
def test_a_step_has_two_sums_per_layer_one_for_the_embedding_and_what_the_law_gathers(
    name, size, law, gathers, num_bytes, reference_of
):
    reference = reference_of(name)
    with_ranks = make(reference.model, max_num_seqs=8, **ranks(reference, (size, 1)).arguments)
    config = with_ranks.engine.source.config
    groups = [each.communicator for each in with_ranks.engine.runner.places]
    for each in groups:
        each.forget_traffic()
    with_ranks.generate([[5, 6, 7]], SamplingParams(max_tokens=6, **law), use_tqdm=False)
    steps = list(with_ranks.trace)
    num_tokens = sum(record.num_prefill_tokens + record.num_decode_tokens for record in steps)
    hidden = config.hidden_size * 4
    sums = 1 + 2 * config.num_layers
    each_gather = num_bytes(Split(0, size).most_tokens(config.vocab_size))
    assert [each.traffic for each in groups] == size * [
        {
            "sum": Traffic(sums * len(steps), sums * num_tokens * hidden),
            "gather": Traffic(gathers * len(steps), gathers * len(steps) * each_gather),
        }
    ]
    with_ranks.close()


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_a_step_crosses_each_boundary_once(name, reference_of):
    """With the residual stream of its tokens, from each rank of a stage."""
    reference = reference_of(name)
    llm = make(reference.model, **ranks(reference, (2, 2)).arguments)
    prompts, params = [[5, 6, 7], [5] * 30], SamplingParams(max_tokens=6)
    llm.generate(prompts, params, use_tqdm=False)
    steps = list(llm.trace)
    num_tokens = sum(record.num_prefill_tokens + record.num_decode_tokens for record in steps)
    sent = Traffic(len(steps), num_tokens * llm.engine.source.config.hidden_size * 4)
    first, last = llm.engine.runner.places[:2], llm.engine.runner.places[2:]
    assert [each.traffic["send"] for each in first] == [sent, sent]
    assert all("gather" not in each.traffic for each in first)  # the last stage chooses
    assert all("send" not in each.traffic and each.traffic["gather"].calls for each in last)
    llm.close()


def test_a_stage_holds_its_layers(tmp_path):
    """Of tied weights the first stage has the embedding, the last the output matrix."""
    fields = {"num_hidden_layers": 4, "tie_word_embeddings": True, "vocab_size": 512}
    folder = Tiny("llama", fields).write(tmp_path).folder
    alone = make(folder, enforce_eager=True).engine
    more = {"distributed_executor_backend": "threads", "enforce_eager": True}
    llm = make(folder, pipeline_parallel_size=2, **more)
    runners = llm.engine.runner.runners
    weights = [each.stats()["weights"] for each in runners]
    frequencies = sum(each.nbytes for each in runners[0].model.rope.buffers())
    twice = 512 * 64 * 4 + 64 * 4 + frequencies  # the vocabulary, and the last norm
    assert sum(weights) == alone.allocated()["weights"] + twice
    layers = [len(each.model.layers) for each in runners]
    assert layers == [len(each.layers(alone.source.config)) for each in (Stage(0, 2), Stage(1, 2))]
    assert all(each.kv.key.shape[0] == len(each.model.layers) for each in runners)
    llm.close()


def test_a_rank_holds_its_share(tmp_path, monkeypatch):
    """All ranks together have no more weights than one, but for norms and biases. Panels would pad
    the outputs of each rank to a multiple of 32."""
    monkeypatch.setenv(cpu.PANELS, "0")
    fields = SHORT | {"num_key_value_heads": 4, "vocab_size": 512}
    folder = Tiny("mistral", fields).write(tmp_path).folder
    alone = make(folder).engine.allocated()
    llm = make(folder, tensor_parallel_size=4, distributed_executor_backend="threads")
    runners = llm.engine.runner.runners
    assert all(each.stats()["weights"] < alone["weights"] / 3.8 for each in runners)
    assert sum(each.stats()["kv_cache"] for each in runners) == alone["kv_cache"]
    llm.close()


# ---- planted bugs ------------------------------------------------------------------------------


def wrong_kv_head(self: Split, num_kv_heads: int) -> range:
    return range(self.rank % num_kv_heads, self.rank % num_kv_heads + 1)


def bias_on_every_rank(self, matrix, x, bias):
    return self.communicator.sum(self.inner.apply(matrix, x, bias))


def no_sum(self, matrix, x, bias):
    total = self.inner.apply(matrix, x, None)
    return total if bias is None else total + bias


def up_of_another_rank(matrix, split):
    """As where the stack of gate and up is cut, and not each of them: the shapes fit."""
    parts = []
    for place, part in enumerate(matrix.parts):
        total = part.shape[0] * split.size
        own = Split((split.rank + place) % split.size, split.size).share(total)
        parts.append(shard.rows(part, total, own))
    matrix.parts = tuple(parts)


def summed_twice(self, x):
    """The shared experts are whole sums already."""
    shared = self.moe.shared(x)
    return self.communicator.sum(self.moe(x).contiguous()) + self.communicator.sum(shared) / 2


def local_ids(self, matrix, ids):
    if not self.held:
        return self.communicator.sum(torch.zeros(len(ids), matrix.in_features))
    return self.communicator.sum(self.inner.lookup(matrix, ids % len(self.held)))


def of_another_row(self, plan, result):
    """A stage is fed the tokens of its neighbours."""
    rows = [row.seq_id for row in plan.rows if row.num_logits]
    for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True):
        self._learned[row] = result.token_ids[other][:1]


def twice_rounded(self, x, residual):
    """As if half of the boundary's sum were lost."""
    total = x if residual is None else x.bfloat16().float() + residual
    self.pipe.send(total)
    return total, total


def own_by_place(self, x, weights, ids):
    """As if the second rank's experts were the first's."""
    own = ids % len(self.held)
    return self.experts(x, weights, own)


def weights_of_the_first_choice(self, x, weights, ids):
    own = ids - self.held.start
    rows, choices = torch.where((own >= 0) & (own < len(self.held)))
    chosen = weights[rows, 0, None], own[rows, choices, None]
    return torch.zeros_like(x).index_add(0, rows, self.experts(x[rows], *chosen))


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", [own_by_place, weights_of_the_first_choice])
def test_a_planted_bug_of_experts_changes_tokens(wrong, reference_of, monkeypatch):
    monkeypatch.setattr(OwnExperts, "forward", wrong)
    cell = Cell(0, "off", "ample", False)
    with pytest.raises(AssertionError, match="token_ids"):
        check(reference_of("qwen3_moe"), (2, 1), cell, enable_expert_parallel=True)


PLANTED_IN_STAGES = {
    "tokens of another row": (Ranks, "note", of_another_row),
    "tokens are not learned": (Ranks, "note", lambda *_: None),
    "a boundary rounds": (Sent, "add", twice_rounded),
    "a layer on both stages": (Stage, "layers", lambda self, _: range(self.index, 2)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", PLANTED_IN_STAGES)
def test_a_planted_bug_of_stages_changes_tokens(bug, reference_of, monkeypatch):
    owner, attribute, wrong = PLANTED_IN_STAGES[bug]
    cell = Cell(7, "off", "ample", False)
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises((AssertionError, EngineDeadError)):
        check(reference_of("mistral"), (1, 2), cell)


PLANTED = {  # what is replaced, and a model on which it shows
    "KV head r mod Hkv": (Split, "kv_heads", wrong_kv_head, "llama"),
    "a bias on every rank": (shard.RowParallel, "apply", bias_on_every_rank, "llama"),
    "no sum": (shard.RowParallel, "apply", no_sum, "mistral"),
    "up of another rank": (shard, "share_rows", up_of_another_rank, "mistral"),
    "shared experts summed again": (shard.SummedMoE, "forward", summed_twice, "deepseek_v3"),
    "ids of the shard": (shard.VocabularyParallel, "lookup", local_ids, "mistral"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_changes_tokens(bug, reference_of, monkeypatch):
    owner, attribute, wrong, name = PLANTED[bug]
    monkeypatch.setattr(owner, attribute, wrong)
    cell = Cell(0, "off", "ample", False)
    with pytest.raises(AssertionError, match="token_ids"):
        check(reference_of(name), (4, 1), cell)
    monkeypatch.undo()
    check(reference_of(name), (4, 1), cell)
