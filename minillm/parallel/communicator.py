"""What the ranks of a group say to each other: sums, gathers and exchanges, in rank order.

    rank 0   [ part 0 ] --+                        +--> part 0 + part 1 + ...  on every rank
    rank 1   [ part 1 ] --+-- exchange: all parts --+
    rank n-1 [ ...    ] --+                        +--> the same bits everywhere

A sum adds the parts as a balanced tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in float32, and
rounds once: so all ranks get the same bits, and a row gets the same bits whatever stands beside it.
A ring would give neither (issue B9 of the parallelism notes: libraries start each chunk at another
rank). Ranks that bring subtrees of one tree get its bits, however many they are (`fixed_sums`). A
kind of communicator is one method, `exchange`; some bring a faster `add_up`.
"""

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.errors import MinillmError

PATIENCE = 60.0  # seconds that a rank waits for the others


class CommunicationError(MinillmError):
    """Another rank has failed, has ended, or does not answer."""


class Traffic(NamedTuple):
    """What a rank has asked for: calls, and the bytes that it brought to them."""

    calls: int
    num_bytes: int


class Communicator:
    """One rank of a group of `size` ranks, all of which make the same calls in the same order."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.seconds = 0.0  # in calls, most of them waiting for others

    def sum(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks, in place and returned. Any shape and float dtype."""
        self._count("sum", part)
        start = perf_counter()
        self.add_up(part)
        self.seconds += perf_counter() - start
        return part

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, which have one shape: [..] -> [size, ..], in rank order."""
        self._count("gather", part)
        start = perf_counter()
        parts = self.exchange(part)
        self.seconds += perf_counter() - start
        return parts

    def all_to_all(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send each rank some rows, and receive those for this one.

        Args:
            rows: [M, w], those for rank 0 first.
            counts: int64 [size, size] on the host: how many rows each rank (row) sends to each
                (column); the same on all ranks.

        Returns:
            [R, w], those of rank 0 first.
        """
        others = len(rows) - int(counts[self.rank, self.rank])
        self._count("all_to_all", rows, others * rows[:0].element_size() * rows.shape[1])
        start = perf_counter()
        received = self.distribute(rows, counts)
        self.seconds += perf_counter() - start
        return received

    def add_up(self, part: Tensor) -> None:
        """What `sum` does to the part, uncounted."""
        part.copy_(tree_sum(self.exchange(part)))

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What `all_to_all` returns, uncounted. Here all ranks see all rows."""
        sent = counts.sum(1)
        padded = rows.new_zeros((int(sent.max()), rows.shape[1]))
        if not len(padded):
            return rows
        padded[: len(rows)] = rows
        ends = counts.cumsum(1)[:, self.rank].tolist()
        own = zip(self.exchange(padded), ends, counts[:, self.rank].tolist(), strict=True)
        return torch.cat([part[end - count : end] for part, end, count in own])

    def exchange(self, part: Tensor) -> Tensor:
        """What `gather` returns, uncounted."""
        raise NotImplementedError

    def abort(self) -> None:
        """This rank has failed: the calls in which others wait for it raise."""

    def close(self) -> None:
        """Give back what the group needs of the system. Closing twice is fine."""

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far, by the name of the call."""
        return {name: Traffic(calls, self._bytes[name]) for name, calls in self._calls.items()}

    def forget_traffic(self) -> None:
        """Count from 0."""
        self._calls.clear()
        self._bytes.clear()

    def stopped(self) -> CommunicationError:
        """Another rank has failed; its own error says why."""
        return CommunicationError(
            f"Rank {self.rank} of {self.size} stopped, because another rank has failed, has ended, "
            "or does not answer."
        )

    def waited(self, seconds: float, missing: Sequence[int]) -> CommunicationError:
        """Ranks did not arrive; `missing` says which, where that is known."""
        names = " and ".join(f"rank {each}" for each in missing) or "the other ranks"
        return CommunicationError(
            f"Rank {self.rank} of {self.size} waited {seconds:g} s for {names}."
        )

    def unequal(self, parts: Sequence[object]) -> CommunicationError:
        """Ranks have brought different parts to a call; `parts` says what each brought."""
        return CommunicationError(
            f"Rank {self.rank} of {self.size} found that the parts of the ranks differ: "
            f"{', '.join(map(str, parts))}."
        )

    def _count(self, name: str, part: Tensor, num_bytes: int | None = None) -> None:
        if not part.is_contiguous():  # gloo would add the wrong bytes, without an error
            raise ValueError(
                f"The communicator got a tensor of shape {list(part.shape)} that is not "
                "contiguous; give it a contiguous one."
            )
        self._calls[name] += 1
        self._bytes[name] += part.nbytes if num_bytes is None else num_bytes


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension in float32: neighbours are added, then their sums, until one
    is left; a last one without a neighbour waits for the next round."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    left = [each.to(wide) for each in parts]
    while len(left) > 1:
        pairs = [a + b for a, b in zip(left[::2], left[1::2], strict=False)]
        left = pairs + left[2 * len(pairs) :]
    return left[0]


class Alone(Communicator):
    """The only rank: nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def exchange(self, part: Tensor) -> Tensor:
        """[..] -> [1, ..]"""
        return torch.stack([part])
