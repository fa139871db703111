"""Ranks on GPUs: process groups of `torch.distributed` with NCCL, one GPU for each rank.

NCCL's all-reduce adds in an order of its own, so results differ from one rank's in the last bits;
in deterministic mode parts are gathered and added as everywhere else. NCCL's calls can be captured
in CUDA graphs. The backend is a parameter: with "gloo" the same classes run on CPUs, in tests.
"""

import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from minillm.errors import ConfigError, in_one_line
from minillm.parallel.communicator import CommunicationError, Communicator
from minillm.parallel.meeting import Address
from minillm.parallel.pipes import Pipe
from minillm.parallel.place import Place, Topology
from minillm.parallel.sockets import as_bytes


def backend_of(device: torch.device) -> str | None:
    """The backend of ranks on this device; None for those that communicate as on CPUs."""
    return "nccl" if device.type == "cuda" else None


def check_gpus(device: torch.device, ranks_here: int) -> None:
    """ConfigError if this node has fewer GPUs than ranks, or the device is one of them."""
    if device.index is not None:
        raise ConfigError(
            f"device is '{device}', and every rank needs a GPU of its own; give device='cuda', and "
            "choose the GPUs with the variable CUDA_VISIBLE_DEVICES."
        )
    count = torch.get_device_module("cuda").device_count()
    if ranks_here > count:
        raise ConfigError(
            f"{ranks_here} ranks on this node need {ranks_here} GPUs, and torch sees {count}; use "
            "fewer ranks, more nodes, or device='cpu'."
        )


def join_devices(plain: dict[str, Any]) -> Place:
    """The place of a rank, by the `group` of its `SetUp`; binds this process to a GPU."""
    topology, rank, device = Topology(**plain["topology"]), plain["rank"], plain["device"]
    if device != "cpu":
        number = int(os.environ.get("LOCAL_RANK", rank))
        check_gpus(torch.device(device), number + 1)
        torch.get_device_module(device).set_device(number)
    _, store = Address(*plain["store"]).open()
    options = {"rank": rank, "world_size": topology.num_ranks}
    patience = timedelta(seconds=plain["patience"])
    distributed.init_process_group(plain["backend"], store=store, timeout=patience, **options)
    every = dict.fromkeys(map(topology.group, range(topology.num_ranks)))
    groups = {ranks: distributed.new_group(list(ranks)) for ranks in every if len(ranks) > 1}

    def group(ranks: range) -> Communicator:
        made = GroupCommunicator(ranks.index(rank), groups[ranks], device, plain["ordered"])
        made.sum(torch.zeros(1, device=device))  # connects, and allocates NCCL's buffers
        made.forget_traffic()
        return made

    return topology.place(rank, group, lambda other: GroupPipe(other, device))


class GroupCommunicator(Communicator):
    """One rank of a process group.

    Args:
        rank: of this process in the group.
        group: of `torch.distributed`.
        device: of the tensors that the backend sends; others are copied.
        ordered: whether sums are those of other communicators in every bit.
    """

    def __init__(
        self, rank: int, group: distributed.ProcessGroup, device: str, ordered: bool = False
    ):
        super().__init__(rank, group.size())
        self._group, self._device, self._ordered = group, device, ordered

    def add_up(self, part: Tensor) -> None:
        if self._ordered:
            super().add_up(part)
        else:
            self._call(distributed.all_reduce, part)

    def exchange(self, part: Tensor) -> Tensor:
        own = part.to(self._device)
        parts = own.new_empty((self.size, *part.shape))
        if own.numel():
            # Its name in torch 2.13, and in older versions.
            old = distributed.all_gather_into_tensor
            gather = getattr(distributed, "all_gather_single", old)
            self._call(gather, as_bytes(parts), as_bytes(own))
        return parts.to(part.device)

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[M, w], [size, size] -> [R, w]; each row is sent to its destination only."""
        sent, expected = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        received = rows.new_empty((sum(expected), rows.shape[1]))
        self._call(distributed.all_to_all_single, received, rows, expected, sent)
        return received

    def close(self) -> None:
        """End this process's part of all groups. Idempotent."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments, group=self._group)
        except RuntimeError as error:
            raise CommunicationError(f"{self.stopped()} ({in_one_line(error)})") from None


class GroupPipe(Pipe):
    """One end of a link between two ranks. `other` is the rank at the other end."""

    def __init__(self, other: int, device: str):
        super().__init__()
        self._other, self._device = other, device
        self._sent: deque[tuple[Any, Tensor]] = deque()  # until it has arrived

    def send(self, x: Tensor) -> None:
        self._count(x)
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        self._sent.append((distributed.isend(copy, self._other), copy))
        while self._sent[0][0].is_completed() and len(self._sent) > 1:
            self._sent.popleft()

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=self._device)
        try:
            distributed.recv(x, self._other)
        except RuntimeError as error:
            raise CommunicationError(f"The stage before is gone: {in_one_line(error)}.") from None
        return x

    def abort(self) -> None:
        """The receiver notices that this process ends."""
