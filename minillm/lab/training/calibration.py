"""The calibration text of the package: a sample of the training files of the standard library."""

import gzip
import random
from pathlib import Path

from minillm.lab.training import corpus

SEED = 26
LONGEST = 60_000  # characters of a file; more files make a more varied text
SIZE = 400_000  # characters of the text


def write_calibration_text(manifest: corpus.Manifest, path: Path) -> str:
    """Write whole training files, drawn at random, as gzipped text. Held-out files are never
    used, so quality on held-out text stays comparable. Returns a summary."""
    files = manifest.select(held_out=False, stdlib=True)
    random.Random(SEED).shuffle(files)
    texts: list[str] = []
    for file in files:
        text = corpus.read(file).decode()
        if len(text) <= LONGEST and sum(map(len, texts)) < SIZE:
            texts.append(text)
    content = "\n".join(texts).encode()
    path.write_bytes(gzip.compress(content, mtime=0))
    return f"{path}: {len(texts)} files, {len(content):,} bytes."
