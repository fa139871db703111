"""Faults of other engines, by their numbers in the notes on parallelism (1.3).

Elsewhere: B3, B19, B20, B22 in `test_processes.py`; B4, B6 in `test_shard.py` and
`test_sharded_sampler.py`; B9 in `test_deterministic_ranks.py` and `test_communicators.py`; B12, B13
in `tests/scheduling/test_pipelined.py`; B23 in `test_ranks_same_tokens.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, EngineDeadError, UnsupportedFeatureError
from minillm.parallel import executor
from minillm.parallel.sampler import ShardedSampler
from tests.engine.small import make, write_model
from tests.models.tiny import Tiny

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("byte-model"))


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


PLANS = """
import hashlib, sys
from minillm import LLM, SamplingParams
from minillm.execution.runner import Runner
from minillm.execution.wire import plan_to_bytes
from tests.engine.small import make

found, launch = hashlib.sha256(), Runner.launch

def told(self, plan):
    found.update(plan_to_bytes(plan))
    return launch(self, plan)

Runner.launch = told
llm = make(sys.argv[1], num_gpu_blocks_override=24, prefix_cache="radix", max_num_seqs=8)
prompts = ["ab" * 9, "ab" * 9 + "c", "ab" * 5, "cd" * 11, "ab" * 9, "a"]
for _ in range(2):
    params = [SamplingParams(max_tokens=9, n=1 + i % 2, seed=i, ignore_eos=True) for i in range(6)]
    llm.generate(prompts, params, use_tqdm=False)
counters = llm.engine.scheduler.counters
assert counters.num_preemptions_recompute and counters.num_cached_tokens
print(found.hexdigest())
"""


@pytest.mark.slow
def test_b2_plans_do_not_depend_on_the_order_of_sets(folder):
    """One scheduler decides; and what it decides is the same under two seeds of Python's hashes."""
    said = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PLANS, str(folder)]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, timeout=300
        )
        assert not done.returncode, done.stderr
        said.add(done.stdout.strip().splitlines()[-1])
    assert len(said) == 1


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


def test_b11_experts_that_move_change_no_output(tmp_path):
    """Weights move, ids stay those of the checkpoint: the same question before and after."""
    model = Tiny("qwen3_moe", {"num_hidden_layers": 2}, seed=2).write(tmp_path).folder
    config = {"window_size": 12, "step_interval": 12, "num_redundant_experts": 2}
    fields = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": config}
    llm = make(model, enable_prefix_caching=False, **TWO, **fields)
    layers = [e for e in llm.engine.runner.runners[1].model.modules() if hasattr(e, "placement")]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    placements, outputs = [], []
    for _ in range(3):  # each in one placement
        (output,) = llm.generate([[5, 6, 7] * 9], params, use_tqdm=False)
        placements.append(tuple(each.placement for each in layers))
        outputs.append(output.outputs[0])
    assert [each.version for each in layers] == [2, 2]
    assert placements[0] != placements[1]
    for each in outputs[1:]:
        assert each.token_ids == outputs[0].token_ids
        assert each.cumulative_logprob == pytest.approx(outputs[0].cumulative_logprob, abs=1e-3)
    llm.close()


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
