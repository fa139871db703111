"""Scripts as the articles about vLLM print them, with nothing changed but the import and the model.

Constructor arguments, calls and fields are those of the articles; the embedded model stands for
Llama-3.1-8B, so lengths are smaller, and one device for several.
"""

import asyncio
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minillm import AsyncEngineArgs, AsyncLLMEngine, LLM, SamplingParams  # isort: skip
from minillm.plan.machine import available_memory_bytes
from tests.engine.small import write_model
from tests.serving.async_small import run

GIB = 2**30


@pytest.fixture(autouse=True)
def only_expected_warnings():
    """What an article's script prints beyond its output is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# ---- offline -----------------------------------------------------------------------------------


def test_the_configuration_dictionary():
    vllm_config = {
        "model": "tiny",
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.90,
        "max_model_len": 512,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 64,
        "enable_chunked_prefill": True,
        "block_size": 16,
        "swap_space": 4 if available_memory_bytes() > 8 * GIB else 0.01,  # GB of CPU memory
        "enforce_eager": False,
        "disable_log_stats": False,
    }
    llm = LLM(**vllm_config)
    (output,) = llm.generate(["def add(a, b):"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 4
    assert llm.engine.allocated()["swap_space"] > 0
    llm.close()


def test_offline_inference_with_stop_strings():
    llm = LLM(
        model="tiny",
        tensor_parallel_size=1,
        dtype="bfloat16",
        max_model_len=512,
        gpu_memory_utilization=0.5,
        enforce_eager=False,
        quantization=None,
    )
    sampling_params = SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=24, stop=["</s>", "[INST]"]
    )
    prompts = ["def fib(n):", "class Stack:", "import os\n"]
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        generated_text = output.outputs[0].text
        assert isinstance(generated_text, str)
        assert 0 < len(output.outputs[0].token_ids) <= 24
        assert not any(stop in generated_text for stop in ("</s>", "[INST]"))


def test_offline_inference_with_penalties_and_a_prefix_cache():
    with pytest.warns(UserWarning, match="use_v2_block_manager has no meaning") as caught:
        llm = LLM(
            model="tiny",
            dtype="auto",
            max_model_len=512,
            gpu_memory_utilization=0.5,
            max_num_seqs=16,
            enable_prefix_caching=True,
            use_v2_block_manager=True,
        )
    assert len(caught) == 1
    system = "# Small functions, each of which says what it does in one line.\n" * 4
    prompts = [system + f"def function_{i}(" for i in range(3)]
    sampling_params = SamplingParams(
        temperature=0.8, top_p=0.95, max_tokens=16, presence_penalty=0.1, frequency_penalty=0.1
    )
    llm.generate(prompts[:1], sampling_params)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.num_cached_tokens for output in outputs)


@pytest.fixture
def long_llama(tmp_path: Path) -> str:
    """A Llama of random weights with positions for 8,192 tokens, and heads for four ranks."""
    write_model(tmp_path)  # the tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_four_ranks_and_long_texts(long_llama: str) -> None:
    """Claim K13: the arguments that an article gives Llama-3.1-70B on four GPUs."""
    llm = LLM(
        model=long_llama,
        tensor_parallel_size=4,
        dtype="bfloat16",
        max_model_len=8192,
        gpu_memory_utilization=0.90,
    )
    (output,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    assert llm.engine.max_model_len == 8192
    assert [each.rank for each in llm.trace[-1].ranks] == [0, 1, 2, 3]
    llm.close()


# ---- asynchronous ------------------------------------------------------------------------------


def test_async_streaming():
    engine_args = AsyncEngineArgs(
        model="tiny",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        max_model_len=512,
        enable_prefix_caching=True,
    )
    engine = AsyncLLMEngine.from_engine_args(engine_args)
    printed: dict[str, list[str]] = {}

    async def stream_generate(prompt: str, request_id: str) -> str:
        sampling_params = SamplingParams(temperature=0.7, max_tokens=32)
        previous_text = ""
        async for output in engine.generate(prompt, sampling_params, request_id):
            current_text = output.outputs[0].text
            new_text = current_text[len(previous_text) :]
            printed.setdefault(request_id, []).append(new_text)
            previous_text = current_text
            if output.finished:
                break
        return previous_text

    async def main() -> list[str]:
        tasks = [
            stream_generate("def fib(n):", "request-1"),
            stream_generate("class Stack:", "request-2"),
            stream_generate("import os\n", "request-3"),
        ]
        return await asyncio.gather(*tasks)

    texts = run(main())
    assert ["".join(pieces) for pieces in printed.values()] == texts
    assert all(texts)
    assert engine.num_unfinished == 0
    texts = run(main())  # the same ids again, in another event loop
    assert len(texts) == 3
    engine.shutdown()


def test_importing_the_arguments_costs_no_torch():
    code = (
        "import sys; from minillm import AsyncEngineArgs, EngineArgs; "
        "AsyncEngineArgs('tiny'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
