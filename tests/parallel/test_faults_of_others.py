"""Faults of other engines, by their numbers in the notes on parallelism (1.3).

Elsewhere: B2 in `tests/scheduling/test_scheduler.py`; B3, B19, B20, B22 in `test_processes.py`; B4,
B6 in `test_shard.py` and `test_sharded_sampler.py`; B9 in `test_deterministic_ranks.py` and
`test_communicators.py`; B11 in `test_expert_placement.py`; B12, B13 in
`tests/scheduling/test_pipelined.py`; B23 in `tests/matrix`.
"""

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, EngineDeadError, UnsupportedFeatureError
from minillm.parallel import executor
from minillm.parallel.sampler import ShardedSampler
from tests.engine.small import make
from tests.models.tiny import Tiny

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"}


def test_b1_ranks_sample_alike_without_a_seed(folder, monkeypatch):
    """The driver draws a seed for each request; a hash is compared in every step."""
    compared = []
    check = executor.check_agreement
    monkeypatch.setattr(
        executor, "check_agreement", lambda hashes: (compared.append(hashes), check(hashes))
    )
    llm = make(folder, **TWO)
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, n=2)
    outputs = llm.generate(["ab", "abc"], params, use_tqdm=False)
    texts = {one.text for output in outputs for one in output.outputs}
    assert len(texts) > 1
    assert len(compared) >= 12
    assert all(len(hashes) == 2 and len(set(hashes)) == 1 for hashes in compared)
    llm.close()


def test_b1_a_rank_that_chooses_another_token_is_noticed_in_its_step(folder, monkeypatch):
    right = ShardedSampler.choose

    def unlike(self, *arguments, **more):
        tokens, best = right(self, *arguments, **more)
        return (tokens + self.communicator.rank) % self.vocab_size, best

    monkeypatch.setattr(ShardedSampler, "choose", unlike)
    llm = make(folder, **TWO)
    with pytest.raises(EngineDeadError, match="Rank 1 chose other tokens than rank 0"):
        llm.generate("ab", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(list(llm.trace)) <= 2
    llm.close()


def test_b5_a_norm_over_all_heads_is_refused(tmp_path):
    """Ours are per head, so each rank norms its own; a checkpoint with another shape is refused."""
    tiny = Tiny("qwen3", {"num_hidden_layers": 1})
    model = tiny.write(tmp_path)
    from safetensors.torch import load_file, save_file

    (file,) = model.folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_norm.weight"
    heads = tiny.config().num_attention_heads
    tensors[name] = tensors[name].repeat(heads)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        LLM(model.folder, **TWO)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tensor_parallel_size": 3}, "can be 1, 2, 4"),
        ({"pipeline_parallel_size": 9}, "at most 7"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "needs a model with experts"),
        ({"distributed_executor_backend": "ray"}, "needs ranks"),
        ({"distributed_executor_backend": "mpi"}, "mp, threads, external, ray"),
    ],
)
def test_one_sentence_says_what_cannot_be(fields, what):
    with pytest.raises((ConfigError, UnsupportedFeatureError), match=what) as caught:
        LLM("tiny", **fields)
    assert "\n" not in str(caught.value)
