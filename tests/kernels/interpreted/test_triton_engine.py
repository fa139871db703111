"""The whole engine on interpreted kernels: a few tokens, the same as on plain torch."""

from pathlib import Path

import pytest
import torch

from minillm import SamplingParams, ops
from minillm.execution import runner
from minillm.models import deterministic
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.models.fused_layers import FusedLayers
from minillm.ops import cpu_int8_cache
from minillm.ops import triton as ops_triton
from minillm.ops.slots import untangled
from minillm_kernels import mla
from minillm_kernels.interpreter import ordered_dots
from tests.kernels.engine_cases import (
    PROMPTS,
    SAMPLING,
    TINY,
    generate,
    logprobs,
    open_engine,
    tokens,
)
from tests.models.tiny import VOCAB_SIZE
from tests.pairs import some
from tests.speculative.treed import Branching

INT8 = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    written: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in written:
            written[family] = TINY[family].write(tmp_path_factory.mktemp(family)).folder
        return written[family]

    return get


@pytest.fixture(scope="module")
def plain(folder_of):
    """What each family answers on plain torch, asked before a kernel is chosen."""
    return {
        family: generate(open_engine(folder_of(family), "cpu"), max_tokens=2) for family in TINY
    }


@pytest.mark.parametrize("family", some(("llama", "deepseek_v2"), TINY))
def test_the_engine_says_the_same(family, folder_of, plain, kernels):
    outputs = generate(open_engine(folder_of(family), "cpu"), max_tokens=2)
    assert tokens(outputs) == tokens(plain[family])
    for got, expected in zip(outputs, plain[family], strict=True):
        assert logprobs(got) == pytest.approx(logprobs(expected), abs=2e-4)
    assert len(kernels) >= 5, kernels


@pytest.mark.parametrize(("family", "dtype", "most"), [
    ("llama", torch.float32, 8), ("qwen3", torch.float32, 8), ("qwen3", torch.bfloat16, 20),
])  # fmt: skip
def test_fused_layers_compute_the_same(family, dtype, most, folder_of, kernels, monkeypatch):
    """Three sequences of several tokens; then as many rows as no kernel takes. In bf16 a tile of
    rows is not full."""
    monkeypatch.setattr(ops_triton, "FUSED_ROWS", 20)
    config = open_model(folder_of(family)).config
    model = Decoder(config, dtype, "cpu", config.max_position_embeddings)
    model.initialize(std=0.2)
    runs, count = ForwardPass(model), most - 2
    fused = FusedLayers.of(model)
    given = [Chunk(0, 0, [5, 9] * (count // 2)), Chunk(1, 0, [7]), Chunk(2, 0, [4])]
    apart, kv = runs.run(given, runs.allocate(3, 32)), runs.allocate(3, 32)
    assert "_silu_mul" in kernels
    kernels.clear()
    model.all_layers = fused
    for got, expected in zip(runs.run(given, kv), apart, strict=True):
        scale = float(expected.abs().max())
        close = 2e-5 if dtype == torch.float32 else 2e-2 * scale
        torch.testing.assert_close(got, expected, rtol=close, atol=close)
    assert "_silu_mul" not in kernels
    runs.run([Chunk(0, 0, [1] * (most + 1))], runs.allocate(1, 32))
    assert "_silu_mul" in kernels
    model.layers[0].mlp.activation = ops.invariant_silu_mul
    assert FusedLayers.of(model) is None


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_tiles_are_found_with_kernels(family, folder_of, kernels, monkeypatch):
    """The probe must not compare what a kernel leaves in padding rows."""
    monkeypatch.setattr(deterministic, "PROBE_TOKENS", (1, 1))
    config = open_model(folder_of(family)).config
    model = Decoder(config)
    model.initialize(std=0.2)
    with ordered_dots():
        assert deterministic.find_tiles(model, (8,)) == (8,)
    assert kernels & {"invariant_kernel", "_decode_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "max_tokens"), [("llama", 2), ("deepseek_v2", 1)])
def test_every_bit_is_as_alone(family, max_tokens, folder_of, kernels, monkeypatch):
    """The deterministic mode; its tiles are not tried, which would take a minute here."""
    monkeypatch.setattr(deterministic, "find_tiles", lambda model: (16,))
    with ordered_dots():
        llm = open_engine(folder_of(family), "cpu", deterministic=True)
        together = generate(llm, max_tokens)[2]
        llm.reset_prefix_cache()
        (alone,) = generate(llm, max_tokens, only=2)
    assert tokens([alone]) == tokens([together])
    assert logprobs(alone) == logprobs(together)


TREES = {"llama": ("llama", {}), "window": ("mistral", {}), "codes": ("llama", INT8),
         "latent": ("deepseek_v2", {})}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_trees_are_verified_where_their_keys_are(name, folder_of, request, monkeypatch):
    """Greedy and sampled, in a batch; the accepted paths move on the pages of the kernels. Only
    latent attention copies pages."""
    family, options = TREES[name]
    tangled, moved, keep = [], [], runner.keep_path
    plain = open_engine(folder_of(family), "cpu", **options)
    requests = [plain.engine.make_request(str(i), None, prompt, SamplingParams(
        max_tokens=9, **SAMPLING[i])) for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    wanted = generate(plain, 9)
    known = {
        (tuple(prompt), one.seed, 0, repr(one.params)): found
        for prompt, one, found in zip(PROMPTS, requests, tokens(wanted), strict=True)
    }
    ran = request.getfixturevalue("kernels")
    monkeypatch.setattr(cpu_int8_cache, "takes", lambda *_: False)  # as of tensors on a GPU
    monkeypatch.setattr(runner, "keep_path", lambda *given: (moved.append(given[-1]), keep(*given)))
    monkeypatch.setattr(ops, "untangled", lambda *given: (tangled.append(1), untangled(*given))[1])
    proposer = Branching(known, VOCAB_SIZE)
    options |= {"speculative_config": {"method": proposer, "num_speculative_tokens": 7}}
    outputs = generate(open_engine(folder_of(family), "cpu", **options), 9)
    assert tokens(outputs) == tokens(wanted)
    for got, due in zip(outputs, wanted, strict=True):
        assert logprobs(got) == pytest.approx(logprobs(due), abs=5e-3 if name == "codes" else 2e-4)
    assert proposer.num_branched > 3
    assert any(node != place for path in moved for place, node in enumerate(path))
    assert bool(tangled) == (name == "latent")
    assert ran & {"decode_kernel", "attention_kernel", "_decode_kernel"}


class Known:
    """Drafts that are right, but for the last one."""

    def __init__(self, answers):
        self.answers = answers

    def propose(self, rows):
        drafts = []
        for row in rows:
            left = next(
                whole[len(row.token_ids) :]
                for whole in self.answers
                if whole[: len(row.token_ids)] == list(row.token_ids)
            )[: row.num_drafts]
            drafts.append([*left[:-1], (left[-1] + 1) % 100] if left else [])
        return drafts


@pytest.mark.slow
def test_verified_drafts_have_the_bits_of_decoding(folder_of, kernels, monkeypatch):
    """Latent attention in the deterministic mode, with up to 4 queries of a sequence."""
    monkeypatch.setattr(deterministic, "find_tiles", lambda model: (16,))
    lengths, attend = [], mla._decode

    def seen(arguments, config, few, *more):
        lengths.append(few)
        attend(arguments, config, few, *more)

    monkeypatch.setattr(mla, "_decode", seen)
    options = {"deterministic": True}
    with ordered_dots():
        plain = generate(open_engine(folder_of("deepseek_v2"), "cpu", **options), 5, only=0)
        assert set(lengths) == {1}
        answer = [*PROMPTS[0], *tokens(plain)[0]]
        options["speculative_config"] = {"method": Known([answer]), "num_speculative_tokens": 3}
        verified = generate(open_engine(folder_of("deepseek_v2"), "cpu", **options), 5, only=0)
    assert max(lengths) == 4
    assert tokens(verified) == tokens(plain)
    assert logprobs(verified[0]) == logprobs(plain[0])
