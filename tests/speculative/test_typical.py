"""Typical acceptance: the decision of the formula in numpy, and outputs that say what it does."""

import json
import math

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.ops.sampling import Pack
from minillm.sampling import typical
from minillm.sampling.rules import DraftedToken, Verification
from minillm.serving.replies import FINGERPRINT
from tests.planting import plant
from tests.serving.http_small import served

CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "typical"}


def compare(num_rows: int = 200, width: int = 16) -> None:
    """Random logits, flat and peaked, and drafts of every rank, at temperature 0.7."""
    dice = np.random.default_rng(0)
    logits = dice.normal(size=(num_rows, width)) * dice.uniform(0.1, 6, (num_rows, 1))
    drafts = logits.argsort()[np.arange(num_rows), -dice.integers(1, 5, num_rows)]
    p = np.exp(logits / 0.7)
    p /= p.sum(1, keepdims=True)
    limits = [min(0.2, 0.6 * math.exp((row * np.log(row)).sum())) for row in p]
    expected = [bool(row[d] > limit) for row, d, limit in zip(p, drafts, limits, strict=True)]
    zeros = torch.zeros(num_rows)
    whole = zeros.long()
    pack = Pack(zeros + 0.7, zeros, zeros + 1, zeros.int(), whole, whole, whole, False)
    drafted = [DraftedToken(int(token), 0, None) for token in drafts]
    given = Verification(whole - 1, torch.tensor(logits), pack, drafted, torch.float32)
    tokens = typical.Typical(0.2, 0.6).choose(given)
    assert (tokens >= 0).tolist() == expected
    assert len({*expected}) == 2
    assert [int(t) for t, draft in zip(tokens, drafts, strict=True) if t not in (-1, draft)] == []


def test_a_draft_is_accepted_as_the_formula_says():
    compare()


BUGS = {
    "no bug": ("clamp(max=self.threshold)", "clamp(max=self.threshold)"),
    "the larger limit": ("clamp(max=self.threshold)", "clamp(min=self.threshold)"),
    "a sign": ("xlogy(p, p).sum(dim=-1)", "xlogy(p, p).sum(dim=-1).neg()"),
    "no entropy": (".exp() * self.alpha", ".exp() * 0 + self.alpha"),
    "the other way round": ("where(accepted, tokens, samples)", "where(accepted, samples, tokens)"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    plant(monkeypatch, typical, *BUGS[bug])
    if bug == "no bug":
        return compare()
    with pytest.raises(AssertionError):
        compare()


def test_greedy_text_is_unchanged_and_sampled_text_accepts_more():
    prompt, found = "def add(a, b):\n    return a + b\n\ndef add", {}
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, n=8, seed=1)
    plain = LLM("tiny").generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text
    for rule in ("strict", "typical"):
        llm = LLM("tiny", speculative_config=CONFIG | {"rejection_sample_method": rule})
        assert llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].text == plain
        metrics = llm.generate(prompt, sampled, use_tqdm=False)[0].metrics
        found[rule] = metrics.num_accepted_tokens
        assert metrics.acceptance == (rule if rule == "typical" else None)
    assert found["typical"] > found["strict"] > 0


@pytest.mark.parametrize(("rule", "suffix"), [("typical", "-typical"), ("strict", "")])
def test_every_output_says_so(folder, cli, rule, suffix):
    config = CONFIG | {"rejection_sample_method": rule}
    body = {"prompt": "abcabcabc", "max_tokens": 8}
    with served(folder, speculative_config=config) as server:
        pieces = [server.complete(**body), *server.stream("/v1/completions", body)]
    assert {each["system_fingerprint"] for each in pieces} == {FINGERPRINT + suffix}
    said = cli("generate", "abc", "--speculative-config", json.dumps(config)).err
    assert ("typical acceptance: not the model's distribution" in said) == (rule == "typical")
