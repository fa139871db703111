"""The training loop: packed rows, bf16 autocast, one process per CPU core, resumable.

On a CPU, data-parallel single-threaded processes are faster than one process with many threads:
they synchronise once per step instead of once per operation, and are less sensitive to other load.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from minillm.config import ModelConfig
from minillm.errors import CheckpointError
from minillm.lab.training.attention import causal_rows
from minillm.lab.training.data import TokenStreams, row
from minillm.lab.training.recipes import Recipe
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch

CHECKPOINT = "checkpoint.safetensors"
ROWS_IN_MIX = 16  # rows of which Phase.stdlib_rows come from the standard library


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; except for rounding, these options do not change the result."""

    folder: Path  # checkpoints and log of this run
    device: str = "cpu"
    compile: bool = True
    save_every: int = 200
    evaluate_every: int = 100
    progress: bool = True


def build_model(config: ModelConfig, seed: int, device: str = "cpu") -> Decoder:
    """A float32 decoder with trainable, randomly initialised parameters."""
    model = Decoder(config, device=device)
    model.initialize(std=0.02, seed=seed)
    return model.requires_grad_(True)


def make_optimizers(model: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW without weight decay for all other parameters."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.matrix_lr,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=recipe.embedding_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rows_batch(input_ids: Tensor, window: int) -> Batch:
    """The flat batch of rows of `window` tokens each, from ids [N], without block tables."""
    device, count = input_ids.device, len(input_ids) // window
    positions = torch.arange(window, device=device).repeat(count)
    starts = torch.arange(0, len(input_ids) + 1, window, dtype=torch.int32, device=device)
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        query_start=starts,
        seq_lens=torch.full((count,), window, dtype=torch.int32, device=device),
        block_tables=torch.empty(count, 0, dtype=torch.int64, device=device),
        logits_indices=torch.arange(len(input_ids), device=device),
        max_query_len=window,
    )


def row_logits(model: Decoder, input_ids: Tensor, window: int) -> Tensor:
    """Logits [N, V] of rows of `window` tokens, under bf16 autocast."""
    with torch.autocast(input_ids.device.type, torch.bfloat16):
        hidden = model(rows_batch(input_ids, window), causal_rows(model.config, window))
        return model.logits(hidden)


@torch.no_grad()
def logits_of(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32 after each of the T tokens of one sequence."""
    batch = rows_batch(torch.tensor(ids, device=model.device), len(ids))
    return model.logits(model(batch, causal_rows(model.config, len(ids)))).float()


def text_loss(model: Decoder, input_ids: Tensor, targets: Tensor, window: int) -> Tensor:
    """Mean cross-entropy in nats of the next token. [N], [N] -> scalar"""
    return F.cross_entropy(row_logits(model, input_ids, window).float(), targets)


def distillation_loss(model: Decoder, input_ids: Tensor, teacher: Decoder, window: int) -> Tensor:
    """Mean cross-entropy in nats against the teacher's distribution (Hinton et al., 2015): its
    entropy plus KL(teacher || model). [N] -> scalar"""
    with torch.no_grad():
        wanted = row_logits(teacher, input_ids, window).float().softmax(-1)  # [N, V]
    logits = row_logits(model, input_ids, window).float()
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()


class Trainer:
    """One process of a run: `rank` of `world` processes, each with a share of every step."""

    def __init__(
        self,
        recipe: Recipe,
        streams: TokenStreams,
        options: RunOptions,
        rank: int = 0,
        world: int = 1,
        teacher: Decoder | None = None,
    ):
        self.recipe, self.streams, self.options = recipe, streams, options
        self.rank, self.world = rank, world
        self.step, self.seconds = 0, 0.0
        self.model = build_model(recipe.config, recipe.seed, options.device)
        self.optimizers = make_optimizers(self.model, recipe)
        self.teacher = teacher
        loss: Callable[..., Tensor] = text_loss if teacher is None else distillation_loss
        self.loss = torch.compile(loss, dynamic=False) if options.compile else loss

    # --- data ---------------------------------------------------------------------------------

    def step_rows(self, step: int) -> Tensor:
        """All rows of `step`, int64 [R, window + 1]: equal for every number of processes."""
        recipe, window = self.recipe, self.recipe.window_at(step)
        phase, start = recipe.phase_at(step)
        cycles, place = divmod(step - start, len(phase.windows))
        earlier = cycles * phase.windows.count(window) + phase.windows[:place].count(window)
        # Each phase and each row length makes its own shuffled passes over the text.
        seed = recipe.seed + start + window - phase.windows[0]
        count = recipe.batch_tokens // window
        from_stdlib = phase.stdlib_rows * count // ROWS_IN_MIX
        return torch.stack(
            [
                torch.from_numpy(row(stream, earlier * number + index, window, seed))
                for stream, number in (
                    (self.streams.stdlib, from_stdlib),
                    (self.streams.packages, count - from_stdlib),
                )
                for index in range(number)
            ]
        )

    # --- one step -----------------------------------------------------------------------------

    def train_step(self) -> float:
        """Forward, backward and update; returns the mean loss in nats per token."""
        window = self.recipe.window_at(self.step)
        rows = self.step_rows(self.step)[self.rank :: self.world].to(self.options.device)
        micro = max(1, self.recipe.micro_tokens // window)
        total = torch.zeros((), device=rows.device)
        for part in rows.split(micro):
            inputs, targets = part[:, :-1].flatten(), part[:, 1:].flatten()
            goal = targets if self.teacher is None else self.teacher
            loss = self.loss(self.model, inputs, goal, window) * (len(part) / len(rows))
            loss.backward()
            total += loss.detach()
        self._average_gradients(total)
        factor = self.recipe.lr_factor(self.step)
        for optimizer, lr in zip(
            self.optimizers, (self.recipe.matrix_lr, self.recipe.embedding_lr), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(total)

    def _average_gradients(self, loss: Tensor) -> None:
        if self.world == 1:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients] + [loss.flatten()])
        dist.all_reduce(flat)
        flat /= self.world
        pieces = flat.split([g.numel() for g in gradients] + [1])
        for gradient, piece in zip(gradients, pieces, strict=False):
            gradient.copy_(piece.view_as(gradient))
        loss.copy_(pieces[-1].squeeze())

    def run(self, held_out: Tensor | None = None, until: int | None = None) -> None:
        """Train up to step `until` (default: all steps); log, evaluate and save regularly.

        The log also contains the loss of `held_out` [R, window + 1].
        """
        end = until or self.recipe.steps
        leader = self.rank == 0
        begin = time.monotonic() - self.seconds
        shown = leader and self.options.progress
        bar = tqdm(total=end, initial=self.step, disable=not shown, unit="step")
        while self.step < end:
            loss = self.train_step()
            self.seconds = time.monotonic() - begin
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if leader and held_out is not None and self.step % self.options.evaluate_every == 0:
                self._log({"step": self.step, "loss": loss, "held_out": self.evaluate(held_out)})
            if leader and (self.step % self.options.save_every == 0 or self.step == end):
                self.save()
        bar.close()

    @torch.no_grad()
    def evaluate(self, rows: Tensor) -> float:
        """Mean loss in nats per token of rows [R, window + 1]."""
        window = rows.shape[1] - 1
        losses = [
            text_loss(self.model, part[:, :-1].flatten(), part[:, 1:].flatten(), window)
            for part in rows.to(self.options.device).split(4)
        ]
        return float(torch.stack(losses).mean())

    def _log(self, record: dict[str, float]) -> None:
        with open(self.options.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    # --- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint of the current step."""
        notes = {"recipe": self.recipe.name, "step": str(self.step)}
        notes["seconds"] = f"{self.seconds:.0f}"
        self.options.folder.mkdir(parents=True, exist_ok=True)
        save_state(self.options.folder / CHECKPOINT, self._weights(), self.optimizers, notes)

    def resume(self) -> bool:
        """Continue from the checkpoint in the run's folder; False if there is none."""
        path = self.options.folder / CHECKPOINT
        if not path.exists():
            return False
        self.step, self.seconds = checkpoint_progress(path, self.recipe.name)
        load_state(path, self._weights(), self.optimizers, self.options.device)
        return True

    def _weights(self) -> dict[str, Tensor]:
        """Weights under their Hugging Face names."""
        return {k: tensor.target for k, tensor in self.model.checkpoint_tensors().items()}


def save_state(
    path: Path,
    weights: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    notes: dict[str, str],
) -> None:
    """Write weights and each optimizer's tensors, replacing the last checkpoint atomically."""
    tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer/{number}/{index}/{key}"] = torch.as_tensor(value)
    unfinished = path.with_name("unfinished.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, notes)
    os.replace(unfinished, path)


@torch.no_grad()
def load_state(
    path: Path,
    weights: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    device: str = "cpu",
) -> None:
    """Fill weights and optimizers from a checkpoint. Raises CheckpointError if it has others."""
    tensors = load_file(path, device=device)
    if not {f"model/{name}" for name in weights} <= tensors.keys():
        raise CheckpointError(f"{path} is of another model or version; begin in another folder.")
    for name, weight in weights.items():
        weight.copy_(tensors[f"model/{name}"])
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, which, index, key = name.split("/")
            states[int(which)].setdefault(int(index), {})[key] = tensor
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def checkpoint_progress(path: Path, recipe_name: str) -> tuple[int, float]:
    """Steps and seconds of training of a checkpoint, after checking that the recipe matches."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("recipe") != recipe_name:
        raise CheckpointError(
            f"{path} belongs to the recipe {metadata.get('recipe')!r}, not {recipe_name!r}; "
            "choose another folder with --out."
        )
    return int(metadata["step"]), float(metadata.get("seconds", 0))
