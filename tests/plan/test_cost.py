"""The cost model against torch's FLOP counter, brute force, and golden figures."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from minillm.config import MLAConfig, ModelConfig, MoEConfig
from minillm.errors import ConfigError
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost, step_time
from minillm.models.presets import PRESETS, preset
from minillm.plan.cost import activation_peak_bytes, kv_bytes_per_token, memory_plan, weight_bytes
from minillm.plan.parameters import expected_distinct, parameter_count
from tests.plan.hf_shapes import hf_model

LLAMA = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=56,
    max_position_embeddings=256,
)
EXPERTS = MoEConfig(num_experts=8, num_experts_per_token=2, intermediate_size=24)
LATENT = MLAConfig(
    kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, q_lora_rank=12
)
TINY = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
    "olmo2": replace(LLAMA, family="olmo2", post_norm=True),
    "mistral": replace(LLAMA, family="mistral", sliding_windows=(8,) * 3),
    "mixtral": replace(LLAMA, family="mixtral", intermediate_size=24, moe=EXPERTS),
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, moe=EXPERTS),
    "deepseek_v3": replace(
        LLAMA,
        family="deepseek_v3",
        num_kv_heads=8,
        head_dim=10,
        mla=LATENT,
        moe=replace(EXPERTS, shared_intermediate_size=48, num_groups=2, score_bias=True),
        moe_layers=(False, True, True),
    ),
}


def counted(model, **inputs):
    """FLOPs that torch sees, without the rotation angles (they are a product in transformers)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = model(use_cache=True, **inputs)
    rotary = sum(
        sum(flops.values())
        for name, flops in counter.get_flop_counts().items()
        if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - rotary, outputs.past_key_values


def eager_attention(config: ModelConfig, queries: int, keys: int) -> int:
    """FLOPs of one sequence in transformers' eager attention: every query meets every key, masked
    or not. For MLA it expands the latents of all cached tokens to full heads in every step."""
    pairs = 2 * config.num_layers * config.num_heads * queries * keys
    if config.mla is None:
        return pairs * 2 * config.head_dim
    per_head = config.mla.qk_nope_head_dim + config.mla.v_head_dim
    expand = (keys - queries) * config.mla.kv_lora_rank * config.num_heads * per_head
    return pairs * (config.head_dim + config.mla.v_head_dim) + 2 * config.num_layers * expand


@pytest.mark.parametrize("name", TINY)
def test_flops_equal_torchs_counter(name):
    config = TINY[name]
    torch.manual_seed(0)
    model = hf_model(config, "cpu")
    prompt = torch.arange(2 * 5).view(2, 5)
    flops, cache = counted(model, input_ids=prompt)
    ours = step_cost(config, [5, 5], [5, 5], num_logits=10)
    assert ours.linear_flops == flops - 2 * eager_attention(config, 5, 5)

    flops, _ = counted(model, input_ids=prompt[:, :1], past_key_values=cache)
    ours = step_cost(config, [1, 1], [6, 6])
    assert ours.linear_flops == flops - 2 * eager_attention(config, 1, 6)
    if config.mla is None:  # one query sees all keys, so the two counts agree
        assert ours.flops == flops


def test_absorbed_attention_equals_torchs_counter():
    mla, heads, keys = LATENT, 8, 11
    latents = torch.randn(1, keys, 20)
    query = torch.randn(1, heads, 20)
    with FlopCounterMode(display=False) as counter:
        scores = query @ latents.transpose(1, 2)
        scores.softmax(-1) @ latents[..., : mla.kv_lora_rank]
    cost = step_cost(TINY["deepseek_v3"], [1], [keys])
    assert cost.attention_flops == 3 * counter.get_total_flops()


@given(
    query=st.integers(1, 40),
    before=st.integers(0, 40),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_attention_counts_equal_a_mask(query, before, window):
    seq = query + before
    config = replace(LLAMA, num_layers=1, sliding_windows=(window,))
    cost = step_cost(config, [query], [seq], dtype="float32")
    q, k = np.arange(before, seq)[:, None], np.arange(seq)[None]
    mask = (k <= q) & (k > q - (window or seq))
    assert cost.attention_flops == int(mask.sum()) * 4 * 32
    assert cost.kv_read_bytes == int(mask.any(0).sum()) * 2 * 8 * 4
    assert cost.kv_write_bytes == query * 2 * 8 * 4


@settings(deadline=None)
@given(cuts=st.sets(st.integers(1, 59)), name=st.sampled_from(sorted(TINY)))
def test_chunks_cost_the_operations_of_the_whole(cuts, name):
    bounds = [0, *sorted(cuts), 60]
    chunks = [step_cost(TINY[name], [b - a], [b], num_logits=0) for a, b in pairwise(bounds)]
    whole = step_cost(TINY[name], [60], [60], num_logits=0)
    assert sum(c.flops for c in chunks) == whole.flops
    assert sum(c.kv_write_bytes for c in chunks) == whole.kv_write_bytes
    assert sum(c.weight_bytes for c in chunks) >= whole.weight_bytes


def test_a_batch_is_its_sequences_with_one_read_of_the_weights():
    config = preset("llama-3.1-8b")
    one, two = step_cost(config, [1], [100]), step_cost(config, [7], [300])
    both = step_cost(config, [1, 7], [100, 300])
    assert both.flops == one.flops + two.flops
    assert both.kv_read_bytes == one.kv_read_bytes + two.kv_read_bytes
    embedding_rows = 8 * 4096 * 2
    head_and_body = weight_bytes(config) - 128256 * 4096 * 2
    assert both.weight_bytes == head_and_body + embedding_rows


def test_tied_weights_are_read_once():
    config = preset("qwen2.5-3b")
    assert step_cost(config, [1], [1]).weight_bytes == weight_bytes(config) + 2048 * 2
    body = weight_bytes(config) - 151936 * 2048 * 2
    assert step_cost(config, [1], [1], num_logits=0).weight_bytes == body + 2048 * 2


def test_expected_experts_equal_a_simulation():
    rng = np.random.default_rng(0)
    for tokens in (1, 4, 20):
        draws = rng.random((4000, tokens, 8)).argsort(-1)[..., :2]
        distinct = np.mean([len(np.unique(draw)) for draw in draws])
        assert expected_distinct(8, 2, tokens) == pytest.approx(distinct, rel=0.02)
    assert expected_distinct(8, 2, 1) == 2  # claim N14
    assert expected_distinct(8, 2, 4) == pytest.approx(5.5, abs=0.05)
    assert expected_distinct(8, 2, 8) == pytest.approx(7.2, abs=0.05)


def test_mixture_reads_what_is_active_and_in_the_limit_everything():
    config = preset("deepseek-v3")
    table = config.vocab_size * config.hidden_size * 2
    active = 2 * parameter_count(config).active
    assert step_cost(config, [1], [1]).weight_bytes == active - table + 7168 * 2
    many = step_cost(config, [8192], [8192])
    gathered = 8192 * 7168 * 2
    assert many.weight_bytes == pytest.approx(weight_bytes(config) - table + gathered, rel=1e-6)


def test_golden_kv_bytes():
    """Claims C2, C4, C5, C10, D10 and F26."""
    per_token = {name: kv_bytes_per_token(config) for name, config in PRESETS.items()}
    assert per_token["llama-2-7b"] == 524_288
    assert per_token["llama-3.1-70b"] == 327_680
    assert per_token["llama-3.1-8b"] == per_token["mistral-7b"] == 131_072
    assert per_token["deepseek-v2"] == 69_120
    assert per_token["llama-3.1-70b"] * 4096 == 1.25 * 2**30
    assert per_token["llama-2-7b"] * 2048 == 2**30
    assert kv_bytes_per_token(preset("llama-3.1-70b"), "float32") == 2 * 327_680


def test_golden_decode():
    """Claims A15, A18, A19, A29, C12 and D12."""
    llama, h100 = preset("llama-3.1-70b"), DATASHEET["h100-sxm"]
    cost = step_cost(llama, [1], [1])
    assert cost.weight_bytes / 1e9 == pytest.approx(139.0, abs=0.05)
    assert cost.linear_flops / cost.weight_bytes == pytest.approx(1, abs=1e-4)
    assert step_time(cost, h100).memory_seconds == pytest.approx(41.5e-3, abs=0.1e-3)
    assert step_time(cost, h100).compute_seconds == pytest.approx(0.14e-3, abs=2e-6)
    qwen = preset("qwen2.5-3b")
    tokens_per_second = (
        1 / step_time(step_cost(qwen, [1], [1]), DATASHEET["rtx-5070-ti"], 0).seconds
    )
    assert tokens_per_second == pytest.approx(145, abs=0.5)
    for context, gain in ((256, 30.5), (1024, 26.8), (4096, 17.9), (16384, 7.7)):
        cost = step_cost(qwen, [1] * 32, [context] * 32)
        assert 32 * cost.weight_bytes / cost.total_bytes == pytest.approx(gain, abs=0.06)
    absorbed = step_cost(preset("deepseek-v2"), [1], [4096]).attention_flops
    assert absorbed / 1e12 == pytest.approx(0.068, abs=0.001)


def test_golden_ridge():
    """Claims A16 and A33: the ratio of the two limits is the ridge over the intensity."""
    h100, config = DATASHEET["h100-sxm"], preset("llama-2-7b")
    cost = step_cost(config, [1], [1])
    time = step_time(cost, h100)
    ratio = time.memory_seconds / time.compute_seconds
    assert ratio == pytest.approx(h100.ridge() / cost.intensity)
    assert step_time(step_cost(config, [100], [100]), h100, 0).bound == "memory"
    assert step_time(step_cost(config, [1000], [1000]), h100, 0).bound == "compute"
    assert step_time(step_cost(preset("smollm2-135m"), [1], [1]), h100).bound == "overhead"


class PeakBytes(TorchDispatchMode):
    """Peak bytes of the live storages that were created while it is active."""

    def __init__(self):
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = [t.untyped_storage()._cdata for t in tree_leaves(args) if torch.is_tensor(t)]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def measured_peak(config: ModelConfig, tokens: int, logits: int) -> int:
    model = hf_model(config, "cpu")
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), PeakBytes() as tracker:
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False, logits_to_keep=logits)
    return tracker.peak


def test_activation_peak_does_not_grow_with_layers():
    """Claim B5, its shape: 6.75 MiB at any depth, three residual and three MLP vectors."""
    shape = {"hidden_size": 256, "intermediate_size": 896, "num_heads": 4, "num_kv_heads": 4}
    config = replace(LLAMA, **shape, head_dim=64)
    estimate = activation_peak_bytes(config, 512, 1, "float32")
    assert estimate == 6.75 * 2**20
    peaks = [measured_peak(replace(config, num_layers=n), 512, 1) for n in (2, 6)]
    assert peaks[0] == peaks[1]
    angles, embeddings = 2 * 512 * 64 * 4, 512 * 256 * 4  # that transformers keeps alive as well
    assert estimate == pytest.approx(peaks[0] - angles - embeddings, rel=0.002)


def test_activation_peak_of_logits():
    config = replace(LLAMA, vocab_size=50_000)
    assert activation_peak_bytes(config, 64, 64, "float32") >= measured_peak(config, 64, 64)
    assert activation_peak_bytes(config, 64, 64, "bfloat16") == 64 * (32 * 2 + 50_000 * 6)


def test_plan_accounts_for_every_byte():
    plan = memory_plan(preset("llama-3.1-8b"), 24 * 10**9, max_model_len=8192)
    parts = plan.reserve_bytes + plan.weight_bytes + plan.activation_bytes + plan.kv_cache_bytes
    assert parts == plan.memory_bytes == 24 * 10**9
    assert plan.num_tokens * plan.kv_bytes_per_token <= plan.kv_cache_bytes
    assert (plan.num_tokens + 16) * plan.kv_bytes_per_token > plan.kv_cache_bytes
    assert plan.fits
    assert plan.hints == ()
    assert [fit.context for fit in plan.combinations] == [1024, 4096, 8192]
    for fit in plan.combinations:
        assert fit.batch * fit.context <= plan.num_tokens < (fit.batch + 1) * fit.context


def test_golden_plan():
    """Claim K13, four GPUs of 80 GB as one pool: 448k tokens beside a 70B model."""
    plan = memory_plan(preset("llama-3.1-70b"), 4 * 80 * 10**9, max_model_len=8192)
    assert plan.num_tokens == pytest.approx(448_000, rel=0.005)


def test_plan_of_a_70b_model_on_a_laptop_says_what_is_missing():
    config, memory = preset("llama-3.1-70b"), 16 * 2**30
    plan = memory_plan(config, memory)
    assert not plan.fits
    assert plan.num_tokens == 0
    assert {fit.batch for fit in plan.combinations} == {0}
    assert plan.hints == ("191.0 GiB of memory", "147.9 GiB of memory and max_model_len=4096")
    assert memory_plan(config, memory + plan.shortfall_bytes).fits
    assert not memory_plan(config, memory + plan.shortfall_bytes - 16).fits


def test_hints_are_enough():
    config, memory = replace(preset("qwen3-0.6b"), dtype="float32"), 4 * 10**9
    plan = memory_plan(config, memory, max_model_len=8192)
    assert f"max_model_len={plan.num_tokens}" in plan.hints
    assert memory_plan(config, memory, max_model_len=plan.num_tokens).fits
    assert not memory_plan(config, memory, max_model_len=plan.num_tokens + 1).fits
    assert 'dtype="bfloat16"' in plan.hints
    assert memory_plan(config, memory, max_model_len=8192, dtype="bfloat16").fits


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        (([], []), "at least one sequence"),
        (([1], [1, 2]), "1 query lengths and 2 sequence lengths"),
        (([0], [5]), "5 tokens cannot compute its last 0"),
        (([6], [5]), "5 tokens cannot compute its last 6"),
    ],
)
def test_impossible_steps_are_refused(lens, message):
    with pytest.raises(ConfigError, match=message):
        step_cost(LLAMA, *lens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bfloat"}, "Did you mean 'bfloat16'"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"block_size": -1}, "block_size is -1"),
        ({"gpu_memory_utilization": 1.5}, r"is 1.5; it must be in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, "is nan"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
    ],
)
def test_impossible_plans_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        memory_plan(LLAMA, **({"memory_bytes": 2**30} | arguments))
