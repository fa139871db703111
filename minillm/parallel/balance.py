"""Expert placement by load: ranks count how often experts are chosen, and experts move (EPLB;
DeepSeek-AI, 2024, 3.4).

    plan, rebalance=3   loads of the last steps --gather--> the same sums on all ranks
                        place(loads) ---------------------> the same placement; a hash is compared
                        an expert of each rank --gather---> ranks keep those that they need

Only weights move. Routers choose experts by the ids of the checkpoint; a table maps ids to slots,
which the ranks share like experts that never move.
"""

import logging
from collections.abc import Iterator
from itertools import chain
from operator import ne
from statistics import fmean
from zlib import crc32

import torch
from torch import Tensor, nn

from minillm.errors import EngineDeadError
from minillm.layers.moe import Experts, MoE
from minillm.models.decoder import Decoder
from minillm.parallel.communicator import Communicator
from minillm.parallel.place import Place
from minillm.parallel.placement import Placement, place

logger = logging.getLogger(__name__)

PIECE = 2**22  # elements of an expert that are sent at once


class BalancedExperts(nn.Module):
    """A layer's experts, which may have copies on several ranks and move between ranks.

    Args:
        by_slot: computes the layer for slots [N, k] in place of expert ids; rank 0's come first.
        held: this rank's experts.
        placement: the current placement of all experts.
        communicator: of the ranks that have them.
        window_size: steps whose choices are counted.
        first_row: number of the first row of a batch, which selects among copies. Equal on ranks
            that have the same batch.
    """

    def __init__(
        self,
        by_slot: nn.Module,
        held: Experts,
        placement: Placement,
        communicator: Communicator,
        window_size: int,
        first_row: int = 0,
    ):
        super().__init__()
        self.by_slot, self.held, self.first_row = by_slot, held, first_row
        self.communicator, self.device = communicator, held.down.weight.device
        shape = window_size, len(placement.copies)
        self._window = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._num_steps = self.version = 0
        self.use(placement)

    def use(self, placement: Placement) -> None:
        """Make `placement` the current one."""
        size, most = len(placement.slots[0]), max(map(len, placement.copies))
        table = [
            [rank * size + slot for rank, slot in copy] + [-1] * (most - len(copy))
            for copy in placement.copies
        ]
        self.placement = placement
        self._table = torch.tensor(table, device=self.device)  # [E, most]
        self._counts = torch.tensor(list(map(len, placement.copies)), device=self.device)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d]"""
        self.count(ids)
        return self.by_slot(x, weights, self.slots(ids))

    def slots(self, ids: Tensor) -> Tensor:
        """Ids [N, k] -> slots [N, k]; the number of a row selects among an expert's copies."""
        rows = torch.arange(self.first_row, self.first_row + len(ids), device=ids.device)
        return self._table[ids, rows[:, None] % self._counts[ids]]

    def count(self, ids: Tensor) -> None:
        """Count the expert ids of a step."""
        step, chosen = self._window[self._num_steps % len(self._window)], ids.flatten()
        step.zero_().index_add_(0, chosen, torch.ones_like(chosen, dtype=step.dtype))
        self._num_steps += 1

    def loads(self) -> Tensor:
        """How often this rank's tokens chose each expert within the window: [E]"""
        return self._window.sum(0)

    def better(self, loads: list[int]) -> Placement:
        """The placement for these loads, or the current one where that is as balanced."""
        now = self.placement
        better = place(loads, len(now.slots), now.num_slots - len(loads))
        return better.settled(now) if better.balance(loads) > now.balance(loads) else now

    def move(self, placement: Placement) -> None:
        """Exchange weights until they lie as in `placement`; copies one matrix at a time."""
        for matrix in (self.held.gate_up, self.held.down):
            for tensor in (*matrix.parameters(recurse=False), *matrix.buffers(recurse=False)):
                rows = tensor.view(len(placement.slots[0]), -1)
                move(rows, self.placement, placement, self.communicator)
        self.use(placement)


def balance_experts(model: Decoder, placement: Placement, place: Place, window_size: int) -> None:
    """Make the experts of a rank's loaded and connected layers count their loads and move."""
    communicator, first_row = place.experts or place.communicator, place.copy
    for layer in list(model.modules()):
        if isinstance(layer, MoE):
            (held,) = (module for module in layer.experts.modules() if isinstance(module, Experts))
            parts = layer.experts, held, placement, communicator, window_size, first_row
            layer.experts = BalancedExperts(*parts)  # type: ignore[assignment]


def move(own: Tensor, now: Placement, to: Placement, communicator: Communicator) -> None:
    """Exchange rows of the ranks' tensors `own` [slots, n] from placement `now` to `to`. In each
    turn every rank sends one row that others need."""
    rank = communicator.rank
    pairs = zip(now.slots[rank], to.slots[rank], strict=True)
    come = [slot for slot, (old, new) in enumerate(pairs) if old != new]
    place_of = {to.slots[rank][slot]: place for place, slot in enumerate(come)}
    received = own.new_empty(len(come), own.shape[1])
    for turn in turns(now.sent(to)):
        row = own[turn[rank]]
        for start in range(0, len(row), PIECE):
            parts = communicator.gather(row[start : start + PIECE])
            for sender, slot in enumerate(turn):
                at = place_of.get(now.slots[sender][slot])
                if at is not None:
                    received[at, start : start + PIECE] = parts[sender]
    own[come] = received


def turns(sent: list[list[int]]) -> Iterator[list[int]]:
    """The slot that each rank sends, turn by turn; a rank that has sent all sends slot 0."""
    for turn in range(max(map(len, sent))):
        yield [tensor[turn] if turn < len(tensor) else 0 for tensor in sent]


@torch.inference_mode()
def rebalance(model: nn.Module, version: int) -> None:
    """Place the experts of a rank's layers by their loads, as placement number `version`. All ranks
    of a group do this before the same plan.

    Raises:
        EngineDeadError: the placements of the ranks differ.
    """
    layers = [module for module in model.modules() if isinstance(module, BalancedExperts)]
    if not layers:
        return
    communicator = layers[0].communicator
    own = torch.stack([moe.loads() for moe in layers])  # [L, E]
    loads = communicator.gather(own).sum(0).tolist()
    now = [moe.placement for moe in layers]
    better = [moe.better(load) for moe, load in zip(layers, loads, strict=True)]
    version_here, text = layers[0].version + 1, repr([now, better]).encode()
    told = communicator.gather(torch.tensor([version_here, crc32(text)])).tolist()
    check_placements(told, version)
    for layer, placement in zip(layers, better, strict=True):
        if placement != layer.placement:
            layer.move(placement)
        layer.version = version
    if communicator.rank == 0:
        report(now, better, loads)


def check_placements(told: list[list[int]], version: int) -> None:
    """EngineDeadError unless all ranks have the same placement and the driver's version."""
    for rank, answer in enumerate(told):
        if answer != [version, told[0][1]]:
            raise EngineDeadError(
                f"Rank {rank} has placed experts otherwise than rank 0 in placement {version}, so "
                "nothing that follows can be trusted; make a new engine, and report this."
            )


def report(now: list[Placement], better: list[Placement], loads: list[list[int]]) -> None:
    """Log how balanced these loads were, and how balanced they are in the new placements."""
    before, after = (fmean(map(Placement.balance, some, loads)) for some in (now, better))
    old, new = ([expert for one in some for expert in chain(*one.slots)] for some in (now, better))
    logger.info(
        "Experts are placed by load: mean over largest load of a rank %.2f before, %.2f now; %d of "
        "%d slots have another expert.",
        before,
        after,
        sum(map(ne, old, new)),
        len(old),
    )
