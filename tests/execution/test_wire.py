"""An executor behind bytes: plans go in and results come out as they would to another process."""

from typing import Any

import pytest
from msgspec import ValidationError, msgpack

from minillm import LLM, SamplingParams
from minillm.errors import Failure
from minillm.execution.executor import Executor
from minillm.execution.flight import Flight, StepResult
from minillm.execution.wire import plan_from_bytes, to_bytes
from minillm.sampling.logprobs import TokenLogprob
from minillm.scheduling.plan import NewSequence, StepPlan
from tests.engine.small import assert_idle, limit_steps, make, tokens


class Remote:
    """Knows nothing but bytes of the engine that drives it."""

    def __init__(self, executor: Executor):
        self.executor, self.sizes = executor, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def launch(self, plan: StepPlan) -> Flight:
        data = to_bytes(plan)
        self.sizes.append(len(data))
        received = plan_from_bytes(data)
        assert received == plan
        there, here = self.executor.launch(received), Flight()

        def read() -> None:
            data = to_bytes(there.collect())
            result = msgpack.decode(data, type=StepResult)
            assert result == there.result
            here.result = result

        here.reads.append(read)
        return here


PROMPTS = [list(range(10 * i + 1, 10 * i + 5 + 2 * i)) for i in range(6)]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": -(2**62), "top_p": 0.9, "min_p": 0.01, "top_k": 30},
    "edited": {"logit_bias": {5: 3.0, 77: -100.0}, "bad_words": ["a", "bc"], "min_tokens": 3,
               "repetition_penalty": 1.2, "allowed_token_ids": list(range(200)), "seed": 3,
               "stop_token_ids": [9]},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "seed": 4, "stop": ["~"]},
    "forks": {"n": 3, "seed": 5},
}  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("setting", [{}, {"num_gpu_blocks_override": 20, "swap_space": 0.001}])
def test_an_executor_behind_bytes_gives_the_same_outputs(folder, monkeypatch, overlap, setting):
    def outputs(llm: LLM) -> list[Any]:
        params = [
            SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | fields)
            for fields in (*KINDS.values(), {"temperature": 0.0})
        ]
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [
            (tokens(one), [each.logprobs for each in one.outputs], one.prompt_logprobs)
            for one in found
        ]

    llm = make(folder, async_scheduling=overlap, **setting)
    limit_steps(llm, monkeypatch)
    remote = llm.engine._runner = Remote(llm.engine.runner)
    assert outputs(llm) == outputs(make(folder, async_scheduling=overlap, **setting))
    assert_idle(llm.engine)
    assert len(remote.sizes) > 10


def test_a_decode_step_is_a_few_bytes_per_row(folder):
    llm = make(folder, max_num_seqs=8, num_gpu_blocks_override=100)
    remote = llm.engine._runner = Remote(llm.engine.runner)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    llm.generate([[i + 1] * 4 for i in range(8)], params, use_tqdm=False)
    assert remote.sizes[-1] < 8 * 40


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_survive(kind):
    params = SamplingParams(**KINDS[kind])
    assert msgpack.decode(to_bytes(params), type=SamplingParams) == params


def test_results_survive():
    entry = {5: TokenLogprob(-0.5, 1), 9: TokenLogprob(-float("inf"), 3)}
    result = StepResult(
        {3: [5, 6, 7], 4: [None], 9: [1, None]},
        {3: [entry, None]},
        {4: (2, [entry, entry])},
        {4: {0: Failure("wrong", "model")}, 9: {1: Failure("also", "request")}},
        {4},
        {3: 2, 9: 0},
        8,
        "several tokens of a sequence",
    )
    read = msgpack.decode(to_bytes(result), type=StepResult)
    assert read == result
    assert read.errors[9][1].owner == "request"


def test_a_plan_with_everything_survives():
    params = SamplingParams(**KINDS["edited"])
    new = NewSequence(1, 2, 3, (4, 5, 6, 7), params, 2**63 - 1, (8,), ((9, 10), (11,)), "a")
    plan = StepPlan(7, [1, 2], [new], rebalance=3)
    assert plan_from_bytes(to_bytes(plan)) == plan
    for wrong in ([7, "x"], {"step": 7, "rows": [[0, 0, 1, 1, 0]]}, {"step": 7, "dropped": ["a"]}):
        with pytest.raises(ValidationError):
            plan_from_bytes(msgpack.encode(wrong))
    for moved in ("request", "prompt", "arrival"):
        assert moved not in NewSequence._fields  # numbers and parameters, not a request


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}])
def test_a_row_with_several_logits_samples_at_each_of_its_positions(folder, fields):
    """As a proposer's drafts will be verified: each position draws what plain decoding would
    draw there, because the noise depends on the position and not on the step."""
    prompt = PROMPTS[3]
    params = SamplingParams(max_tokens=9, ignore_eos=True, **fields)
    llm = make(folder)
    engine = llm.engine
    engine.add(engine.make_request("several", None, prompt, params))
    engine.add(engine.make_request("beside", None, PROMPTS[1], params))
    plan = engine.scheduler.schedule()
    plan.rows[:] = [
        row._replace(num_logits=4) if row.num_tokens == len(prompt) else row for row in plan.rows
    ]
    result = engine.runner.execute(plan)
    plain = make(folder)
    expected = [
        tokens(plain.generate([prompt[:end]], params, use_tqdm=False)[0])[0][0]
        for end in range(len(prompt) - 3, len(prompt) + 1)
    ]
    assert result.token_ids[0] == expected
    (beside,) = tokens(plain.generate([PROMPTS[1]], params, use_tqdm=False)[0])
    assert result.token_ids[1] == beside[:1]
    # The sequence goes on from the last of them.
    place = engine.runner._rows[0].row
    assert int(engine.runner.rows.last[place]) == expected[-1]
