"""The training corpus of the embedded models: installed Python source.

Nothing is downloaded. The manifest lists files of the standard library and of a few permissively
licensed packages of `constraints.txt`, with a sha256 each; training stops if a file differs.
Held-out text is whole top-level modules of the standard library and one whole package
(`assets/MODEL_CARD.md` says how files were chosen).
"""

import gzip
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from minillm.errors import CheckpointError, ConfigError

MANIFEST = Path(__file__).parents[2] / "assets" / "corpus.json.gz"


@dataclass(frozen=True)
class CorpusFile:
    """One file of the corpus. `path` is relative to the folder its source is installed in."""

    source: str
    path: str
    sha256: str
    held_out: bool


@dataclass(frozen=True)
class Manifest:
    """The corpus: the version of the interpreter, and every file with its hash."""

    python: str
    files: tuple[CorpusFile, ...]

    def select(self, *, held_out: bool, stdlib: bool | None = None) -> list[CorpusFile]:
        """Files of one split; `stdlib` selects the standard library (True) or packages (False)."""
        return [
            file
            for file in self.files
            if file.held_out == held_out and stdlib in (None, file.source == "stdlib")
        ]


def install_root(source: str) -> Path:
    """Folder on this machine to which the paths of `source` are relative."""
    if source == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    try:
        return Path(str(metadata.distribution(source).locate_file("")))
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"The corpus needs the package {source!r}, which is not installed; "
            f"install it with `pip install -c constraints.txt {source}`."
        ) from error


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Read the manifest of the package."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    files = [
        CorpusFile(name, file, sha256, split == "held_out")
        for name, package in content["packages"].items()
        for split in ("train", "held_out")
        for file, sha256 in package[split].items()
    ]
    files.sort(key=lambda file: (file.source, file.path))
    return Manifest(content["python"], tuple(files))


def read(file: CorpusFile) -> bytes:
    """Bytes of one file, after checking them against the manifest."""
    path = install_root(file.source) / file.path
    advice = "install the versions that `minillm/assets/MODEL_CARD.md` lists"
    if not path.is_file():
        raise CheckpointError(f"{file.source}: {file.path} is not installed; {advice}.")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CheckpointError(
            f"{file.source}: {file.path} differs from the corpus manifest (sha256); {advice}."
        )
    return data


def verify(manifest: Manifest) -> int:
    """Check every file of the corpus and return the total size in bytes."""
    return sum(len(read(file)) for file in manifest.files)
