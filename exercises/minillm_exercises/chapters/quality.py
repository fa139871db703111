"""Chapters 13 to 15: how far a model with changed weights is from the model itself.

`Subject` holds a model in float32, a text that `tiny` was not trained on, and what the unchanged
model says about it. `judge` changes all matrices of the layers and compares. The two texts are
copies of files of this project, kept as text, so that the numbers stay the same when the project
changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import minillm
from minillm.lab.comparison.candidates import load_base
from minillm.lab.comparison.run import tokenizer_of
from minillm.lab.training.trainer import logits_of
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model

TINY = Path(minillm.__file__).parent / "assets" / "tiny"
WINDOW, WINDOWS = 512, 4  # tokens of a window, and how many are judged
Change = Callable[[str, Tensor], Tensor]  # name and weight [out, in] of a matrix -> its new weight


class Quality(NamedTuple):
    """What a changed model says about the text.

    `kl` is the mean Kullback-Leibler divergence from the distribution of the unchanged model, in
    nats per token; `bits` are bits per byte of the text; `same` is the share of positions with the
    same most likely token.
    """

    kl: float
    bits: float
    same: float


def text(name: str) -> str:
    """The text "held_out" or "calibration"."""
    return Path(__file__).with_name(f"text_{name}.txt").read_text(encoding="utf-8")


class Subject:
    """A model in float32 with its matrices, and the windows it is judged on. A quantised one has
    the values of its codes."""

    def __init__(self, name: str | Path = TINY) -> None:
        source = open_model(name)
        self.model = load_base(source, torch.float32)
        self.tokenizer = tokenizer_of(source)
        ids = self.tokenizer.encode(text("held_out"))
        self.windows = [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]
        self._matrices = {
            name.removeprefix("layers.").replace("attention.", "").replace("mlp.", ""): each
            for name, each in self.model.named_modules()
            if isinstance(each, Matrix) and name.startswith("layers.")
        }
        self.weights = {name: each.values().clone() for name, each in self._matrices.items()}
        self._own = self._dists()

    @property
    def num_weights(self) -> int:
        """Weights of all matrices of the layers."""
        return sum(each.numel() for each in self.weights.values())

    def judge(self, change: Change, inputs: Change | None = None) -> Quality:
        """The quality with all weights changed, and with the inputs [tokens, in] of every matrix if
        `inputs` changes them. Afterwards the model is as it was."""
        new = {name: change(name, each) for name, each in self.weights.items()}
        hooks = [
            each.register_forward_pre_hook(lambda _, args, name=name: (inputs(name, args[0]),))
            for name, each in self._matrices.items()
            if inputs is not None
        ]
        try:
            with self.changed(new):
                dists = self._dists()
        finally:
            for hook in hooks:
                hook.remove()
        return self.quality(dists)

    def quality(self, dists: Sequence[Tensor]) -> Quality:
        """That of other logarithmic distributions [T, V] for the windows."""
        kl, same, nats = 0.0, 0, 0.0
        for own, dist, ids in zip(self._own, dists, self.windows, strict=True):
            kl += float((own.exp() * (own - dist)).sum())
            same += int((own.argmax(-1) == dist.argmax(-1)).sum())
            nats += float(F.nll_loss(dist[:-1], torch.tensor(ids[1:]), reduction="sum"))
        count = sum(map(len, self.windows))
        num_bytes = sum(len(self.tokenizer.decode(ids[1:]).encode()) for ids in self.windows)
        return Quality(kl / count, nats / math.log(2) / num_bytes, same / count)

    @contextmanager
    def changed(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Other weights inside the block."""
        self._put(weights)
        try:
            yield
        finally:
            self._put(self.weights)

    @torch.no_grad()
    def inputs(self, tokens: int, start: int = 0) -> dict[str, Tensor]:
        """The inputs [tokens, in] of each matrix on the calibration text, in windows of 512."""
        ids = self.tokenizer.encode(text("calibration"))[start : start + tokens]
        seen: dict[str, list[Tensor]] = {name: [] for name in self._matrices}
        hooks = [
            each.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
            for name, each in self._matrices.items()
        ]
        try:
            for at in range(0, len(ids), WINDOW):
                logits_of(self.model, ids[at : at + WINDOW])
        finally:
            for hook in hooks:
                hook.remove()
        return {name: torch.cat(parts) for name, parts in seen.items()}

    @torch.no_grad()
    def plant(self, factor: float, channels: int, seed: int = 14) -> dict[str, Tensor]:
        """Multiply some channels of every norm before a matrix, and divide their columns.

        The model computes what it computed before, with large activations in these channels.

        Returns:
            The channels by the matrix that reads them.
        """
        generator = torch.Generator().manual_seed(seed)
        chosen = {}
        for number in range(self.model.config.num_layers):
            for norm, name in (("input_norm", "qkv_proj"), ("mlp_norm", "gate_up_proj")):
                weight = self.model.get_parameter(f"layers.{number}.{norm}.weight")
                at = torch.randperm(len(weight), generator=generator)[:channels]
                weight[at] *= factor
                self.weights[f"{number}.{name}"][:, at] /= factor
                chosen[f"{number}.{name}"] = at
        self._put(self.weights)
        self._own = self._dists()
        return chosen

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, each in self._matrices.items():
            each.values().copy_(weights[name])

    def _dists(self) -> list[Tensor]:
        return [logits_of(self.model, ids).log_softmax(-1) for ids in self.windows]
