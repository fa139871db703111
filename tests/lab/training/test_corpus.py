"""The corpus: what is held out stays out, and a manifest notices every change."""

import hashlib
import platform
from pathlib import Path

import pytest

from minillm.errors import CheckpointError, ConfigError, MinillmError
from minillm.lab.training import corpus

CODE = "".join(
    f"def a_function_with_number_{i}(argument):\n    return argument\n\n" for i in "abcdefgh"
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of three modules; sha256 says that `pathlib` is held out."""
    monkeypatch.setattr(corpus, "install_root", lambda source: tmp_path)
    for name, marker in (("pathlib.py", "path"), ("queue.py", "queue"), ("tests/x.py", "test")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(CODE.replace("function", f"{marker}_function"))
    return tmp_path


STDLIB = (corpus.Source("stdlib", "PSF-2.0", ("",)),)


def test_splits_by_the_hash_of_the_module(library: Path) -> None:
    assert int(hashlib.sha256(b"pathlib.py").hexdigest(), 16) % 14 == 0
    manifest = corpus.build_manifest(STDLIB)
    assert [(file.path, file.held_out) for file in manifest.files] == [
        ("pathlib.py", True),
        ("queue.py", False),
    ]
    assert (
        manifest.files[0].sha256
        == hashlib.sha256((library / "pathlib.py").read_bytes()).hexdigest()
    )


def test_a_copy_of_held_out_text_is_not_trained_on(library: Path) -> None:
    stolen = (library / "pathlib.py").read_text().splitlines(keepends=True)[:9]
    (library / "queue.py").write_text((library / "queue.py").read_text() + "".join(stolen))
    assert not corpus.build_manifest(STDLIB).select(held_out=False)


def test_near_copies_tables_and_broken_files_are_left_out(library: Path) -> None:
    (library / "again.py").write_text((library / "queue.py").read_text() + "x = 1\n")
    (library / "table.py").write_text("t = [" + "12345, " * 200 + "]\n")
    (library / "latin.py").write_bytes(CODE.encode() + b"\xff\n")
    (library / "short.py").write_text("x = 1\n")
    kept = [file.path for file in corpus.build_manifest(STDLIB).select(held_out=False)]
    assert len(kept) == 1
    assert kept[0] in ("again.py", "queue.py")


def test_manifest_survives_the_file(library: Path, tmp_path: Path) -> None:
    manifest = corpus.build_manifest(STDLIB)
    path = tmp_path / "manifest.json.gz"
    corpus.save_manifest(manifest, path)
    first = path.read_bytes()
    assert corpus.load_manifest(path) == manifest
    corpus.save_manifest(manifest, path)
    assert path.read_bytes() == first  # no time of writing inside


def test_a_changed_file_is_named(library: Path) -> None:
    manifest = corpus.build_manifest(STDLIB)
    assert corpus.verify(manifest) == sum(
        (library / name).stat().st_size for name in ("pathlib.py", "queue.py")
    )
    (library / "queue.py").write_text(CODE + "# one comment more\n")
    with pytest.raises(CheckpointError, match=r"queue\.py differs from the corpus manifest"):
        corpus.verify(manifest)
    (library / "queue.py").unlink()
    with pytest.raises(CheckpointError, match=r"queue\.py is not installed"):
        corpus.verify(manifest)


def test_missing_package_and_manifest_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-package.*pip install"):
        corpus.install_root("no-such-package")
    with pytest.raises(MinillmError, match=r"training manifest"):
        corpus.load_manifest(tmp_path / "none.json.gz")


def test_shipped_manifest_keeps_the_splits_apart() -> None:
    manifest = corpus.load_manifest()
    train, held_out = manifest.select(held_out=False), manifest.select(held_out=True)
    assert not {file.sha256 for file in train} & {file.sha256 for file in held_out}
    modules = {file.path.split("/")[0] for file in held_out if file.source == "stdlib"}
    assert {"pathlib.py", "inspect.py", "doctest.py", "wsgiref"} <= modules
    assert not [f for f in train if f.source == "stdlib" and f.path.split("/")[0] in modules]
    assert not [f for f in train if f.source in corpus.HELD_OUT_PACKAGES]
    assert not [f.path for f in manifest.files if f.path.startswith(("/", ".."))]


@pytest.mark.skipif(
    platform.python_version() != corpus.load_manifest().python,
    reason="the manifest is for another version of Python",
)
def test_shipped_manifest_fits_this_standard_library() -> None:
    files = [file for file in corpus.load_manifest().files if file.source == "stdlib"]
    assert sum(len(corpus.read(file)) for file in files) > 9_000_000
