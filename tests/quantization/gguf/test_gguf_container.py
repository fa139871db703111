"""Damaged GGUF files: one sentence, bounded time and memory."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from minillm.errors import (
    CheckpointError,
    MinillmError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from minillm.gguf.container import open_gguf, parse
from minillm.models.checkpoint import open_model
from minillm.text.tokenizer import Tokenizer

MUTATIONS = 5000


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def field(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file(fields=(), tensors=(), data=b"\0" * 128, version=3, counts=None):
    counts = counts or (len(tensors), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return head + b"\0" * (-len(head) % 32) + data


STRINGS = struct.pack("<IQ", 8, 2) + text("a") + text("bc")
NESTED = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8))
FIELDS = (
    field("general.architecture", 8, text("llama")),
    field("llama.block_count", 4, struct.pack("<I", 1)),
    field("tokenizer.ggml.model", 8, text("llama")),
    field("tokenizer.ggml.tokens", 9, STRINGS),
    field("nested", 9, NESTED),
    field("flag", 7, b"\1"),
    field("number", 6, struct.pack("<f", 1e-6)),
)
TENSORS = (tensor("a.weight", (4, 2), 0, 0), tensor("b.weight", (32, 2), 8, 32))
GOOD = file(FIELDS, TENSORS)


def test_values():
    found = parse(GOOD, Path("x"))
    assert found.fields["tokenizer.ggml.tokens"] == ("a", "bc")
    assert found.fields["nested"] == ((7, 8), (7, 8))
    assert found.fields["flag"] is True
    assert found.fields["number"] == 1e-6
    assert found.tensors["a.weight"].shape == (2, 4)  # innermost dimension last
    assert found.tensors["b.weight"].start == found.tensors["a.weight"].start + 32


HUGE = 1 << 62
BAD = {
    "not GGUF": (b"GGML" + GOOD[4:], "does not begin"),
    "version 1": (file(version=1), "version 1"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "empty": (b"GGUF", "ends at byte"),
    "counts of tensors": (file(counts=(HUGE, 0)), "tensors are announced"),
    "counts of fields": (file(counts=(0, HUGE)), "metadata fields are announced"),
    "long key": (file([struct.pack("<Q", HUGE)]), "announced"),
    "long array": (file([field("a", 9, struct.pack("<IQ", 4, HUGE))]), "items of 'a'"),
    "long array of strings": (file([field("a", 9, struct.pack("<IQ", 8, HUGE))]), "items of 'a'"),
    "deep arrays": (file([field("a", 9, struct.pack("<IQ", 9, 1) * 9)]), "nested"),
    "bool 2": (file([field("a", 7, b"\2")]), "bools are 0 or 1"),
    "value type": (file([field("a", 99, b"\2")]), "unknown value type 99"),
    "key twice": (file([FIELDS[5], FIELDS[5]]), "given twice"),
    "not UTF-8": (file([struct.pack("<Q", 1) + b"\xff" + GOOD[4:]]), "not UTF-8"),
    "tensor twice": (file((), [TENSORS[0], TENSORS[0]]), "given twice"),
    "overlap": (file((), [TENSORS[0], tensor("c", (8,), 0, 0)]), "overlap"),
    "misplaced": (file((), [tensor("c", (8,), 0, 4)]), "multiple of 32"),
    "beyond the file": (file((), [tensor("c", (8, HUGE), 0, 0)]), "cut off"),
    "dimensions": (file((), [tensor("c", (8,) * 5, 0, 0)]), "5 dimensions"),
    "width": (file((), [tensor("c", (33,), 8, 0)]), "multiple of 32"),
    "no rows": (file((), [tensor("c", (32, 0), 8, 0)]), "at least 1"),
    "IQ4_XS": (file((), [tensor("c", (32,), 23, 0)]), "IQ4_XS"),
    "MXFP4": (file((), [tensor("c", (32,), 39, 0)]), "MXFP4"),
    "alignment": (
        file([field("general.alignment", 4, struct.pack("<I", 3))], TENSORS[:1]),
        "power of two",
    ),
    "large alignment": (
        file([field("general.alignment", 4, struct.pack("<I", 1 << 31))], TENSORS[:1]),
        "cut off",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damage_is_named(name, tmp_path):
    data, message = BAD[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def test_every_shorter_file_is_refused():
    for length in range(len(GOOD) - 60):  # the last tensor ends there
        with pytest.raises(CheckpointError):
            parse(GOOD[:length], Path("x"))


def test_alignment_moves_the_data():
    fields = [field("general.alignment", 4, struct.pack("<I", 64))]
    found = parse(file(fields, TENSORS[:1]) + b"\0" * 64, Path("x"))
    assert found.tensors["a.weight"].start % 64 == 0


def mutated(draw):
    data = bytearray(GOOD)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(4, len(data))
        kind = draw.randrange(4)
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack(
                "<Q", draw.choice((0, 1, 255, 1 << 31, HUGE, -1 % 2**64))
            )
        elif kind == 2:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    return bytes(data)


def test_mutated_headers(tmp_path):
    draw, refused = random.Random(0), 0
    tracemalloc.start()
    for _ in range(MUTATIONS):
        try:
            parse(mutated(draw), Path("x"))
        except CheckpointError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > MUTATIONS // 2
    assert peak < 1 << 20  # the file has about 800 bytes


def test_mutated_files_as_models(tmp_path):
    draw, path = random.Random(1), tmp_path / "m.gguf"
    for _ in range(300):
        path.write_bytes(mutated(draw))
        for use in (open_model, Tokenizer.from_folder):
            with pytest.raises(MinillmError):
                use(path)


def test_architecture_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(file([field("general.architecture", 8, text("gemma3"))]))
    with pytest.raises(UnsupportedFeatureError, match="gemma3"):
        open_model(path)
    with pytest.raises(ModelNotFoundError):
        open_model(tmp_path / "other.gguf")
