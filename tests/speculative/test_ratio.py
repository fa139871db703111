"""The ratio rule by exact counting: it emits the target's distribution, no wrong variant does.

The functions are those that the engine calls. `test_ratio_sampler.py` draws with them.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops.philox import Purpose, random_words
from minillm.ops.sampling import Pack, dist
from minillm.sampling import ratio
from minillm.sampling.ratio import accept_probability, draw, emitted_dist, residual
from minillm.sampling.rules import coins
from tests.speculative.distributions import distance, pipeline

EXACT = 1e-12
P, Q = torch.tensor([[0.1, 0.5, 0.4], [0.5, 0.4, 0.1]], dtype=torch.float64)
Dist = Callable[[tuple[int, ...]], Tensor]


def one_hot(token: int, size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[token]


def random_dist(generator: torch.Generator, size: int) -> Tensor:
    """A distribution in which some probabilities are 0."""
    weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 2
    kept = torch.rand(size, generator=generator) < 0.7
    kept[int(torch.randint(size, (1,), generator=generator))] = True
    return weights * kept / (weights * kept).sum()


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Distributions of 3 to 5 tokens: random ones, equal, disjoint, and with one token only."""
    generator = torch.Generator().manual_seed(0)
    found = [(P, Q), (Q, P)]
    for size in (3, 4, 5):
        found += [(random_dist(generator, size), random_dist(generator, size)) for _ in range(60)]
        flat = torch.full_like(same := random_dist(generator, size), 1 / size)
        low = torch.zeros(size, dtype=torch.float64)
        low[:2] = torch.tensor([0.25, 0.75])
        found += [(same, same), (flat, flat), (low, low.flip(0)), (low.flip(0), low)]
        hots = [one_hot(token, size) for token in range(size)]
        found += list(itertools.product([*hots, same], hots)) + [(hot, same) for hot in hots]
    return found


def test_the_emitted_token_has_the_dist_of_the_target():
    for p, q in pairs():
        assert (emitted_dist(p, q) - p).abs().max() < EXACT
        each = (q[d] * accept_probability(p, q, torch.tensor(d)) for d in range(len(p)))
        assert float(sum(each)) == pytest.approx(1 - distance(p, q), abs=EXACT)


def test_the_residual_has_no_rejected_draft():
    for p, q in pairs():
        left = residual(p, q)
        assert float(left.sum()) == pytest.approx(1, abs=EXACT)
        assert bool((left >= 0).all())
        for token in range(len(p)):
            if float(accept_probability(p, q, torch.tensor(token))) < 1 and float(q[token]) > 0:
                assert left[token] == 0


def test_a_draft_that_was_not_drawn_is_accepted_with_its_probability():
    for token in range(3):
        q = one_hot(token, 3)
        assert float(accept_probability(P, q, torch.tensor(token))) == float(P[token])
        without = P.clone()
        without[token] = 0
        assert (residual(P, q) - without / without.sum()).abs().max() < EXACT


# ---- wrong variants --------------------------------------------------------------------------


def without_residual(p, q, token):
    return accept_probability(p, q, torch.tensor(token)), p


def unlikely_draft_is_dropped(p, q, token):
    if q[token] < 0.45:
        return 0.0, p
    return ratio.ratio(p, q, token)


def with_epsilon(p, q, token):
    return (p / (q + 1e-8)).clamp(max=1)[token], residual(p, q)


def residual_of_the_other_sign(p, q, token):
    return accept_probability(p, q, torch.tensor(token)), residual(q, p)


def inverted(p, q, token):
    return accept_probability(q, p, torch.tensor(token)), residual(p, q)


def accepts_all(p, q, token):
    return 1.0, p


def best_token(p, q, token):
    accepts, left = ratio.ratio(p, q, token)
    return accepts, one_hot(int(left.argmax()), len(p))


def accepts_what_is_impossible(p, q, token):
    return max(float(accept_probability(p, q, torch.tensor(token))), 0.01), residual(p, q)


TRUNCATED = torch.tensor([5 / 9, 4 / 9, 0], dtype=torch.float64)
WRONG = {
    "the rejected draft is replaced from p": (without_residual, None, (0.14, 0.60, 0.26)),
    "argmax draft, soft q": (ratio.ratio, one_hot(0, 3), (0.2, 0.2, 0.6)),
    "truncated draft, untruncated q": (ratio.ratio, TRUNCATED, (1 / 9, 5 / 9, 1 / 3)),
    "an unlikely draft is dropped": (unlikely_draft_is_dropped, None, (0.15, 0.35, 0.50)),
    "residual of q - p": (residual_of_the_other_sign, None, (0.5, 0.4, 0.1)),
    "p and q change places": (inverted, None, None),
    "all is accepted": (accepts_all, None, (0.5, 0.4, 0.1)),
    "the best token of the residual": (best_token, None, (0.1, 0.4, 0.5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_has_another_dist(name):
    rule, drawn, published = WRONG[name]
    emitted = emitted_dist(P, Q, rule, drawn)
    assert distance(emitted, P) > 0.06
    if published is not None:
        assert emitted.tolist() == pytest.approx(published, abs=1e-12)


def test_identical_models_never_reject():
    """Claim G5: with a flat distribution of 50,000 tokens `p / (q + 1e-8)` rejects 5 drafts in
    10,000, and then nothing is left to draw from."""
    flat = torch.full((50_000,), 1 / 50_000)
    assert float(accept_probability(flat, flat, torch.tensor(7))) == 1
    assert float(with_epsilon(flat, flat, 7)[0]) == pytest.approx(1 - 5e-4, abs=1e-5)
    assert torch.equal(residual(flat, flat), flat)
    third = torch.full((3,), 1 / 3)
    left = residual(third, torch.nextafter(third, torch.ones(3)))  # rounding: p is below q
    assert torch.equal(left, third)


def test_a_token_without_probability_is_never_accepted():
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    assert float(accept_probability(p, q, torch.tensor(0))) == 0  # not 0 / 0
    generator = torch.Generator().manual_seed(3)
    caught = 0
    for _ in range(50):
        p, q = random_dist(generator, 5), random_dist(generator, 5)
        caught += distance(emitted_dist(p, q, accepts_what_is_impossible), p) > 1e-4
    assert caught > 25  # where p has a 0 that q has not


# ---- runs of tokens --------------------------------------------------------------------------


def chain_dist(
    p: Dist, q: Dist, k: int, count: int, bonus_is_late: bool = False, once_per_step: bool = False
) -> dict:
    """The distribution of the first `count` tokens, by going through all drafts of all rounds.

    Wrong variants: the last token is sampled where the last draft was; the target's distributions
    are those at the start of the step.
    """
    cells: dict[tuple[int, ...], float] = defaultdict(float)

    def emit(history: tuple[int, ...], weight: float, drafted: int, start: int) -> None:
        if weight == 0:
            return
        if len(history) >= count:
            cells[history[:count]] += weight
            return
        seen = history[:start] if once_per_step else history
        own = p(seen)
        if drafted == k:
            own = p(history[:-1]) if bonus_is_late else own
            for token, probability in enumerate(own.tolist()):
                after = (*history, token)
                emit(after, weight * probability, 0, len(after))
            return
        for token, drawn in enumerate(q(history).tolist()):
            accepts, left = ratio.ratio(own, q(history), token)
            emit((*history, token), weight * drawn * float(accepts), drafted + 1, start)
            for other, probability in enumerate(left.tolist()):
                after, lost = (*history, other), weight * drawn * (1 - float(accepts))
                emit(after, lost * probability, 0, len(after))

    emit((), 1.0, 0, 0)
    return cells


def dists_of(seed: int, size: int = 3) -> Dist:
    """A distribution for every history."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[int, ...], Tensor] = {}
    for length in range(6):
        for history in itertools.product(range(size), repeat=length):
            known[history] = random_dist(generator, size)
    return known.__getitem__


def off(cells: dict, p: Dist, count: int, size: int = 3) -> float:
    """The largest error of a probability."""
    errors = []
    for run in itertools.product(range(size), repeat=count):
        right = 1.0
        for i, token in enumerate(run):
            right *= float(p(run[:i])[token])
        errors.append(abs(cells.get(run, 0.0) - right))
    return max(errors)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_runs_of_tokens_have_the_dist_of_the_target(k, count):
    p, q = dists_of(1), dists_of(2)
    assert off(chain_dist(p, q, k, count), p, count) < EXACT
    assert off(chain_dist(p, p, k, count), p, count) < EXACT


@pytest.mark.parametrize("wrong", ["bonus_is_late", "once_per_step"])
def test_a_wrong_step_has_another_dist(wrong):
    p, q = dists_of(1), dists_of(2)
    assert off(chain_dist(p, q, 1, 3, **{wrong: True}), p, 3) > 0.01


# ---- from words to decisions -----------------------------------------------------------------


def pack_of(num_rows: int, params: SamplingParams | None = None) -> Pack:
    params, ones = params or SamplingParams(), torch.ones(num_rows)
    zero = torch.zeros(num_rows, dtype=torch.int64)
    numbers = ones * params.temperature, ones * params.min_p, ones * params.top_p
    top_k = (ones * max(params.top_k, 0)).int()
    return Pack(*numbers, top_k, zero, zero, torch.arange(num_rows), True)


def test_coins_are_words_of_their_purpose():
    pack = pack_of(50)._replace(seed=torch.arange(50) * -(2**57), sample_index=torch.arange(50) % 7)
    found = coins(pack, Purpose.ACCEPT, Purpose.RESAMPLE)
    for row, purpose in zip(found, (Purpose.ACCEPT, Purpose.RESAMPLE), strict=True):
        stream = pack.seed, pack.sample_index, pack.position, purpose
        words = random_words(*stream, torch.zeros(1, dtype=torch.int64))[:, 0]
        assert torch.equal(row, (words.double() + 0.5) / 2**32)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_both_ends_of_the_noise(word, monkeypatch):
    """The largest word is 1 - 2^-33, which float32 rounds to 1: equal distributions would reject.
    The smallest is no 0, which would accept a token without probability."""
    words = torch.full((1, 1), word)
    monkeypatch.setattr("minillm.sampling.rules.philox", lambda *_: (words,))
    (coin,) = coins(pack_of(1), Purpose.ACCEPT)
    assert 0 < float(coin) < 1
    never, always = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    token = torch.tensor([0])
    assert not bool(coin < accept_probability(never[None], always[None], token))
    assert bool(coin < accept_probability(always[None], always[None], token))
    for weights in ([0, 1, 0, 2, 0], [1, 0], [0, 1], [0, 0, 1e-30, 0]):
        drawn = int(draw(torch.tensor([weights], dtype=torch.float64), coin))
        assert weights[drawn] > 0
    if word:
        assert float(coin.float()) == 1  # the planted bug


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_k=6, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_the_dist_is_that_of_the_whole_pipeline(params):
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(5)) * 2
    found = dist(logits, pack_of(20, params))
    for row, given in zip(found, logits, strict=True):
        assert distance(row, pipeline(given.numpy(), params)) < 1e-6
        alone = dist(given[None], pack_of(1, params))
        assert torch.equal(alone[0], row)
    assert found.dtype == torch.float32
