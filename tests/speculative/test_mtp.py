"""MTP: every draft is that of transformers' decoder layer, whatever happened before.

The proposer is EAGLE's (`test_eagle.py` and its planted bugs); here is what differs: the layer, its
place in the target's checkpoint, and the feature, the hidden state after the final norm.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM
from minillm.errors import CheckpointError, ConfigError
from minillm.speculative import mtp
from tests.engine.small import make
from tests.models.tiny import Tiny
from tests.pairs import one_in
from tests.planting import plant_everywhere
from tests.speculative.eagled import K, eagle_of
from tests.speculative.headed import Watch
from tests.speculative.test_draft_model import SAMPLED, Toggled, generate, params_of, run_history

LAYERS = 3  # of the target; the fourth becomes the multi-token prediction layer
OWN = f"model.layers.{LAYERS}."
ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7] * K}
PROMPTS = [[5, 6, 7], [8] * 20, [9]]


class Checkpoint:
    """A checkpoint with an MTP layer, and the transformers model of which it is the last layer."""

    def __init__(self, folder: Path):
        made = Tiny("deepseek_v3", {"num_hidden_layers": LAYERS + 1, "vocab_size": 256}).write(
            folder
        )
        self.folder, self.model, dice = folder, made.reference, torch.Generator().manual_seed(3)
        size = self.model.config.hidden_size
        self.extra = {name: 1 + torch.randn(size, generator=dice) * 0.3 for name in
                      (f"{OWN}enorm", f"{OWN}hnorm", f"{OWN}shared_head.norm")}  # fmt: skip
        self.extra[f"{OWN}eh_proj"] = torch.randn(size, 2 * size, generator=dice) * 0.3
        tensors = load_file(folder / "model.safetensors")
        copies = {f"{OWN}embed_tokens": "model.embed_tokens", f"{OWN}shared_head.head": "lm_head"}
        tensors |= {
            f"{to}.weight": tensors[f"{name}.weight"].clone() for to, name in copies.items()
        }
        tensors |= {f"{name}.weight": tensor for name, tensor in self.extra.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        self.change(num_hidden_layers=LAYERS, num_nextn_predict_layers=1)

    def change(self, **fields: Any) -> None:
        """Replace fields of config.json."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm."""
        scale = (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x * scale * self.extra[OWN + name]

    @torch.no_grad()
    def logits(self, ids: list[int], drafts: list[int]) -> list[np.ndarray]:
        """Logits [V] for each draft after `ids`, given the drafts before it; no cache."""
        model, found = self.model.model, []
        last, model.layers = model.layers, model.layers[:LAYERS]
        states = model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, :-1]
        model.layers = last
        features = torch.cat((torch.zeros(1, states.shape[1]), states))
        for count in range(len(drafts)):
            embedded = self.rms(model.embed_tokens(torch.tensor(ids + drafts[:count])), "enorm")
            x = (
                torch.cat((embedded, self.rms(features, "hnorm")), 1)
                @ self.extra[f"{OWN}eh_proj"].T
            )
            places = torch.arange(len(x))[None]
            mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
            a = last[LAYERS](
                x[None], attention_mask=mask, position_ids=places, use_cache=False,
                position_embeddings=model.rotary_emb(x[None], places),
            )  # fmt: skip
            a = (a[0] if isinstance(a, tuple) else a).view(len(x), -1)[-1:]
            found.append(self.model.lm_head(self.rms(a, "shared_head.norm"))[0].double().numpy())
            features = torch.cat((features, a))
        return found


class MTPWatch(Watch):
    """The formula of an MTP layer."""

    def __init__(self, llm: LLM, made: Checkpoint, monkeypatch: pytest.MonkeyPatch):
        super().__init__(llm, monkeypatch)
        self.made = made
        eagle = eagle_of(llm)
        for tensor in (*eagle.features.pages.tensors, *eagle.shadow.kv.tensors):
            tensor.fill_(torch.nan)

    def logits(self, ids: list[int], drafts: list[int]) -> Iterable[np.ndarray]:
        return self.made.logits(ids, drafts)


def with_mtp(folder: Any, config: Any = None, **arguments: Any) -> LLM:
    """An engine with small blocks that drafts with the MTP layer."""
    config = {"method": "mtp", "num_speculative_tokens": K} | (config or {})
    return make(folder, speculative_config=config, **({"max_model_len": 128} | arguments))


@pytest.fixture
def made(tmp_path: Path) -> Checkpoint:
    """DeepSeek-V3: latent attention, experts."""
    return Checkpoint(tmp_path / "model")


@pytest.mark.parametrize("how", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_drafts_are_those_of_transformers_and_change_no_token(made, monkeypatch, how):
    llm, params = with_mtp(made.folder, **how), params_of(24, **SAMPLED)
    watch = MTPWatch(llm, made, monkeypatch)
    found = generate(llm, PROMPTS, params)
    assert found == generate(make(made.folder, max_model_len=128, **how), PROMPTS, params)
    watch.assert_right(least=80)


def test_trees_change_no_token_and_a_chain_is_one_of_them(made):
    plain, found = generate(make(made.folder, max_model_len=128), PROMPTS, params_of(24)), []
    for tree in (None, [[0] * i for i in range(1, K + 1)], [[0], [1], [2], [0, 0], [1, 0]]):
        config = {} if tree is None else {"tree": tree, "num_speculative_tokens": len(tree)}
        llm = with_mtp(made.folder, config)
        assert generate(llm, PROMPTS, params_of(24)) == plain
        found.append(drafts_of(llm))
    assert found[0] == found[1]
    assert found[2][1] > 0


@pytest.mark.parametrize("seed", one_in(2, range(2)))
def test_in_any_history(made, monkeypatch, seed):
    """A starved pool, prefixes, forks, aborts, steps planned ahead, drafts in some steps."""
    choose = random.Random(seed)
    llm = with_mtp(
        made.folder, ACCEPTED, num_gpu_blocks_override=40, swap_space=(0, 2**-12)[seed],
        prefix_cache=("hash", "radix")[seed], max_num_batched_tokens=32, max_num_seqs=8,
        async_scheduling=bool(seed),
    )  # fmt: skip
    watch, engine = MTPWatch(llm, made, monkeypatch), llm.engine
    engine.scheduler.drafts = Toggled(seed)
    run_history(engine, choose, 12, 40, lambda i: {"seed": i} | choose.choice(({"n": 3}, {})))
    assert engine.scheduler.counters.num_accepted_tokens > 50
    watch.assert_right(least=100)


def test_a_quantised_layer_is_made_dense(tmp_path):
    """FP8 in blocks, as DeepSeek-V3 is published: the drafts of the same weights in 16 bits."""
    counts = []
    for kind in ("fp8", "dense"):
        made = Checkpoint(tmp_path / kind)
        path = made.folder / "model.safetensors"
        tensors = load_file(path)
        for name in [n for n in tensors if n.endswith("proj.weight") or "kv_a_proj_with_mqa" in n]:
            scale = tensors[name].abs().max() / 448
            codes = (tensors[name] / scale).to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in codes.shape]
            fp8 = {name: codes, f"{name}_scale_inv": scale.expand(blocks).contiguous()}
            tensors |= fp8 if kind == "fp8" else {name: codes.float() * scale}
        save_file(tensors, path, {"format": "pt"})
        if kind == "fp8":
            method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
            made.change(quantization_config=method | {"activation_scheme": "dynamic"})
        llm = with_mtp(made.folder)
        counts.append([generate(llm, PROMPTS, params_of(24, **SAMPLED)), *drafts_of(llm)])
    assert counts[0] == counts[1]


def drafts_of(llm: LLM) -> tuple[int, int]:
    """Drafts, and those that were accepted."""
    counters = llm.engine.scheduler.counters
    return counters.num_drafts, counters.num_accepted_tokens


def test_what_is_allocated_is_what_was_planned(made):
    llm = with_mtp(made.folder, swap_space=2**-9, enforce_eager=True)  # panels pad odd sizes
    plan, sizes, runner = llm.plan(), llm.engine.allocated(), llm.engine.runner
    assert sizes["draft_weights"] == plan.draft_weight_bytes
    assert sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.draft_block_bytes
    assert sizes["draft_swap_space"] == runner.host.num_blocks * plan.draft_block_bytes


# What is wrong: fields of config.json, arguments, a tensor that is missing or cut; the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "tiny"}, "'mtp' needs the multi-token .* and tiny has none;"),
    "no layers": ({"num_nextn_predict_layers": 0}, ".* has none; choose another method"),
    "a folder": ({"config": {"model": "tiny-eagle"}}, "and no other method takes one"),
    "a tree": ({"config": {"tree": "auto"}}, "'auto' and method 'mtp', whose accuracy is not"),
    "a number": ({"config": {"tree": [[0]], "num_speculative_tokens": "auto"}}, "give paths, and"),
    "too deep": ({"config": {"tree": [[0] * i for i in range(1, 17)]}}, "of 16 ranks and the lay"),
    "random weights": ({"load_format": "dummy"}, "random weights have no trained heads"),
    "ranks": ({"tensor_parallel_size": 2}, "one process and this engine has 2 ranks"),
    "missing": ({"without": "eh_proj"}, "eh_proj.weight of shape None, and config.json gives"),
    "cut": ({"half": "enorm"}, r"enorm.weight of shape \(32,\), and config.json gives \(64,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(made, name):
    given, message = dict(REFUSED[name][0]), REFUSED[name][1]
    model, path = given.pop("model", made.folder), made.folder / "model.safetensors"
    if (key := "num_nextn_predict_layers") in given:
        made.change(**{key: given.pop(key)})
        path.unlink()
    if tensor := given.pop("without", None) or given.get("half"):
        tensors = load_file(path)
        whole = tensors.pop(f"{OWN}{tensor}.weight")
        tensors |= {f"{OWN}{tensor}.weight": whole[:32].clone()} if given.pop("half", None) else {}
        save_file(tensors, path, {"format": "pt"})
    with pytest.raises((ConfigError, CheckpointError), match=message) as error:
        with_mtp(model, **given)
    assert "\n" not in str(error.value)


BUGS = {
    "no bug": ("return target.norm", "return target.norm", False),
    "features without the norm": ("return target.norm", "return torch.nn.Identity()", True),
    "halves exchanged": (
        "(self.embedding_norm(embedded), self.feature_norm(features))",
        "(self.feature_norm(features), self.embedding_norm(embedded))", True),
    "norms exchanged": (
        "(self.embedding_norm(embedded), self.feature_norm(features))",
        "(self.feature_norm(embedded), self.embedding_norm(features))", True),
    "no residual stream": ("return x + residual", "return x", True),
    "another norm before the output": (
        'RMSNorm(f"{prefix}shared_head.norm"', 'RMSNorm(f"{prefix}enorm"', True),
    "a dense layer": ("target, num_layers=1,", "target, num_layers=1, moe=None,", True),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, made, monkeypatch):
    right, wrong, found = BUGS[bug]
    plant_everywhere(monkeypatch, mtp, right, wrong)
    if not found:
        return test_drafts_are_those_of_transformers_and_change_no_token(made, monkeypatch, {})
    with pytest.raises((AssertionError, CheckpointError, ConfigError, RuntimeError)):
        test_drafts_are_those_of_transformers_and_change_no_token(made, monkeypatch, {})
