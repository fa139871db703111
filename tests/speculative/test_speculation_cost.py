"""The cost model of speculative decoding, and `minillm plan --speculate`."""

import json

import numpy as np
import pytest

from minillm.errors import ConfigError
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost, step_time
from minillm.lab.speculation_cost import best, speculation, survival, verification_seconds
from minillm.models.presets import preset

H200 = next(value for key, value in DATASHEET.items() if key.startswith("h200"))


def linear(batch, drafts):
    """A made-up distribution: 10 ms, and 1 ms for each token."""
    return 0.010 + 0.001 * (batch + drafts)


def test_tokens_are_those_of_a_chain_that_is_played():
    rates, rng = [0.9, 0.6, 0.8], np.random.default_rng(0)
    hits = rng.random((200_000, 4)) < [*rates, rates[-1]]
    accepted = hits.cumprod(axis=1).sum(axis=1)
    found = speculation(1, 4, rates, linear)
    assert found.tokens == pytest.approx(1 + accepted.mean(), abs=0.01)
    assert survival(rates, 4) == pytest.approx(hits.cumprod(axis=1).mean(axis=0), abs=0.01)


def test_speed_up_is_tokens_over_all_that_a_step_costs():
    found = speculation(2, 3, [0.5], linear, draft_seconds=0.002, host_seconds=0.0006)
    assert found.tokens == 1 + 0.5 + 0.25 + 0.125
    assert found.verification == pytest.approx(18 / 12)
    assert found.drafting == pytest.approx(3 * 2 / 12)
    assert found.host == pytest.approx(0.05)
    assert found.speedup == pytest.approx(1.875 / (1.5 + 0.5 + 0.05))


@pytest.mark.parametrize("batch", [1, 4])
def test_a_proposer_without_an_answer_costs_no_verification(batch):
    rng = np.random.default_rng(1)
    answers = rng.random((100_000, batch)) < 0.3
    steps = np.vectorize(linear)(batch, 5 * answers.sum(axis=1)) / linear(batch, 0)
    found = speculation(batch, 5, [0.5], linear, answered=0.3)
    assert found.verification == pytest.approx(steps.mean(), rel=0.01)
    assert found.tokens == pytest.approx(1 + 0.3 * sum(0.5**place for place in range(1, 6)))


def test_the_best_count_falls_with_the_batch_and_may_be_none():
    config = preset("qwen3-8b")
    verify = verification_seconds(config, 512, lambda cost: step_time(cost, H200).seconds)

    def fastest(batch, rate):
        return best([speculation(batch, count, [rate], verify) for count in range(9)])

    assert fastest(1, 0.9).num_drafts == 8
    assert 0 < fastest(128, 0.9).num_drafts < 8
    assert fastest(512, 0.3) is None


def test_verification_is_a_step_with_a_logit_at_every_draft():
    config, costs = preset("smollm2-135m"), []
    verification_seconds(config, 100, lambda cost: costs.append(cost) or 1.0)(3, 7)
    assert costs == [step_cost(config, [4, 3, 3], [100] * 3, num_logits=10)]


def test_a_mistake_gets_one_sentence():
    with pytest.raises(ConfigError, match=r"acceptance has 1\.5; it must be numbers from 0 to 1"):
        survival([1.5], 2)
    with pytest.raises(ConfigError, match="acceptance is empty"):
        survival([], 2)
    with pytest.raises(ConfigError, match="batch is 0"):
        speculation(0, 1, [0.5], linear)


# ---- the command ------------------------------------------------------------------------------

TARGET = ["plan", "preset:qwen3-8b", "--hardware", "h200"]


def test_json_has_the_numbers_of_the_model(cli):
    _, out, _ = cli(*TARGET, "--speculate", "preset:qwen3-0.6b", "--acceptance", "0.8", "--json")
    found = json.loads(out)
    assert found["acceptance"] == [0.8]
    first = found["speculation"][0]
    seconds = [
        step_time(step_cost(preset(name), query, [1024], num_logits=query[0]), H200).seconds
        for name, query in (("qwen3-8b", [2]), ("qwen3-8b", [1]), ("qwen3-0.6b", [1]))
    ]
    assert first["verification"] == pytest.approx(seconds[0] / seconds[1])
    assert first["drafting"] == pytest.approx(seconds[2] / seconds[1])
    assert first["speedup"] == pytest.approx(1.8 / (seconds[0] + seconds[2]) * seconds[1])
    found = json.loads(cli(*TARGET, "--speculate", "ngram", "--json")[1])["speculation"]
    plain = step_time(step_cost(preset("qwen3-8b"), [1] * 64, [1024] * 64), H200).seconds
    assert found[-1]["host"] == pytest.approx(64 * 20e-6 / plain)  # a look-up for each sequence


def test_the_table_says_what_is_assumed(cli):
    code, out, _ = cli(*TARGET, "--speculate", "ngram")
    assert code == 0
    assert "an assumed acceptance of 0.5" in " ".join(out.split())
    code, out, _ = cli(*TARGET, "--speculate", "preset:qwen3-0.6b", "--acceptance", "0.8,0.7")
    assert "with an acceptance of 0.8, 0.7" in " ".join(out.split())
    assert [line.split()[0] for line in out.splitlines() if line.endswith("best")] == [
        "1", "4", "16", "64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--acceptance", "0.5"], "need --speculate; add it"),
        (["--speculate", "ngram", "--acceptance", "0.5,x"], "from 0 to 1, not 'x'"),
        (["--speculate", "ngram", "--answered", "2"], "from 0 to 1, not '2'"),
        (["--speculate", "preset:llama-3.1-8b"], "must have the vocabulary of its target"),
    ],
)
def test_a_wrong_option_gets_one_sentence(cli, options, message):
    code, _, err = cli(*TARGET, *options)
    assert code != 0
    assert message in " ".join(err.split())
