"""`speculative_config` is checked where it is given, by every way in."""

import json

import pytest

from minillm.api.arguments import AsyncEngineArgs, EngineArgs
from minillm.api.speculative_config import AUTO_MOST, SpeculativeConfig
from minillm.cli import main
from minillm.errors import ConfigError, UnknownArgumentError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
TYPICAL = NGRAM | {"rejection_sample_method": "typical"}


class Silent:
    """A proposer that has no idea."""

    def propose(self, rows):
        return [[] for _ in rows]


BAD = [
    ("ngram", ConfigError, "'ngram'; it must be a dictionary such as"),
    ({"method": "ngram"}, ConfigError, "no 'num_speculative_tokens'; set it to a whole number"),
    (NGRAM | {"num_speculative_tokens": 0}, ConfigError, "is 0; .* from 1 to 15 .* or 'auto'"),
    (NGRAM | {"num_speculative_tokens": None}, ConfigError, "is None; .* from 1 to 15"),
    (NGRAM | {"num_speculative_tokens": 16}, ConfigError, "is 16; .* from 1 to 15"),
    (NGRAM | {"num_speculative_tokens": True}, ConfigError, "is True; .* whole number"),
    (NGRAM | {"num_speculative_tokens": 2.5}, ConfigError, "is 2.5; .* whole number"),
    ({"num_speculative_tokens": 4}, ConfigError, "neither 'method' nor 'model'"),
    (NGRAM | {"method": "ngramm"}, ConfigError, "'ngramm'; .* Did you mean 'ngram'"),
    (NGRAM | {"method": 3}, ConfigError, "'method' is 3; .* with a method 'propose'"),
    (NGRAM | {"model": "tiny-draft"}, ConfigError, "'ngram' and model 'tiny-draft'"),
    ({"method": "draft_model", "num_speculative_tokens": 2}, ConfigError, "model None; .* need a"),
    ({"model": "", "num_speculative_tokens": 2}, ConfigError, "'model' is ''; .* a name, a hub id"),
    (NGRAM | {"prompt_lookup_max": 2, "prompt_lookup_min": 3}, ConfigError, "min is 3 and .* 2"),
    (NGRAM | {"prompt_lookup_max": 0}, ConfigError, "'prompt_lookup_max' is 0; .* from 1 to 64"),
    (NGRAM | {"prompt_lookup_mx": 2}, UnknownArgumentError, "Did you mean 'prompt_lookup_max'"),
    (NGRAM | {"disable_by_batch_size": 0}, ConfigError, "'disable_by_batch_size' is 0"),
    (NGRAM | {"max_model_len": 64}, ConfigError, "context of a draft model; leave it out"),
    (NGRAM | {"rejection_sample_method": "lax"}, ConfigError, "must be one of strict, standard"),
    (NGRAM | {"rejection_sample_method": "synthetic"}, ConfigError, "belong together"),
    (NGRAM | {"synthetic_acceptance_rates": [0.5] * 4}, ConfigError, "belong together"),
    (
        NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 2]},
        ConfigError,
        "must be 4 numbers from 0 to 1",
    ),
    (
        {"model": "tiny-draft", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        ConfigError,
        "belongs to method 'ngram'",
    ),
    (SUFFIX | {"prompt_lookup_min": 2}, ConfigError, "belongs to method 'ngram'; leave it out"),
    (NGRAM | {"suffix_decoding_max_tree_depth": 8}, ConfigError, "belongs to method 'suffix'"),
    (NGRAM | {"posterior_alpha": 0.3}, ConfigError, "to rejection_sample_method 'typical'; .* 'st"),
    (TYPICAL | {"posterior_alpha": -1}, ConfigError, "'posterior_alpha' is -1; .* a number from 0"),
    (TYPICAL | {"posterior_threshold": 1.5}, ConfigError, "is 1.5; .* a probability from 0 to 1"),
    (SUFFIX | {"suffix_decoding_max_tree_depth": 0}, ConfigError, "_depth' is 0; .* from 1 to"),
    (SUFFIX | {"suffix_decoding_max_cached_requests": -1}, ConfigError, "is -1; .* from 0 to"),
    (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, ConfigError, "is 1.5; .* from 0 to 1"),
    (SUFFIX | {"suffix_decoding_min_token_prob": "x"}, ConfigError, "'x'; it must be a prob"),
    (SUFFIX | {"suffix_min_token_prob": 0.1}, UnknownArgumentError, "'suffix_decoding_min_token"),
    (SUFFIX | {"model": "tiny-draft"}, ConfigError, "'suffix' and model 'tiny-draft'"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_a_mistake_gets_one_sentence(given, error, message):
    for build in (EngineArgs, AsyncEngineArgs):
        with pytest.raises(error, match=message) as caught:
            build(model="tiny", speculative_config=given)
        assert "\n" not in str(caught.value)


def test_what_is_left_out_has_a_default():
    ngram = SpeculativeConfig.of(NGRAM)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (2, 4)
    only = SpeculativeConfig.of(NGRAM | {"prompt_lookup_max": 3})
    assert (only.prompt_lookup_min, only.prompt_lookup_max) == (3, 3)  # as in vLLM
    assert ngram.rejection_sample_method == "strict"
    suffix = SpeculativeConfig.of(SUFFIX | {"suffix_decoding_max_cached_requests": 0})
    assert suffix.suffix_decoding_max_cached_requests == 0
    assert suffix.suffix_decoding_max_tree_depth == 24
    assert suffix.suffix_decoding_min_token_prob == 0.3
    assert suffix.prompt_lookup_min is suffix.prompt_lookup_max is None
    assert SpeculativeConfig.of(suffix) is suffix
    draft = SpeculativeConfig.of({"model": "tiny-draft", "num_speculative_tokens": "auto"})
    assert (draft.method, draft.adapts, draft.most) == ("draft_model", True, AUTO_MOST)
    own = SpeculativeConfig.of({"method": Silent(), "num_speculative_tokens": 3})
    assert own.name == "Silent"
    assert SpeculativeConfig.of(own) is own


@pytest.fixture
def run(capsys):
    """Exit code, output and errors of a command."""

    def call(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_the_command_line_takes_json(run):
    command = ["generate", "for i in range(", "--temperature", "0", "--max-tokens", "24"]
    command += ["--dtype", "float32", "--json"]
    code, plain, _ = run(*command)
    assert code == 0
    code, drafted, _ = run(*command, "--speculative-config", json.dumps(NGRAM))
    assert code == 0
    assert json.loads(drafted)["outputs"] == json.loads(plain)["outputs"]
    for text, message in (('{"method"', "is not JSON"), ("{}", "no 'num_speculative_tokens'")):
        code, _, said = run(*command, "--speculative-config", text)
        assert code == 2
        assert message in said


def test_help_names_the_difference_to_vllm(run):
    _, said, _ = run("generate", "--help")
    assert "the output stays the same, except with" in " ".join(said.split())
