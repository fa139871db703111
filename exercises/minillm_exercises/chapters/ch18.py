"""Chapter 18: models with experts, who reads which, simulated choices, and placements on GPUs."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm import LLM, ops
from minillm.config import ModelConfig
from minillm.lab.hardware import Hardware
from minillm.lab.roofline import step_cost, step_time
from minillm.layers.moe import Router
from minillm.models.families import qwen3_moe
from minillm.models.forward_pass import Chunk
from minillm.plan.parameters import parameter_count
from minillm_exercises.chapters.common import rounded as rounded
from minillm_exercises.chapters.common import show_table as show_table

Ids = NDArray[np.int64]
NUM_EXPERTS, PER_TOKEN = 128, 8

# The config.json of Qwen/Qwen3-30B-A3B.
QWEN3_30B_FIELDS = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": NUM_EXPERTS, "num_experts_per_tok": PER_TOKEN,
    "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


# Models --------------------------------------------------------------------------------------


def qwen3_30b() -> ModelConfig:
    """Qwen3-30B-A3B: 128 experts in each of 48 layers, 8 per token."""
    return qwen3_moe(QWEN3_30B_FIELDS)


def models_table(models: dict[str, ModelConfig]) -> list[list[str]]:
    """Rows of [name, experts, per token, shared, billions in all, billions per token]."""
    rows = []
    for name, config in models.items():
        moe, count = config.moe, parameter_count(config)
        kinds = ["–", "–", "–"]
        if moe is not None:
            shared = "yes" if moe.shared_intermediate_size else "no"
            kinds = [f"{moe.num_experts}", f"{moe.num_experts_per_token}", shared]
        rows.append([name, *kinds, billions(count.total), billions(count.active)])
    return rows


def billions(count: int) -> str:
    """A number of parameters as model names have it."""
    return f"{count / 1e9:.1f}" if count < 1e11 else f"{count / 1e9:.0f}"


def seconds(config: ModelConfig, gpu: Hardware, tokens: int) -> float:
    """The bound of a step of so many tokens in bfloat16, without launches: bytes or operations.
    Each token is the first of its sequence, so that only weights count."""
    ones = [1] * tokens
    return step_time(step_cost(config, ones, ones, dtype="bfloat16"), gpu, 0).seconds


def ratio(one: ModelConfig, other: ModelConfig, gpu: Hardware, tokens: int) -> float:
    """Times as long as the other model's step."""
    return seconds(one, gpu, tokens) / seconds(other, gpu, tokens)


# The engine's experts ------------------------------------------------------------------------


def open_small() -> LLM:
    """A small model of random weights with as many experts as Qwen3-30B-A3B has, on the
    processor, so that its weights are the same on every machine."""
    small = QWEN3_30B_FIELDS | {
        "model_type": "qwen3_moe",
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(small), encoding="utf-8")
        more = {"load_format": "dummy", "dtype": "float32", "device": "cpu"}
        return LLM(folder, tokenizer="tiny", enforce_eager=True, **more)


@contextmanager
def watched(llm: LLM) -> Iterator[list[Tensor]]:
    """What the routers choose inside: a tensor [N, k] of experts per layer and step, in order."""
    seen: list[Tensor] = []

    def note(_: Router, __: tuple[Tensor], out: tuple[Tensor, Tensor]) -> None:
        seen.append(out[1])

    routers = [each for each in llm.engine.forward_pass.model.modules() if isinstance(each, Router)]
    hooks = [each.register_forward_hook(note) for each in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def experts_read(llm: LLM, tokens: Sequence[int]) -> list[int]:
    """How many experts each layer reads in one step of so many sequences of one token."""
    forward = llm.engine.forward_pass
    with watched(llm) as seen:
        cache = forward.allocate(len(tokens), 2)
        forward.run([Chunk(number, 0, [token]) for number, token in enumerate(tokens)], cache)
    return [len(ids.unique()) for ids in seen]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Tokens of the small vocabulary."""
    return torch.randint(4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_layer(num_experts: int, width: int) -> tuple[Tensor, Tensor]:
    """The stacked matrices of a layer: [E, 2 width, width] and [E, width, width]."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.rand(num_experts, 2 * width, width, generator=generator) - 0.5
    return gate_up, torch.rand(num_experts, width, width, generator=generator) - 0.5


def within_capacity(ids: Tensor, capacity: int, num_experts: int) -> Tensor:
    """Which of the choices [N, k] find room where every expert takes its first `capacity` rows."""
    taken = [0] * num_experts
    kept = torch.zeros_like(ids, dtype=torch.bool)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            taken[expert] += 1
            kept[token, place] = taken[expert] <= capacity
    return kept


def with_capacity(
    x: Tensor, matrices: tuple[Tensor, Tensor], weights: Tensor, ids: Tensor, capacity: int
) -> Tensor:
    """The engine's layer [N, d] where choices without room do not count."""
    kept = within_capacity(ids, capacity, len(matrices[0]))
    return ops.moe_experts(x, *matrices, weights * kept, ids)


# Simulated choices ---------------------------------------------------------------------------


def popularity(num_experts: int, exponent: float, seed: int = 0) -> NDArray[np.float64]:
    """How often each expert is wanted by Zipf's law (exponent 0: equally often), the popular ones
    anywhere; adds up to 1."""
    dist = np.arange(1, num_experts + 1) ** -float(exponent)
    return np.random.default_rng(seed).permutation(dist / dist.sum())


def choices(dist: NDArray[np.float64], per_token: int, tokens: int, seed: int = 0) -> Ids:
    """Experts [tokens, per_token] that differ within a token, each drawn by its popularity among
    those that are left (Gumbel's trick: the largest of log(distribution) + noise)."""
    dice = np.random.default_rng(seed)
    scores = np.log(dist) - np.log(-np.log(dice.random((tokens, len(dist)))))
    return np.argpartition(-scores, per_token - 1, axis=1)[:, :per_token]


def in_order(num_experts: int, gpus: int) -> list[list[int]]:
    """The same number of neighbouring experts on each GPU."""
    each = num_experts // gpus
    return [list(range(gpu * each, (gpu + 1) * each)) for gpu in range(gpus)]


def rows_per_gpu(ids: Ids, placement: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """The rows that each GPU computes; an expert's rows take its copies in turn."""
    loads = np.bincount(ids.ravel())
    holders: dict[int, list[int]] = {}
    for gpu, held in enumerate(placement):
        for expert in held:
            holders.setdefault(expert, []).append(gpu)
    rows = np.zeros(len(placement), dtype=np.int64)
    for expert, load in enumerate(loads):
        for turn, gpu in enumerate(holders[expert]):
            rows[gpu] += len(range(turn, load, len(holders[expert])))
    return rows


def balance(
    dist: NDArray[np.float64],
    per_token: int,
    tokens: int,
    placement: Sequence[Sequence[int]],
    steps: int = 20,
) -> float:
    """Mean over largest number of rows of a GPU, the mean of so many simulated steps."""
    found = []
    for step in range(steps):
        rows = rows_per_gpu(choices(dist, per_token, tokens, 1000 + step), placement)
        found.append(rows.mean() / rows.max())
    return float(np.mean(found))


# Copies and placements -----------------------------------------------------------------------


def copies(loads: Sequence[float], spares: int) -> list[int]:
    """Each spare to the largest load per copy; of equal ones to the lowest number."""
    counts = [1] * len(loads)
    for _ in range(spares):
        counts[int(np.argmax(np.array(loads) / counts))] += 1
    return counts


def pack(loads: Sequence[float], counts: Sequence[int], gpus: int) -> list[list[int]]:
    """Copies from the largest to the smallest, each to the GPU with the least load so far and a
    free slot."""
    slots = sum(counts) // gpus
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    placement: list[list[int]] = [[] for _ in range(gpus)]
    totals = [0.0] * gpus
    order = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for expert in sorted(order, key=lambda expert: -each[expert]):
        free = [gpu for gpu in range(gpus) if len(placement[gpu]) < slots]
        gpu = min(free, key=lambda gpu: totals[gpu])
        placement[gpu].append(expert)
        totals[gpu] += each[expert]
    return placement
