"""Training of draft heads on the target's own text; resumable.

Only the heads are trained. Their inputs, hidden states of the target, are computed once. Their
matrices are trained, norms are left as they begin.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import ConfigError
from minillm.lab.quantise.calibration_text import read_text
from minillm.lab.quantise.quantize_folder import begin
from minillm.lab.training.attention import causal_rows
from minillm.lab.training.own_text import PART, PROMPT, TEMPERATURES, own_text
from minillm.lab.training.trainer import CHECKPOINT, load_state, rows_batch, save_state
from minillm.models.checkpoint import WEIGHTS, open_model
from minillm.models.decoder import Decoder, tensors_of
from minillm.models.loader import load_model
from minillm.ops.sampling import Pack
from minillm.plan.machine import cpu_has_bf16, cpu_name
from minillm.speculative.heads import HEADS_FILE, base_hash
from minillm.speculative.medusa import MedusaHeads
from minillm.speculative.trees import ranked

COMPILED_FROM, EVERY = 300, 100  # steps; those between two checkpoints
LATER = 0.8  # weight of each head relative to the one before
RANKS, RANKED = 10, 24  # ranks of a head that are measured, on so many rows of a temperature
# Logits [K, V], and of each the number of its row and its position -> tokens [ranks, K].
Best = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HeadRecipe:
    """What is trained and how long; a run that is resumed must have the same."""

    method: str
    num_heads: int = 4
    width: int = 0  # of Medusa's hidden layer; 0: that of the model
    num_rows: int = 2112
    steps: int = 700
    rows_per_step: int = 10
    lr: float = 4e-3
    warmup: int = 20
    seed: int = 0
    parallel: bool = False  # whether an EAGLE layer drafts in parallel
    minutes: int = 0  # maximum CPU time of all steps; 0: no maximum

    def done(self, step: int, cpu_seconds: float) -> float:
        """The part of the training that is done, from 0 to 1."""
        return max(step / self.steps, cpu_seconds / (60 * self.minutes) if self.minutes else 0.0)

    def lr_at(self, step: int, done: float) -> float:
        """The learning rate: warm-up, then constant, then linear decay over the last 60 %."""
        return self.lr * max(0.0, min(1.0, (step + 1) / self.warmup, (1 - done) / 0.6))


class Task:
    """A target and the Medusa heads that are trained for it."""

    heads: nn.Module

    def __init__(self, recipe: HeadRecipe, target: Decoder):
        self.recipe, self.target = recipe, target
        self.heads = self.build()
        self._initialize()
        for tensor in self.heads.parameters():
            tensor.requires_grad_(tensor.ndim == 2)

    def build(self) -> nn.Module:
        """The heads, with uninitialised weights."""
        size = self.target.config.hidden_size
        sizes = self.recipe.num_heads, size, self.recipe.width or size
        return MedusaHeads(*sizes, torch.float32, self.target.device)

    @property
    def sizes(self) -> dict[str, Any]:
        """Their fields of `heads.json`."""
        width = self.recipe.width or self.target.config.hidden_size
        return {"num_heads": self.recipe.num_heads, "width": width}

    def optimizer(self, matrices: Sequence[Tensor]) -> torch.optim.Optimizer:
        """What updates the matrices."""
        return torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    def passes_at(self, done: float) -> int:
        """Number of passes of the loss, when this part of the training is done."""
        return 1

    @torch.no_grad()
    def _initialize(self) -> None:
        """A = I, W1 random, W2 = 0: each head begins as the output matrix."""
        generator = torch.Generator().manual_seed(self.recipe.seed)
        for name, tensor in tensors_of(self.heads).items():
            if "skip" in name:
                tensor.target.copy_(torch.eye(len(tensor.target)))
            elif "up" in name:
                tensor.target.normal_(0, tensor.target.shape[1] ** -0.5, generator=generator)
            else:
                tensor.target.zero_()

    @torch.no_grad()
    def hidden(self, rows: Tensor) -> Tensor:
        """The target's final hidden states of rows [R, T], as bf16 [R, T, d]."""
        batch = rows_batch(rows.flatten(), rows.shape[1])
        with autocast(rows.device):
            found = self.target(batch, causal_rows(self.target.config, rows.shape[1]))
        return found.bfloat16().view(*rows.shape, -1)

    def predictions(
        self, rows: Tensor, hidden: Tensor, passes: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each head its logits [R, n, V] and the tokens [R, n] that it should predict; the
        last n of each row belong together."""
        length, offset = rows.shape[1], 2  # the output matrix itself predicts the next token
        states = self.heads(hidden.flatten(0, 1)).unflatten(1, (len(rows), length))
        for state in states:
            yield self.target.logits(state[:, : length - offset]), rows[:, offset:]
            offset += 1

    def loss(self, rows: Tensor, hidden: Tensor, passes: int = 1) -> Tensor:
        """Weighted mean cross-entropy of the heads, in nats."""
        total, weights = torch.zeros((), device=rows.device), 0.0
        with autocast(rows.device):
            for i, (logits, wanted) in enumerate(self.predictions(rows, hidden, passes)):
                own = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(0, 1))
                total, weights = total + LATER**i * own, weights + LATER**i
        return total / weights

    def drafts_of(self, rows: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """For each head its logits [R, n, V] for the last n tokens of each row, which the target
        generated, if the tokens before are right."""
        for logits, _ in self.predictions(rows, hidden):
            yield logits[:, PROMPT - 1 :]

    @torch.no_grad()
    def rates(self, rows: Tensor, hidden: Tensor, numbers: Tensor, best: Best) -> list[list[float]]:
        """By head and rank: how often a token of `best` is the one that follows, in the rows with
        these numbers."""
        found: list[list[Tensor]] = []
        for part in numbers.split(8):
            own = rows[part]
            for head, logits in enumerate(self.drafts_of(own, hidden[part].float())):
                found += [[]] * (head == len(found))
                wanted = own[:, -logits.shape[1] :]
                positions = torch.arange(own.shape[1])[-logits.shape[1] :].repeat(len(part))
                seeds = part.repeat_interleave(logits.shape[1])
                same = best(logits.flatten(0, 1).float(), seeds, positions) == wanted.flatten()
                found[head] = [*found[head], same.float()]
        means = [torch.cat(same_at, dim=1).mean(1).tolist() for same_at in found]
        return [[round(rate, 3) for rate in head_rates] for head_rates in means]

    def accuracy(self, rows: Tensor, hidden: Tensor) -> dict[str, list[float]]:
        """By temperature: how often each head's best token is the one that follows."""
        found = {}
        for i, temperature in enumerate(TEMPERATURES):
            numbers = torch.arange(i, len(rows), 3)
            rates = self.rates(rows, hidden, numbers, lambda logits, *_: logits.argmax(-1)[None])
            found[f"{temperature:g}"] = [rate for (rate,) in rates]
        return found

    def rank_accuracy(self, rows: Tensor, hidden: Tensor) -> dict[str, list[list[float]]]:
        """By temperature [heads, RANKS], what token trees are built from: how often each rank is
        the token that follows. Ranked with the noise that the target had."""
        found, first = {}, -(-self.recipe.num_rows // PART) * PART  # the seed of held-out row 0
        for i, temperature in enumerate(TEMPERATURES):
            best = partial(with_noise, temperature, first)
            numbers = torch.arange(i, len(rows), 3)[:RANKED]
            found[f"{temperature:g}"] = self.rates(rows, hidden, numbers, best)
        return found


def with_noise(
    temperature: float, first: int, logits: Tensor, rows: Tensor, position: Tensor
) -> Tensor:
    """The RANKS best tokens [RANKS, K] of logits [K, V], with the noise of these rows, the first of
    which has the seed `first`, at these positions."""
    zeros = torch.zeros(len(logits))
    options = zeros + temperature, zeros, zeros + 1, zeros.int()
    seed = first + rows
    pack = Pack(*options, seed, torch.zeros_like(seed), position, truncates=False)
    return ranked(logits, pack, RANKS)


def has_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are fast: without instructions for them a CPU takes 100 times as
    long."""
    return device.type != "cpu" or cpu_has_bf16()


def autocast(device: torch.device) -> torch.autocast:
    """bf16 where it is fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bf16(device))


class HeadTrainer:
    """One run; its state is in `folder`."""

    def __init__(self, task: Task, folder: Path):
        self.task, self.recipe, self.folder = task, task.recipe, folder
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        # Compiled, a step in bf16 takes half as long; compilation as long as 100 steps. In float32
        # products take nearly all of the time.
        compiles = self.recipe.steps > COMPILED_FROM and has_bf16(task.target.device)
        self.loss = torch.compile(task.loss, dynamic=False) if compiles else task.loss
        self.tensors = {name: tensor.target for name, tensor in tensors_of(task.heads).items()}
        self.matrices = [each for each in task.heads.parameters() if each.requires_grad]
        self.optimizer = task.optimizer(self.matrices)

    @property
    def done(self) -> float:
        """The part of the training that is done, from 0 to 1."""
        return self.recipe.done(self.step, self.cpu_seconds)

    def train_step(self, rows: Tensor, hidden: Tensor) -> float:
        """One step on some of the rows; returns the loss before it."""
        began, done = time.process_time(), self.done
        generator = torch.Generator().manual_seed(1000 * self.recipe.seed + self.step)
        chosen = torch.randperm(len(rows), generator=generator)[: self.recipe.rows_per_step]
        loss = self.loss(rows[chosen], hidden[chosen].float(), self.task.passes_at(done))
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(self.step, done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.cpu_seconds += time.process_time() - began
        return float(loss.detach())

    def run(self, rows: Tensor, hidden: Tensor, held_out: Sequence[Tensor]) -> None:
        """All steps that are left; the bar shows the accuracy of each head on held-out text."""
        begin = time.monotonic() - self.seconds
        with tqdm(total=self.recipe.steps, initial=self.step, unit="step") as bar:
            while self.done < 1:
                loss = self.train_step(rows, hidden)
                self.seconds = time.monotonic() - begin
                bar.update()
                if self.step % EVERY == 0 or self.done >= 1:
                    greedy = self.task.accuracy(*held_out)["0"]
                    bar.set_postfix_str(f"loss {loss:.3f}, right when greedy {greedy}")
                    self.save()

    def save(self) -> None:
        """Replace the checkpoint."""
        notes = {name: str(getattr(self, name)) for name in ("step", "seconds", "cpu_seconds")}
        save_state(self.folder / CHECKPOINT, self.tensors, [self.optimizer], notes)

    def resume(self) -> bool:
        """Continue from the checkpoint; False if there is none."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return False
        with safe_open(path, "pt") as file:
            notes = file.metadata()
        self.step, self.seconds = int(notes["step"]), float(notes["seconds"])
        self.cpu_seconds = float(notes["cpu_seconds"])
        load_state(path, self.tensors, [self.optimizer])
        return True


def train_heads(
    model: str,
    recipe: HeadRecipe,
    out: Path,
    text: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    kind: type[Task] = Task,
) -> dict[str, Any]:
    """Train heads for a model, or continue, and write them in bf16 to `out`; returns `heads.json`.

    Raises:
        ConfigError: the model has no weights or no tokenizer, the text is too short, or `out` has
            a run with other settings.
        CheckpointError: `out` cannot be written.
    """
    source = open_model(model)
    bound = base_hash(source)
    if not bound:
        raise ConfigError(f"{model} has no weights; heads are trained for a model with weights.")
    digest = sha256(read_text(text).encode()).hexdigest()
    state = {"recipe": asdict(recipe), "base_hash": bound, "text": digest}
    begin(out, state, "train.json")
    folder = out / "training"
    rows, held_out = own_text(model, folder, recipe.num_rows, text)
    task = kind(recipe, load_model(source, torch.float32).requires_grad_(False))
    say("Computing hidden states")
    hidden, held = (torch.cat([task.hidden(p) for p in r.split(8)]) for r in (rows, held_out))
    trainer = HeadTrainer(task, folder)
    if trainer.resume():
        say(f"Continuing at step {trainer.step}")
    trainer.run(rows, hidden, (held_out, held))
    card = {
        "method": recipe.method,
        **task.sizes,
        "base_model": source.name,
        "base_hash": bound,
        "accuracy": task.accuracy(held_out, held),
        "training": asdict(recipe)
        | {
            "done_steps": trainer.step,
            "seconds": round(trainer.seconds),
            "cpu_seconds": round(trainer.cpu_seconds),
            "machine": f"{cpu_name()}, torch {version('torch')}",
        },
    }
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in trainer.tensors.items()}
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    (out / HEADS_FILE).write_text(json.dumps(card, indent=2) + "\n")
    say("Ranking tokens")
    card["rank_accuracy"] = task.rank_accuracy(held_out, held)
    (out / HEADS_FILE).write_text(json.dumps(card, indent=2) + "\n")
    return card
