"""Fingerprints of nodes: whether two have the same software and the same checkpoint, of which only
the ends of its files are read."""

import socket
import sys
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version

from minillm.errors import CheckpointError, NodeError
from minillm.models.checkpoint import ModelSource, weight_files

PART = 1 << 20  # bytes that are read at each end of a file


def fingerprint(sources: Mapping[str, ModelSource], load_format: str = "auto") -> dict[str, str]:
    """The node's name and versions, and for each model short hashes of its configuration and of the
    sizes, beginnings and ends of its files. Random weights have the first only."""
    minillm, torch = sys.modules["minillm"].__version__, version("torch").split("+")[0]
    texts = {"versions": f"minillm {minillm}, torch {torch.rpartition('.')[0]}, {sys.byteorder}"}
    for what, source in sources.items():
        texts[what] = f"config {sha256(repr(source.config).encode()).hexdigest()[:12]}"
        if source.folder is None or load_format == "dummy":
            continue
        content = sha256()
        for path in sorted(weight_files(source)):
            with open(path, "rb") as file:
                size = path.stat().st_size
                first = file.read(PART)
                file.seek(max(size - PART, 0))
                content.update(repr((path.name, size)).encode() + first + file.read(PART))
        texts[what] += f" and weights {content.hexdigest()[:12]}"
    return texts | {"node": socket.gethostname()}


def check_versions(theirs: Mapping[str, str]) -> None:
    """NodeError where the driver's node has other versions."""
    mine = fingerprint({})
    if mine["versions"] != theirs["versions"]:
        raise NodeError(
            f"The nodes do not match: node {mine['node']} has {mine['versions']}, and the driver's "
            f"node {theirs['node']} {theirs['versions']}; install the same versions on all nodes."
        )


def check_models(
    theirs: Mapping[str, str], sources: Mapping[str, ModelSource], load_format: str
) -> None:
    """CheckpointError where a model of this node differs from that of the driver's node."""
    mine = fingerprint(sources, load_format)
    for what, source in sources.items():
        if mine[what] != theirs[what]:
            raise CheckpointError(
                f"The {what} {source.name} on node {mine['node']} is another than the driver's: "
                f"here {mine[what]}, on node {theirs['node']} {theirs[what]}; copy the same files "
                "to both."
            )
