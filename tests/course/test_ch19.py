"""Chapter 19's own functions: ranks, who holds what, laws, orders of sums, and prices."""

from fractions import Fraction

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.lab.links import LINKS, all_reduce
from minillm.models.presets import preset
from minillm.parallel import sampler
from minillm.parallel.split import Split
from minillm.plan.hardware import DATASHEET
from minillm.sampling.sampler import SamplingRow, sample
from minillm_exercises.chapters import ch19

H100, LLAMA = DATASHEET["h100-sxm"], preset("llama-3.1-70b")
P = [Fraction(each, 100) for each in (30, 5, 15, 2, 20, 10, 8, 10)]


@pytest.fixture(scope="module")
def two() -> LLM:
    return ch19.open_ranks("tiny", 2)


# Ranks ---------------------------------------------------------------------------------------


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


def test_the_class_of_an_article_loses_outputs_and_ranks():
    """Claim K11: 10 outputs on 4 ranks become 8, and all ranks hold the same."""
    before = torch.get_rng_state()
    shards = ch19.article_shards(4, 3, 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.shape for each in shards] == [(2, 3)] * 4
    assert all(torch.equal(each, shards[0]) for each in shards)


def test_numbers_of_ranks_that_do_not_divide_are_refused():
    assert ch19.refused("tiny", 3)
    assert not ch19.refused("tiny", 2)


def test_the_heads_of_four_ranks():
    """Claim K1."""
    splits = [Split(rank, 4) for rank in range(4)]
    spans = [ch19.span(each.share(LLAMA.num_heads), 64) for each in splits]
    assert spans == ["0 to 15", "16 to 31", "32 to 47", "48 to 63"]
    assert [ch19.kv_heads(LLAMA, rank, 4) for rank in range(4)] == ["0, 1", "2, 3", "4, 5", "6, 7"]


# Tokens: the law of a bug --------------------------------------------------------------------


def test_the_noise_is_the_engine_s():
    """Logits plus this noise give the tokens that the engine draws at these positions."""
    logits = 4 * torch.rand(20, 128, generator=torch.Generator().manual_seed(1))
    rows = [SamplingRow(SamplingParams(temperature=1.0), 0, 0, position) for position in range(20)]
    want = (logits + ch19.noise(20, 128)).argmax(dim=-1)
    assert want.tolist() == sample(logits, rows).token_ids


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_law_of_local_noise(size):
    """By drawing: tokens at the same place share their noise."""
    generator = torch.Generator().manual_seed(0)
    rows, each = 200_000, len(P) // size
    gumbel = -(-torch.rand(rows, each, generator=generator).log()).log()
    scores = torch.tensor([float(p) for p in P]).log() + gumbel.repeat(1, size)
    found = scores.argmax(1).bincount(minlength=len(P)) / rows
    law = ch19.law_of_local_noise(P, size)
    assert sum(law) == 1
    assert found.tolist() == pytest.approx([float(p) for p in law], abs=0.006)
    assert (law == P) == (size == 1)
    assert ch19.distance(law, P) == sum(max(a - b, 0) for a, b in zip(law, P, strict=True))


# Sums ----------------------------------------------------------------------------------------


def test_values_change_where_the_order_depends_on_the_place():
    def in_order(parts):
        return sum(parts[1:], parts[0])

    def by_place(parts):
        """Odd places of the whole tensor begin at the last rank."""
        odd = torch.arange(parts[0].numel()).view(parts.shape[1:]) // parts.shape[2] % 2 == 1
        return torch.where(odd, in_order(parts.flip(0)), in_order(parts))

    assert ch19.changed(in_order, 4, 6) == 0
    assert ch19.changed(by_place, 2, 6) == 0
    assert 5 < ch19.changed(by_place, 3, 6) < 50


# What it costs: claims K2, K3, K7 to K10, K13 ------------------------------------------------


def test_the_published_predictions():
    """The table of the notes, in ms: 70B on H100s."""
    table = {
        ("nvlink", 1): (41.6, 21.5, 11.1, 6.3),
        ("pcie", 1): (41.6, 24.9, 14.6, 9.4),
        ("pcie", 64): (47.9, 34.7, 26.1, 21.8),
        ("pcie", 0): (300, 370, 403, 420),
    }
    for (link, batch), want in table.items():
        found = [1e3 * ch19.seconds(LLAMA, H100, link, ranks, batch) for ranks in (1, 2, 4, 8)]
        assert found == pytest.approx(want, rel=0.05)
    assert ch19.sums_per_step(LLAMA) == 161
    assert ch19.speed_up(LLAMA, H100, "pcie", 2, 0) < 1 < ch19.speed_up(LLAMA, H100, "pcie", 2, 1)
    assert ch19.weight_gigabytes(LLAMA) == pytest.approx(141.1, abs=0.1)


def test_a_token_is_faster_over_every_link():
    """Claim K3: also between machines; K9: additions are nothing beside products."""
    found = [
        1e3 * ch19.seconds(LLAMA, H100, link, 4, 1) for link in ("nvlink", "pcie", "infiniband")
    ]
    assert found == pytest.approx([11.2, 14.6, 17.9], rel=0.01)
    token = ch19.token(LLAMA, H100, "pcie", 4)
    assert 1e3 * token.seconds == pytest.approx(found[1])
    assert token.communication == pytest.approx(1 - 10.4 / 14.6, abs=0.01)  # 139 GB over 4 GPUs
    assert ch19.additions(LLAMA, 4) == 161 * 3 * 8192
    assert token.stages[0].cost.flops == pytest.approx(2 * 69.5e9 / 4, rel=0.02)


def test_what_four_gpus_hold():
    """Claim K13: 35.3 GB of weights, and nine tenths of 80 GB less these for the cache."""
    plan = ch19.room(LLAMA, H100, 4, dtype="bfloat16", gpu_memory_utilization=0.90)
    assert plan.weight_bytes / 1e9 == pytest.approx(35.3, abs=0.05)
    assert plan.kv_cache_bytes / 1e9 == pytest.approx(0.9 * 80 - 35.3, abs=0.3)
    assert plan.num_tokens == pytest.approx(36.5e9 / 81_920, rel=0.01)


def test_the_formula_of_the_chapter_is_the_cost_model_s():
    for ranks, num_bytes in ((2, 2**10), (4, 2**20), (8, 2**25)):
        want = 25e-6 + 2 * (ranks - 1) / ranks * num_bytes / 25e9
        assert all_reduce(LINKS["pcie"], ranks, num_bytes).seconds == pytest.approx(want)


def test_a_prompt_over_pcie_is_the_engine_s_prediction():
    for ranks in (1, 2, 8):
        assert ch19.read_prompt(LLAMA, H100, ranks) == ch19.seconds(LLAMA, H100, "pcie", ranks)


def test_short_prompts_and_faster_links_gain():
    def gains(tokens: int, gigabytes: float = 25) -> bool:
        one, two = (ch19.read_prompt(LLAMA, H100, n, tokens, gigabytes) for n in (1, 2))
        return two < one

    assert [gains(tokens) for tokens in (1, 64, 128, 256, 2048)] == [True] * 3 + [False] * 2
    assert [gains(2048, rate) for rate in (25, 38, 39, 50)] == [False] * 2 + [True] * 2
