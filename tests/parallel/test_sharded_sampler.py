"""Ranks that each have some of the logits choose the tokens that one rank chooses from all."""

from functools import partial

import pytest
import torch

from minillm import SamplingParams
from minillm.ops import cpu_sampling
from minillm.parallel import sampler as sharded
from minillm.parallel.communicator import Traffic
from minillm.parallel.sampler import ShardedSampler
from minillm.parallel.split import Split
from minillm.sampling.sampler import Sampler
from tests.parallel.rank_groups import on_ranks
from tests.sampling.sampling_rows import SamplingRow

CPU = torch.device("cpu")
ROWS = 96
PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 0.8, "logit_bias": {3: 4.0, 4: -100.0}},
}
HERE = ("greedy", "temperature", "hot", "min-p")


def requests(kinds):
    """Rows of these kinds in turn, each with its own seed and position."""
    for i in range(ROWS):
        params = SamplingParams(**PARAMS[kinds[i % len(kinds)]])
        yield SamplingRow(params, 1000 + 17 * i, i % 3, 5 + i, (1, 2, 3), (3,) * (i % 3))


def chosen(sampler, logits, kinds, forks=()):
    for row, request in enumerate(requests(kinds)):
        sampler.set_row(row, request)
    return sampler.choose(logits, range(ROWS), [5 + i for i in range(ROWS)], forks)


def by_ranks(size, logits, kinds, forks=(), traffic=None):
    """Each rank's choice from its part of the logits."""

    def call(communicator):
        vocab_size = logits.shape[1]
        held = Split(communicator.rank, size).vocabulary(vocab_size)
        sampler = ShardedSampler(ROWS, vocab_size, CPU, communicator)
        found = chosen(sampler, logits[:, held.start : held.stop].contiguous(), kinds, forks)
        if traffic is not None:
            traffic.append(communicator.traffic)
        return found

    return on_ranks(size, call)


def compare(size, logits, kinds, forks=()):
    tokens, best = chosen(Sampler(ROWS, logits.shape[1], CPU), logits, kinds, forks)
    for own_tokens, own_best in by_ranks(size, logits, kinds, forks):
        assert torch.equal(own_tokens, tokens)
        torch.testing.assert_close(own_best, best, rtol=0, atol=0, equal_nan=True)


def some_logits(vocab_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(ROWS, vocab_size, generator=generator)).to(dtype)


@pytest.fixture(params=["C", pytest.param("torch", marks=pytest.mark.slow)])
def backend(request, monkeypatch):
    """Both ways in which a processor draws."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_sampling, "takes", lambda *_: False)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [7, 131, 1003])
def test_dists_that_need_no_gathered_logits(vocab_size, size, backend):
    """7 tokens: all ranks but the first have none."""
    compare(size, some_logits(vocab_size), HERE)


@pytest.mark.parametrize("forks", [(), tuple(i % 4 for i in range(ROWS))], ids=["", "forks"])
@pytest.mark.parametrize("kinds", [tuple(PARAMS), ("top-k", "top-p")], ids=["mixed", "gathered"])
def test_rows_with_any_dist_stand_side_by_side(kinds, forks, backend):
    compare(3, some_logits(517, seed=2), kinds, forks)


def test_forks_of_dists_that_need_no_gathered_logits(backend):
    compare(4, some_logits(517, seed=3), HERE, tuple(i % 3 for i in range(ROWS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_many_ties(dtype, backend):
    compare(4, some_logits(1003, dtype, seed=4), HERE)


@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_logits_the_lowest_id_wins(size, backend):
    logits = torch.zeros(ROWS, 517)
    logits[:, [70, 300, 500]] = 9.0
    compare(size, logits, HERE)
    tokens, _ = by_ranks(size, logits, ("greedy",))[0]
    assert tokens.unique().tolist() == [70]


def test_logits_that_are_all_negative(backend):
    """Issue B6 of the notes: padding with zeros would win."""
    compare(4, -some_logits(101).abs() - 5, tuple(PARAMS))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 70, 499])
def test_a_row_without_a_dist_fails_alone(bad, place, backend):
    """The largest logit says so on every rank: NaN, infinity, or minus infinity everywhere."""
    logits = some_logits(500, seed=5)
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, place] = bad
    whole, best = chosen(Sampler(ROWS, 500, CPU), logits, HERE)
    for tokens, own in by_ranks(4, logits, HERE):
        good = [row for row in range(ROWS) if row != 1]
        assert torch.equal(tokens[good], whole[good])
        assert torch.equal(own[good], best[good])
        assert not own[1].isfinite()
        assert 0 <= int(tokens[1]) < 500


def test_infinities_beside_finite_logits(backend):
    """Masked tokens: a rank may have nothing that can be chosen."""
    logits = some_logits(500, seed=6)
    logits[:, :260] = float("-inf")
    compare(4, logits, HERE)


@pytest.mark.parametrize("kinds", [("greedy",), HERE])
def test_sixteen_bytes_per_row_are_gathered(kinds):
    """Once if all rows are greedy, else twice; and not the logits, 4,012 bytes each."""
    traffic = []
    by_ranks(4, some_logits(1003), kinds, traffic=traffic)
    calls = 1 if kinds == ("greedy",) else 2
    assert traffic == 4 * [{"gather": Traffic(calls, calls * ROWS * 16)}]


# ---- planted bugs ------------------------------------------------------------------------------


def local_ids(right, logits, pack, before, best):
    """Noise by the place in the shard: fluent, and another distribution than one rank's."""
    return right(logits, pack, 0, best)


def local_max(right, logits, pack, before, best):
    """Each rank takes the largest of its own logits for that of all."""
    own = logits.float().amax(1) if logits.shape[1] else best
    return right(logits, pack, before, own)


def last_of_equals(self, values, ids):
    parts = self.communicator.gather(torch.stack((values.double(), ids.double())))
    largest = parts[:, 0].amax(dim=0)
    return torch.stack((largest, parts[:, 1].where(parts[:, 0] == largest, -1).amax(dim=0)))


def places_of_the_shard(self, values, ids):
    parts = self.communicator.gather(torch.stack((values.double(), ids.double() % 64)))
    largest = parts[:, 0].amax(dim=0)
    return torch.stack((largest, parts[:, 1].where(parts[:, 0] == largest, 1e9).amin(dim=0)))


def padded_with_zeros(self, logits):
    part = logits.new_zeros((len(logits), self.most))
    part[:, : len(self.held)] = logits
    parts = self.communicator.gather(part).transpose(0, 1).reshape(len(logits), -1)
    # The padding stands in the middle if it is not minus infinity until it is cut off.
    return parts[:, -self.vocab_size :].contiguous()


@pytest.mark.mutation
@pytest.mark.parametrize("wrong", [local_ids, local_max])
def test_a_planted_bug_of_the_draw_is_found(wrong, monkeypatch):
    monkeypatch.setattr(sharded, "draw_from_shard", partial(wrong, sharded.draw_from_shard))
    with pytest.raises(AssertionError):
        compare(4, some_logits(1003), ("temperature", "min-p"))


EQUALS = partial(test_of_equal_logits_the_lowest_id_wins, 2)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("name", "wrong", "test"),
    [
        ("_gathered", last_of_equals, EQUALS),
        ("_gathered", places_of_the_shard, EQUALS),
        ("whole", padded_with_zeros, test_logits_that_are_all_negative),
    ],
)
def test_a_planted_bug_of_a_meeting_is_found(name, wrong, test, monkeypatch):
    monkeypatch.setattr(ShardedSampler, name, wrong)
    with pytest.raises(AssertionError):
        test(None)
