"""Faults of other engines, by their numbers in the notes on parallelism (1.3).

Elsewhere: B2 in `tests/scheduling/test_scheduler.py`; B3, B19, B20, B22 in `test_processes.py`; B4,
B6 in `test_shard.py` and `test_sharded_sampler.py`; B5, a norm over all heads, is a tensor of
another shape (`tests/models/test_load_errors.py`); B9 in `test_deterministic_ranks.py` and
`test_communicators.py`; B11 in `test_expert_placement.py`; B12, B13 in
`tests/scheduling/test_pipelined.py`; B23 in `tests/matrix`.
"""

import pytest

from minillm import SamplingParams
from minillm.errors import EngineDeadError
from minillm.parallel import executor
from minillm.parallel.sampler import ShardedSampler
from tests.engine.small import make

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
