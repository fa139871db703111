"""Expert parallelism of copies that have different tokens: rows go to their experts, and come back
(Lepikhin et al., 2020; DeepSeek-AI, 2024: attention with data parallelism).

    copy 0   tokens a b c --+-- a, c --> experts 0 .. 3 --> parts --+--> a b c
                            |                                       |
    copy 1   tokens d e ----+-- a, b, d, e --> experts 4 .. 7 ------+--> d e

Each layer makes three exchanges: how many rows go where, the rows, and the parts that come back. A
token is sent once to each rank that has some of its experts, with its choices and their weights.
The copies compute their steps together, and one without tokens still takes part in all exchanges,
since others may need its experts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minillm.execution.flight import StepResult
from minillm.execution.runner import Runner
from minillm.layers.moe import MoE
from minillm.models.decoder import Decoder
from minillm.parallel.communicator import Communicator
from minillm.parallel.experts import OwnExperts
from minillm.parallel.split import Split
from minillm.scheduling.plan import Row


class DispatchedExperts(nn.Module):
    """A layer's experts, of which each rank has some, for the tokens of this one."""

    def __init__(self, own: OwnExperts, communicator: Communicator):
        super().__init__()
        self.own, self.communicator = own, communicator

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d]"""
        group = self.communicator
        wanted = torch.zeros(len(x), group.size, dtype=torch.bool, device=x.device)
        wanted.scatter_(1, ids // len(self.own.held), True)
        counts = group.gather(wanted.sum(0)).cpu()  # [from, to]
        tokens = wanted.T.nonzero()[:, 1]  # those for rank 0 first
        rows = group.all_to_all(packed(x[tokens], weights[tokens], ids[tokens]), counts)
        parts = self.own(*unpacked(rows, x, weights, ids))
        parts = group.all_to_all(parts.contiguous(), counts.T.contiguous())
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add_(0, tokens, parts.float()).to(x.dtype)  # in the order of ranks


def packed(*columns: Tensor) -> Tensor:
    """Several of [M, ..] as bytes, side by side: [M, b]"""
    views = [each.contiguous().view(torch.uint8) for each in columns]
    return torch.cat(views, 1)


def unpacked(rows: Tensor, *like: Tensor) -> Iterator[Tensor]:
    """What `packed` put together, with the width and dtype of these."""
    widths = [each.shape[1] * each.element_size() for each in like]
    for column, each in zip(rows.split(widths, 1), like, strict=True):
        yield column.clone(memory_format=torch.contiguous_format).view(each.dtype)


def dispatch_experts(model: Decoder, num_slots: int, communicator: Communicator) -> None:
    """Let the loaded layers of one of several copies compute with the experts in the slots of
    all."""
    held = Split(communicator.rank, communicator.size).share(num_slots)
    for layer in list(model.modules()):
        if isinstance(layer, MoE):
            own = OwnExperts(layer.experts, held)
            layer.experts = DispatchedExperts(own, communicator)  # type: ignore[assignment]


class LockstepRunner(Runner):
    """The runner of a copy that shares its experts: a step without rows computes other copies'."""

    def _passes(
        self, rows: Sequence[Row], result: StepResult
    ) -> list[tuple[Sequence[Row], Tensor]]:
        if not rows and isinstance(self.model, Decoder):
            serve_others(self.model)
        return super()._passes(rows, result)


def serve_others(model: Decoder) -> None:
    """Take part in the exchanges of a pass, without a token."""
    x = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.experts(x, *layer.router(x))
