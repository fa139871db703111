"""Chapter 19's own functions: ranks, who holds what, distributions, orders of sums, and prices."""

from fractions import Fraction

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.parallel import sampler
from minillm.parallel.split import Split
from minillm.sampling.sampler import SamplingRow, sample
from minillm_exercises.chapters import ch19

P = [Fraction(each, 100) for each in (30, 5, 15, 2, 20, 10, 8, 10)]


@pytest.fixture(scope="module")
def two() -> LLM:
    return ch19.open_ranks("tiny", 2)


def test_on_ranks_gives_what_each_rank_returns():
    def call(comm):
        part = torch.tensor([1.0 + comm.rank])
        return comm.rank, ch19.share(comm, 6), comm.sum(part).item()

    assert ch19.on_ranks(3, call) == [(r, slice(2 * r, 2 * r + 2), 6.0) for r in range(3)]


def test_what_a_token_asks_for_is_counted_without_the_prompt(two):
    """2 L + 1 sums of one row in float32, a gather of a pair, two where a token is drawn."""
    prompt = two.tokenizer.encode("def f(x):\n")
    counted = ch19.per_token(two, prompt, 4)
    assert counted == {
        "sum calls": 15,
        "sum num_bytes": 15 * 256 * 4,
        "gather calls": 1,
        "gather num_bytes": 16,
    }
    assert ch19.per_token(two, prompt * 3, 4) == counted
    drawn = ch19.per_token(two, prompt, 4, temperature=1.0)
    assert drawn["gather calls"] == 2
    assert ch19.sums_per_step(two.engine.source.config) == 15


def test_the_table_of_what_a_rank_holds(two):
    rows = {name.strip("`"): rest for name, *rest in ch19.held(two, 1)}
    assert rows["gate_proj"] == ["768 × 256", "384 to 767", "all"]
    assert rows["down_proj"] == ["256 × 768", "all", "384 to 767"]
    assert rows["embed_tokens"][1] == "2048 to 4095"
    assert len(rows) == 8


def test_bugs_are_there_inside_and_gone_after():
    right = sampler.draw_from_shard
    with ch19.heads_in_turn():
        assert [list(Split(rank, 4).kv_heads(2)) for rank in range(4)] == [[0], [1], [0], [1]]
        assert list(Split(1, 2).kv_heads(4)) == [2, 3]
    assert [list(Split(rank, 4).kv_heads(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    with ch19.local_noise():
        assert sampler.draw_from_shard is not right
    assert sampler.draw_from_shard is right


def test_the_noise_is_the_engine_s():
    """Logits plus this noise give the tokens that the engine draws at these positions."""
    logits = 4 * torch.rand(20, 128, generator=torch.Generator().manual_seed(1))
    rows = [SamplingRow(SamplingParams(temperature=1.0), 0, 0, position) for position in range(20)]
    want = (logits + ch19.noise(20, 128)).argmax(dim=-1)
    assert want.tolist() == sample(logits, rows).token_ids


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_dist_of_local_noise(size):
    """By drawing: tokens at the same place share their noise."""
    generator = torch.Generator().manual_seed(0)
    rows, each = 200_000, len(P) // size
    gumbel = -(-torch.rand(rows, each, generator=generator).log()).log()
    scores = torch.tensor([float(p) for p in P]).log() + gumbel.repeat(1, size)
    found = scores.argmax(1).bincount(minlength=len(P)) / rows
    dist = ch19.dist_of_local_noise(P, size)
    assert sum(dist) == 1
    assert found.tolist() == pytest.approx([float(p) for p in dist], abs=0.006)
    assert (dist == P) == (size == 1)
    assert ch19.distance(dist, P) == sum(max(a - b, 0) for a, b in zip(dist, P, strict=True))
