"""Fingerprints of checkpoints: whether two nodes have the same one, without reading all of it."""

import json
import socket
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


def check_fingerprint(
    theirs: dict[str, str], mine: dict[str, str], node: str, where: str, what: str = "model"
) -> None:
    """CheckpointError where this node's copy differs from that of the driver's node."""
    names = [name for name in theirs | mine if theirs.get(name) != mine.get(name)]
    if names:
        here = " and ".join(f"{name} {mine.get(name, 'missing')}" for name in names)
        there = " and ".join(f"{name} {theirs.get(name, 'missing')}" for name in names)
        raise CheckpointError(
            f"The {what} at {where} on node {socket.gethostname()} is another than the driver's: "
            f"here {here}, on node {node} {there}; copy the same files to both."
        )
