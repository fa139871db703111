"""The ratio rule in the real sampler: distributions of one to three tokens, and bugs they show.

A test compares counts with the exact distribution at a level of 10^-6; each of the planted bugs has
been published, by another engine or by an article. What a count cannot see is in `test_ratio.py`.
"""

import pytest
import torch

from minillm.api.sampling_params import SamplingParams
from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose, dist
from minillm.sampling import ratio
from minillm.sampling.edits import Edits
from minillm.sampling.ratio import Ratio, accept_probability, draw, residual
from minillm.sampling.rules import DraftedToken, Rule, Verification, coins
from minillm.sampling.sampler import Sampler
from minillm_kernels import reference
from tests.sampling.sampling_rows import SamplingRow
from tests.speculative.distributions import Rig, chi_square, close_to, distance, first_dist, table

TARGET = table(1)
DRAFT = close_to(TARGET, 2)
PLAIN = SamplingParams(temperature=1.0)
TRUNCATED = SamplingParams(temperature=0.7, top_k=5, top_p=0.8)
LEAST = SamplingParams(temperature=1.2, min_p=0.1)
PENALISED = SamplingParams(temperature=1.0, repetition_penalty=1.8, presence_penalty=1.0)
N = 10_000
CASES = {
    "plain-1": (PLAIN, 1),
    "plain-2": (PLAIN, 2),
    "plain-4": (PLAIN, 4),
    "truncated-2": (TRUNCATED, 2),
    "min_p-4": (LEAST, 4),
}


def worst(rig: Rig, num_sequences: int, num_tokens: int) -> float:
    """The largest statistic of the first 1, 2, .. tokens, in units of what is allowed."""
    runs = rig.run(num_sequences, num_tokens)
    found = []
    for count in range(1, num_tokens + 1):
        cells = first_dist(rig.target, rig.params, count)
        statistic, allowed = chi_square([run[:count] for run in runs], cells)
        found.append(statistic / max(allowed, 1e-9))
    return max(found)


def rig_of(params=PLAIN, num_drafts=2, batch_size=N, rule=None, target=TARGET, draft=DRAFT) -> Rig:
    return Rig(target, draft, params, num_drafts, rule or Ratio(), batch_size)


# ---- distributions of tokens ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain-2", "truncated-2", "min_p-4"])
def test_the_first_three_tokens(name):
    rig = rig_of(*CASES[name])
    assert worst(rig, N, 3) < 1
    assert rig.num_accepted / rig.num_drafted > 0.5  # some of each kind are seen


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_first_three_tokens_of_many_sequences(name):
    assert worst(rig_of(*CASES[name], 50_000), 200_000, 3) < 1


@pytest.mark.parametrize(("batch_size", "num_sequences"), [(1, 200), (8, 1200)])
def test_batches(batch_size, num_sequences):
    assert worst(rig_of(num_drafts=2, batch_size=batch_size), num_sequences, 2) < 1


@pytest.mark.parametrize("num_drafts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_penalties_that_depend_on_drafts(num_drafts):
    assert worst(rig_of(PENALISED, num_drafts, 150), 1050, 3) < 1


def test_the_draft_may_be_far_off():
    """Disjoint distributions: every draft is rejected."""
    low, high = TARGET.clone(), TARGET.clone()
    low[..., :4], high[..., 4:] = -torch.inf, -torch.inf
    rig = rig_of(target=low, draft=high)
    assert worst(rig, 4000, 2) < 1
    assert rig.num_accepted == 0


def test_the_acceptance_is_that_of_the_dists():
    """The sum of min(p, q): no more of a draft can be accepted."""
    same = torch.zeros(9, 9, 8)
    target, draft = same + TARGET[0, 0], same + DRAFT[0, 0]
    rig = rig_of(target=target, draft=draft, num_drafts=3)
    rig.run(5000, 6)
    p, q = (first_dist(each, PLAIN, 1) for each in (target, draft))
    right = 1 - distance(list(p.values()), list(q.values()))
    spread = (right * (1 - right) / rig.num_drafted) ** 0.5
    assert abs(rig.num_accepted / rig.num_drafted - right) < 5 * spread


@pytest.mark.parametrize("params", [PLAIN, TRUNCATED, LEAST], ids=["plain", "truncated", "min_p"])
def test_identical_models_accept_everything(params):
    """Claim G5."""
    rig = rig_of(params, 4, 500, draft=TARGET)
    rig.run(500, 100)
    assert rig.num_drafted == 40_000
    assert rig.num_accepted == rig.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4])
def test_temperature_to_zero(temperature):
    """The tokens of a greedy decoding, whatever was drafted."""
    params = SamplingParams(temperature=temperature)
    for draft in (TARGET, DRAFT, -TARGET):
        rig = rig_of(params, 3, 20, draft=draft)
        runs = rig.run(20, 12)
        greedy: tuple[int, ...] = ()
        for _ in range(12):
            before = (8, 8, *greedy)
            greedy += (int(TARGET[before[-2], before[-1]].argmax()),)
        assert set(runs) == {greedy}
        assert (rig.num_accepted == rig.num_drafted) == (draft is TARGET)


# ---- planted bugs ----------------------------------------------------------------------------


class StopsTheBatch(Ratio):
    """Claim G4: one rejection rejects all drafts of the batch."""

    def choose(self, given):
        pack, drafted, p = given.pack, given.drafts, dist(given.logits, given.pack).double()
        q = torch.stack([each.dist for each in drafted]).double()
        tokens = torch.tensor([each.token for each in drafted])
        accept, resample = coins(pack, Purpose.ACCEPT, Purpose.RESAMPLE)
        if bool((accept < accept_probability(p, q, tokens)).all()):
            return tokens
        return draw(residual(p, q), resample)


@pytest.mark.mutation
@pytest.mark.parametrize(("batch_size", "num_sequences"), [(1, 300), (2, 1200), (8, 2400)])
def test_one_rejection_must_not_stop_the_batch(batch_size, num_sequences):
    """The planted rule is right for a batch of 1; for others it has claim G4's distribution."""
    rig = rig_of(num_drafts=1, batch_size=batch_size, rule=StopsTheBatch())
    runs = rig.run(num_sequences, 1)
    p, q = (torch.tensor(list(first_dist(each, PLAIN, 1).values())) for each in (TARGET, DRAFT))
    alpha = 1 - distance(p, q)
    accepted = torch.minimum(p, q) * alpha ** (batch_size - 1)
    planted = accepted + (1 - alpha**batch_size) * residual(p, q)
    statistic, allowed = chi_square(runs, {(i,): float(each) for i, each in enumerate(planted)})
    assert statistic < allowed
    statistic, allowed = chi_square(runs, first_dist(TARGET, PLAIN, 1))
    assert (statistic < allowed) == (batch_size == 1)


def one_coin(monkeypatch, rig):
    """Accepting and drawing from the residual share noise."""
    monkeypatch.setattr(ratio, "coins", lambda pack, *_: coins(pack, *[Purpose.ACCEPT] * 2))


def resamples_from_p(monkeypatch, rig):
    monkeypatch.setattr(ratio, "residual", lambda p, q: p)


def p_is_not_truncated(monkeypatch, rig):
    """The distribution of the target is not that of its sampler."""
    monkeypatch.setattr(ratio, "dist", lambda z, pack: dist(z, pack._replace(truncates=False)))


def q_is_not_truncated(monkeypatch, rig):
    rig.dist_of_draft = lambda z, pack: dist(z, pack._replace(truncates=False))


def q_has_another_temperature(monkeypatch, rig):
    rig.dist_of_draft = lambda z, pack: dist(z, pack._replace(temperature=pack.temperature * 1.5))


def q_is_late(monkeypatch, rig):
    """The distribution that a draft was drawn from is that of the draft after it."""
    given = rig.sampler.choose
    monkeypatch.setattr(
        rig.sampler,
        "choose",
        lambda *args, dists, **more: given(
            *args, dists={row: each.roll(-1, 0) for row, each in dists.items()}, **more
        ),
    )


def drafts_are_the_best_tokens(monkeypatch, rig):
    """An argmax draft, with the distribution of a sampled one."""
    monkeypatch.setattr(
        "tests.speculative.distributions.choose",
        lambda z, pack, purpose: choose(z, pack._replace(temperature=0 * pack.temperature)),
    )


def accepts_all(monkeypatch, rig):
    monkeypatch.setattr(ratio, "accept_probability", lambda p, q, token: torch.ones(len(p)))


def accepts_unlikely_drafts(monkeypatch, rig):
    """A threshold, as "typical acceptance" has one."""
    monkeypatch.setattr(
        ratio,
        "accept_probability",
        lambda p, q, token: (p.gather(1, token[:, None])[:, 0] > 0.09).double(),
    )


def emits_the_best_token(monkeypatch, rig):
    monkeypatch.setattr(ratio, "draw", lambda weights, coin: weights.argmax(-1))


BUGS = [
    one_coin,
    resamples_from_p,
    p_is_not_truncated,
    q_is_not_truncated,
    q_has_another_temperature,
    q_is_late,
    drafts_are_the_best_tokens,
    accepts_all,
    accepts_unlikely_drafts,
    emits_the_best_token,
]


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, monkeypatch):
    rig = rig_of(TRUNCATED, 2)
    bug(monkeypatch, rig)
    assert worst(rig, 4000, 2) > 2


@pytest.mark.mutation
def test_penalties_without_the_drafts_are_seen(monkeypatch):
    """The logits after each draft are edited as if it were not there."""
    rig = rig_of(PENALISED, 3, 150)
    real, given = rig.sampler.choose, Edits.append

    def choose_without(*args, **more):
        with monkeypatch.context() as patch:
            patch.setattr(Edits, "append", lambda *_: None)
            return real(*args, **more)

    monkeypatch.setattr(rig.sampler, "choose", choose_without)
    assert worst(rig, 1200, 3) > 1.5
    assert Edits.append is given


class ResidualWithNoiseOf(Ratio):
    """Draws from the residual as from logits, with the noise of another purpose."""

    def __init__(self, purpose):
        self.purpose = purpose

    def choose(self, given):
        decided, (_, logits, pack, drafted, _) = super().choose(given), given
        tokens = torch.tensor([each.token for each in drafted])
        q = torch.stack([each.dist for each in drafted]).double()
        left = residual(dist(logits, pack).double(), q).log().float()
        ones, zeros = torch.ones(len(left)), torch.zeros(len(left))
        stream = pack.seed, pack.sample_index, pack.position, self.purpose
        return torch.where(
            decided == tokens, tokens, reference.gumbel_argmax(left, ones, zeros, *stream)
        )


def test_the_residual_has_noise_of_its_own():
    """With the draft's noise (.1, .5, .4) becomes (.100, .4475, .4525)."""
    target, draft = (
        torch.tensor(each).log().expand(4, 4, 3) for each in ([0.1, 0.5, 0.4], [0.5, 0.4, 0.1])
    )
    dists = {}
    for purpose in (Purpose.RESAMPLE, Purpose.DRAFT):
        rule = ResidualWithNoiseOf(purpose)
        runs = Rig(target, draft, PLAIN, 1, rule, N).run(N, 1)
        dists[purpose] = torch.tensor(runs)[:, 0].bincount() / N
    assert distance(dists[Purpose.RESAMPLE], [0.1, 0.5, 0.4]) < 0.01
    assert distance(dists[Purpose.DRAFT], [0.1, 0.4475, 0.4525]) < 0.01


# ---- many rows at once, without the sampler --------------------------------------------------


@pytest.mark.slow
def test_200_000_first_tokens():
    """Large enough to see distributions that are 0.01 apart."""
    size = 200_000
    ones, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int64)
    pack = Pack(ones, 0 * ones, ones, zeros.int(), torch.arange(size), zeros, zeros, False)
    raw, logits = DRAFT[8, 8].expand(size, -1), TARGET[8, 8].expand(size, -1)
    tokens, _ = choose(raw, pack, purpose=Purpose.DRAFT)
    q = dist(raw, pack)
    drafted = [
        DraftedToken(token, 0, each)
        for token, each in zip(tokens.tolist(), q.unbind(0), strict=True)
    ]
    samples, _ = choose(logits, pack)
    decided = Ratio().choose(Verification(samples, logits, pack, drafted, torch.float32))
    cells = first_dist(TARGET, PLAIN, 1)
    for found in (samples, decided):
        statistic, allowed = chi_square([(token,) for token in found.tolist()], cells)
        assert statistic < allowed
    other = decided.clone()
    moved = (other == 0).nonzero()[: size // 100]  # 1 in 100 tokens is another
    other[moved] = 1
    statistic, allowed = chi_square([(token,) for token in other.tolist()], cells)
    assert statistic > allowed


# ---- rows ------------------------------------------------------------------------------------


def sampler_of(params: list[SamplingParams], rule: Rule | None) -> Sampler:
    sampler = Sampler(len(params), 8, torch.device("cpu"))
    sampler.rule = rule
    for row, each in enumerate(params):
        sampler.set_row(row, SamplingRow(each, seed=row, sample_index=0, position=0))
    return sampler


MIXED = [PLAIN, TRUNCATED, PENALISED, SamplingParams(temperature=0.0), LEAST, PLAIN]


def chosen(rows: list[int], rule: Rule | None, without_dist: int = -1, num_forks: int = 0) -> dict:
    """Tokens of some of the rows 0 to 5, which have 0 to 3 drafts; those without fork."""
    sampler = sampler_of(MIXED, rule)
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(6, 4, 8, generator=generator)
    dists = torch.randn(6, 3, 8, generator=generator).softmax(-1)
    drafts = {row: [row, 2, 7][: row % 4] for row in rows if row % 4}
    places = [row for row in rows for _ in range(1 + row % 4)]
    tokens, _ = sampler.choose(
        torch.cat([logits[row, : 1 + row % 4] for row in rows]),
        places,
        [i for row in rows for i in range(1 + row % 4)],
        [0 if row % 4 else num_forks for row in places],
        drafts,
        {row: dists[row] for row in drafts if row != without_dist},
    )
    found, left = {}, tokens.tolist()
    for row in rows:
        count = 1 + (row % 4 or num_forks)
        found[row], left = left[:count], left[count:]
    return found


def test_a_row_is_the_same_alone_and_in_any_batch(monkeypatch):
    together = chosen([3, 0, 5, 1, 2, 4], Ratio())
    assert [len(together[row]) for row in range(6)] == [1, 2, 3, 4, 1, 2]
    for row in range(6):
        assert chosen([row], Ratio())[row] == together[row]
    monkeypatch.setattr("minillm.sampling.edits.CHUNK_VALUES_CPU", 24)  # three rows at a time
    assert chosen([3, 0, 5, 1, 2, 4], Ratio()) == together
    forked = chosen([3, 0, 5, 1, 2, 4], Ratio(), num_forks=2)
    assert [len(forked[row]) for row in range(6)] == [3, 2, 3, 4, 3, 2]
    assert {row: tokens[: 1 + row % 4] for row, tokens in forked.items()} == together


def test_without_a_dist_samples_stay():
    """Such a draft is accepted where it equals the sample, as in strict mode."""
    rows = list(range(6))
    strict, ruled = chosen(rows, None), chosen(rows, Ratio())
    assert ruled[2] != strict[2]  # penalised, with a distribution
    without = chosen(rows, Ratio(), without_dist=2)
    assert without[2] == strict[2]
    assert [without[row] for row in (0, 3, 4)] == [strict[row] for row in (0, 3, 4)]
    assert [without[row] for row in (1, 5)] == [ruled[row] for row in (1, 5)]
    assert without[3] == strict[3]  # greedy


def test_a_row_that_fails_harms_no_other():
    sampler = sampler_of([PLAIN, PLAIN, PENALISED], Ratio())
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(4))
    dists = torch.full((1, 8), 0.125)
    arguments = [0, 0, 1, 1, 2, 2], [0, 1] * 3, [], {0: [1], 1: [2], 2: [3]}
    right, _ = sampler.choose(logits, *arguments, dict.fromkeys(range(3), dists))
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[2] = bad
        tokens, best = sampler.choose(broken, *arguments, dict.fromkeys(range(3), dists))
        assert best.isfinite().tolist() == [True, True, False, True, True, True]
        kept = [0, 1, 3, 4, 5]
        assert tokens[kept].tolist() == right[kept].tolist()
        assert 0 <= int(tokens[2]) < 8
