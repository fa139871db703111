"""Training of an EAGLE layer: on features of the target, then on its own, as it will draft.

    pass 0    (x_p, g of p - 1)     attends to pass 0 up to p
    pass 1    (x_p, a of p - 1)     attends to pass 0 up to p - 1, and to itself
    pass 2    (x_p, a' of p - 1)    attends to pass 0 up to p - 2, pass 1 of p - 1, and itself

This is the training-time test of EAGLE-3 (Li et al., 2025, section 3.2): pass i computes what the
layer computes for its draft i + 1, for all positions at once. Its loss is the cross-entropy against
the target's distribution. In parallel mode (P-EAGLE) all later passes have the mask as their input.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.lab.training.attention import causal_rows
from minillm.lab.training.heads import LATER, HeadRecipe, Task, autocast
from minillm.lab.training.own_text import PART, PROMPT, TEMPERATURES
from minillm.lab.training.ranks import RANKS
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import tensors_of
from minillm.ops.batch import Batch
from minillm.ops.sampling import Pack
from minillm.speculative.eagle import EagleLayer, run_layers
from minillm.speculative.trees import ranked

RECIPE = HeadRecipe("eagle", num_heads=0, lr=2e-3)
SELF_FED = 2  # passes on features of its own, of the loss
MEASURED = 4  # passes whose accuracy is measured
RANKED = 24  # rows of a temperature of which it is by rank
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
        known = {name: each.target for name, each in target.checkpoint_tensors().items()}
        first, last = "model.layers.0.", f"model.layers.{target.config.num_layers - 1}."
        norms = {"norm": "model.norm", "midlayer.input_layernorm": f"{first}input_layernorm",
                 "midlayer.hidden_norm": f"{last}input_layernorm"}  # fmt: skip
        for name, each in tensors_of(self.heads).items():
            own, (stem, kind), part = each.target, name.rsplit(".", 1), name.split(".", 1)[1]
            if own.ndim == 1:
                own.fill_(float(kind == "weight"))
            else:
                own.normal_(0, own.shape[1] ** -0.5, generator=generator)
            halves = [first, last] if stem.endswith(("q_proj", "k_proj", "v_proj")) else [last]
            names = [f"{norms[stem]}.weight"] if stem in norms else [half + part for half in halves]
            found = [known[each] for each in names if each in known]
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
        states = torch.cat([each for each in taps.values() if each is not None], dim=-1)
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

    def loss(self, rows: Tensor, hidden: Tensor, passes: int = 1) -> Tensor:
        """Weighted mean cross-entropy of the passes, in nats."""
        total, weights = torch.zeros((), device=rows.device), 0.0
        with autocast(rows.device):
            with torch.no_grad():
                last = hidden[..., -self.target.config.hidden_size :]
                wanted = (
                    self.target.logits(self.target.norm(last).flatten(0, 1)).float().softmax(-1)
                )
            for i, logits in enumerate(self.drafts(rows, hidden, passes)):
                own = F.cross_entropy(logits.flatten(0, 1).float(), wanted)
                total, weights = total + LATER**i * own, weights + LATER**i
        return total / weights

    @torch.no_grad()
    def accuracy(self, rows: Tensor, hidden: Tensor) -> dict[str, list[float]]:
        """By temperature: how often the best token of each pass is the one that follows, if the
        tokens before are right. Only tokens that the target generated count."""
        found = {}
        for i, temperature in enumerate(TEMPERATURES):
            right = torch.zeros(MEASURED)
            parts = zip(rows[i::3].split(8), hidden[i::3].split(8), strict=True)
            for own, mine in parts:
                for number, logits in enumerate(self.drafts(own, mine.float(), MEASURED)):
                    same = logits[:, PROMPT - 1 : -1].argmax(-1) == own[:, PROMPT:]
                    right[number] += same.float().sum()
            total = rows[i::3, PROMPT:].numel()
            found[f"{temperature:g}"] = [round(float(each) / total, 3) for each in right]
        return found

    @torch.no_grad()
    def rank_accuracy(
        self, model: str, out: Path, text: Path | None, held_out: tuple[Tensor, Tensor]
    ) -> dict[str, list[list[float]]]:
        """By temperature [passes, RANKS]: how often each rank of a pass is the token that follows,
        if the tokens before are right. Ranked with the noise that the target had."""
        found, first = {}, -(-self.recipe.num_rows // PART) * PART  # the seed of held-out row 0
        for i, temperature in enumerate(TEMPERATURES):
            right = torch.zeros(MEASURED, RANKS)
            numbers = torch.arange(i, len(held_out[0]), 3)[:RANKED]
            for part in numbers.split(8):
                rows, hidden = (each[part] for each in held_out)
                wanted = rows[:, PROMPT:]
                pack = pack_of_rows(temperature, first + part, wanted.shape[1])
                for number, logits in enumerate(self.drafts(rows, hidden.float(), MEASURED)):
                    best = ranked(logits[:, PROMPT - 1 : -1].flatten(0, 1).float(), pack, RANKS)
                    right[number] += (best == wanted.flatten()).float().sum(1)
            rates = right / (len(numbers) * wanted.shape[1])
            found[f"{temperature:g}"] = [[round(float(r), 3) for r in each] for each in rates]
        return found


def pack_of_rows(temperature: float, seeds: Tensor, count: int) -> Pack:
    """Sampling parameters of `count` positions behind the prompt, of rows with these seeds."""
    seed = seeds.repeat_interleave(count)
    zeros = torch.zeros(len(seed))
    position = torch.arange(PROMPT, PROMPT + count).repeat(len(seeds))
    options = zeros + temperature, zeros, zeros + 1, zeros.int()
    return Pack(*options, seed, torch.zeros_like(seed), position, truncates=False)
