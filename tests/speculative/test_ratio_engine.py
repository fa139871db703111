"""The rules "standard" and "synthetic" in the whole engine, on a model with a vocabulary of 8.

The exact distributions come from transformers: its logits after every history of the first tokens.
"""

import itertools
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from minillm import LLM, SamplingParams
from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose, dist
from minillm.speculative.proposer import Draft
from tests.engine.small import assert_idle
from tests.pairs import one_in
from tests.speculative.distributions import chi_square, last_two, pipeline, table
from tests.speculative.test_ratio_sampler import StopsTheBatch

PROMPT = [1, 5, 2, 7, 0, 3]
PLAIN = SamplingParams(temperature=1.0, ignore_eos=True)
TRUNCATED = SamplingParams(temperature=0.8, top_k=6, top_p=0.9, ignore_eos=True)
PENALISED = SamplingParams(temperature=1.0, presence_penalty=1.5, min_p=0.02, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer, whose logits differ enough from history to history."""
    path = tmp_path_factory.mktemp("eight")
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(path)
    return path


class Sampled:
    """Draws drafts from a table, with noise of their own, and says what from."""

    def __init__(self, logits: torch.Tensor, tells_dist: bool = True):
        self.logits, self.tells_dist = logits, tells_dist

    def propose(self, rows):
        """All rows at once; their requests have the same parameters."""
        histories, dists = [list(row.token_ids) for row in rows], []
        params, one = rows[0].new.params, torch.ones(len(rows))
        numbers = one * params.temperature, 0 * one, one * params.top_p
        for _ in range(max(row.num_drafts for row in rows)):
            places = zip(rows, histories, strict=True)
            streams = [(row.new.seed, row.new.sample_index, len(each)) for row, each in places]
            stream = torch.tensor(streams).T.contiguous()
            pack = Pack(*numbers, (one * max(params.top_k, 0)).int(), *stream, True)
            raw = torch.stack([self.after(each) for each in histories])
            chosen, _ = choose(raw, pack, purpose=Purpose.DRAFT)
            dists.append(dist(raw, pack))
            for history, token in zip(histories, chosen.tolist(), strict=True):
                history.append(token)
        drafts = []
        for place, (row, history) in enumerate(zip(rows, histories, strict=True)):
            tokens = history[len(row.token_ids) :][: row.num_drafts]
            drafts.append(self.told(tokens, [each[place] for each in dists[: row.num_drafts]]))
        return drafts

    def told(self, tokens, dists):
        """A draft, and perhaps what it was drawn from."""
        return Draft(tokens, torch.stack(dists)) if self.tells_dist and tokens else tokens

    def after(self, history):
        return self.logits[last_two(history)]


def engine(folder: Path, proposer=None, num_drafts: int = 2, method="standard", **more) -> LLM:
    """An engine whose proposer is an object."""
    speculation = None
    if proposer is not None:
        speculation = {"method": proposer, "num_speculative_tokens": num_drafts}
        speculation["rejection_sample_method"] = method
        if method == "synthetic":
            speculation["synthetic_acceptance_rates"] = more.pop("rates")
    defaults = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 1024}
    defaults |= {"max_model_len": 64, "max_num_seqs": 64, "seed": 1}
    return LLM(folder, speculative_config=speculation, **(defaults | more))


def run(llm: LLM, params: SamplingParams, num_requests: int, num_tokens: int, n: int = 16):
    """The first tokens of `n` completions of each request."""
    params = replace(params, n=n, max_tokens=num_tokens)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * num_requests, params, use_tqdm=False)
    return [tuple(each.token_ids) for output in outputs for each in output.outputs]


def cells_of(folder: Path, params: SamplingParams, count: int) -> dict:
    """The exact distribution of the first `count` tokens."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    dists: dict = {}
    for length in range(count):
        histories = list(itertools.product(range(8), repeat=length))
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *each] for each in histories])).logits[:, -1]
        for history, row in zip(histories, logits.numpy(), strict=True):
            dists[history] = pipeline(row, params, history)
    return {
        each: float(np.prod([dists[each[:i]][token] for i, token in enumerate(each)]))
        for each in itertools.product(range(8), repeat=count)
    }


def excess(folder: Path, runs: list, params: SamplingParams, count: int = 3) -> float:
    """The statistic of the first `count` tokens in units of what is allowed."""
    found = []
    for first in range(1, count + 1):
        statistic, allowed = chi_square(
            [each[:first] for each in runs], cells_of(folder, params, first)
        )
        found.append(statistic / max(allowed, 1e-9))
    return max(found)


# ---- standard --------------------------------------------------------------------------------

DRAFT = table(5)
ROOM = {"num_gpu_blocks_override": 1024}
STARVED = {"num_gpu_blocks_override": 24, "max_num_seqs": 16}
SWAPS = STARVED | {"swap_space": 0.001}


@pytest.mark.parametrize(
    ("params", "num_drafts", "more"),
    one_in(3, [(TRUNCATED, 2, ROOM), (PENALISED, 3, ROOM), (PLAIN, 3, STARVED), (PLAIN, 1, SWAPS)]),
    ids=["truncated", "penalised", "recompute", "swap"],
)
def test_the_dist_of_the_first_tokens(folder, params, num_drafts, more):
    llm = engine(folder, Sampled(DRAFT), num_drafts, **more)
    assert excess(folder, run(llm, params, 40, 5), params) < 1
    counters = llm.engine.scheduler.counters
    assert counters.num_draft_tokens > counters.num_accepted_tokens > 200
    assert (counters.num_preemptions_recompute > 0) == (more is STARVED)
    assert (counters.num_preemptions_swap > 0) == (more is SWAPS)
    assert_idle(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "num_drafts"), [(1, 1), (2, 2), (8, 4), (64, 2)])
@pytest.mark.parametrize("params", [PLAIN, TRUNCATED, PENALISED], ids=["plain", "cut", "penalised"])
def test_the_dist_in_batches(folder, params, num_rows, num_drafts):
    llm = engine(folder, Sampled(DRAFT), num_drafts, max_num_seqs=num_rows)
    count = 500 if num_rows < 8 else 1000
    assert excess(folder, run(llm, params, count, 5, n=min(num_rows, 8)), params) < 1


@pytest.mark.mutation
def test_one_rejection_must_not_stop_the_batch(folder):
    """Claim G4, planted in the engine."""
    llm = engine(folder, Sampled(DRAFT), 1)
    llm.engine.runner.sampler.rule = StopsTheBatch()
    assert excess(folder, run(llm, PLAIN, 25, 4), PLAIN) > 2


@pytest.mark.mutation
def test_a_draft_that_lies_about_its_dist_is_seen(folder):
    class Liar(Sampled):
        def told(self, tokens, dists):
            roots = torch.stack(dists).sqrt()
            return Draft(tokens, roots / roots.sum(-1, keepdim=True))

    llm = engine(folder, Liar(DRAFT), 1)
    assert excess(folder, run(llm, PLAIN, 50, 4), PLAIN) > 1.5


class Target(Sampled):
    """Draws from the target itself, computed by transformers."""

    def __init__(self, folder: Path):
        super().__init__(torch.empty(0))
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def after(self, history):
        with torch.no_grad():
            return self.model(torch.tensor([history])).logits[0, -1]


def test_identical_models_accept_everything(folder):
    """But for rounding: the two distributions are computed in different ways."""
    for params in (PLAIN, TRUNCATED):
        llm = engine(folder, Target(folder), 4)
        run(llm, params, 1, 26)
        counters = llm.engine.scheduler.counters
        assert counters.num_draft_tokens == counters.num_accepted_tokens == 16 * 20


def test_without_dists_tokens_are_those_of_plain_decoding(folder):
    plain = run(engine(folder), TRUNCATED, 1, 16)
    for method in ("strict", "standard"):
        llm = engine(folder, Sampled(DRAFT, tells_dist=False), 3, method)
        assert run(llm, TRUNCATED, 1, 16) == plain
        assert llm.engine.scheduler.counters.num_accepted_tokens > 0
    ruled, again = (run(engine(folder, Sampled(DRAFT), 3), TRUNCATED, 1, 16) for _ in range(2))
    assert ruled == again
    assert ruled != plain


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda dists: dists[:, :7],
            r"is \[3, 7\], torch.float32; probabilities \[3, 8\] are expected",
        ),
        (lambda dists: dists[:2], r"is \[2, 8\], .*; probabilities \[3, 8\] are expected"),
        (lambda dists: dists > 0, r"torch.bool; probabilities"),
        (lambda dists: dists.log(), r"must be probabilities that sum to 1"),
        (lambda dists: dists * 1.01, r"a row whose sum is 0.01 off 1"),
        (lambda dists: dists * torch.nan, r"must be probabilities"),
    ],
)
def test_what_is_no_dist_is_refused(folder, wrong, message, caplog):
    class Confused(Sampled):
        def told(self, tokens, dists):
            return Draft(tokens, wrong(torch.stack(dists)))

    llm = engine(folder, Confused(DRAFT), 3)
    with caplog.at_level(logging.WARNING):
        found = run(llm, TRUNCATED, 1, 8, n=4)
    assert found == run(engine(folder), TRUNCATED, 1, 8, n=4)
    (said,) = [record.getMessage() for record in caplog.records if "Speculative" in record.msg]
    assert re.search(message, said)


# ---- synthetic -------------------------------------------------------------------------------


class Wild:
    """Always the same tokens, likely or not."""

    def propose(self, rows):
        return [[0, 1, 2, 3][: row.num_drafts] for row in rows]


@pytest.mark.parametrize(
    "rates", one_in(2, [((0.9, 0.5, 0.25),), ((0.0, 1.0, 1.0),), ((1.0, 1.0, 0.0),)])
)
@pytest.mark.parametrize(
    "params", [TRUNCATED, PENALISED, SamplingParams(temperature=0.0, ignore_eos=True)],
    ids=["truncated", "penalised", "greedy"],
)  # fmt: skip
def test_drafts_are_accepted_at_the_given_rates(folder, params, rates):
    llm = engine(folder, Wild(), 3, "synthetic", rates=rates)
    runs = run(llm, params, 3, 50, n=1 if params.temperature == 0 else 16)
    assert {len(each) for each in runs} == {50}
    tried, accepted = Counter(), Counter()
    for record in llm.trace:
        for drafted in record.drafted:
            reached = min(drafted.num_drafted, drafted.num_accepted + 1)
            tried.update(range(reached))
            accepted.update(range(drafted.num_accepted))
    for place, rate in enumerate(rates):
        spread = (rate * (1 - rate) * tried[place]) ** 0.5
        assert abs(accepted[place] - rate * tried[place]) <= 4.5 * spread
    assert tried[0] > 30
