"""Requests for an engine that computes with kernels, and for the one it is compared with."""

from pathlib import Path
from typing import Any

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from tests.models.tiny import VOCAB_SIZE, Tiny

# GQA; window; norms of q and k, heads of 24; latent attention beside experts; experts alone.
TINY = {
    "llama": Tiny("llama", {"num_hidden_layers": 2}),
    "mistral": Tiny("mistral", {"num_hidden_layers": 2}, seed=1),
    "qwen3": Tiny("qwen3", {"num_hidden_layers": 2}, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", {"num_hidden_layers": 2}, seed=3),
    "qwen3_moe": Tiny("qwen3_moe", {"num_hidden_layers": 2}, seed=4),
}
SHARED = [5 + 3 * i % 110 for i in range(9)]
PROMPTS = (
    [7],
    [3 + (11 * i) % (VOCAB_SIZE - 3) for i in range(21)],
    [*SHARED, 9, 8, 7],
    [*SHARED, 100],
)
DRAWN = {"temperature": 0.9, "seed": 5, "logprobs": 2, "ignore_eos": True}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True},
    DRAWN,
    DRAWN | {"top_p": 0.8, "top_k": 30, "min_p": 0.01},
)


def open_engine(folder: str | Path, device: str, **arguments: Any) -> LLM:
    """Small blocks and chunks, so that tables are long and batches are mixed."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": device,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 64,
        "long_prefill_token_threshold": 8,
    }
    return LLM(folder, **(defaults | arguments))


def generate(llm: LLM, max_tokens: int, only: int | None = None) -> list[RequestOutput]:
    """All requests together, or one of them alone."""
    chosen = range(len(PROMPTS)) if only is None else [only]
    params = [SamplingParams(max_tokens=max_tokens, **SAMPLING[i]) for i in chosen]
    return llm.generate([list(PROMPTS[i]) for i in chosen], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """What was generated."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def logprobs(output: RequestOutput) -> list[float]:
    """Of the generated tokens and what was asked for beside them, and of the prompt's."""
    entries = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [one.logprob for entry in entries for _, one in sorted((entry or {}).items())]
