"""Predicted times of communication between devices: all-reduce, all-gather, all-to-all, send.

An all-reduce of S bytes per device over n devices, on a link of B bytes/s, takes

    ring      a + 2 (n - 1) hop + 2 (n - 1)/n S/B        library: parts are sent around a ring,
    tree      a + 2 ceil(log2 n) hop + 2 S/B             or up and down a tree
    one-shot  k + (n - 1) S/b            one kernel that reads the memory of the other devices:
    two-shot  2 k + 2 (n - 1)/n S/b      all of it, or first one share and then the summed shares

with the library's latency a, the latency of a kernel's phase k and its bandwidth b. Small messages
are latency-bound, large ones bandwidth-bound. A kernel has less latency and the library more
bandwidth, so the fastest algorithm depends on S and n; predictions use the fastest one of the link.
The constants are fitted to published measurements, because datasheets give no latencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite, log2
from types import MappingProxyType
from typing import Literal

from minillm.errors import ConfigError, did_you_mean

Algorithm = Literal["ring", "tree", "one-shot", "two-shot"]


@dataclass(frozen=True)
class Direct:
    """A kernel that reads the memory of the other devices.

    Attributes:
        latency: seconds of a phase and its barrier, without the part per device.
        per_device: seconds that each of the n devices adds to a phase.
        bandwidth: bytes per second that a device receives.
    """

    latency: float
    per_device: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """The interconnect of devices.

    Attributes:
        latency: seconds of every library call.
        hop: additional seconds of each step from device to device.
        bandwidth: bytes per second of a device in one direction, for large messages (the "bus
            bandwidth" of collective benchmarks).
        algorithms: all-reduce algorithms of the library.
        direct: the kernel that reads other devices' memory; None if that is not possible.
        source: the origin of the constants.
    """

    name: str
    latency: float
    hop: float
    bandwidth: float
    source: str
    algorithms: tuple[Literal["ring", "tree"], ...] = ("ring",)
    direct: Direct | None = None

    def __post_init__(self) -> None:
        sane = all(isfinite(seconds) and seconds >= 0 for seconds in (self.latency, self.hop))
        if not sane or not (isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(
                f"Link {self.name!r} has latency {self.latency}, hop {self.hop} and bandwidth "
                f"{self.bandwidth}; times are at least 0 and the bandwidth is positive."
            )
        if not self.algorithms:
            raise ConfigError(f"Link {self.name!r} has no algorithm; give it 'ring' or 'tree'.")


# nvlink: The kernel is fitted by least squares of the logarithm to 12 measurements of SGLang's on
# H100s (sglang PR #2904: n = 2, 4, 8; 4 KB to 1 MB: 3.7 to 33.8 us), within 13 percent of each.
# The bandwidth is the lower end of NCCL's for large messages, 365 to 480 GB/s (nccl #1455). Latency
# and hop are fitted to NCCL's times for 0.5 to 16 MB on 4 and 8 GPUs (vllm PR #24532,
# Triton-distributed #57: 21 to 136 us); predictions for 8 GPUs and 4 MB or more are 16 to 23
# percent below the measurements. Within a node NCCL's trees are chains, so "tree" is left out.
# pcie: Measurements are 20 us at 8 KB and 52 us at 128 KB on four V100s (sglang-V100 PR #2), and
# 57 us at 8 KB on eight A800s (vllm #50576). The constants, 25 us and 25 GB/s (PCIe 4.0 x16 minus
# its overhead), are closer to the faster measurements.
# infiniband: Two nodes took 46 us (nccl #1244); a 400 Gb/s adapter reaches 46 to 48 GB/s
# (nccl-tests #290). One adapter per device.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink": Link(
            "nvlink",
            latency=11.5e-6,
            hop=1.3e-6,
            bandwidth=365e9,
            source="sglang PR #2904, vllm PR #24532, Triton-distributed #57, nccl #1455",
            direct=Direct(latency=3.4e-6, per_device=0.15e-6, bandwidth=68e9),
        ),
        "pcie": Link(
            "pcie",
            latency=25e-6,
            hop=0.0,
            bandwidth=25e9,
            source="sglang-V100 PR #2, vllm #50576; PCIe 4.0 x16",
        ),
        "infiniband": Link(
            "infiniband",
            latency=46e-6,
            hop=0.0,
            bandwidth=46e9,
            source="nccl #1244, nccl-tests #290; 400 Gb/s for each device",
            algorithms=("ring", "tree"),
        ),
    }
)


def find_link(name: str) -> Link:
    """The link called `name`; raises ConfigError with the nearest known name."""
    key = name.strip().lower()
    if key not in LINKS:
        raise ConfigError(
            f"There is no link {name[:40]!r}.{did_you_mean(key, LINKS)} "
            f"Known are {', '.join(LINKS)}."
        )
    return LINKS[key]


@dataclass(frozen=True)
class Collective:
    """The algorithm of a collective and its time."""

    algorithm: Algorithm
    seconds: float


def all_reduce_seconds(link: Link, size: int, num_bytes: float, algorithm: Algorithm) -> float:
    """Seconds of an all-reduce of `num_bytes` per device over `size` devices, by one algorithm."""
    _check(size, num_bytes)
    if size == 1:
        return 0.0
    twice = 2 * (size - 1) / size  # share of the bytes that a device sends: reduce-scatter, gather
    if algorithm == "ring":
        return link.latency + 2 * (size - 1) * link.hop + twice * num_bytes / link.bandwidth
    if algorithm == "tree":
        return link.latency + 2 * ceil(log2(size)) * link.hop + 2 * num_bytes / link.bandwidth
    if link.direct is None:
        raise ConfigError(
            f"Devices on {link.name} have no kernel that reads other devices' memory, so "
            f"{algorithm} is not possible; use {' or '.join(link.algorithms)}."
        )
    phase = link.direct.latency + size * link.direct.per_device
    if algorithm == "one-shot":
        return phase + (size - 1) * num_bytes / link.direct.bandwidth
    return 2 * phase + twice * num_bytes / link.direct.bandwidth


def all_reduce(link: Link, size: int, num_bytes: float) -> Collective:
    """The fastest all-reduce of `num_bytes` per device over `size` devices."""
    offered: list[Algorithm] = [*link.algorithms]
    if link.direct is not None:
        offered += ["one-shot", "two-shot"]
    times = {way: all_reduce_seconds(link, size, num_bytes, way) for way in offered}
    fastest = min(times, key=times.__getitem__)
    return Collective(fastest, times[fastest])


def all_gather_seconds(link: Link, size: int, num_bytes: float) -> float:
    """Seconds of an all-gather of `num_bytes` per device over `size` devices."""
    return _exchange_seconds(link, size, (size - 1) * num_bytes)


def all_to_all_seconds(link: Link, size: int, num_bytes: float) -> float:
    """Seconds of an all-to-all in which every device sends `num_bytes` in total to the others."""
    return _exchange_seconds(link, size, num_bytes)


def _exchange_seconds(link: Link, size: int, received: float) -> float:
    """Seconds of one phase in which each device receives so many bytes, by library or kernel."""
    _check(size, received)
    if size == 1:
        return 0.0
    times = [link.latency + (size - 1) * link.hop + received / link.bandwidth]
    if link.direct is not None:
        phase = link.direct.latency + size * link.direct.per_device
        times.append(phase + received / link.direct.bandwidth)
    return min(times)


def send_seconds(link: Link, num_bytes: float) -> float:
    """Seconds to send `num_bytes` from one device to another."""
    _check(2, num_bytes)
    return link.latency + link.hop + num_bytes / link.bandwidth


def _check(size: int, num_bytes: float) -> None:
    if size < 1 or not num_bytes >= 0:
        raise ConfigError(
            f"A collective has {size} devices and {num_bytes} bytes; it needs at least 1 device "
            "and at least 0 bytes."
        )
