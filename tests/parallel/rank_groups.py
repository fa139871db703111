"""Communicators of every kind as threads of this process, and what their sums must be."""

import itertools
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minillm.parallel.communicator import Communicator, ThreadGroup
from minillm.parallel.shared_memory import SharedGroup, why_not
from minillm.parallel.sockets import SocketCommunicator, as_bytes

KINDS = ("threads", "shared", "sockets")
ROOM = 8192  # bytes of shared memory for a part
LONG = 600.0  # seconds: a test that waits so long hangs
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COUNTS = (0, 1, 7, 1025, 2048, 2049, 9001)  # a piece is 2,048 float32


def on_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls at the same time, or their errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(each) for each in calls]
        return [each.exception() or each.result() for each in futures]


def on_ranks(size: int, call: Callable[[Communicator], Any]) -> list[Any]:
    """What each of so many threads returns, given its communicator."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, ThreadGroup(size, patience=10).communicators()))


def ranks(kind: str, size: int, patience: float = LONG) -> list[Communicator]:
    """The ranks of a group."""
    if kind == "threads":
        return ThreadGroup(size, patience).communicators()
    if kind == "shared":
        if reason := why_not():
            pytest.skip(reason)
        group = SharedGroup(size, ROOM)
        found = group.communicators(patience)
        group.close()
        return found
    return mesh(size, patience)


def mesh(size: int, patience: float) -> list[Communicator]:
    """Ranks with a connection between each two."""
    ends: list[list[Any]] = [[None] * size for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        ends[low][high], ends[high][low] = socket.socketpair()
    return [SocketCommunicator(rank, each, patience) for rank, each in enumerate(ends)]


def call(communicators: Sequence[Communicator], name: str, parts: Sequence[Tensor]) -> list[Any]:
    """What all ranks get from a call; a sum's part is copied before it is overwritten."""
    pairs = list(zip(communicators, parts, strict=True))
    return on_all([lambda c=c, part=part: getattr(c, name)(part.clone()) for c, part in pairs])


def parts_of(size: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Numbers of many magnitudes, some of which cancel: another order gives other sums."""
    found = []
    for rank in range(size):
        generator = np.random.default_rng([seed, rank])
        values = generator.standard_normal(shape) * 10.0 ** generator.integers(-5, 4, shape)
        found.append(torch.as_tensor(values, dtype=torch.float64).to(dtype))
    found[-1][..., ::3] = -found[0][..., ::3]
    for each in found:
        each[..., :1] = -0.0  # the sum of which is -0.0
    return found


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Added as a balanced tree by numpy, rounded once."""
    wide = np.float64 if parts[0].dtype == torch.float64 else np.float32
    left = [each.double().numpy().astype(wide) for each in parts]
    while len(left) > 1:
        pairs = [left[i] + left[i + 1] for i in range(0, len(left) - 1, 2)]
        left = pairs + left[2 * len(pairs) :]
    return torch.as_tensor(left[0]).to(parts[0].dtype)


def same_bits(got: Any, wanted: Tensor) -> bool:
    """Whether a result is this one, in every bit."""
    if isinstance(got, Exception):
        raise AssertionError("a call failed") from got
    same = got.dtype == wanted.dtype and got.shape == wanted.shape
    return same and torch.equal(as_bytes(got), as_bytes(wanted))
