"""The target of a plan: named hardware, an amount of memory, or this machine."""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError, did_you_mean
from minillm.lab.ceilings import measure
from minillm.lab.hardware import DATASHEET, Hardware

UNITS: Mapping[str, float] = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
         "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
MOST_BYTES = 2**63  # larger sizes cannot be addressed


@dataclass(frozen=True)
class Place:
    """The target of a plan: its memory, and its hardware rates if they are known."""

    what: str
    memory_bytes: int
    hardware: Hardware | None
    is_cpu: bool = False

    @property
    def known(self) -> Hardware:
        """The rates of the hardware. Raises ConfigError if they are not known."""
        if self.hardware is None:
            raise ConfigError(
                "Speed needs the rates of hardware; add --hardware NAME, or leave out --memory."
            )
        return self.hardware


def find_place(args: Namespace, terminal: Terminal) -> Place:
    """The hardware that --hardware names, else this machine; --memory overrides its memory."""
    memory = None if args.memory is None else parse_size(args.memory)
    if args.hardware is not None:
        hardware = find_hardware(args.hardware)
        held = hardware.memory_bytes if memory is None else memory
        return Place(hardware.name, held, hardware)
    if memory is not None:
        return Place(f"{args.memory} of memory", memory, None)
    from minillm.engine.setup import choose_device, free_memory

    device = choose_device("auto")
    with terminal.progress("Measuring this machine"):
        hardware = measure(device=str(device))
    return Place(
        f"this machine ({hardware.name}), as much as is free now",
        free_memory(device),
        hardware,
        device.type == "cpu",
    )


def find_hardware(name: str) -> Hardware:
    """Look up a datasheet entry by its name or a unique prefix."""
    key = name.lower()
    matches = [key] if key in DATASHEET else [known for known in DATASHEET if known.startswith(key)]
    if len(matches) == 1:
        return DATASHEET[matches[0]]
    what = f"could be {' or '.join(matches)}." if matches else "is not in the datasheet."
    raise ConfigError(
        f"--hardware {name!r} {what}{'' if matches else did_you_mean(key, DATASHEET)} "
        f"Known hardware: {', '.join(DATASHEET)}."
    )


def parse_size(text: str) -> int:
    """Parse a size such as ``24GiB``, ``24GB``, ``512MiB``, or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?i?)b?\s*", text.lower())
    num_bytes = float(match[1]) * UNITS[match[2]] if match and match[2] in UNITS else 0.0
    if not 1 <= num_bytes < MOST_BYTES:
        raise ConfigError(f"--memory is {text[:80]!r}; it must be a size such as 24GiB or 24GB.")
    return int(num_bytes)
