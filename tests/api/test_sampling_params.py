"""Every value a stranger can send is accepted or refused with one clear sentence."""

import dataclasses
import inspect
import json
import pickle
import re
from argparse import ArgumentParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.api.sampling_params import SamplingParams, validate_against_model
from minillm.cli.options import add_sampling_options, sampling_params
from minillm.errors import InvalidRequestError, MinillmError, UnknownArgumentError
from minillm.serving.params import Limits, completion_job
from minillm.serving.protocol import CompletionRequest, parse

NAN, INF = float("nan"), float("inf")


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    expected = dict(n=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=16)
    expected |= dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    expected |= dict(min_tokens=0, seed=None, logprobs=None, prompt_logprobs=None)
    expected |= dict(ignore_eos=False, skip_special_tokens=True, detokenize=True)
    expected |= dict(include_stop_str_in_output=False, logit_bias=None, allowed_token_ids=None)
    assert {name: getattr(params, name) for name in expected} == expected
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())


def test_values_are_normalised():
    params = SamplingParams(
        stop="###",
        top_k=-1,
        seed=-1,
        n=np.int64(2),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([3, 4]),
        bad_words=["a"],
        logit_bias={np.int32(5): 1},
        max_tokens=None,
        min_tokens=7,
    )
    assert params.stop == ("###",)
    assert (params.top_k, params.seed, params.n, params.temperature) == (0, None, 2, 0.5)
    assert (params.stop_token_ids, params.bad_words) == ((3, 4), ("a",))
    assert params.logit_bias == {5: 1.0}
    assert type(params.n) is int
    assert type(params.temperature) is float
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()


def test_is_a_frozen_dataclass_that_travels():
    params = SamplingParams(temperature=0.3, stop=["a", "b"], logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3).n == 3
    assert "temperature" in inspect.signature(SamplingParams).parameters
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]


def test_an_assignment_is_answered_with_the_way_to_change_a_copy():
    params = SamplingParams(max_tokens=7)
    with pytest.raises(InvalidRequestError) as caught:
        params.max_tokens = 5  # type: ignore[misc]
    assert isinstance(caught.value, AttributeError)
    [call] = re.findall(r"use (dataclasses\.replace\(.*?\)) to make", str(caught.value))
    assert eval(call).max_tokens == 5  # the message's own advice, followed
    assert params.max_tokens == 7
    with pytest.raises(AttributeError, match=r"no argument 'max_token'. Did you mean 'max_tokens'"):
        params.max_token = 5  # type: ignore[attr-defined]


def test_greedy_below_the_threshold_of_vllm():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


BAD = [
    ("temperature", NAN, "0 to 1000000"),
    ("temperature", INF, "0 to 1000000"),
    ("temperature", -0.1, "0 to 1000000"),
    ("temperature", 10**400, "0 to 1000000"),
    ("temperature", "hot", "must be a number"),
    ("temperature", None, "must be a number"),
    ("temperature", True, "must be a number"),
    ("temperature", np.bool_(True), "must be a number"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("top_p", NAN, "above 0 and at most 1"),
    ("top_k", -2, "from -1"),
    ("top_k", 1.5, "must be an integer"),
    ("top_k", 2**31, "from -1 to 2147483647"),
    ("min_p", 1.1, "from 0 to 1"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -INF, "from -2 to 2"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("n", 0, "from 1 to 64"),
    ("n", 10**6, "from 1 to 64"),
    pytest.param("n", 10**5000, "too large to print", id="n-of-5000-digits"),
    ("n", True, "must be an integer"),
    ("n", None, "must be an integer"),
    ("max_tokens", 0, "from 1 to"),
    ("max_tokens", "16", "must be an integer"),
    ("min_tokens", -1, "from 0 to"),
    ("min_tokens", 17, "at most max_tokens, which is 16"),
    ("seed", 2**63, "9223372036854775807"),
    ("seed", 1.0, "must be an integer"),
    ("logprobs", 21, "from 0 to 20"),
    ("logprobs", -1, "from 0 to 20"),
    ("prompt_logprobs", 21, "from 0 to 20"),
    ("stop", [""], "1 to 256 characters"),
    ("stop", "x" * 257, "1 to 256 characters"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", [5], "must be a string"),
    ("stop", 5, "must be a list"),
    ("stop", {"a": 1}, "must be a list"),
    ("stop_token_ids", [-1], "from 0"),
    ("stop_token_ids", [True], "must be an integer"),
    ("stop_token_ids", list(range(1025)), "at most 1024"),
    ("stop_token_ids", 7, "must be a list"),
    ("bad_words", "word", "must be a list"),
    ("bad_words", ["a"] * 129, "at most 128"),
    ("allowed_token_ids", [], "needs at least one id"),
    ("allowed_token_ids", ["a"], "must be an integer"),
    ("logit_bias", [1], "map token ids"),
    ("logit_bias", {1: 101}, "-100 to 100"),
    ("logit_bias", {1: NAN}, "-100 to 100"),
    ("logit_bias", {"1": 1}, "must be an integer"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "at most 1024"),
    ("ignore_eos", 1, "True or False"),
    ("detokenize", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_refusals_name_the_parameter_the_value_and_the_range(name, value, says):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert says in message
    assert len(message) < 300
    assert message.endswith(".")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("n", 1, 64),
        ("temperature", 0.0, 1e6),
        ("top_p", 1e-9, 1.0),
        ("repetition_penalty", 0.01, 100.0),
        ("logprobs", 0, 20),
        ("seed", -(2**63), 2**63 - 1),
    ],
)
def test_the_limits_themselves_are_allowed(name, low, high):
    assert getattr(SamplingParams(**{name: low}), name) == low
    assert getattr(SamplingParams(**{name: high}), name) == high


def test_refused_combinations():
    with pytest.raises(InvalidRequestError, match="n is 2 and temperature is 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InvalidRequestError, match="stop strings need the text"):
        SamplingParams(stop="a", detokenize=False)


def test_unknown_and_unbuilt_arguments():
    with pytest.raises(UnknownArgumentError, match="Did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)
    with pytest.raises(UnknownArgumentError, match=r"structured_outputs has no key.*'regex'"):
        SamplingParams(structured_outputs={"regx": "a"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [100]), ("allowed_token_ids", [1, 100]), ("logit_bias", {100: 1.0}),
     ("bad_words", ["x"])],
)  # fmt: skip
def test_ids_beyond_the_logit_width_are_refused(name, value):
    params, ids = SamplingParams(**{name: value}), [(1, 100)] if name == "bad_words" else ()
    validate_against_model(params, 101, ids)
    with pytest.raises(InvalidRequestError, match=f"{name} contains token id 100.*0 to 99"):
        validate_against_model(params, 100, ids)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none(), st.floats()), max_size=4),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.floats(), max_size=3),
)
NAMES = [item.name for item in dataclasses.fields(SamplingParams)]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=3))
def test_junk_never_causes_another_exception(arguments):
    try:
        params = SamplingParams(**arguments)
    except MinillmError:
        return
    assert 1 <= params.n <= 64
    assert 0 <= params.temperature <= 1e6


# ---- the same parameters everywhere ------------------------------------------------------------

# One of these is a value of any parameter that is not its default.
VALUES = (2, 0.5, True, False, ["x"], [1, 2], {3: 1.0}, {"choice": ["a", "b"]})
# Why HTTP or the command line does not have a parameter.
NOT_IN_HTTP = {
    "logprobs": "a number in completions, a flag and a number in chats: tests/serving",
    "detokenize": "replies are text",
    "output_kind": "a request says `stream`",
}
NOT_ON_THE_COMMAND_LINE = {
    "n": "one text is shown", "logprobs": "text is shown", "prompt_logprobs": "text is shown",
    "detokenize": "text is shown", "output_kind": "text is streamed",
    "stop_token_ids": "for programs", "allowed_token_ids": "for programs",
    "logit_bias": "for programs", "include_stop_str_in_output": "for programs",
    "skip_special_tokens": "for programs", "bad_words": "for programs",
    "structured_outputs": "for programs",
}  # fmt: skip


def another(name: str) -> tuple[Any, Any]:
    """A value of a parameter as a user gives it, and as `SamplingParams` has it."""
    for value in VALUES:
        try:
            found = getattr(SamplingParams(**{name: value}), name)
        except MinillmError:
            continue
        if found != getattr(SamplingParams(), name):
            return value, found
    raise AssertionError(f"no value is known for {name}: add one to VALUES")


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_arrives_from_http_and_the_command_line_or_it_is_said_why_not(name):
    given, expected = another(name)
    parser = ArgumentParser()
    add_sampling_options(parser, max_tokens=16, temperature=1.0, top_p=1.0)
    option = f"--{name.replace('_', '-')}"
    assert (option in parser.format_help()) != (name in NOT_ON_THE_COMMAND_LINE)
    if name not in NOT_ON_THE_COMMAND_LINE:
        values = given if isinstance(given, list) else [] if given is True else [str(given)]
        args = parser.parse_args([option, *values])
        assert getattr(sampling_params(args), name) == expected
    if name not in NOT_IN_HTTP:
        body = json.dumps({"prompt": "p", name: given}).encode()
        params = completion_job(parse(CompletionRequest, body), {}, Limits(100, 1000), None).params
        assert getattr(params, name) == expected
