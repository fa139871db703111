"""The training corpus of the embedded models: installed Python source.

Nothing is downloaded. The standard library of the running interpreter and a few permissively
licensed packages of `constraints.txt` are filtered, de-duplicated and listed in a manifest with a
sha256 per file; training stops if a file differs from it. Held-out text consists of whole top-level
modules of the standard library, selected by a hash of their name, and one whole package. Training
files that copy lines of held-out text are excluded.
"""

import gzip
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from minillm.errors import CheckpointError, ConfigError

MANIFEST = Path(__file__).parents[2] / "assets" / "corpus.json.gz"
HELD_OUT_MODULUS = 14  # a stdlib module is held out when sha256(name) % 14 == 0: 5 % of the bytes
HELD_OUT_PACKAGES = ("jinja2",)
# Excluded: tests, which some distributions of Python do not install; vendored code, tables and
# generated files, from which a model learns little about Python.
SKIPPED_FOLDERS = frozenset(
    [
        *("__pycache__", "site-packages", "test", "tests", "testing", "_testing", "idle_test"),
        *("_vendor", "_vendored", "vendored", "pydoc_data", "encodings", "__phello__"),
        *("serialized_patterns", "rubi"),
    ]
)
SKIPPED_FILES = ("_sysconfigdata", "version.py", "_version.py")
MIN_BYTES, MAX_BYTES = 400, 250_000


@dataclass(frozen=True)
class Source:
    """One installed source of text; `budget` is the maximum number of bytes (0: all)."""

    name: str
    licence: str
    roots: tuple[str, ...]
    budget: int = 0


SOURCES = (
    Source("stdlib", "PSF-2.0", ("",)),
    Source("jinja2", "BSD-3-Clause", ("jinja2",)),
    Source("torch", "BSD-3-Clause", ("torch",), 20_000_000),
    Source("sympy", "BSD-3-Clause", ("sympy",), 6_000_000),
    Source("numpy", "BSD-3-Clause", ("numpy",), 5_000_000),
    Source("scipy", "BSD-3-Clause", ("scipy",), 6_000_000),
    Source("networkx", "BSD-3-Clause", ("networkx",), 4_000_000),
    Source("mpmath", "BSD-3-Clause", ("mpmath",)),
    Source("transformers", "Apache-2.0", ("transformers",), 10_000_000),
    Source("huggingface_hub", "Apache-2.0", ("huggingface_hub",)),
    Source("setuptools", "MIT", ("setuptools", "pkg_resources")),
    Source("mypy", "MIT", ("mypy",)),
    Source("pytest", "MIT", ("_pytest",)),
    Source("pydantic", "MIT", ("pydantic",)),
    Source("rich", "MIT", ("rich",)),
    Source("fsspec", "BSD-3-Clause", ("fsspec",)),
    Source("anyio", "MIT", ("anyio",)),
    Source("click", "BSD-3-Clause", ("click",)),
    Source("typer", "MIT", ("typer",)),
    Source("filelock", "MIT", ("filelock",)),
    Source("packaging", "Apache-2.0 OR BSD-2-Clause", ("packaging",)),
    Source("markdown-it-py", "MIT", ("markdown_it",)),
    Source("PyYAML", "MIT", ("yaml",)),
    Source("sortedcontainers", "Apache-2.0", ("sortedcontainers",)),
    Source("execnet", "MIT", ("execnet",)),
    Source("h11", "MIT", ("h11",)),
    Source("httpx2", "BSD-3-Clause", ("httpx2",)),
    Source("httpcore2", "BSD-3-Clause", ("httpcore2",)),
    Source("Pygments", "BSD-2-Clause", ("pygments",), 1_000_000),
)


@dataclass(frozen=True)
class CorpusFile:
    """One file of the corpus. `path` is relative to the folder its source is installed in."""

    source: str
    path: str
    sha256: str
    held_out: bool


@dataclass(frozen=True)
class Manifest:
    """The corpus: versions of the interpreter and the packages, and every file with its hash."""

    python: str
    versions: dict[str, str]
    licences: dict[str, str]
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


def is_held_out(source: str, path: str) -> bool:
    """Whether `path` is held out from training."""
    if source != "stdlib":
        return source in HELD_OUT_PACKAGES
    module = path.split("/")[0]
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def is_prose_and_code(data: bytes) -> bool:
    """Reject tables, generated code and other text that was not written by people."""
    if not MIN_BYTES <= len(data) <= MAX_BYTES:
        return False
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    digits = sum(character.isdigit() for character in text)
    lines = text.splitlines()
    return (
        digits < 0.12 * len(text)
        and len(data) - len(text) < 0.02 * len(data)  # nearly all ASCII
        and max(map(len, lines)) < 400
        and "enerated by" not in text[:600]
    )


def _walk(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the usable files of one source, ordered by a hash."""
    root = install_root(source.name)
    paths = [path for top in source.roots for path in (root / top).rglob("*.py")]
    relative = [path.relative_to(root) for path in paths]
    kept = [
        path.as_posix()
        for path in relative
        if not SKIPPED_FOLDERS.intersection(path.parts[:-1])
        and not path.name.startswith(SKIPPED_FILES)
    ]
    for name in sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest()):
        data = (root / name).read_bytes()
        if is_prose_and_code(data):
            yield name, data


def _long_lines(data: bytes) -> set[bytes]:
    """Distinct lines that are long enough to identify their origin."""
    return {line for raw in data.splitlines() if len(line := raw.strip()) >= 30}


def build_manifest(sources: Iterable[Source] = SOURCES) -> Manifest:
    """Select the corpus from the installed packages. Deterministic for equal installations."""
    sources = tuple(sources)
    files: list[CorpusFile] = []
    held_out_lines: set[bytes] = set()
    seen: set[bytes] = set()

    def add(source: Source, path: str, data: bytes, held_out: bool) -> None:
        files.append(CorpusFile(source.name, path, hashlib.sha256(data).hexdigest(), held_out))

    texts = {source: list(_walk(source)) for source in sources}
    for source, items in texts.items():
        for path, data in items:
            if is_held_out(source.name, path):
                add(source, path, data, True)
                held_out_lines |= _long_lines(data)
    for source, items in texts.items():
        room = source.budget or 1 << 60
        for path, data in items:
            lines = _long_lines(data)
            copied = len(lines & held_out_lines) > 0.1 * len(lines)
            repeated = len(lines & seen) > 0.4 * len(lines)
            if is_held_out(source.name, path) or copied or repeated or len(data) > room:
                continue
            seen |= lines
            room -= len(data)
            add(source, path, data, False)
    return Manifest(
        python=platform.python_version(),
        versions={
            # Without a build's local part: torch 2.13.0+cpu has the Python files of 2.13.0.
            s.name: metadata.version(s.name).split("+")[0]
            for s in sources
            if s.name != "stdlib"
        },
        licences={source.name: source.licence for source in sources},
        files=_ordered(files),
    )


def _ordered(files: Iterable[CorpusFile]) -> tuple[CorpusFile, ...]:
    return tuple(sorted(files, key=lambda file: (file.source, file.path)))


def save_manifest(manifest: Manifest, path: Path = MANIFEST) -> None:
    """Write the manifest as gzipped JSON without a timestamp: equal content gives equal bytes."""
    packages: dict[str, dict[str, object]] = {}
    for name, licence in manifest.licences.items():
        version = manifest.versions.get(name, manifest.python)
        packages[name] = {"version": version, "licence": licence, "train": {}, "held_out": {}}
    for file in manifest.files:
        split = packages[file.source]["held_out" if file.held_out else "train"]
        split[file.path] = file.sha256  # type: ignore[index]
    content = json.dumps({"python": manifest.python, "packages": packages}, indent=0)
    path.write_bytes(gzip.compress(content.encode(), mtime=0))


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Read a manifest that `save_manifest` wrote."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no corpus manifest at {path}; "
            "write one with `python -m minillm.lab.training manifest`."
        ) from error
    packages = content["packages"]
    return Manifest(
        python=content["python"],
        versions={name: p["version"] for name, p in packages.items() if name != "stdlib"},
        licences={name: package["licence"] for name, package in packages.items()},
        files=_ordered(
            CorpusFile(name, file, sha256, split == "held_out")
            for name, package in packages.items()
            for split in ("train", "held_out")
            for file, sha256 in package[split].items()
        ),
    )


def read(file: CorpusFile) -> bytes:
    """Bytes of one file, after checking them against the manifest."""
    path = install_root(file.source) / file.path
    advice = "install the versions the manifest lists, or build one for this machine with "
    advice += "`python -m minillm.lab.training manifest`"
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
