"""A real chat model, SmolLM2-135M-Instruct in Q4_1, compared with transformers' reader of the file.

transformers dequantises every weight to float32 by itself; minillm computes with the blocks.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError
from minillm.lab.comparison.candidates import parse
from minillm.lab.comparison.run import Work, compare
from minillm.models.checkpoint import open_model
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.models.loader import load_model
from minillm.models.presets import preset
from tests.engine.test_int8_pages import solved
from tests.serving.http_small import served
from tests.text.build import TEXTS

PAGE = (Path(__file__).resolve().parents[2] / "LICENSE").read_text("utf-8")  # 2,215 tokens
CONTEXT, SHORT = 2000, 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "Who are you?")
CONVERSATIONS = (
    [{"role": "user", "content": QUESTIONS[0]}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " é 中 😀\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)


@pytest.fixture(scope="module")
def file() -> Path:
    folder = open_model("smollm2").folder
    assert folder is not None
    return folder


@pytest.fixture(scope="module")
def theirs(file: Path) -> LlamaForCausalLM:
    """transformers' model. Its `from_pretrained` does the same, but asks for another package."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    model = model.to_empty(device="cpu").float().eval()
    model.load_state_dict(found["tensors"], strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # not among the tensors
    return model


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    """transformers' reader takes GPT-2's pre-tokenizer; the file names "smollm", which separates
    digits first (llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM)."""
    found = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", max_model_len=CONTEXT + 24) as engine:
        yield engine


def page(llm: LLM, length: int) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(PAGE)[:length]


def test_the_preset_has_its_shape() -> None:
    """`info smollm2` shows the preset's before the download."""
    found, known = open_model("smollm2").config, preset("smollm2-135m")
    for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"):
        assert getattr(found, name) == getattr(known, name)
    assert (found.rope, found.longest_context) == (known.rope, known.longest_context)


def test_logits_of_64_positions(llm: LLM, theirs: LlamaForCausalLM) -> None:
    ids = page(llm, SHORT)
    run = ForwardPass(load_model(open_model("smollm2"), torch.float32))
    hidden, _ = run.run([Chunk(0, 0, ids)], run.allocate(1, SHORT))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    assert (run.logits(hidden) - wanted).abs().max() < 1e-3


def test_2000_tokens_through_the_engine(llm: LLM, theirs: LlamaForCausalLM) -> None:
    """The perplexity of the page to three digits, and the greedy continuation."""
    ids = page(llm, CONTEXT)
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    each = [entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    continued = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        first = theirs(torch.tensor([ids]), use_cache=True)
        scores = first.logits[0, :-1].log_softmax(-1)
        wanted = scores.gather(1, torch.tensor(ids[1:])[:, None]).mean()
        found, cache, chosen = torch.tensor(each).mean(), first.past_key_values, []
        logits = first.logits[:, -1]
        for _ in continued:
            chosen.append(int(logits.argmax()))
            step = theirs(torch.tensor([chosen[-1:]]), past_key_values=cache, use_cache=True)
            logits, cache = step.logits[:, -1], step.past_key_values
    assert f"{(-found).exp():.3g}" == f"{(-wanted).exp():.3g}"
    assert continued == chosen


@pytest.mark.parametrize("text", [*TEXTS, PAGE], ids=range(len(TEXTS) + 1))
def test_texts_have_the_same_ids(llm: LLM, tokenizer: Any, text: str) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    assert ids == tokenizer.encode(text)
    assert llm.tokenizer.decode(ids, False) == tokenizer.decode(ids)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_prompt_is_what_transformers_renders(
    llm: LLM, tokenizer: Any, messages: list[dict[str, str]]
) -> None:
    prompt = llm.chat_prompt(messages)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert prompt["prompt"] == tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert prompt["prompt_token_ids"] == tokenizer.apply_chat_template(messages, **options)


def answers(llm: LLM) -> list[str]:
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [each.outputs[0].text for each in llm.chat(asked, GREEDY, use_tqdm=False)]


def test_it_answers(llm: LLM) -> None:
    assert answers(llm)[0] == "The capital of France is Paris."


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                                "rejection_sample_method": "strict"}},
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
    ],
    ids=["ngram", "tp3", "pp2"],
)  # fmt: skip
def test_other_ways_to_the_same_answers(llm: LLM, options: dict[str, Any]) -> None:
    ranks = {"distributed_executor_backend": "threads"} if len(options) == 1 else {}
    with LLM("smollm2", dtype="float32", max_model_len=256, **options, **ranks) as other:
        assert answers(other) == answers(llm)


def test_needle_and_copy_tasks_have_the_same_score_with_a_cache_of_8_bits() -> None:
    plain = solved("smollm2", "auto")
    assert sum(plain) >= 6
    assert solved("smollm2", "int8") == plain


def test_two_ranks_cannot_share_nine_heads() -> None:
    with pytest.raises(ConfigError, match="9"):
        LLM("smollm2", tensor_parallel_size=2)


def test_our_own_quantisation_keeps_its_quality(
    theirs: LlamaForCausalLM, tokenizer: Any, tmp_path: Path
) -> None:
    """int8, int4 and GPTQ of six dequantised layers, in the order that theory gives; a table of the
    whole model is in notebooks/results/quantisation/smollm2.json."""
    config = copy.deepcopy(theirs.config)
    config.num_hidden_layers = 6
    cut = LlamaForCausalLM(config)
    cut.load_state_dict(theirs.state_dict(), strict=False)
    cut.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    candidates = tuple(parse(name) for name in ("int8", "rtn:4:64:sym", "gptq:4:64:sym"))
    work = Work(str(tmp_path), candidates, None, 2, 256, None, 8, 256, speed=False)
    rows = {row["name"]: row["quality"][0] for row in compare(work)["results"][1:]}
    kl = {name: row["kl"]["value"] for name, row in rows.items()}
    assert kl["int8"] < 0.01 < kl["gptq:4:64:sym"] < kl["rtn:4:64:sym"] < 1


def test_it_calls_a_tool_and_sees_the_result() -> None:
    """Its template knows no tools, so they are told of in the system's message."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    weather = {"name": "weather", "description": "The weather of a city.", "parameters": parameters}
    tools = [{"type": "function", "function": weather}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    common = {"tools": tools, "temperature": 0, "max_tokens": 80, "parallel_tool_calls": False}
    with served("smollm2", block_size=16, num_gpu_blocks_override=128, max_model_len=1024) as made:
        for choice in ("required", "none"):
            body = {**common, "messages": messages, "tool_choice": choice}
            reply = made.send("/v1/chat/completions", body)
            assert reply.status == 200, reply.body
            (found,) = reply.data["choices"]
            messages.append(found["message"])
            if choice == "required":
                assert found["finish_reason"] == "tool_calls"
                (call,) = found["message"]["tool_calls"]
                assert call["function"]["name"] == "weather"
                assert json.loads(call["function"]["arguments"])["city"].startswith("Oslo")
                result = {"tool_call_id": call["id"], "content": "Snow, -4 degrees Celsius."}
                messages.append({"role": "tool", **result})
    assert "-4 degrees" in found["message"]["content"], found
