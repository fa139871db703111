"""`minillm bench --quantization`: what engines are told, what is counted, and the peers' files."""

import os
import signal as signals
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm.gguf.container import open_gguf
from minillm.lab.benchmarks.checkpoint import gguf_of
from minillm.lab.benchmarks.compare import Work, cost_of, options, result
from minillm.lab.benchmarks.compare_table import weights_line
from minillm.lab.benchmarks.contest import Case, Run, Score
from minillm.lab.benchmarks.peers import llamacpp_files, openvino_engine
from minillm.lab.benchmarks.peers.llamacpp_engine import Worker
from minillm.lab.benchmarks.peers.protocol import Timeline
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.loader import load_model
from minillm.models.presets import preset
from minillm.plan.weight_sizes import WeightSizes
from tests.lab.benchmarks.test_bench_command import CEILING

CASE = Case(4, 128, 8)
CONFIG = preset("smollm2-135m")


def work(what: str = "decode", **more: Any) -> Work:
    return Work(what, "m", "m", CONFIG, (CASE,), 1, ("minillm",), 1, "bfloat16", **more)


EIGHT = WeightSizes("int8", 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 1.0, products="int8")


def test_bounds_are_those_of_the_quantised_bytes() -> None:
    """Half the bytes of weights, the same of the cache; prompts at the rate of int8."""
    plain, eight = cost_of(work(), CASE), cost_of(work(weights=EIGHT), CASE)
    assert eight.weight_bytes == pytest.approx(plain.weight_bytes / 2, rel=1e-3)
    assert eight.kv_read_bytes == plain.kv_read_bytes
    score = Score("minillm", [Run(0.5, 1.0, 28, 7)])
    found = result(work(weights=EIGHT), CASE, score, CEILING)
    assert found["bound_seconds"] == pytest.approx(eight.total_bytes / CEILING.bandwidth)
    prefill = work("prefill", weights=EIGHT)
    fast = type(CEILING)(CEILING.ways, CEILING.flops, CEILING.flops_fp32, ops_int8=3e12)
    bounds = [result(prefill, CASE, score, each)["bound_seconds"] for each in (CEILING, fast)]
    assert bounds[0] == pytest.approx(3 * bounds[1])
    assert weights_line({"weights": {"name": "int8"}, "dtype": "bfloat16"}) == (
        "weights in int8, bfloat16"
    )


def test_a_cache_of_8_bits_is_told_and_counted() -> None:
    """66 bytes for each 128 of a head; the pool has the same bytes, so that it holds more."""
    plain, eight = work(), work(kv_cache_dtype="int8")
    told = options(plain), options(eight)
    assert [each["kv_cache_dtype"] for each in told] == ["auto", "int8"]
    assert told[0]["kv_cache_bytes"] == told[1]["kv_cache_bytes"]
    costs = cost_of(plain, CASE), cost_of(eight, CASE)
    assert costs[1].kv_read_bytes / costs[0].kv_read_bytes == pytest.approx(66 / 128)
    assert costs[1].weight_bytes == costs[0].weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_cpp_gets_the_weights_of_the_folder_without_a_tokenizer(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = ASSETS / "tiny"
    file = gguf_of(folder, dtype)
    before = file.stat()
    assert gguf_of(folder, dtype) == file
    assert file.stat() == before  # made once
    assert open_gguf(file).fields["tokenizer.ggml.model"] == "none"
    loaded = [load_model(open_model(each), getattr(torch, dtype)) for each in (file, folder)]
    own, theirs = (dict(each.named_parameters()) for each in loaded)
    assert own.keys() == theirs.keys()
    assert [key for key in theirs if not torch.equal(own[key], theirs[key])] == []


def test_a_file_is_quantised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, made = tmp_path / "m.gguf", []
    plain.write_bytes(b"GGUF")

    def quantise(source: Path, target: Path, kind: str) -> None:
        made.append(kind)
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(llamacpp_files, "quantise", quantise)
    found = [llamacpp_files.gguf_file(plain, kind) for kind in (None, "Q4_0", "Q4_0")]
    four = tmp_path / "m.Q4_0.gguf"
    assert (made, found) == (["Q4_0"], [(plain, False), (four, True), (four, False)])
    assert sorted(tmp_path.iterdir()) == [four, plain]


class Counted(Worker):
    """The worker with a model whose next token is the number of tokens before it."""

    def __init__(self, limit: int, most: int):
        self._limit, self._most = limit, most
        self.held: dict[int, int] = {}  # sequence -> tokens in its cache
        self.most_at_once = 0

    def _forget(self, sequence: int) -> None:
        del self.held[sequence]

    def _decode(self, rows: Any, place: dict[int, int]) -> dict[int, int]:
        assert sum(len(ids) for _, ids, _ in rows) <= self._most
        found = {}
        for index, ids, start in rows:
            sequence = place[index]
            assert start == self.held.get(sequence, 0)  # positions follow each other
            assert start == 0 or ids == [start]  # the token that came out last
            found[index] = self.held[sequence] = start + len(ids)
        self.most_at_once = max(self.most_at_once, len(self.held))
        return found


def test_requests_take_the_places_of_complete_ones() -> None:
    worker = Counted(limit=3, most=20)
    prompts, lengths = [[7] * n for n in (5, 9, 4, 18, 1, 6)], [3, 1, 7, 2, 5, 4]
    assert worker.offline(prompts, lengths) == {"tokens": sum(lengths)}
    assert (worker.held, worker.most_at_once) == ({}, 3)


def test_steps_of_a_batch_are_timed() -> None:
    timeline: Timeline = Counted(limit=2, most=64).steps([[7] * 9, [7] * 5], 4)
    assert timeline.done
    assert [row[1:] for row in timeline.rows] == [(2, 2, 0), (2, 2, 0), (2, 2, 0), (2, 2, 2)]


def test_openvino_exports_compressed_weights(tmp_path, monkeypatch):
    """The export is a folder of its own for each weight format."""
    commands: list[list[str]] = []

    def run(command: list[str], **others: Any) -> None:
        commands.append(command)
        Path(command[-1]).mkdir()

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(subprocess, "run", run)
    folders = {
        openvino_engine.export(tmp_path, openvino_engine.WEIGHTS[name], tmp_path)[0].name[-5:]
        for name in ("bfloat16", "int8", "int4")
    }
    assert folders == {"-fp16", "-int8", "-int4"}
    four = commands[-1]
    assert four[four.index("--weight-format") + 1 : -1] == [
        "int4", "--sym", "--group-size", "64", "--ratio", "1.0", "--backup-precision", "int8_asym",
    ]  # fmt: skip


@pytest.mark.parametrize(("signal", "survives"), [(None, True), (signals.SIGKILL, False)])
def test_what_ends_the_process_is_tried_in_a_child(signal: int | None, survives: bool) -> None:
    class Tried(Worker):
        _most = 8

        def _load(self, path: Path, options: dict[str, Any], repacked: bool) -> None:
            assert repacked

        def _decode(self, rows: Any, place: dict[int, int]) -> dict[int, int]:
            if signal is not None:
                os.kill(os.getpid(), signal)
            return {}

    assert Tried()._survives(Path("a.gguf"), {}) == survives
