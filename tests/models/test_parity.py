"""Logits and greedy tokens of every family against transformers, on tiny random checkpoints."""

import json
from dataclasses import make_dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import SamplingParams
from minillm.config import ModelConfig, RopeConfig, unknown_fields
from minillm.errors import ConfigError
from minillm.models.all_layers import AllLayers
from minillm.models.checkpoint import open_model, shard_files
from minillm.models.families import FAMILIES, parse_config
from minillm.models.fixed_sums import why_tiles
from minillm.models.loader import load_model
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from minillm.parallel.split import check_split
from minillm.plan.parameters import parameter_count
from tests.engine.small import make
from tests.models.parity import (
    BFLOAT16_TOLERANCE,
    TOLERANCE,
    bfloat16_errors,
    load,
    measure,
    reference_logits,
    relative_error,
    whole,
)
from tests.models.tiny import CASES, ROPE_CASES, Tiny, old_style, prompt
from tests.pairs import one_in


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_logits_and_greedy_tokens(case, checkpoint_of):
    checkpoint = checkpoint_of(case)
    parity = measure(checkpoint, load(checkpoint))
    assert parity.holds, parity


WHOLE = ("olmo2", "smollm3")  # families whose layers ranks cannot share
WAYS = {
    "packed": {},
    "deterministic": {"deterministic": True},
    "stages": {"pipeline_parallel_size": 2},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", one_in(2, CASES))
def test_log_probabilities_as_engines_compute_them(case, way, checkpoint_of, monkeypatch):
    """A family may be right layer by layer, and wrong on a faster path that takes its block for
    another."""
    monkeypatch.setenv(cpu.PANELS, "1")
    checkpoint, ids = checkpoint_of(case), prompt(60)
    settings = WAYS[way] | {"distributed_executor_backend": "threads"}
    if way == "ranks" and checkpoint.tiny.family in WHOLE:
        with pytest.raises(ConfigError, match="which ranks cannot share"):
            make(checkpoint.folder, **settings)
        return
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    with make(checkpoint.folder, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": ids.tolist()}], params)
    given = zip(output.prompt_logprobs[1:], ids[1:].tolist(), strict=True)
    found = torch.tensor([place[token].logprob for place, token in given])
    right = reference_logits(checkpoint, ids).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found, right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_counted_as_the_files_have_them(case, checkpoint_of):
    folder = checkpoint_of(case).folder
    stored = (each for path in shard_files(folder) for each in load_file(path).values())
    assert parameter_count(open_model(folder).config).total == sum(x.numel() for x in stored)


def test_a_field_that_faster_paths_do_not_know_switches_them_off(checkpoint_of, monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "1")
    model = load(checkpoint_of("llama"))
    pack_weights(model)
    assert cpu.functions(model.dtype) is None or AllLayers.of(model) is not None
    novel = [("novel", bool, False)]
    new, rope = (make_dataclass("New", novel, bases=(part,), frozen=True)
                 for part in (ModelConfig, RopeConfig))  # fmt: skip
    plain = vars(model.config)
    for config in (
        new(**plain, novel=True),
        replace(model.config, rope=rope(**vars(model.config.rope), novel=True)),
    ):
        model.config = config
        assert AllLayers.of(model) is None
        assert cpu.functions(model.dtype) is None or "after a norm" in why_tiles(model)
        with pytest.raises(ConfigError, match="novel"):
            check_split(config, 2)
    model.config = new(**plain)
    assert not unknown_fields(model.config)


@pytest.mark.parametrize("case", one_in(3, ROPE_CASES))
def test_rope_types(case, checkpoint_of):
    checkpoint = checkpoint_of(case)
    ids = prompt(130)
    reference = reference_logits(checkpoint, ids)
    assert relative_error(whole(load(checkpoint), ids), reference) <= TOLERANCE


@pytest.mark.parametrize("case", ROPE_CASES)
def test_old_config_style_means_the_same(case, checkpoint_of):
    checkpoint = checkpoint_of(case)
    old = old_style(checkpoint.config)
    assert "rope_parameters" not in old
    assert parse_config(old) == parse_config(checkpoint.config)


def test_old_config_style_of_a_folder(checkpoint_of, tmp_path):
    checkpoint = checkpoint_of("deepseek_v3 / yarn, mscale")
    (tmp_path / "config.json").write_text(json.dumps(old_style(checkpoint.config)))
    (tmp_path / "model.safetensors").symlink_to(checkpoint.folder / "model.safetensors")
    ids = prompt(130)
    model = load_model(open_model(tmp_path), torch.float32)
    assert relative_error(whole(model, ids), reference_logits(checkpoint, ids)) <= TOLERANCE


def test_cases_cover_one_and_many_shards_tied_and_untied(checkpoint_of):
    assert {case.split(" / ")[0] for case in ROPE_CASES} == FAMILIES.keys()
    for family in FAMILIES:
        seen = set()
        for name, tiny in CASES.items():
            if tiny.family == family:
                folder = checkpoint_of(name).folder
                tied = open_model(folder).config.tie_word_embeddings
                seen.add((tied, len(shard_files(folder)) > 1))
        assert {tied for tied, _ in seen} == {True, False}, family
        assert {sharded for _, sharded in seen} == {True, False}, family


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(case, checkpoint_of):
    """Teacher-forced, and up to a fifth: our rounding differs from theirs, but is not worse."""
    ours, theirs = bfloat16_errors(checkpoint_of(case))
    assert ours <= BFLOAT16_TOLERANCE
    assert ours <= 1.2 * theirs


def test_float16_loads_and_agrees(checkpoint_of):
    checkpoint = checkpoint_of("llama")
    ids = prompt(130)
    logits = whole(load(checkpoint, torch.float16), ids)
    assert logits.dtype == torch.float16
    assert relative_error(logits, reference_logits(checkpoint, ids)) < 0.02


def test_context_dependent_rope_is_fixed_per_engine(checkpoint_of):
    """A short prompt gets the frequencies of the engine's context, not of its own length, which
    is where transformers differs: there, text before and after the change do not fit together."""
    checkpoint = checkpoint_of("llama / longrope, beyond")
    ids = prompt(40)
    ours = whole(load(checkpoint), prompt(130))[:40]
    assert relative_error(ours, reference_logits(checkpoint, prompt(130))[:40]) <= TOLERANCE
    assert relative_error(whole(load(checkpoint), prompt(130)[:40]), ours) <= TOLERANCE
    assert relative_error(whole(load(checkpoint), ids), reference_logits(checkpoint, ids)) > 0.01


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_without_shared_experts(family, tmp_path):
    """transformers then writes shared experts of no rows, which real files do not have."""
    checkpoint = Tiny(family, {"n_shared_experts": 0}).write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    full = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    assert len(full) < len(tensors)
    save_file(full, tmp_path / "model.safetensors")
    parity = measure(checkpoint, load(checkpoint), new_tokens=8)
    assert parity.holds, parity
