"""Expert placement by load: ranks count what tokens choose, and experts move (EPLB; DeepSeek-AI,
2024, 3.4).

    plan, rebalance=3   loads of the last steps --gather--> the same sums on all ranks
                        place(loads) ---------------------> the same placement; a hash is compared
                        an expert of each rank --gather---> ranks keep those that they need

Only weights move. A router chooses experts by the ids of the checkpoint, before and after, and a
table says which slot of which rank computes what a row chose.
"""

import logging
from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor, nn

from minillm.errors import EngineDeadError
from minillm.layers.moe import Experts
from minillm.parallel.communicator import Communicator
from minillm.parallel.experts import OwnExperts
from minillm.parallel.placement import Placement, place
from minillm.parallel.split import Split

logger = logging.getLogger(__name__)

PIECE = 2**22  # numbers of an expert that are sent at once


class BalancedExperts(OwnExperts):
    """A rank's slots for experts, which may lie on several ranks and change their places.

    Args:
        experts: as many as the rank has slots, as `placement` says.
        placement: where all experts lie now.
        communicator: of the ranks that have them.
        window_size: steps whose choices are counted.
    """

    def __init__(
        self, experts: Experts, placement: Placement, communicator: Communicator, window_size: int
    ):
        super().__init__(experts, range(0))
        self.communicator, self.version = communicator, 0
        self.num_redundant = sum(map(len, placement.slots)) - len(placement.copies)
        device = experts.down.values().device
        shape = window_size, len(placement.copies)
        self._window = torch.zeros(shape, dtype=torch.int32, device=device)
        self._num_steps = 0
        self.use(placement)

    def use(self, placement: Placement) -> None:
        """Send rows to where experts lie now."""
        rank, most = self.communicator.rank, max(map(len, placement.copies))
        table = [
            [slot if owner == rank else -1 for owner, slot in each] + [-1] * (most - len(each))
            for each in placement.copies
        ]
        self.placement = placement
        self._table = torch.tensor(table, device=self._window.device)  # [E, most]
        self._counts = torch.tensor(list(map(len, placement.copies)), device=self._window.device)

    def slots(self, ids: Tensor) -> Tensor:
        """[N, k] -> [N, k]. Of an expert with several copies each row takes one, by its number."""
        step = self._window[self._num_steps % len(self._window)]
        chosen = ids.flatten()
        step.zero_().index_add_(0, chosen, torch.ones_like(chosen, dtype=step.dtype))
        self._num_steps += 1
        rows = torch.arange(len(ids), device=ids.device)
        return self._table[ids, rows[:, None] % self._counts[ids]]

    def loads(self) -> Tensor:
        """How often this rank's tokens chose each expert in the last steps: [E]"""
        return self._window.sum(0)

    def better(self, loads: list[int]) -> Placement:
        """The placement for these loads, or the one of now where that is as even."""
        now = self.placement
        found = place(loads, len(now.slots), self.num_redundant)
        return found.settled(now) if found.balance(loads) > now.balance(loads) else now

    def move(self, placement: Placement) -> None:
        """Bring weights to where they are to lie; a matrix of one layer is held twice at most."""
        for matrix in (self.experts.gate_up, self.experts.down):
            for each in (*matrix.parameters(recurse=False), *matrix.buffers(recurse=False)):
                move(each.view(len(placement.slots[0]), -1), self.placement, placement,
                     self.communicator)  # fmt: skip
        self.use(placement)


def own_part(
    experts: Experts, placement: Placement, communicator: Communicator, window_size: int
) -> OwnExperts:
    """A rank's experts, which stay where they are if no steps are counted."""
    if window_size:
        return BalancedExperts(experts, placement, communicator, window_size)
    split = Split(communicator.rank, communicator.size)
    return OwnExperts(experts, split.share(len(placement.copies)))


def move(own: Tensor, now: Placement, to: Placement, communicator: Communicator) -> None:
    """Exchange rows of the ranks' tensors `own` [slots, n], as experts lie `now`, until they lie
    as in `to`. In each turn every rank sends one row that others need."""
    rank = communicator.rank
    pairs = zip(now.slots[rank], to.slots[rank], strict=True)
    come = [slot for slot, (old, new) in enumerate(pairs) if old != new]
    place_of = {to.slots[rank][slot]: place for place, slot in enumerate(come)}
    found = own.new_empty(len(come), own.shape[1])
    for turn in turns(now.sent(to)):
        row = own[turn[rank]]
        for start in range(0, len(row), PIECE):
            parts = communicator.gather(row[start : start + PIECE])
            for sender, slot in enumerate(turn):
                at = place_of.get(now.slots[sender][slot])
                if at is not None:
                    found[at, start : start + PIECE] = parts[sender]
    own[come] = found


def turns(sent: list[list[int]]) -> Iterator[list[int]]:
    """The slot that each rank sends, turn by turn; slot 0 of a rank that has no more to send."""
    for turn in range(max(map(len, sent))):
        yield [each[turn] if turn < len(each) else 0 for each in sent]


@torch.inference_mode()
def rebalance(model: nn.Module, version: int) -> None:
    """Place the experts of a rank's layers by their loads, as placement number `version`. All
    ranks of a stage do this before they compute the same plan.

    Raises:
        EngineDeadError: the ranks have not placed them alike.
    """
    layers = [each for each in model.modules() if isinstance(each, BalancedExperts)]
    if not layers:
        return
    communicator = layers[0].communicator
    own = torch.stack([each.loads() for each in layers])  # [L, E]
    loads = communicator.gather(own).sum(0).tolist()
    now = [each.placement for each in layers]
    found = [each.better(load) for each, load in zip(layers, loads, strict=True)]
    version_here, text = layers[0].version + 1, repr([now, found]).encode()
    told = communicator.gather(torch.tensor([version_here, crc32(text)])).tolist()
    check_placements(told, version)
    for layer, placement in zip(layers, found, strict=True):
        if placement != layer.placement:
            layer.move(placement)
        layer.version = version
    if communicator.rank == 0:
        report(now, found, loads)


def check_placements(told: list[list[int]], version: int) -> None:
    """EngineDeadError unless all ranks have placed experts alike, and as often as the driver
    says."""
    for rank, each in enumerate(told):
        if each != [version, told[0][1]]:
            raise EngineDeadError(
                f"Rank {rank} has placed experts otherwise than rank 0 in placement {version}, so "
                "nothing that follows can be trusted; make a new engine, and report this."
            )


def report(now: list[Placement], found: list[Placement], loads: list[list[int]]) -> None:
    """Log how even the ranks' loads were, and how even the same loads are from now on."""
    before, after = (
        sum(each.balance(load) for each, load in zip(some, loads, strict=True)) / len(loads)
        for some in (now, found)
    )
    pairs = [
        pair
        for old, new in zip(now, found, strict=True)
        for held in zip(old.slots, new.slots, strict=True)
        for pair in zip(*held, strict=True)
    ]
    logger.info(
        "Experts are placed by load: mean over largest load of a rank %.2f before, %.2f now; %d of "
        "%d slots have another expert.",
        before,
        after,
        sum(old != new for old, new in pairs),
        len(pairs),
    )
