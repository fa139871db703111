"""Expert parallelism: each rank has whole experts (Lepikhin et al., 2020, 3.1).

Tensor parallelism. All ranks have all tokens and route them alike. A rank computes what was routed
to its own experts, and the sum that tensor parallelism needs anyway adds the parts:

    rank 0   experts 0 .. 3    tokens routed to one of them --+
                                                              +-- the layer's sum --> x
    rank 1   experts 4 .. 7    tokens routed to one of them --+

Data parallelism. Copies have different tokens, whose rows are dispatched to the experts' ranks and
combined afterwards (DeepSeek-AI, 2024):

    copy 0   tokens a b c --+-- a, c --> experts 0 .. 3 --> parts --+--> a b c
                            |                                       |
    copy 1   tokens d e ----+-- a, b, d, e --> experts 4 .. 7 ------+--> d e

Each layer makes three exchanges: the numbers of rows, the rows, and the parts that come back. A
token is sent once to each rank that has some of its experts, with its expert ids and weights. All
copies step together; a copy without tokens takes part, because others need its experts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minillm.execution.flight import StepResult
from minillm.execution.runner import Runner
from minillm.layers.moe import Experts, MoE
from minillm.models.decoder import Decoder
from minillm.parallel.communicator import Communicator
from minillm.parallel.split import Split
from minillm.scheduling.plan import Row


def share_experts(experts: Experts, held: Sequence[int]) -> None:
    """Keep a rank's experts, whole and in this order, of a layer that has no memory yet."""
    for matrix in (experts.gate_up, experts.down):
        each = len(matrix.parts) // (matrix.copies or 1)  # gate and up, or down alone
        starts = [expert * each for expert in held]
        matrix.parts = tuple(part for at in starts for part in matrix.parts[at : at + each])
        matrix.copies = len(held)


class OwnExperts(nn.Module):
    """Computes what was routed to some of a layer's experts; rows of other experts stay 0."""

    def __init__(self, experts: Experts, held: range):
        super().__init__()
        self.experts, self.held = experts, held

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d], a part of a sum over ranks"""
        own = ids - self.held.start
        rows, choices = torch.where((own >= 0) & (own < len(self.held)))
        out = torch.zeros_like(x)
        if not len(rows):
            return out
        chosen = weights[rows, choices, None], own[rows, choices, None]
        return out.index_add(0, rows, self.experts(x[rows], *chosen))


class DispatchedExperts(nn.Module):
    """All experts of a layer, of which each copy has some, for the tokens of this copy."""

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
        return total.index_add_(0, tokens, parts.float()).to(x.dtype)  # in rank order


def packed(*columns: Tensor) -> Tensor:
    """Tensors [M, ..] as bytes, side by side: [M, b]"""
    views = [column.contiguous().view(torch.uint8) for column in columns]
    return torch.cat(views, 1)


def unpacked(rows: Tensor, *like: Tensor) -> Iterator[Tensor]:
    """The inverse of `packed`, with the widths and dtypes of `like`."""
    widths = [tensor.shape[1] * tensor.element_size() for tensor in like]
    for column, tensor in zip(rows.split(widths, 1), like, strict=True):
        yield column.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def dispatch_experts(model: Decoder, num_slots: int, communicator: Communicator) -> None:
    """Connect the loaded layers of one copy to the experts of all copies, in `num_slots` slots."""
    held = Split(communicator.rank, communicator.size).share(num_slots)
    model.all_layers = None  # tokens travel to other copies in the middle of a layer
    for layer in list(model.modules()):
        if isinstance(layer, MoE):
            own = OwnExperts(layer.experts, held)
            layer.experts = DispatchedExperts(own, communicator)  # type: ignore[assignment]


class LockstepRunner(Runner):
    """The runner of a copy that shares its experts: without rows of its own, a step still takes
    part in the exchanges of every layer."""

    def _passes(
        self, rows: Sequence[Row], result: StepResult
    ) -> list[tuple[Sequence[Row], Tensor]]:
        model = self.model
        if not rows and isinstance(model, Decoder):
            x = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
            for layer in model.modules():
                if isinstance(layer, MoE):
                    layer.experts(x, *layer.router(x))
        return super()._passes(rows, result)
