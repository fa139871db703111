"""The sampler against transformers' logits processors, float64 numpy, and exact distributions."""

import dataclasses
import math
from collections import Counter
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.api.sampling_params import SamplingParams
from minillm.ops import cpu, cpu_sampling
from minillm.sampling import sampler as sampler_module
from minillm.sampling.edit import ALWAYS, Edit
from minillm.sampling.edits import EDITS, Edits
from minillm.sampling.logprobs import describe, token_logprobs
from minillm.sampling.sampler import NO_TOKEN, Sampler, SamplingRow, sample
from minillm.sampling.segments import Segments
from minillm_kernels import reference
from tests.pairs import some
from tests.sampling.sampling_rows import edit_logits, scale_logits, truncate_row

EMPTY = torch.zeros(1, 0, dtype=torch.int64)
INF = math.inf


def row(prompt=(), output=(), seed=0, position=0, stop_ids=(), bad_words_ids=(), **params):
    ids = list(prompt), list(output), tuple(stop_ids), tuple(bad_words_ids)
    return SamplingRow(SamplingParams(**params), seed, 0, position, *ids)


def random_logits(seed: int, rows: int, vocab: int, ties: bool = False) -> torch.Tensor:
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (logits * 2).round() / 2 if ties else logits


def processed(logits: torch.Tensor, request: SamplingRow) -> torch.Tensor:
    """The logits that `sample` adds its noise to, -inf where a token was removed: [1, V]."""
    scaled = scale_logits(edit_logits(logits, [request]), [request])
    return truncate_row(scaled[0], request.params.top_k, request.params.top_p)[None]


def assert_same_distribution(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.equal(ours == -INF, theirs == -INF)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


# ---- each operation against transformers ------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 400),
    ties=st.booleans(),
    temperature=st.floats(0.1, 5),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 399, 1000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_truncation_as_in_transformers(seed, vocab, ties, temperature, top_k, top_p, min_p):
    logits = random_logits(seed, 1, vocab, ties)
    expected = hf.TemperatureLogitsWarper(temperature)(EMPTY, logits)
    if min_p:
        ratios = (expected - expected.max()).double().exp()
        if bool(((ratios / min_p - 1).abs() < 1e-5).any()):
            return  # a token on the very edge: rounding decides
        expected = hf.MinPLogitsWarper(min_p)(EMPTY, expected)
    if top_k:
        expected = hf.TopKLogitsWarper(top_k)(EMPTY, expected)
    if top_p < 1:
        mass = expected.double().softmax(-1).sort(stable=True).values.cumsum(-1)
        if bool(((mass - (1 - top_p)).abs() < 1e-5).any()):
            return
        expected = hf.TopPLogitsWarper(top_p)(EMPTY, expected)
    request = row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = processed(logits, request)
    # Which of several equal logits top-p keeps is open in transformers (its sort is not stable):
    # compare how many of each value stay, and require that ours are those with the smallest ids.
    assert_same_distribution(ours.sort(stable=True).values, expected.sort(stable=True).values)
    kept = (ours[0] > -INF).tolist()
    for value in logits.unique():
        ids = (logits[0] == value).nonzero().flatten().tolist()
        assert sorted((kept[token] for token in ids), reverse=True) == [kept[i] for i in ids]


def test_top_k_keeps_tokens_whose_probability_rounds_to_zero():
    request = row(top_k=3)
    kept = processed(torch.tensor([[0.0, -200.0, -300.0, -400.0]]), request) > -INF
    assert kept.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("ties", [True, False])
def test_rows_with_different_truncation_do_not_disturb_each_other(ties):
    logits = random_logits(1, 45, 3000, ties) / 3
    top_k = [[0, 1, 7, 300, 5000][i % 5] for i in range(45)]
    top_p = [[1.0, 0.5, 0.99][i % 3] for i in range(45)]
    scaled = scale_logits(logits, [row()] * 45)
    together = reference.truncate(scaled, torch.tensor(top_k), torch.tensor(top_p))
    for i in range(45):
        assert torch.equal(together[i], truncate_row(scaled[i], top_k[i], top_p[i]))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.floats(0.1, 3),
    prompt=st.lists(st.integers(0, 29), max_size=12),
    output=st.lists(st.integers(0, 29), max_size=12),
)
def test_repetition_penalty_as_in_transformers(seed, penalty, prompt, output):
    logits = random_logits(seed, 1, 30)
    history = torch.tensor([prompt + output], dtype=torch.int64)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    request = row(prompt, output, repetition_penalty=penalty)
    torch.testing.assert_close(edit_logits(logits, [request]), expected)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    output=st.lists(st.integers(0, 3), max_size=8),
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_bad_words_as_in_transformers(seed, output, words):
    logits = random_logits(seed, 1, 6)
    history = torch.tensor([output], dtype=torch.int64)
    expected = hf.NoBadWordsLogitsProcessor(words)(history, logits.clone())
    # vLLM looks at the output only: the same words in the prompt must not count.
    request = row([1, 2, 3], output, bad_words_ids=[tuple(word) for word in words])
    assert torch.equal(edit_logits(logits, [request]), expected)


@pytest.mark.parametrize("generated", [0, 2, 3, 4])
def test_min_tokens_as_in_transformers(generated):
    logits = random_logits(3, 1, 20)
    history = torch.zeros(1, 5 + generated, dtype=torch.int64)
    processor = hf.MinNewTokensLengthLogitsProcessor(5, 3, [7, 9])
    request = row(range(5), [0] * generated, stop_ids=(7, 9), min_tokens=3)
    assert torch.equal(edit_logits(logits, [request]), processor(history, logits.clone()))


def test_logit_bias_as_in_transformers():
    logits = random_logits(4, 1, 20)
    bias = {0: 3.0, 7: -100.0, 19: 0.25}
    processor = hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(edit_logits(logits, [row(logit_bias=bias)]), expected)


def test_allowed_token_ids_as_in_transformers():
    logits = random_logits(5, 1, 20)
    others = [token for token in range(20) if token not in (3, 11)]
    expected = hf.SuppressTokensLogitsProcessor(others)(EMPTY, logits.clone())
    request = row(allowed_token_ids=[11, 3, 11])
    assert torch.equal(edit_logits(logits, [request]), expected)


@settings(max_examples=50, deadline=None)
@given(
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    output=st.lists(st.integers(0, 9), max_size=20),
)
def test_penalties_as_in_float64(presence, frequency, repetition, output):
    prompt = [0, 1, 1]
    logits = random_logits(6, 3, 10)
    expected = logits.double().numpy()
    for token in {*prompt, *output}:
        value = expected[1, token]
        expected[1, token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(output).items():
        expected[1, token] -= frequency * count + presence
    request = row(
        prompt,
        output,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    plain = row(prompt, output)
    ours = edit_logits(logits, [plain, request, plain])
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-5)


# ---- order ------------------------------------------------------------------------------------


def test_bias_comes_before_penalties_and_penalties_before_temperature():
    logits = torch.tensor([[-1.0, 0.0]])
    request = row([0], [], logit_bias={0: 2.0}, repetition_penalty=2.0, temperature=0.5)
    assert torch.equal(edit_logits(logits, [request]), torch.tensor([[0.5, 0.0]]))
    assert torch.equal(processed(logits, request), torch.tensor([[0.0, -1.0]]))


def test_a_mask_wins_over_a_bias():
    request = row(allowed_token_ids=[0], logit_bias={1: 100.0}, temperature=0.0)
    assert sample(torch.zeros(1, 3), [request]).token_ids == [0]


# ---- draws ------------------------------------------------------------------------------------

SETTINGS = [
    dict(), dict(temperature=0.6), dict(temperature=1.5, top_k=7), dict(top_p=0.8),
    dict(temperature=1.3, min_p=0.1, top_k=20, top_p=0.9),
    dict(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5, top_p=0.95),
]  # fmt: skip


def exact_distribution(logits: torch.Tensor, request: SamplingRow) -> np.ndarray:
    """float64 [V], written without the sampler's truncation."""
    params = request.params
    scores = edit_logits(logits, [request])[0].double().numpy() / params.temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    p[order[1:][np.cumsum(p[order])[:-1] >= params.top_p]] = 0
    return p / p.sum()


AXES = ("seed", "sample_index", "position")
IN_TURN = [(AXES[i % 3], params) for i, params in enumerate(SETTINGS)]


@pytest.mark.parametrize(("axis", "params"), some(IN_TURN, product(AXES, SETTINGS)))
def test_draws_follow_the_exact_distribution(params, axis):
    draws = 10_000
    logits = random_logits(7, 1, 40)
    base = row([1, 2], [3, 3, 5], seed=5, position=9, **params)
    requests = [dataclasses.replace(base, **{axis: i}) for i in range(draws)]
    chosen: list[int] = []
    for start in range(0, draws, 250):
        chosen += sample(logits.expand(250, -1), requests[start : start + 250]).token_ids
    counts = np.bincount(chosen, minlength=40)
    expected = exact_distribution(logits, base) * draws
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


def mixed_batch() -> tuple[torch.Tensor, list[SamplingRow]]:
    choices = [*SETTINGS, dict(temperature=0), dict(allowed_token_ids=[5, 6, 7]), dict(top_k=1)]
    requests = [
        row([1, 2], [3, 3, 5], seed=i // 3, position=i, logprobs=i % 4, **choices[i % len(choices)])
        for i in range(36)
    ]
    return random_logits(8, 36, 1003), requests


def test_a_row_draws_the_same_alone_and_anywhere_in_a_batch():
    logits, requests = mixed_batch()
    together = sample(logits, requests)
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sample(logits[order], [requests[i] for i in order])
    for place, index in enumerate(order):
        alone = sample(logits[index : index + 1], [requests[index]])
        assert alone.token_ids[0] == together.token_ids[index] == shuffled.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[index] == shuffled.logprobs[place]


def test_truncation_does_not_change_the_noise_of_a_token():
    logits = random_logits(9, 60, 500)
    free = sample(logits, [row(seed=i) for i in range(60)]).token_ids
    cut = sample(logits, [row(seed=i, top_k=499) for i in range(60)]).token_ids
    least = logits.argmin(-1).tolist()
    assert [a for a, low in zip(free, least, strict=True) if a != low] == [
        a for a, b, low in zip(cut, free, least, strict=True) if b != low
    ]


def test_chunks_do_not_show(monkeypatch):
    logits, requests = mixed_batch()
    whole = sample(logits, requests)
    monkeypatch.setattr("minillm.sampling.edits.CHUNK_VALUES_CPU", 2500)
    assert sample(logits, requests) == whole


def test_greedy_takes_the_best_token_and_half_precision_works():
    logits = random_logits(11, 5, 300).bfloat16()
    result = sample(logits, [row(temperature=0.0)] * 5)
    assert result.token_ids == logits.argmax(-1).tolist()
    assert result.logprobs == [None] * 5


# ---- cost -------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Records the name and the largest tensor of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [item for item in (*args, result) if isinstance(item, torch.Tensor)]
        self.seen.append((func.__name__, max((t.numel() for t in tensors), default=0)))
        return result


def operations_on_the_vocabulary(logits: torch.Tensor, request: SamplingRow) -> set[str]:
    with Operations() as operations:
        sample(logits, [request])
    return {name.split(".")[0] for name, size in operations.seen if size >= logits.numel()}


def test_rows_that_ask_for_nothing_cost_nothing():
    logits = random_logits(12, 1, 20_480)
    with patch.object(cpu_sampling, "takes", lambda *arguments: False):
        greedy = operations_on_the_vocabulary(logits, row(temperature=0.0))
        drawn = operations_on_the_vocabulary(logits, row())
    assert greedy == {"amax", "argmax"}
    assert not drawn & {"sort", "cumsum", "copy_"}


def test_an_empty_batch_is_fine():
    assert sample(torch.zeros(0, 50), []).token_ids == []


# ---- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("params", [*SETTINGS, dict(temperature=0)])
def test_broken_logits_fail_their_row_only(value, params):
    logits = random_logits(13, 3, 50)
    requests = [row(seed=i, logprobs=1, **params) for i in range(3)]
    healthy = sample(logits, requests)
    logits[1, 17] = value
    result = sample(logits, requests)
    assert list(result.failed) == [1]
    assert "NaN or infinity" in result.failed[1].message
    assert (result.token_ids[1], result.logprobs[1]) == (NO_TOKEN, None)
    for index in (0, 2):
        assert result.token_ids[index] == healthy.token_ids[index]
        assert result.logprobs[index] == healthy.logprobs[index]


def test_a_row_with_nothing_to_choose_from_fails_alone():
    requests = [row(), row([], [], stop_ids=(4,), allowed_token_ids=[4], min_tokens=1), row()]
    result = sample(random_logits(14, 3, 10), requests)
    assert list(result.failed) == [1]
    assert "exclude all" in result.failed[1].message


# ---- log-probabilities ------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits(16, 4, 60, ties=True)
    requests = [
        row([], [9], seed=i, logprobs=i, temperature=3.0, top_k=50, logit_bias={9: 50.0})
        for i in range(4)
    ]
    result = sample(logits, requests)
    exact = logits.double().log_softmax(-1)
    for index, entry in enumerate(result.logprobs):
        chosen = result.token_ids[index]
        assert entry is not None
        assert next(iter(entry)) == chosen
        assert chosen in entry
        best = exact[index].topk(index).values if index else torch.zeros(0)
        others = sorted((v.logprob for v in entry.values()), reverse=True)[:index]
        torch.testing.assert_close(torch.tensor(others).double(), best.double(), atol=1e-5, rtol=0)
        assert index <= len(entry) <= index + 1
        for token, (logprob, rank) in entry.items():
            assert logprob == pytest.approx(float(exact[index, token]), abs=1e-5)
            assert rank == int((logits[index] > logits[index, token]).sum()) + 1


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_prompt_logprobs_never_hold_all_logits(chunk_rows):
    generator = torch.Generator().manual_seed(17)
    hidden = torch.randn(50, 16, generator=generator)
    weight = torch.randn(200, 16, generator=generator)
    targets = torch.randint(0, 200, (50,), generator=generator)
    heights = []

    def logits_fn(part: torch.Tensor) -> torch.Tensor:
        heights.append(len(part))
        return part @ weight.T

    with Operations() as operations:
        reads = token_logprobs(logits_fn, hidden, targets, top_k=3, chunk_rows=chunk_rows)
    result, wrong = reads.read()
    assert wrong is None
    assert sum(heights) == 50
    assert max(heights) == min(chunk_rows, 50)
    largest = max(size for _, size in operations.seen)
    assert largest <= max(chunk_rows * 200, hidden.numel(), weight.numel())
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    for t, entry in enumerate(result):
        target = int(targets[t])
        assert entry[target].logprob == pytest.approx(float(exact[t, target]), abs=1e-4)
        assert entry[target].rank == int((exact[t] > exact[t, target]).sum()) + 1
        assert set(entry) == {target, *exact[t].topk(3).indices.tolist()}


def test_prompt_logprobs_of_broken_logits_say_so():
    logits = torch.zeros(3, 5)
    logits[1, 2] = math.nan
    entries = token_logprobs(lambda part: part, logits, torch.tensor([0, 1, 2]), top_k=0)
    found, wrong = entries.read()
    assert found == []
    assert "NaN" in wrong.message


# ---- a sampler that is kept from step to step -------------------------------------------------

ALLOWED = dict(allowed_token_ids=[1, 2, 3, 5, 8, 13])
KINDS = [
    dict(), dict(temperature=0.0),
    dict(repetition_penalty=1.3, frequency_penalty=1.9, presence_penalty=-0.2),
    dict(presence_penalty=0.5, top_p=0.9), dict(logit_bias={3: 2.0, 7: -100.0}), ALLOWED,
    dict(structured_outputs={"regex": "x"}), dict(min_tokens=6), dict(bad_words=["x"]),
    dict(temperature=0.7, top_k=5, repetition_penalty=1.2, min_tokens=30),
]  # fmt: skip
WORDS = ((3,), (1, 2), (5, 5, 5), (2, 3, 1, 4))


class Thirds:
    """A matcher: behind n tokens come those of every third id."""

    is_accepting = False

    def __init__(self):
        self.count = 0

    def fill(self, bits):
        bits[:] = np.packbits(np.arange(40) % 3 == self.count % 3, bitorder="little")

    def accept(self, token):
        self.count += 1
        return True

    def rollback(self, count):
        self.count -= count


GRAMMARS = SimpleNamespace(
    width=40, vocabulary=SimpleNamespace(length=[1] * 40), matcher=lambda _: Thirds()
)


def kept_sampler(num_rows: int, device="cpu") -> Sampler:
    sampler = Sampler(num_rows, 40, torch.device(device))
    sampler.edits.grammars = GRAMMARS
    return sampler


def kept_request(index: int, output: list[int], **beside) -> SamplingRow:
    params = SamplingParams(**KINDS[index % len(KINDS)] | beside, max_tokens=1000)
    words = WORDS if params.bad_words else ()
    prompt = [1, 2, 2, index % 40]
    known = [*prompt, *output]
    return SamplingRow(
        params, index, 0, len(known), prompt, list(output), (4, 9), words, token_ids=known
    )


def anew(logits: torch.Tensor, requests: list[SamplingRow]) -> list[int]:
    """Tokens of rows that are made anew, without C."""
    with patch.object(cpu, "functions", lambda dtype: None):
        return sample(logits, requests, grammars=GRAMMARS).token_ids


def test_a_sampler_that_is_kept_chooses_as_one_that_is_made_anew():
    """Eighteen sequences over 90 steps: rows come, go and move, and histories outgrow their room.
    Few different logits make penalties, bans and words matter."""
    dice = np.random.default_rng(0)
    sampler, vocab = kept_sampler(20), 40
    held: dict[int, SamplingRow] = {}
    outputs = {index: [] for index in range(18)}
    places = {index: index for index in outputs}
    for row, index in enumerate(outputs):
        sampler.set_row(row, held.setdefault(index, kept_request(index, [])))
    for step in range(90):
        if step % 29 == 5:  # a sequence ends, and the last one moves to its row
            gone, last = dice.choice(list(places)), max(places, key=places.get)
            row = places.pop(gone)
            sampler.edits.drop(row)
            if last != gone:
                sampler.move(places[last], row)
                sampler.edits.drop(places[last]) if places[last] != row else None
                places[last] = row
            free = min(set(range(20)) - set(places.values()))
            new = 100 + step
            outputs[new] = []
            places[new] = free
            sampler.set_row(free, held.setdefault(new, kept_request(new, [])))
        members = [index for index in places if dice.random() < 0.8] or list(places)
        logits = torch.from_numpy(
            dice.normal(size=(len(members), vocab)).astype(np.float32)
        ).round()
        rows = [places[index] for index in members]
        positions = [4 + len(outputs[index]) for index in members]
        tokens, _ = sampler.choose(logits, rows, positions)
        right = anew(logits, [kept_request(index, outputs[index]) for index in members])
        assert tokens.tolist() == right, step
        sampler.append(rows, positions, tokens)
        for index, token in zip(members, tokens.tolist(), strict=True):
            outputs[index].append(token)
            held[index].token_ids.append(token)


def behind(request: SamplingRow, tokens: list[int]) -> SamplingRow:
    output = [*request.output_token_ids, *tokens]
    known = [*request.prompt_token_ids, *output]
    return dataclasses.replace(
        request, position=len(known), output_token_ids=output, token_ids=known
    )


def check_rows(sampler: Sampler, requests: dict[int, SamplingRow], drafts: list[int]) -> None:
    """Every row chooses as one that is made anew, behind its tokens and behind each draft."""
    behind_drafts = [drafts[:count] for count in range(len(drafts) + 1)]
    rows = [row for row in requests for _ in behind_drafts]
    each = [behind(one, some) for one in requests.values() for some in behind_drafts]
    logits = random_logits(len(rows), len(rows), 40)
    logits[::2, 2] += 6.0  # a bad word of several tokens ends with it
    given = dict.fromkeys(requests, drafts)
    tokens, best = sampler.choose(logits, rows, [one.position for one in each], (), given)
    assert tokens.tolist() == anew(logits, each)
    assert best.isfinite().all()


FOLLOW = ("repetition_penalty", "presence_penalty", "bad_words", "structured_outputs")
MASKS = ({}, ALLOWED, dict(structured_outputs={"regex": "x"}))
BESIDE = [
    pytest.param(
        *(index, beside, c),
        id="+".join([*KINDS[index], *beside, "C" if c else "torch"]),
        marks=[pytest.mark.slow] * ((index + bool(beside) + c) % 2),
    )
    for index in range(2, len(KINDS))
    for beside in MASKS
    for c in (True, False)
    if KINDS[index].keys().isdisjoint(beside)
]


@pytest.mark.parametrize(("index", "beside", "c"), BESIDE)
def test_an_edit_moves_with_its_row_and_ends_with_it(index, beside, c, monkeypatch):
    """Every edit, alone and beside a mask, in C and without: moved to a row that had any other,
    followed by tokens and by drafts that are rejected, dropped, and its row used again."""
    if not c:
        monkeypatch.setattr(cpu, "functions", lambda dtype: None)
    asked = {*KINDS[index], *beside}
    for other in range(index % 3, len(KINDS), 3):
        sampler, old = kept_sampler(4), kept_request(other, [7, 1])
        for place in range(3):
            sampler.set_row(place, old)
        mine, plain = kept_request(index, [7, 2, 3, 1], **beside), kept_request(0, [7, 1])
        sampler.set_row(0, mine)
        sampler.move(0, 2)
        assert sampler.edits.rows_of([0], [4]) == []
        for token in (3, 2, 5):
            assert sampler.edits.follows(2) == (not asked.isdisjoint(FOLLOW))
            check_rows(sampler, {1: old, 2: mine}, [1, 2])
            check_rows(sampler, {2: mine}, [])
            sampler.append([2], [mine.position], torch.tensor([token]))
            mine.token_ids.append(token)
            mine = dataclasses.replace(behind(mine, [token]), token_ids=mine.token_ids)
        sampler.set_row(0, plain)
        sampler.move(0, 2)
        sampler.set_row(3, old)
        check_rows(sampler, {1: old, 2: plain, 3: old}, [])
        sampler.edits.drop(1)
        assert sampler.edits.rows_of([1, 2], [6, 6]) == []


class LastToken(Edit):
    """A kind that no other code knows: rows of seed 77 choose token 39."""

    def set_row(self, row, request):
        return (None, ALWAYS) if request.seed == 77 else None

    def apply(self, copies):
        copies.logits[[row in self.rows for row in copies.rows], :39] = -INF


@pytest.mark.parametrize("c", [True, False])
def test_a_new_kind_of_edit_holds_beside_a_mask(c, monkeypatch):
    """The C sampler reads the masks of the other rows only."""
    if not c:
        monkeypatch.setattr(cpu, "functions", lambda dtype: None)
    monkeypatch.setattr("minillm.sampling.edits.EDITS", (*EDITS, LastToken))
    sampler, masked, copied = kept_sampler(3), row(allowed_token_ids=[3, 39]), []
    apply = Edits.apply
    monkeypatch.setattr(
        Edits, "apply", lambda self, z, rows, at: copied.extend(rows) or apply(self, z, rows, at)
    )
    for place, seed in ((0, 1), (1, 77), (2, 2)):
        sampler.set_row(place, dataclasses.replace(masked, seed=seed))
    logits = torch.zeros(3, 40)
    logits[:, 3] = 20.0
    assert sampler.choose(logits, [0, 1, 2], [0, 0, 0])[0].tolist() == [3, 39, 3]
    assert copied == ([1] if cpu_sampling.takes(logits) else [0, 1, 2])


def test_every_kind_of_edit_is_tested():
    sampler = kept_sampler(len(KINDS))
    for index in range(len(KINDS)):
        sampler.set_row(index, kept_request(index, []))
    assert [type(edit) for edit in sampler.edits.edits if edit.rows] == [*EDITS]


def test_forks_draw_from_the_same_edited_logits():
    sampler, logits = kept_sampler(4), random_logits(1, 3, 40)
    requests = [kept_request(index, [7]) for index in (0, 2, 5)]
    for row, request in zip((3, 0, 2), requests, strict=True):
        sampler.set_row(row, request)
    tokens, _ = sampler.choose(logits, (3, 0, 2), [5, 5, 5], forks=(0, 3, 2))
    alone = []
    for place, (request, forks) in enumerate(zip(requests, (0, 3, 2), strict=True)):
        for index in range(1 + forks):
            one = dataclasses.replace(request, sample_index=index)
            alone += sample(logits[place : place + 1], [one]).token_ids
    assert tokens.tolist() == alone


class OneDevice(TorchDispatchMode):
    """Refuses operations of a host tensor and a device tensor, except copies, as a GPU does; and an
    index on the host and a copy from memory that is not pinned, which a GPU takes but waits for."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.pinned = []  # kept, so that no other tensor has the address
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor))

    def pin(self, tensor):
        self.pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
        mixed = len({tensor.device for tensor in tensors}) > 1
        assert not mixed or "copy" in func.__name__, f"{func} of tensors on two devices"
        found = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        if "copy" in func.__name__ and {t.device.type for t in (*tensors, *made)} == {
            "cpu",
            "meta",
        }:
            places = {tensor.data_ptr() for tensor in self.pinned}
            assert tensors[-1].data_ptr() in places, f"{func} from memory that is not pinned"
        return found


@pytest.mark.parametrize("forks", [(), tuple(k % 4 for k in range(len(KINDS)))])
@pytest.mark.parametrize("drafted", [False, True])
def test_every_edit_stays_on_the_device_of_the_logits(monkeypatch, forks, drafted):
    """The meta device stands for a GPU: it computes shapes, and no value can be read."""

    def drawn(logits, pack, *_, **__):
        assert {len(column) for column in pack[:-1]} == {len(logits)}
        return logits.new_empty(len(logits), dtype=torch.int64), logits.amax(dim=-1).float()

    monkeypatch.setattr("minillm.sampling.sampler.choose", drawn)
    meta, rows = torch.device("meta"), list(range(len(KINDS)))
    sampler = kept_sampler(len(rows), "meta")
    drafts = {index: [3, 5] for index in rows if drafted}
    with OneDevice(monkeypatch):
        for index in rows:
            sampler.set_row(index, kept_request(index, [7]))
        rows = sorted(3 * rows if drafted else rows)
        positions = [5 + place % 3 if drafted else 5 for place in range(len(rows))]
        each = [count for count in forks for _ in range(3 if drafted else 1)]
        logits = torch.empty(len(rows), 40, device=meta)
        tokens, _ = sampler.choose(logits, rows, positions, each, drafts)
        sampler.append([2], [5], tokens[:1])
    assert tokens.shape == (len(rows) + sum(each),)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (1, 3, 2, 4), (4, 0), (2,)])
def test_rows_of_a_part_are_edited_in_any_order(order):
    sampler, logits = Sampler(5, 40, torch.device("cpu")), random_logits(4, 5, 40, ties=True)
    for row_id in range(5):
        sampler.set_row(row_id, row([row_id, 7, 8], repetition_penalty=1.0 + row_id, temperature=0))
    edited = sampler.edits.apply(logits[list(order)], order, [3] * len(order))
    for place, row_id in enumerate(order):
        alone = sampler.edits.apply(logits[row_id : row_id + 1], [row_id], [3])
        assert torch.equal(edited[place], alone[0])
        seen = logits[row_id, [row_id, 7, 8]].double()
        penalty = 1.0 + row_id
        expected = torch.where(seen > 0, seen / penalty, seen * penalty)
        torch.testing.assert_close(alone[0, [row_id, 7, 8]].double(), expected)


def test_several_logits_of_a_row_are_drawn_at_their_positions():
    sampler, logits = Sampler(2, 40, torch.device("cpu")), random_logits(2, 4, 40)
    sampler.set_row(0, kept_request(1, []))
    sampler.set_row(1, kept_request(0, []))
    tokens, _ = sampler.choose(logits, (1, 1, 1, 0), [4, 5, 6, 4])
    for place, position in enumerate((4, 5, 6)):
        one = dataclasses.replace(kept_request(0, []), position=position)
        assert sample(logits[place : place + 1], [one]).token_ids == [int(tokens[place])]
    sampler.set_row(1, kept_request(2, []))
    with pytest.raises(ValueError, match="needs at least k - 1 drafts"):
        sampler.choose(logits, (1, 1, 1, 0), [4, 5, 6, 4])


def tensors_of(part: object) -> list[torch.Tensor]:
    """The tensors that an object keeps, also in dictionaries and segments."""
    if isinstance(part, torch.Tensor):
        return [part]
    inner = part.values() if isinstance(part, dict) else vars(part).values()
    return [one for each in inner if isinstance(each, torch.Tensor | dict | Segments)
            for one in tensors_of(each)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rows", [32, 256])
def test_the_memory_of_edits_at_150k_tokens(rows):
    """What is kept, and the most that exists at once while a step of edited rows is chosen."""
    edits = Edits(rows, 151_936, torch.device("cpu"))
    params = dict(repetition_penalty=1.05, logit_bias={5: 1.0}, allowed_token_ids=range(150_000))
    for row_id in range(rows):
        prompt = list(range(row_id, row_id + 1000))
        edits.set_row(row_id, row(prompt, position=1000, **params))
    kept = sum(each.nbytes for edit in edits.edits for each in tensors_of(edit))
    assert kept < rows * (151_936 / 8 + 2 * 1000 * 20 + 4096)
    logits, most = torch.zeros(rows, 151_936, dtype=torch.bfloat16), 0
    members = edits.rows_of(range(rows), [1000] * rows)
    for part in edits.chunks(members):
        raw = logits[part]
        with Operations() as operations:
            edits.apply(raw, part, [1000] * len(part))
        most = max(most, *(size for _, size in operations.seen))
    assert most <= 2**21  # numbers of a chunk, not of all logits


@pytest.mark.parametrize("count", [1, 5, 20])
def test_of_equal_logits_the_lowest_ids_are_described(count):
    """So that a row has the same entries with other rows, other counts, and in C."""
    logits = random_logits(3, 40, 300, ties=True).half()  # a type for which there is no C
    logits[0] = torch.tensor([-0.0, 0.0, -1.0]).repeat(100)
    order = logits.float().sort(descending=True, stable=True).indices[:, :count]
    described = describe(logits, order[:, 0], [count] * 40).read()
    assert [list(entries) for entries in described] == order.tolist()


def test_the_device_advances_positions_by_itself_and_others_are_uploaded(monkeypatch):
    cpu_upload, uploads = sampler_module.upload, []

    def counted(device, *arrays):
        uploads.append(len(arrays))
        return cpu_upload(torch.device("cpu"), *arrays)

    sampler = Sampler(2, 40, torch.device("cpu"))
    sampler.device = SimpleNamespace(type="a GPU")
    monkeypatch.setattr(sampler_module, "upload", counted)
    for positions in ([3, 5], [4, 6], [5, 7], [9, 8]):
        assert sampler._pack([0, 1], positions, None).position.tolist() == positions
    assert uploads == [4, 1]
