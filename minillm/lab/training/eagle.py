"""Training of an EAGLE layer: on features of the target, then on its own, as it will draft.

    pass 0    (x_p, g of p - 1)     attends to pass 0 up to p
    pass 1    (x_p, a of p - 1)     attends to pass 0 up to p - 1, and to itself
    pass 2    (x_p, a' of p - 1)    attends to pass 0 up to p - 2, pass 1 of p - 1, and itself

This is the training-time test of EAGLE-3 (Li et al., 2025, section 3.2): pass i computes what the
layer computes for its draft i + 1, for all positions at once. Its loss is the cross-entropy against
the target's distribution. In parallel mode (P-EAGLE) all later passes have the mask as their input.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.lab.training.attention import causal_rows
from minillm.lab.training.heads import HeadRecipe, Task, autocast
from minillm.lab.training.own_text import PROMPT
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import tensors_of
from minillm.ops.batch import Batch
from minillm.speculative.eagle import EagleLayer, run_layers

RECIPE = HeadRecipe("eagle", num_heads=0, lr=2e-3)
SELF_FED = 2  # passes on features of its own, of the loss
MEASURED = 4  # passes whose accuracy is measured
ALONE = 0.4  # part of the training with pass 0 only


class Passes:
    """The attention of all passes over rows of `window` tokens (see above), differentiable."""

    def __init__(self, window: int):
        self.window = window
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Keep key and value [N, Hkv, D] of the next pass."""
        if value is not None:
            self.keys.append(self._rows(key))
            self.values.append(self._rows(value))

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Attention of query [N, H, D] of the last pass -> [N, H, D]."""
        keys, values, length = self.keys, self.values, self.window
        current, kv_heads = len(keys) - 1, keys[0].shape[1]
        q = self._rows(query).unflatten(1, (kv_heads, -1))  # [B, Hkv, G, T, D]
        place = torch.arange(length, device=query.device)
        scores = q @ keys[0][:, :, None].transpose(-1, -2)  # [B, Hkv, G, T, T]
        parts = [scores.masked_fill(place > place[:, None] - current, -torch.inf)]
        for number in range(1, current + 1):  # one key each, `back` positions before
            back = current - number
            one = (q * moved(keys[number], back)[:, :, None]).sum(-1, keepdim=True)
            parts.append(one.masked_fill(place[:, None] < back, -torch.inf))
        weights = (torch.cat(parts, dim=-1).float() * scale).softmax(-1).to(values[0].dtype)
        out = weights[..., :length] @ values[0][:, :, None]
        for number in range(1, current + 1):
            value = moved(values[number], current - number)[:, :, None]
            out = out + weights[..., length + number - 1, None] * value
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [B, H, T, D]"""
        return x.unflatten(0, (-1, self.window)).transpose(1, 2)


def moved(x: Tensor, count: int) -> Tensor:
    """[.., T, D] with each row `count` places later, behind rows of zeros."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]


class EagleTask(Task):
    """A target and the EAGLE layer that is trained for it. `hidden` is [R, T, depths * d]."""

    heads: EagleLayer

    @property
    def depths(self) -> list[int]:
        """After a quarter of the target's layers, after half, and after all: of the last, the
        target's distribution is computed."""
        count = self.target.config.num_layers
        return sorted({-(-count // 4), -(-count // 2), count})

    @property
    def sizes(self) -> dict[str, object]:
        """The layer's fields of `heads.json`."""
        return {"depths": self.depths, "parallel": self.recipe.parallel}

    def passes_at(self, done: float) -> int:
        """The passes on its own features come later: they need features that mean something. Those
        of masks need none."""
        if self.recipe.parallel:
            return MEASURED
        return 1 if done < ALONE else 1 + SELF_FED

    def optimizer(self, matrices: Sequence[Tensor]) -> torch.optim.Optimizer:
        """AdamW: what begins as layers of the target needs no orthogonal steps."""
        return torch.optim.AdamW(matrices, betas=(0.9, 0.95), weight_decay=0.0)

    def build(self) -> EagleLayer:
        """The layer, with uninitialised weights."""
        config, device = self.target.config, self.target.device
        parallel = self.recipe.parallel
        return EagleLayer(config, len(self.depths), torch.float32, device, parallel)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Features begin as the target's last hidden state, and the layer as the target's last one
        where its matrices fit; what q, k and v do with embeddings begins as in its first one."""
        target, generator = self.target, torch.Generator().manual_seed(self.recipe.seed)
        known = {name: tensor.target for name, tensor in target.checkpoint_tensors().items()}
        first, last = "model.layers.0.", f"model.layers.{target.config.num_layers - 1}."
        norms = {"norm": "model.norm", "midlayer.input_layernorm": f"{first}input_layernorm",
                 "midlayer.hidden_norm": f"{last}input_layernorm"}  # fmt: skip
        for name, tensor in tensors_of(self.heads).items():
            own, (stem, kind), part = tensor.target, name.rsplit(".", 1), name.split(".", 1)[1]
            if own.ndim == 1:
                own.fill_(float(kind == "weight"))
            else:
                own.normal_(0, own.shape[1] ** -0.5, generator=generator)
            halves = [first, last] if stem.endswith(("q_proj", "k_proj", "v_proj")) else [last]
            names = [f"{norms[stem]}.weight"] if stem in norms else [half + part for half in halves]
            found = [known[source] for source in names if source in known]
            if found and (joined := torch.cat(found, dim=-1)).shape == own.shape:
                own.copy_(joined)
            elif stem == "fc":
                own.zero_()[:, -len(own) :] = torch.eye(len(own))

    @torch.no_grad()
    def hidden(self, rows: Tensor) -> Tensor:
        """The target's hidden states of rows [R, T], as bf16 [R, T, depths * d]."""
        target, window = self.target, rows.shape[1]
        batch = rows_batch(rows.flatten(), window)
        taps: dict[int, Tensor | None] = dict.fromkeys(self.depths)
        with autocast(rows.device):
            x, rope = target.embedding(batch.input_ids), target.rope(batch.positions)
            run_layers(target.layers, x, rope, batch, causal_rows(target.config, window), taps)
        states = torch.cat([state for state in taps.values() if state is not None], dim=-1)
        return states.bfloat16().unflatten(0, (-1, window))

    def drafts(self, rows: Tensor, hidden: Tensor, passes: int) -> Iterator[Tensor]:
        """Logits [R, T, V] of each pass for the tokens that follow."""
        batch, kv = rows_batch(rows.flatten(), rows.shape[1]), Passes(rows.shape[1])
        embedded, features = self.target.embedding(batch.input_ids), self.heads.fc(hidden)
        fed = moved(features, 1).flatten(0, 1)
        for _ in range(passes):
            own = self.heads(embedded, fed, batch, kv)
            yield self.target.logits(self.heads.norm(own)).unflatten(0, rows.shape)
            fed = moved(own.unflatten(0, rows.shape), 1).flatten(0, 1)
            if self.recipe.parallel:  # pass i at position p is mask i behind position p - i
                masks = self.heads.mask(torch.arange(2, device=rows.device))
                embedded, fed = (mask.expand(rows.numel(), -1) for mask in masks)

    def predictions(
        self, rows: Tensor, hidden: Tensor, passes: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each pass its logits [R, T, V], and the target's distributions [R, T, V]."""
        with torch.no_grad():
            last = hidden[..., -self.target.config.hidden_size :]
            wanted = self.target.logits(self.target.norm(last).flatten(0, 1)).float().softmax(-1)
        for logits in self.drafts(rows, hidden, passes):
            yield logits, wanted.unflatten(0, rows.shape)

    def drafts_of(self, rows: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """For each pass its logits for the tokens that the target generated."""
        for logits in self.drafts(rows, hidden, MEASURED):
            yield logits[:, PROMPT - 1 : -1]
