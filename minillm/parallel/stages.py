"""Pipeline parallelism: each stage has some of the layers (Huang et al., 2019; Narayanan et al.,
2019).

    stage 0   embedding, layers 0 .. 13        x -->|
    stage 1                                         |--> layers 14 .. 27, norm, logits --> tokens

A stage is a decoder with fewer layers, `FromPreviousStage` in place of the embedding, `ToNextStage`
in place of the last norm. One tensor crosses a boundary. A layer returns the residual stream and
its own output, and the norm of the next layer first rounds their sum; sending that sum, rounded
once, gives the bits of one stage.
"""

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.execution.flight import Flight
from minillm.execution.runner import Runner
from minillm.layers.linear import Linear
from minillm.layers.norm import RMSNorm
from minillm.models.decoder import Decoder
from minillm.parallel.pipes import Pipe
from minillm.parallel.place import Place
from minillm.parallel.split import Stage, stage_config
from minillm.scheduling.plan import StepPlan


class FromPreviousStage(nn.Module):
    """Receives from the previous stage, in place of the embedding."""

    def __init__(self, size: int, dtype: torch.dtype):
        super().__init__()
        self.size, self.dtype = size, dtype
        self.pipe = Pipe()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[N] -> [N, d]"""
        states = self.pipe.receive((len(input_ids), self.size), self.dtype)
        return states.to(input_ids.device)


class ToNextStage(RMSNorm):
    """Sends to the next stage, in place of the last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__("model.norm", config.hidden_size, config.rms_norm_eps)
        self.pipe = Pipe()

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, d], [N, d] -> their sum, twice"""
        total = x if residual is None else x + residual
        self.pipe.send(total)
        return total, total


def cut_model(model: Decoder, stage: Stage, whole: ModelConfig, dtype: torch.dtype) -> None:
    """Reduce a decoder without memory to one stage of the `whole` model."""
    config, held = model.config, stage.layers(whole)
    layers = list(model.layers)[held.start : held.stop]
    for place, layer in enumerate(layers):
        layer.attention.layer = place  # type: ignore[union-attr, assignment]
    model.layers = nn.ModuleList(layers)
    model.config = stage_config(config, held)
    if stage.is_last and model.lm_head is None:
        outputs = {"model.embed_tokens": model.embedding.out_features}
        with torch.device("meta"):
            model.lm_head = Linear("", config.hidden_size, outputs)
    if not stage.is_first:
        model.embedding = FromPreviousStage(config.hidden_size, dtype)  # type: ignore[assignment]
    if not stage.is_last:
        with torch.device("meta"):
            model.norm = ToNextStage(config)
        model.lm_head = nn.Module()  # type: ignore[assignment] # which cannot be called


def join_pipes(model: Decoder, place: Place) -> None:
    """Connect a stage's model to its pipes."""
    if isinstance(model.embedding, FromPreviousStage) and place.before is not None:
        model.embedding.pipe = place.before
    if isinstance(model.norm, ToNextStage) and place.after is not None:
        model.norm.pipe = place.after


class StageRunner(Runner):
    """The runner of a stage that is not the last: it does not sample, and learns the tokens from
    later plans."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Compute the stage's layers for one plan."""
        with torch.accelerator.device_index(self.device.index):
            for seq_id, tokens in plan.learned.items():
                if seq_id in self._rows:
                    self._rows[seq_id].token_ids += tokens
            self._update_rows(plan)
            self._move_blocks(plan)
            flight = Flight()
            self._passes(plan.rows, flight.result)
            return flight
