"""Copies what a run needs into a folder: for a machine that is given a copy, not a repository."""

import shutil
import subprocess
from pathlib import Path

from minillm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("minillm", "kernels", "Makefile", "pyproject.toml", "README.md", "LICENSE")
MOST = 25 << 20  # bytes


def pack(folder: Path, root: Path = ROOT, most: int = MOST) -> int:
    """Copy the tracked files of `PARTS`; returns their bytes. Refuses more than `most` of them, and
    a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--pack {folder}: there is something already; name a new folder.")
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *PARTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"--pack needs a checkout with git: {done.stderr.strip()[:200]}")
    names = [name for name in done.stdout.split("\0") if (root / name).is_file()]
    size = sum((root / name).stat().st_size for name in names)
    if size > most:
        raise ConfigError(
            f"--pack: {', '.join(PARTS)} are {size / 2**20:.1f} MiB; at most {most >> 20} MiB are "
            "packed. Remove files that a GPU does not need."
        )
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    return size
