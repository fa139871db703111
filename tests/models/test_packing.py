"""Weights in a processor's own layout: the same products, the same bytes, and never in training."""

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from minillm.cache.spec import cache_spec
from minillm.config import MLAConfig, ModelConfig, MoEConfig
from minillm.layers.kv_cache import KVCache
from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import PanelLinearMethod, PlainLinearMethod
from minillm.layers.mla import MLAttention
from minillm.models import packing
from minillm.models.decoder import Decoder
from minillm.ops import cpu
from minillm.ops.batch import Batch
from tests.pairs import one_in

BF16, F32 = torch.bfloat16, torch.float32
BASE = ModelConfig(
    family="llama",
    vocab_size=100,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=128,
)
MODELS = {
    "tied": replace(BASE, tie_word_embeddings=True),
    "untied": BASE,
    "biases": replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "inner sizes without panels": replace(BASE, intermediate_size=80),
    "experts": replace(BASE, family="qwen3_moe", moe=MoEConfig(4, 2, 48), moe_layers=(True, True)),
    "latent attention": replace(
        BASE, family="deepseek_v2", num_kv_heads=4, mla=MLAConfig(32, 16, 8, 12, q_lora_rank=24)
    ),
    "experts in panels": replace(
        BASE, family="qwen3_moe", moe=MoEConfig(32, 2, 64, 32), moe_layers=(True, False)
    ),
    "latent attention in panels": replace(
        BASE, family="deepseek_v2", num_kv_heads=4, mla=MLAConfig(32, 32, 32, 32, q_lora_rank=32)
    ),
}


def build(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """A model in which every parameter counts, not packed."""
    model = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.2) if name.endswith("norm.weight") else (0.0, 0.15)
            parameter.normal_(mean, std, generator=generator)
        for name, buffer in model.named_buffers():
            if buffer.numel() and "bias" in name:
                buffer.zero_()
    return model


@torch.inference_mode()
def logits(model: Decoder) -> Tensor:
    """Of a prompt of 40 tokens and one of 3, in pages in any order."""
    kv = KVCache(cache_spec(model.config), model.config.num_layers, 16, 4, model.norm.weight.dtype)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    positions = torch.cat((torch.arange(40), torch.arange(3)))
    rows = torch.tensor([0] * 40 + [1] * 3)
    tables = torch.stack((order[:10], order[10:12].repeat(5)))
    batch = Batch(
        input_ids=torch.arange(43) * 7 % 100,
        positions=positions,
        slot_mapping=tables[rows, positions // 4] * 4 + positions % 4,
        query_start=torch.tensor([0, 40, 43], dtype=torch.int32),
        seq_lens=torch.tensor([40, 3], dtype=torch.int32),
        block_tables=tables,
        logits_indices=torch.arange(43),
        max_query_len=40,
    )
    return model.logits(model(batch, kv)).float()


def methods(model: Decoder) -> dict[str, type]:
    """How each matrix is stored, by its path in the model."""
    kinds = Linear | Embedding
    return {n: type(m.method) for n, m in model.named_modules() if isinstance(m, kinds)}


@pytest.fixture
def panels(request, monkeypatch) -> None:
    """Panels, on every processor that has C functions for the type."""
    given = getattr(request.node, "callspec", None)
    dtype = given.params.get("dtype", BF16) if given else BF16
    if cpu.functions(dtype) is None:
        pytest.skip(cpu.describe(dtype))
    monkeypatch.setenv(cpu.PANELS, "1")


@pytest.fixture
def no_panels(monkeypatch) -> None:
    monkeypatch.setenv(cpu.PANELS, "0")


@pytest.fixture(params=["no_panels", "panels"])
def either(request) -> None:
    """Both ways to pack."""
    request.getfixturevalue(request.param)


needs_onednn = pytest.mark.skipif(
    packing.packed(torch.zeros(32, 32)) is None, reason="a torch without oneDNN"
)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_before(name, dtype, either):
    """In bf16 packing may not cost accuracy: the error against float32 stays what it was."""
    model, exact = build(MODELS[name], dtype), build(MODELS[name], F32)
    with torch.no_grad():
        for one, other in zip(exact.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    expected, before = logits(exact), logits(model)
    packing.pack_weights(model)
    limit = 1e-5 * before.norm() if dtype == F32 else 1.2 * (before - expected).norm()
    assert (logits(model) - expected).norm() < limit


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_goes_into_panels(dtype, panels):
    model = build(MODELS["tied"], dtype)
    said = packing.pack_weights(model)
    assert said == "9 matrices in panels"
    assert set(methods(model).values()) == {PanelLinearMethod}
    assert model.lm_head is None
    assert model.all_layers is not None


@pytest.mark.parametrize("dtype", [BF16, F32])
@needs_onednn
def test_without_panels_everything_is_packed_by_onednn(dtype, no_panels):
    if packing.packed(torch.zeros(32, 32, dtype=dtype)) is None:
        pytest.skip(f"a oneDNN without {dtype}")
    model = build(MODELS["untied"], dtype)
    assert packing.pack_weights(model) == "9 matrices packed by oneDNN"
    assert methods(model)["embedding"] is PlainLinearMethod
    assert model.all_layers is None


def test_without_onednn_everything_stays(monkeypatch, no_panels):
    monkeypatch.setattr(packing, "packed", lambda weight: None)
    model = build(MODELS["tied"], F32)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert packing.pack_weights(model) == "9 matrices as in the checkpoint"
    assert set(methods(model).values()) == {PlainLinearMethod}
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_is_not_a_product_of_its_own_stays(dtype, either):
    """Experts, and the matrix that latent attention absorbs into its queries, of sizes that are
    not whole panels."""
    for name in ("experts", "latent attention"):
        model, same = build(MODELS[name], dtype), build(MODELS[name], dtype)
        packing.pack_weights(model)
        absorbed = [m.kv_b_proj for m in model.modules() if isinstance(m, MLAttention)]
        assert all(isinstance(each.method, PlainLinearMethod) for each in absorbed)
        for (path, one), other in zip(model.named_parameters(), same.parameters(), strict=False):
            if "experts" in path or "kv_b_proj" in path or "norm" in path:
                assert torch.equal(one, other)
        assert model.all_layers is None


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["experts in panels", "latent attention in panels"])
def test_experts_and_absorbed_matrices_go_into_panels(name, dtype, panels):
    """No matrix stays as it was, and all layers run in one call."""
    model = build(MODELS[name], dtype)
    before = [weakref.ref(each) for each in model.layers.parameters() if each.dim() > 1]
    packing.pack_weights(model)
    gc.collect()
    assert not any(each() is not None for each in before)
    assert model.all_layers is not None


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_the_checkpoint_s_weights_are_given_back(name, dtype, either):
    """What was packed is not kept as it was, too, but for an embedding that oneDNN would hide."""
    if os.environ[cpu.PANELS] == "0" and packing.packed(torch.zeros(32, 32, dtype=dtype)) is None:
        pytest.skip(f"neither panels nor a oneDNN with {dtype}")
    model = build(MODELS[name], dtype)
    kept = {id(each) for each in model.parameters()}
    before = {n: weakref.ref(p) for n, p in model.named_parameters()}
    packing.pack_weights(model)
    gc.collect()
    replaced = [n for n, p in model.named_parameters() if id(p) not in kept and n in before]
    assert replaced
    assert all(before[each]() is None for each in replaced)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "name",
    [
        "tied",
        "untied",
        "inner sizes without panels",
        "experts in panels",
        "latent attention in panels",
    ],
)
def test_bytes_are_those_that_the_plan_counts(name, dtype, either):
    config = replace(MODELS[name], vocab_size=128)  # whole panels
    model = build(config, dtype)
    before = sum(each.nbytes for each in model.parameters())
    packing.pack_weights(model)
    after = sum(bytes_of(each) for each in model.parameters())
    assert after <= before + packing.copied_weight_bytes(config, dtype)


def bytes_of(weight: nn.Parameter) -> int:
    return weight.numel() * weight.element_size()


def test_a_model_is_not_packed_unless_it_serves():
    for dtype in (BF16, F32):
        model = Decoder(BASE, dtype)
        assert set(methods(model).values()) == {PlainLinearMethod}
        assert model.all_layers is None


PEAK = """
import re, torch
from pathlib import Path
from minillm.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.packing import pack_weights

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

config = ModelConfig("llama", 8192, 1024, 8, 16, 4, 64, 2816, 128, tie_word_embeddings=True)
warm = Decoder(ModelConfig("llama", 64, 64, 1, 4, 2, 16, 96, 64), torch.bfloat16)
warm.initialize()
pack_weights(warm)
model = Decoder(config, torch.bfloat16)
model.initialize()
size, before = sum(each.nbytes for each in model.parameters()), peak()
pack_weights(model)
print((peak() - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_packing_never_holds_a_model_twice(panels):
    """Every matrix goes as soon as its panels are there."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.4, done.stdout
