"""`LLM` end to end on a tiny random checkpoint with a byte tokenizer, against transformers."""

import itertools
import json
import math
import re
import shutil
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import tokenizers
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import minillm
from minillm import LLM, EngineArgs, SamplingParams, errors
from minillm.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from minillm.plan import machine
from minillm.scheduling.policies import POLICIES
from minillm.trace.recorder import Trace
from tests.sampling.sampling_rows import SamplingRow, sample

ROOT = Path(__file__).resolve().parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "minillm" / "GUIDE.md"
EOS = 256
PROMPT = list(range(60, 77))
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def write_byte_tokenizer(folder: Path) -> None:
    """256 ids for 256 bytes and one end-of-sequence token: every id has text."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    config = {"eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def reference() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        initializer_range=0.15,
        max_position_embeddings=128,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(reference: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte-model")
    reference.save_pretrained(path)
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", max_num_batched_tokens=5)


def reference_logprobs(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


# ---- the same numbers as transformers --------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 17, 2048])
def test_greedy_equals_transformers_for_every_prefill_chunk(folder, reference, chunk):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    out = LLM(folder, dtype="float32", max_num_batched_tokens=chunk).generate(PROMPT, params)[0]
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=10**6
    )
    assert list(out.outputs[0].token_ids) == expected[0, len(PROMPT) :].tolist()
    assert out.outputs[0].finish_reason == "length"


def test_logprobs_are_of_the_raw_distribution(llm, reference):
    params = SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=8, logprobs=2)
    out = llm.generate(PROMPT, params)[0].outputs[0]
    expected = reference_logprobs(reference, [*PROMPT, *out.token_ids])
    total = 0.0
    for step, (token, entry) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        row = expected[len(PROMPT) - 1 + step]
        assert next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry[token].rank == int((row > row[token]).sum()) + 1
        assert {int(i) for i in row.topk(2).indices} <= entry.keys()
        total += entry[token].logprob
    assert out.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_cross_chunk_borders(llm, reference):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    entries = llm.generate(PROMPT, params)[0].prompt_logprobs
    expected = reference_logprobs(reference, PROMPT)
    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for position in range(1, len(PROMPT)):
        token = PROMPT[position]
        value = expected[position - 1, token].item()
        assert entries[position][token].logprob == pytest.approx(value, abs=1e-4)


def test_score_equals_transformers_loss(llm, reference):
    text = "def add(a, b):\n    return a + b"
    ids = list(text.encode())
    score = llm.score(text)[0]
    encoded = llm.tokenizer.encode(text)
    with torch.no_grad():
        batch = torch.tensor([encoded])
        loss = reference(batch, labels=batch).loss.item()
    assert score.num_tokens == len(ids) - 1 == score.num_bytes
    assert score.log_likelihood == pytest.approx(-loss * score.num_tokens, rel=1e-4)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(loss / math.log(2), rel=1e-4)


def test_score_counts_the_bytes_of_half_a_character(llm):
    # One token per byte: the first token is a third of the first character.
    score = llm.score("日本語")[0]
    assert (score.num_tokens, score.num_bytes) == (8, 8)
    assert score.bits_per_byte == pytest.approx(-score.log_likelihood / math.log(2) / 8)


def test_every_draw_is_the_samplers_at_its_position_on_transformers_logits(llm, reference):
    # Few tokens to choose from, so that they repeat and the penalty on the output tells.
    params = SamplingParams(
        n=3, seed=11, max_tokens=12, temperature=1.5, frequency_penalty=2.0, ignore_eos=True,
        allowed_token_ids=range(60, 64),
    )  # fmt: skip
    completions = llm.generate(PROMPT, params)[0].outputs
    for completion in completions:
        ids = [*PROMPT, *completion.token_ids]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0]
        for step, token in enumerate(completion.token_ids):
            position = len(PROMPT) + step
            before = PROMPT, completion.token_ids[:step]
            row = SamplingRow(params, 11, completion.index, position, *before)
            assert sample(logits[position - 1 : position], [row]).token_ids == [token]


# ---- requests --------------------------------------------------------------------------------


def test_a_seed_fixes_the_tokens_and_the_engine_seed_the_rest(folder):
    params = [SamplingParams(seed=5, max_tokens=8), SamplingParams(max_tokens=8)]
    runs = []
    for chunk in (3, 64):
        llm = LLM(folder, dtype="float32", max_num_batched_tokens=chunk, seed=7)
        runs.append([o.outputs[0].token_ids for o in llm.generate([PROMPT, PROMPT], params)])
    assert runs[0] == runs[1]
    other = LLM(folder, dtype="float32", seed=8).generate([PROMPT, PROMPT], params)
    assert other[0].outputs[0].token_ids == runs[0][0]
    assert other[1].outputs[0].token_ids != runs[0][1]


def test_outputs_come_in_the_order_of_mixed_prompts(llm):
    prompts = ["abc", [1, 2, 3], {"prompt_token_ids": [4]}, {"prompt": "xyz"}]
    outs = llm.generate(prompts, [GREEDY] * 4)
    assert [out.prompt for out in outs] == ["abc", None, None, "xyz"]
    assert outs[1].prompt_token_ids == [1, 2, 3]
    assert outs[3].prompt_token_ids == llm.tokenizer.encode("xyz")
    assert len({out.request_id for out in outs}) == 4


def test_an_engine_keeps_to_its_processors(folder, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(machine, "cpu_count", lambda: 2)
    try:
        torch.set_num_threads(3)
        LLM(folder)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        LLM(folder)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    out = llm.chat(messages, GREEDY)[0]
    assert out.prompt == "user:hi\n"
    assert [o.prompt for o in llm.chat([messages, messages], GREEDY)] == ["user:hi\n"] * 2
    own = {"chat_template": "{{ messages[0].content }}{{ x }}", "chat_template_kwargs": {"x": 1}}
    assert llm.chat(messages, GREEDY, tools=None, **own)[0].prompt == "hi1"
    assert llm.chat_prompt(messages, continue_final_message=True)["prompt"] == "user:hi"


def test_numpy_integers_are_token_ids(llm):
    ids = np.array(PROMPT)
    plain = llm.generate(PROMPT, GREEDY)[0]
    for prompt in (list(ids), [list(ids)], {"prompt_token_ids": list(ids)}):
        out = llm.generate(prompt, GREEDY)[0]
        assert out.outputs == plain.outputs
        assert out.prompt_token_ids == PROMPT
        assert type(out.prompt_token_ids[0]) is int


UNREADABLE = [5, None, {"role": "user", "content": "x"}, b"x", [3]]
BAD_CALLS = [
    *(("chat", (value,), None) for value in UNREADABLE),
    *(("score", (value,), None) for value in UNREADABLE),
    ("score", ("a",), "1 tokens; scoring needs at least 2"),
    ("stream", (["a", "b"],), "one prompt, not 2"),
    ("generate", (["a", "b"], [GREEDY]), "1 sampling_params for 2 prompts"),
    ("generate", (["a"], {"temperature": 0}), "dict"),
    ("generate", ("a", SamplingParams(stop_token_ids=[9999])), "ids from 0 to 263"),
]


@pytest.mark.parametrize(("call", "given", "message"), BAD_CALLS)
def test_calls_that_make_no_sense_are_refused(llm, call, given, message):
    with pytest.raises(InvalidRequestError, match=message):
        getattr(llm, call)(*given)


def test_vllm_s_names(llm):
    assert llm.get_tokenizer() is llm.tokenizer
    assert EngineArgs("tiny", dtype="half").dtype == "float16"
    assert EngineArgs("tiny", dtype=torch.bfloat16).dtype == "bfloat16"


# ---- endings ---------------------------------------------------------------------------------


def tokens_of(llm: LLM, **kwargs: object) -> minillm.CompletionOutput:
    defaults = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return llm.generate(PROMPT, SamplingParams(**(defaults | kwargs)))[0].outputs[0]


def recommending(folder: Path, to: Path, **fields: object) -> LLM:
    """The model from a copy of its folder, whose authors recommend `fields`."""
    copy = shutil.copytree(folder, to / "model")
    (copy / "generation_config.json").write_text(json.dumps(fields))
    return LLM(copy, dtype="float32")


def test_an_end_of_sequence_id_without_a_logit_is_dropped(folder, tmp_path, caplog):
    llm = recommending(folder, tmp_path, eos_token_id=[EOS, 9999])
    assert llm.engine.eos_token_ids == (EOS,)
    assert "9999" in caplog.text
    assert len(tokens_of(llm, min_tokens=3, ignore_eos=False).token_ids) >= 3


def test_the_end_of_sequence_token_ends_unless_ignored(folder, llm, tmp_path):
    first = tokens_of(llm).token_ids[0]
    llm = recommending(folder, tmp_path, eos_token_id=[EOS, first])
    out = tokens_of(llm, ignore_eos=False)
    assert out.token_ids == [first]
    assert (out.finish_reason, out.stop_reason, out.text) == ("stop", first, "")
    assert len(tokens_of(llm, ignore_eos=True).token_ids) == 24


def test_the_authors_recommendation_is_the_default(folder, tmp_path):
    recommended = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 5, "eos_token_id": EOS}
    llm = recommending(folder, tmp_path, **recommended)
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_k=20, max_tokens=5
    )
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 5


def test_primary_end_token_has_no_stop_reason(llm):
    out = tokens_of(llm, ignore_eos=False, logit_bias={EOS: 100.0})
    assert out.token_ids == [EOS]
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_generation_ends_at_the_context_length(folder):
    llm = LLM(folder, dtype="float32", max_model_len=24)
    for max_tokens in (None, 1000):
        out = tokens_of(llm, max_tokens=max_tokens)
        assert len(out.token_ids) == 24 - len(PROMPT)
        assert out.finish_reason == "length"


# ---- failures --------------------------------------------------------------------------------


def test_nan_in_the_model_fails_the_request_and_not_the_engine(folder):
    llm = LLM(folder, dtype="float32")
    good = tokens_of(llm)
    weight = llm.engine.runner.model.norm.weight
    saved = weight.clone()
    weight.fill_(math.nan)
    bad = tokens_of(llm)
    assert bad.finish_reason == "error"
    assert "NaN" in bad.error
    with pytest.raises(InvalidRequestError, match="NaN"):
        llm.score("abc")
    params = SamplingParams(prompt_logprobs=1, n=2)
    for out in llm.generate([PROMPT, PROMPT], params):
        assert [o.finish_reason for o in out.outputs] == ["error"] * 2
        assert out.finished
    weight.copy_(saved)
    assert tokens_of(llm).token_ids == good.token_ids


def test_close_gives_back_and_says_so(folder):
    with LLM(folder, dtype="float32") as llm:
        llm.generate(PROMPT, GREEDY)
    llm.close()
    for call in (lambda: llm.generate(PROMPT, GREEDY), lambda: llm.score("abc")):
        with pytest.raises(errors.EngineDeadError, match="closed"):
            call()


BAD_PROMPTS = [
    ("", "empty"),
    ({"prompt_token_ids": []}, "empty"),
    ([264], "264.*0 to 263"),
    ([-1], "-1"),
    (["a", 3], "int"),
    ([[1, "a"]], "'a'.*integers"),
    ([[1, True]], "True.*integers"),
    ([1.5], "float"),
    ({"text": "x"}, "'text'"),
    ({"prompt": 3}, "int.*string"),
    (7, "int"),
    (b"abc", "bytes"),
    (None, "NoneType"),
    ({"prompt": "a", "salt": "b"}, r"optionally 'cache_salt'.*'salt'"),
    ([1] * 128, r"128 tokens.*maximum context length is 128.*shorten the prompt\.$"),
    ("a\ud800b", "tokenized"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompts_get_one_sentence(llm, prompt, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.generate(prompt, GREEDY)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_an_empty_prompt_is_refused_also_where_the_tokenizer_adds_a_start_token():
    with LLM("tiny") as tiny:
        assert tiny.tokenizer.encode("") == [0]
        with pytest.raises(InvalidRequestError, match="empty"):
            tiny.generate("", GREEDY)
        assert tiny.generate([[0]], GREEDY)[0].outputs[0].token_ids


def test_a_longer_context_is_proposed_where_the_model_has_one(folder):
    with pytest.raises(InvalidRequestError, match=r"or raise max_model_len\.$"):
        LLM(folder, dtype="float32", max_model_len=20).generate([1] * 20, GREEDY)


def test_a_text_of_the_maximum_length_is_scored_and_a_longer_one_is_not(folder):
    """Scoring computes no new token, so it needs no room for one."""
    text = "a text, one token per byte, as long as the context of the model!"
    short, llm = (LLM(folder, dtype="float32", max_model_len=most) for most in (64, None))
    with short, llm:
        score = short.score(text)[0]
        assert score.num_tokens == 63
        assert score.log_likelihood == pytest.approx(llm.score(text)[0].log_likelihood, rel=1e-6)
        with pytest.raises(InvalidRequestError, match=r"65 tokens; .* length is 64, so shorten"):
            short.score(text + "!")
        with pytest.raises(InvalidRequestError, match="64 and must leave room for one new token"):
            short.generate(text, GREEDY)


BAD_ARGUMENTS = [
    ({"modl": "tiny"}, TypeError, "LLM has no argument 'modl'. Did you mean 'model'"),
    ({"max_model_length": 5}, TypeError, "max_model_len"),
    ({"dtype": "float23"}, ValueError, "float23.*bfloat16"),
    ({"device": "tpu"}, ValueError, "tpu"),
    ({"max_model_len": 0}, ValueError, "max_model_len is 0"),
    ({"max_model_len": 129}, ValueError, "129.*128"),
    ({"max_model_len": True}, ValueError, "True"),
    ({"gpu_memory_utilization": math.nan}, ValueError, "nan"),
    ({"gpu_memory_utilization": 1.5}, ValueError, "1.5"),
    ({"gpu_memory_utilization": 10**400}, ValueError, "gpu_memory_utilization is 1000"),
    ({"seed": "x"}, ValueError, "seed"),
    ({"seed": 2**70}, ValueError, "seed"),
    ({"tokenizer": 5}, ValueError, "tokenizer is 5"),
    ({"tokenizer": "nowhere"}, FileNotFoundError, "nowhere"),
    ({"enforce_eager": "x"}, ValueError, "enforce_eager"),
    ({"disable_log_stats": 1}, ValueError, "disable_log_stats"),
    ({"max_num_batched_tokens": 10**400}, ValueError, "max_num_batched_tokens"),
    ({"gpu_memory_utilization": 1e-320}, ValueError, "gpu_memory_utilization"),
    ({"max_model_len": 1}, ValueError, "max_model_len is 1; .* at least 2"),
    ({"kv_cache_memory_bytes": 10**15}, ValueError, "at most .* bytes of weights, .* may be used"),
    ({"kv_cache_memory_bytes": 9, "max_model_len": 128}, ValueError, r"at least [\d,]+ .*or lower"),
    ({"num_gpu_blocks_override": 10**12}, ValueError, "at most .* bytes of weights, .* may be"),
    ({"max_num_batched_tokens": 10**9}, ValueError, "of activations .*max_num_batched_tokens="),
    ({"load_format": "pickle"}, ValueError, "pickle"),
    ({"gpu_memory_utilization": 1e-6}, ValueError, "bytes of weights"),
    ({"trust_remote_code": True}, UnsupportedFeatureError, "never runs code"),
    ({"quantization": "awq"}, UnsupportedFeatureError, "quantization='awq'"),
    (
        {"enable_prefix_caching": False, "scheduling_policy": "longest_prefix_match"},
        ValueError,
        "leave one of them",
    ),
    ({"enable_prefix_caching": 1}, ValueError, "enable_prefix_caching is 1"),
    ({"enable_prefix_caching": "yes"}, ValueError, "enable_prefix_caching is 'yes'"),
    ({"enable_prefix_caching": False, "prefix_cache": "hash"}, ValueError, "leave one of them"),
    ({"prefix_cache": "trie"}, ValueError, "trie.*hash, radix"),
    ({"enable_chunked_prefill": 1}, ValueError, "enable_chunked_prefill is 1"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0"),
    ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ValueError, r"at least max_num_seqs \(9\)"),
    ({"block_size": 2.5}, ValueError, "block_size is 2.5"),
    ({"num_gpu_blocks_override": 0}, ValueError, "num_gpu_blocks_override is 0"),
    ({"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 9}, ValueError, "one of them"),
    ({"num_gpu_blocks_override": 1, "max_model_len": 128}, ValueError, "at least 4 for one"),
    ({"swap_space": -1}, ValueError, "swap_space is -1"),
    ({"swap_space": math.nan}, ValueError, "swap_space is nan"),
    ({"swap_space": 1e-9}, ValueError, "less than one block"),
    ({"swap_space": 10**6}, ValueError, "swap_space is 1000000; .*GiB, the host memory"),
    ({"preemption_mode": "swap"}, ValueError, "set swap_space"),
    ({"preemption_mode": "recompute", "swap_space": 1}, ValueError, "not used"),
    ({"preemption_mode": "drop"}, ValueError, "drop.*recompute, swap"),
    ({"scheduling_policy": "lifo"}, ValueError, "scheduling_policy is 'lifo'.*fcfs"),
    ({"scheduling_policy": ["fcfs"]}, ValueError, "scheduling_policy is"),
    ({"admission_policy": "hope"}, ValueError, "admission_policy is 'hope'.*watermark"),
    ({"long_prefill_token_threshold": None}, ValueError, "long_prefill_token_threshold is None"),
    ({"long_prefill_token_threshold": -1}, ValueError, "long_prefill_token_threshold is -1"),
    (
        {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
        ValueError,
        "leave one of them out",
    ),
    ({"prefix_cache": "off"}, ValueError, "'off'; .* enable_prefix_caching=False turns it off"),
    ({"tokenizer_mode": "slow"}, UnsupportedFeatureError, "tokenizer_mode='slow' .* one tokenizer"),
    ({"skip_tokenizer_init": True}, UnsupportedFeatureError, "skip_tokenizer_init=True .* always"),
    ({"revision": "v2"}, UnsupportedFeatureError, "revision='v2' .* folder"),
    ({"download_dir": "x"}, UnsupportedFeatureError, "download_dir='x' .* HF_HUB_CACHE"),
    ({"block_size": np.float64(16)}, ValueError, "block_size is"),
    ({"block_size": np.bool_(True)}, ValueError, "block_size is"),
    ({"device": torch.device("meta")}, ValueError, "device is 'meta'"),
    ({"speculative_config": {"method": "ngram"}}, ValueError, "no 'num_speculative_tokens'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_get_one_sentence(folder, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        LLM(folder, **arguments)
    assert isinstance(caught.value, errors.MinillmError)
    assert "\n" not in str(caught.value)


def test_arguments_that_lost_their_meaning_only_warn(folder):
    with pytest.warns(UserWarning, match="use_v2_block_manager"):
        LLM(folder, use_v2_block_manager=True)


def test_vllm_arguments_that_ask_for_nothing_are_taken_in_silence(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(
            folder, tokenizer_mode="auto", skip_tokenizer_init=False, revision=None,
            download_dir=None, seed=None,
        )  # fmt: skip
    assert llm.engine.args == EngineArgs(folder)


def test_numbers_of_numpy_and_a_torch_device_become_plain_values(folder):
    plain = dict(
        block_size=8, max_num_seqs=4, max_model_len=64, kv_cache_memory_bytes=2**20, seed=3,
        long_prefill_token_threshold=4, swap_space=1, gpu_memory_utilization=0.5, device="cpu",
    )  # fmt: skip
    odd = {name: np.int64(value) for name, value in plain.items() if isinstance(value, int)}
    args = EngineArgs(
        folder, **odd, gpu_memory_utilization=np.float32(0.5), device=torch.device("cpu")
    )
    assert args == EngineArgs(folder, **plain)
    assert {type(getattr(args, name)) for name in odd} == {int}
    assert (type(args.gpu_memory_utilization), type(args.device)) == (float, str)
    assert tokens_of(LLM(folder, dtype="float32", device=torch.device("cpu"))).token_ids


def test_a_context_that_memory_shortens_is_that_of_the_plan(folder):
    llm = LLM(folder, num_gpu_blocks_override=2)
    plan = llm.plan()
    assert plan.settings.max_model_len == llm.engine.max_model_len == 64
    assert plan.fits
    assert plan.hints == ()
    assert plan.combinations[-1].context == 64


def test_cached_tokens_are_where_vllm_has_them_too(folder):
    llm = LLM(folder, block_size=8)
    first, second = (llm.generate(PROMPT, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == second.metrics.num_cached_tokens == 16


def test_the_progress_bar_counts_tokens_before_a_request_ends(llm, monkeypatch):
    tqdm = MagicMock()
    bar = tqdm.return_value.__enter__.return_value
    monkeypatch.setattr("minillm.llm.tqdm", tqdm)
    monkeypatch.setattr("minillm.llm.perf_counter", itertools.count().__next__)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([PROMPT, PROMPT[:9]], params)
    options, told = tqdm.call_args.kwargs, bar.set_postfix_str.call_args_list
    assert options["total"] == sum(call.args[0] for call in bar.update.call_args_list) == 2
    assert options["miniters"] == 0  # else it stands still until as many end at once again
    rates = [int(call.args[0].split()[0]) for call in told]  # one text per tick of the clock
    assert len(rates) >= 8
    assert 1 <= rates[0] <= 2
    assert rates[-1] == round(16 / len(rates))


def test_too_much_cache_for_one_request_is_refused_with_the_arithmetic(folder):
    llm = LLM(folder, dtype="float32", kv_cache_memory_bytes=64 * 1024)
    with pytest.raises(InvalidRequestError, match=r"17 prompt .* need 4 blocks of 32 .* has 2"):
        llm.generate(PROMPT, SamplingParams(n=4, max_tokens=24))
    assert tokens_of(llm).finish_reason == "length"


def test_a_model_without_tokenizer_takes_ids_and_says_what_it_cannot(reference, tmp_path, caplog):
    reference.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    assert "token ids still work" in caplog.text
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) > 0
    for call in (
        lambda: llm.generate("text", GREEDY),
        lambda: llm.generate(PROMPT, SamplingParams(stop="x")),
        lambda: llm.generate(PROMPT, SamplingParams(bad_words=["x"])),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            call()


def test_engine_args_are_checked_without_loading():
    assert EngineArgs("tiny").dtype == "auto"
    with pytest.raises(ConfigError, match="model is ''"):
        EngineArgs("")


def run_page(page: Path) -> dict:
    """What the Python blocks of a page define, executed one after another."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks), names)
    return names


def test_the_readme_runs(capsys):
    names = run_page(README)
    names["llm"].close()
    (out,) = names["outs"]
    assert len(out.outputs[0].token_ids) == 64
    assert out.outputs[0].text in capsys.readouterr().out


@pytest.mark.slow
def test_the_guide_runs_and_its_second_batch_reads_the_start_from_the_cache(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names = run_page(GUIDE)
    assert names["llm"].plan().kv_cache_bytes > 0
    names["llm"].close()
    outs = names["outs"]
    assert len(outs) == 8
    report = outs[0].metrics.prefix
    assert outs[0].num_cached_tokens == report.cached >= len(outs[0].prompt_token_ids) // 2
    said = capsys.readouterr().out
    assert f"{report.cached} PrefixReport(cached={report.cached}, " in said
    assert "Counters(num_steps=" in said
    assert re.search(r"^step +ms .* events$", said, re.MULTILINE)
    assert len(Trace.load("run.jsonl")) > 3


def test_every_scheduling_policy_has_its_line_in_the_docstring():
    for name in POLICIES:
        assert f'- "{name}": ' in EngineArgs.__doc__
