"""What several ranks exchange, hold and refuse. Their tokens are compared in `tests/matrix`."""

import pytest

from minillm import SamplingParams
from minillm.ops import cpu
from minillm.parallel.communicator import Traffic
from minillm.parallel.split import Split, Stage
from tests.engine.small import make
from tests.matrix.cells import RANKS, folder_of
from tests.models.tiny import Tiny
from tests.pairs import one_in

SHORT = {"num_hidden_layers": 2}


def ranks(kind: str, model: str, **more: object) -> object:
    """An engine of the matrix."""
    return make(folder_of(model), enable_prefix_caching=False, **RANKS[kind][0] | more)


@pytest.mark.parametrize(
    ("dist", "gathers", "num_bytes"),
    [
        ({"temperature": 0.0}, 1, lambda most: 16),
        ({"temperature": 0.9, "min_p": 0.01}, 2, lambda most: 16),
        ({"temperature": 0.9, "top_p": 0.9}, 1, lambda most: 4 * most),
    ],
    ids=["greedy", "min-p", "top-p"],
)
@pytest.mark.parametrize(
    ("name", "size"), one_in(2, [("llama", 2), ("qwen3_moe", 4), ("deepseek_v3", 2)])
)
def test_a_step_has_two_sums_per_layer_one_for_the_embedding_and_what_the_dist_gathers(
    name, size, dist, gathers, num_bytes
):
    with_ranks = ranks(f"tp {size}", name, max_num_seqs=8)
    config = with_ranks.engine.source.config
    groups = [each.communicator for each in with_ranks.engine.runner.places]
    for each in groups:
        each.forget_traffic()
    with_ranks.generate([[5, 6, 7]], SamplingParams(max_tokens=6, **dist), use_tqdm=False)
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
def test_a_step_crosses_each_boundary_once(name):
    """With the residual stream of its tokens, from each rank of a stage."""
    llm = ranks("tp 2, pp 2", name)
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
