"""Fingerprints of checkpoints: whether two nodes have the same one, without reading all of it."""

import json
import socket
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from minillm.errors import CheckpointError
from minillm.models.checkpoint import ModelSource, weight_files

PAGE = 4096  # bytes that are read at each end of a file
MOST_HEADER = 100 << 20  # bytes, which is also safetensors' limit


def fingerprint(source: ModelSource, load_format: str = "auto") -> dict[str, str]:
    """Short hashes: of the configuration; of the tensors' names, shapes and dtypes; of the sizes,
    beginnings and ends of all files. Random weights have the first only."""
    found = {"config": short(repr(source.config).encode())}
    if source.folder is None or load_format == "dummy":
        return found
    headers: dict[str, Any] = {}
    ends = sha256()
    files = sorted(weight_files(source))
    for path in files:
        with open(path, "rb") as file:
            size = path.stat().st_size
            first = file.read(PAGE)
            file.seek(max(size - PAGE, 0))
            ends.update(repr((size, first, file.read(PAGE))).encode())
            headers |= header(path)
    tensors = json.dumps(headers, sort_keys=True).encode()
    return found | {
        "tensors": f"{len(headers)} of {short(tensors)}",
        "content": f"{len(files)} files of {ends.hexdigest()[:12]}",
    }


def header(path: Path) -> dict[str, Any]:
    """Names, dtypes, shapes and offsets of a file's tensors. A damaged header, which the loader
    reports, is hashed."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        data = file.read(min(size, MOST_HEADER))
    try:
        return {name: each for name, each in json.loads(data).items() if name != "__metadata__"}
    except (ValueError, AttributeError):
        return {path.name: short(data)}


def short(data: bytes) -> str:
    """The first 48 bits of a hash."""
    return sha256(data).hexdigest()[:12]


def check_fingerprints(
    theirs: Mapping[str, Any], sources: Mapping[str, ModelSource], load_format: str
) -> None:
    """CheckpointError where a model of this node differs from that of the driver's node."""
    for what, source in sources.items():
        mine, their = fingerprint(source, load_format), theirs[what]
        names = [name for name in their | mine if their.get(name) != mine.get(name)]
        if names:
            here, there = (
                " and ".join(f"{name} {each.get(name, 'missing')}" for name in names)
                for each in (mine, their)
            )
            raise CheckpointError(
                f"The {what} {source.name} on node {socket.gethostname()} is another than the "
                f"driver's: here {here}, on node {theirs['node']} {there}; copy the same files to "
                "both."
            )
