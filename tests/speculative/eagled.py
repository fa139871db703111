"""A random EAGLE layer for any model, and an engine whose every draft is computed again.

The target's hidden states are those of transformers in float64, and the layer is written down once
more in numpy, from the formulas of EAGLE-3 (Li et al., 2025) and of the layer that it published.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minillm import LLM
from minillm.models.checkpoint import open_model
from minillm.models.decoder import tensors_of
from minillm.speculative.eagle import Eagle, layer_config
from minillm.speculative.heads import HeadsSource, base_hash
from tests.speculative.headed import Watch, with_heads

K = 4
SPREAD = 1.5  # of the weights: drafts that differ from each other


def write_eagle(model: Path, folder: Path, **fields: Any) -> Path:
    """A layer with random weights; `fields` of heads.json are replaced."""
    source, dice = open_model(model), torch.Generator().manual_seed(0)
    count = source.config.num_layers
    depths = sorted({1, -(-count // 2), count})
    made = HeadsSource("eagle", folder, 1, source.config, depths=tuple(depths),
                       parallel=fields.get("parallel", False))  # fmt: skip
    tensors = {}
    for name, tensor in tensors_of(made.build(torch.float32)).items():
        noise = torch.randn(tensor.slice.shape, generator=dice)
        spread = SPREAD * noise.shape[-1] ** -0.5
        tensors[name] = 1 + noise * 0.2 if "norm" in name else noise * spread
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    card = {"method": "eagle", "depths": depths, "base_model": str(model),
            "base_hash": base_hash(source)} | fields  # fmt: skip
    (folder / "heads.json").write_text(json.dumps(card))
    return folder


def with_eagle(model: Any, layer: Any, num_drafts: Any = K, **arguments: Any) -> LLM:
    """An engine with small blocks and a layer."""
    config = {"method": "eagle"} | arguments.pop("config", {})
    return with_heads(model, layer, num_drafts, config=config, **arguments)


def eagle_of(llm: LLM) -> Eagle:
    """The proposer, which must not have failed."""
    proposer = llm.engine.runner.speculator.proposer
    assert isinstance(proposer, Eagle)
    return proposer


class Formula:
    """The layer in float64, over all positions again for every draft; no cache.

    Args:
        model: the folder of the target.
        layer: the folder of the layer.
    """

    def __init__(self, model: Path, layer: Path):
        config = open_model(model).config
        self.config = layer_config(config)
        kind = torch.float32 if config.moe else torch.float64  # its experts have no float64
        self.target = AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        self.depths = json.loads((layer / "heads.json").read_text())["depths"]
        tensors = load_file(layer / "model.safetensors")
        self.tensors = {name: each.double().numpy() for name, each in tensors.items()}
        both = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        self.embedding, self.output = (each.weight.detach().double().numpy() for each in both)

    def states(self, ids: list[int]) -> np.ndarray:
        """The target's hidden states [n, depths * d] of all positions."""
        states = {}

        def keep(depth: int) -> Any:
            def hook(module: Any, given: Any, found: Any) -> None:
                states[depth] = (found[0] if isinstance(found, tuple) else found).view(len(ids), -1)

            return hook

        layers = self.target.model.layers
        handles = [layers[n - 1].register_forward_hook(keep(n)) for n in self.depths]
        with torch.no_grad():
            self.target(torch.tensor([ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        return np.concatenate([states[n].numpy() for n in self.depths], 1)

    def of(self, name: str) -> np.ndarray:
        """A weight."""
        return self.tensors[f"{name}.weight"]

    def rms(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMSNorm of the last dimension."""
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.of(name)

    def layer(self, given: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Embeddings of n tokens, and the features of the positions before -> a [n, d]."""
        mid = "midlayer."
        embedded = self.rms(given, f"{mid}input_layernorm")
        x = np.concatenate((embedded, self.rms(features, f"{mid}hidden_norm")), axis=1)
        x = features + self.attention(x)
        y = self.rms(x, f"{mid}post_attention_layernorm")
        gate, up = y @ self.of(f"{mid}mlp.gate_proj").T, y @ self.of(f"{mid}mlp.up_proj").T
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.of(f"{mid}mlp.down_proj").T

    def attention(self, x: np.ndarray) -> np.ndarray:
        """Causal, with grouped heads."""
        config, mid = self.config, "midlayer.self_attn."

        def heads(name: str, count: int) -> np.ndarray:
            found = (x @ self.of(f"{mid}{name}_proj").T).reshape(len(x), count, -1)
            if f"{mid}{name}_norm.weight" in self.tensors:
                found = self.rms(found, f"{mid}{name}_norm")
            found = found if name == "v" else self.rotated(found)
            return found.repeat(config.num_heads // count, axis=1).swapaxes(0, 1)  # [H, n, D]

        q, k, v = heads("q", config.num_heads), *(heads(n, config.num_kv_heads) for n in "kv")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(config.head_dim)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ v
        return out.swapaxes(0, 1).reshape(len(x), -1) @ self.of(f"{mid}o_proj").T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """RoPE of [n, H, D], as complex numbers."""
        half = x.shape[-1] // 2
        turns = self.config.rope.theta ** (-np.arange(half) / half)
        turn = np.exp(1j * np.arange(len(x))[:, None] * turns)[:, None]
        if self.config.rope.interleaved:
            z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            return np.stack((z.real, z.imag), -1).reshape(x.shape)
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate((z.real, z.imag), -1)

    def logits(self, ids: list[int], drafts: list[int]) -> list[np.ndarray]:
        """Logits [V] for each draft after `ids`, given the drafts before it."""
        features, found = np.zeros((1, self.config.hidden_size)), []
        if len(ids) > 1:
            known = self.states(ids[:-1]) @ self.of("fc").T
            features = np.concatenate((features, known))
        embedded = self.embedding[ids]
        for draft in drafts:
            last = self.layer(embedded, features)[-1:]
            found.append((self.rms(last, "norm") @ self.output.T)[0])
            following = self.embedding[draft], last[0]
            if "mask.weight" in self.tensors:  # P-EAGLE knows neither
                following = self.of("mask")
            embedded = np.concatenate((embedded, following[0][None]))
            features = np.concatenate((features, following[1][None]))
        return found


class EagleWatch(Watch):
    """The formula of an EAGLE layer."""

    def __init__(self, llm: LLM, layer: Path, monkeypatch: pytest.MonkeyPatch):
        super().__init__(llm, monkeypatch)
        self.formula, eagle = Formula(llm.engine.source.folder, layer), eagle_of(llm)
        for tensor in (*eagle.features.pages.tensors, *eagle.shadow.kv.tensors):
            tensor.fill_(torch.nan)

    def logits(self, ids: list[int], drafts: list[int]) -> Iterable[np.ndarray]:
        return self.formula.logits(ids, drafts)
