"""Collective calls of a group of ranks: sum, gather and all-to-all, with results in rank order.

    rank 0   [ part 0 ] --+                        +--> part 0 + part 1 + ...  on every rank
    rank 1   [ part 1 ] --+-- exchange: all parts --+
    rank n-1 [ ...    ] --+                        +--> the same bits on every rank

A sum adds the parts as a balanced tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in float32 and
rounds once. All ranks get the same bits, and the bits of a row do not depend on the rest of the
batch; a ring all-reduce guarantees neither, because it starts each chunk at another rank. Ranks
whose parts are subtrees of one tree get its bits for any number of ranks (`models/fixed_sums.py`).

A transport implements `exchange`; `add_up` and `distribute` may be overridden with faster versions.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Barrier, BrokenBarrierError
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm.errors import MinillmError

PATIENCE = 60.0  # seconds that a call waits for the other ranks


class CommunicationError(MinillmError):
    """Another rank has failed, has ended, or does not answer."""


class Traffic(NamedTuple):
    """Calls of one rank, and the bytes that it contributed to them."""

    calls: int
    num_bytes: int


class Communicator(ABC):
    """One rank of a group of `size` ranks, all of which make the same calls in the same order."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.seconds = 0.0  # spent in calls, mostly waiting for other ranks

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce, in place: returns `part`, of any shape and float dtype."""
        self._count("sum", part, part.nbytes)
        self._timed(self.add_up, part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """All-gather of parts of equal shape: [..] -> [size, ..], in rank order."""
        self._count("gather", part, part.nbytes)
        found: Tensor = self._timed(self.exchange, part)
        return found

    def all_to_all(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send different rows to each rank, and receive this rank's rows.

        Args:
            rows: [M, w], those for rank 0 first.
            counts: int64 [size, size] on the host, equal on all ranks: `counts[i, j]` rows go from
                rank i to rank j.

        Returns:
            [R, w], those of rank 0 first.
        """
        others = len(rows) - int(counts[self.rank, self.rank])
        self._count("all_to_all", rows, others * rows.element_size() * rows.shape[1])
        found: Tensor = self._timed(self.distribute, rows, counts)
        return found

    def add_up(self, part: Tensor) -> None:
        """The transport of `sum`, in place."""
        part.copy_(tree_sum(self.exchange(part)))

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The transport of `all_to_all`; this default sends all rows to all ranks."""
        padded = rows.new_zeros((int(counts.sum(1).max()), rows.shape[1]))
        if not len(padded):
            return rows
        padded[: len(rows)] = rows
        ends = counts.cumsum(1)[:, self.rank].tolist()
        own = zip(self.exchange(padded), ends, counts[:, self.rank].tolist(), strict=True)
        return torch.cat([part[end - count : end] for part, end, count in own])

    @abstractmethod
    def exchange(self, part: Tensor) -> Tensor:
        """The transport of `gather`: [..] -> [size, ..], any dtype."""

    def abort(self) -> None:  # noqa: B027 (optional: a group of one rank has nothing to abort)
        """Make pending and later calls of the other ranks raise, after a failure of this rank."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release system resources. Idempotent."""

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far, by the name of the call."""
        return {name: Traffic(calls, self._bytes[name]) for name, calls in self._calls.items()}

    def forget_traffic(self) -> None:
        """Reset the counters of `traffic`."""
        self._calls.clear()
        self._bytes.clear()

    def stopped(self) -> CommunicationError:
        """The error for a failure of another rank, which reports the cause itself."""
        return CommunicationError(
            f"Rank {self.rank} of {self.size} stopped, because another rank has failed, has ended, "
            "or does not answer."
        )

    def waited(self, seconds: float, missing: Sequence[int]) -> CommunicationError:
        """The error for a timeout; `missing` lists the absent ranks, where known."""
        names = " and ".join(f"rank {rank}" for rank in missing) or "the other ranks"
        return CommunicationError(
            f"Rank {self.rank} of {self.size} waited {seconds:g} s for {names}."
        )

    def unequal(self, parts: Sequence[object]) -> CommunicationError:
        """The error for calls that differ between ranks; `parts` describes each rank's call."""
        return CommunicationError(
            f"Rank {self.rank} of {self.size} found that the parts of the ranks differ: "
            f"{', '.join(map(str, parts))}."
        )

    def _count(self, name: str, part: Tensor, num_bytes: int) -> None:
        if not part.is_contiguous():  # transports send the memory as it is
            raise ValueError(
                f"The communicator got a tensor of shape {list(part.shape)} that is not "
                "contiguous; give it a contiguous one."
            )
        self._calls[name] += 1
        self._bytes[name] += num_bytes

    def _timed(self, transport: Callable[..., Any], *given: Tensor) -> Any:
        start = perf_counter()
        result = transport(*given)
        self.seconds += perf_counter() - start
        return result


def tree_sum(parts: Tensor) -> Tensor:
    """Sum over the first dimension in float32 (or wider), as a balanced tree: neighbours are added
    in each round; an odd last one moves to the next round."""
    left = list(parts.to(torch.promote_types(parts.dtype, torch.float32)))
    while len(left) > 1:
        pairs = [a + b for a, b in zip(left[::2], left[1::2], strict=False)]
        left = pairs + left[2 * len(pairs) :]
    return left[0]


class Alone(Communicator):
    """A group of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def exchange(self, part: Tensor) -> Tensor:
        return torch.stack([part])


class ThreadGroup:
    """A group whose ranks are threads of this process: one slot per rank, and a barrier."""

    def __init__(self, size: int, patience: float = PATIENCE):
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = Barrier(size, timeout=patience)

    def communicators(self) -> list["ThreadCommunicator"]:
        """One for each thread."""
        return [ThreadCommunicator(rank, self) for rank in range(len(self.parts))]


class ThreadCommunicator(Communicator):
    """One rank of a `ThreadGroup`."""

    def __init__(self, rank: int, group: ThreadGroup):
        super().__init__(rank, len(group.parts))
        self._group = group

    def exchange(self, part: Tensor) -> Tensor:
        group = self._group
        group.parts[self.rank] = part
        try:
            group.barrier.wait()
            parts = torch.stack([tensor for tensor in group.parts if tensor is not None])
            group.barrier.wait()  # all ranks have read the parts before one overwrites its own
        except BrokenBarrierError:
            raise self.stopped() from None
        return parts

    def abort(self) -> None:
        self._group.barrier.abort()
