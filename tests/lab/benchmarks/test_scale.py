"""`minillm bench scale`: steps behind contexts that nobody computed are real steps, rates come from
counts over medians, and the table, the sentences and the picture say what was measured."""

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minillm.api.arguments import EngineArgs
from minillm.cli import main
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.benchmarks import calm, decode_rates, scale
from minillm.lab.benchmarks.calm import Calm, calmest, calmly
from minillm.lab.benchmarks.ceiling import SUMS, Ceiling
from minillm.lab.benchmarks.decode_rates import (
    CALLS,
    TWIN_STEPS,
    DecodeProbes,
    Pages,
    Products,
    check_explainable,
    twin_config,
)
from minillm.lab.benchmarks.decode_steps import DecodeSteps, Step, StepsFailedError
from minillm.lab.benchmarks.others import Watch
from minillm.lab.benchmarks.scale import (
    Measured,
    ScaleCase,
    ScaleWork,
    as_json,
    contexts_of,
    statement,
    table,
)
from minillm.lab.benchmarks.scale_plot import check_plot
from minillm.lab.decode_law import DecodeRates, decode_time
from minillm.lab.roofline import step_cost
from minillm.models.presets import preset
from minillm.ops.batch import Batch

CONFIG = replace(preset("smollm2-135m"), num_layers=3, vocab_size=640, intermediate_size=256)
CEILING = Ceiling({SUMS: 20e9}, 1e12, 1e11, machine="a machine")
RATES = DecodeRates(10e9, 500e9, 5e9, 0.001, 0.0001)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- steps ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> Iterator[DecodeSteps]:
    found = DecodeSteps(
        EngineArgs("tiny", dtype="float32", device="cpu", max_model_len=256, block_size=16,
                   max_num_seqs=4, num_gpu_blocks_override=80, enable_prefix_caching=False,
                   max_num_batched_tokens=64)
    )  # fmt: skip
    yield found
    found.close()


def test_every_step_is_a_real_decode_step_behind_its_context(steps, monkeypatch):
    batches: list[Batch] = []
    model = steps.engine.runner.model
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda batch, kv: batches.append(batch) or forward(batch, kv)
    )
    found = steps.run(batch=4, context=250, count=5)
    assert len(found) == 5
    assert len(batches) == 6  # one is not timed, and the prompts never came to the model
    for number, batch in enumerate(batches):
        assert len(batch.input_ids) == 4
        assert batch.max_query_len == 1
        assert batch.seq_lens.tolist() == [250 - 7 + number] * 4
    pages = batches[-1].block_tables[:, : 248 // 16 + 1]
    assert len(pages.unique()) == pages.numel()  # nobody shares a page
    order = pages.flatten().diff()
    assert (order.abs() == 1).sum() < len(order) / 4  # nor do they lie in order, or backwards


def test_the_engine_is_as_before_afterwards(steps: DecodeSteps) -> None:
    engine = steps.engine
    model, config = engine.runner.model, engine.scheduler.config
    steps.run(2, 100, 3)
    assert engine.runner.model is model
    assert engine.scheduler.config is engine.scheduler.admission.config is config
    assert "choose" not in vars(engine.runner.sampler)
    assert "forward" not in vars(model)
    assert "logits" not in vars(model)
    assert not engine.has_work
    assert engine.scheduler.blocks.pool.num_free == 80
    with pytest.raises(StepsFailedError, match="of 5 sequences, or finished"):
        steps.run(5, 100, 3)  # of which 4 have a seat
    assert not engine.has_work
    assert engine.runner.model is model


# ---- rates ------------------------------------------------------------------------------------


def test_a_probe_counts_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_rates, "PAGE_BYTES", 2**26)
    products = Products(CONFIG, torch.float32, 4)
    parameters = 576 * (3 * (960 + 576 + 512) + 640) + 256 * 3 * 576
    assert products.num_bytes == 4 * parameters
    assert products.flops(4) == 8 * parameters
    assert products.seconds(4) > 0
    pages = Pages(CONFIG, torch.float32)
    per_layer = 16 * 1024 * 2 * 3 * 64 * 4
    assert pages.num_bytes == 2 * per_layer
    assert pages.seconds() > 0


def test_rates_are_counts_over_medians_of_calm_rounds() -> None:
    probes = DecodeProbes.__new__(DecodeProbes)
    probes.config, probes.dtype, probes.batch = CONFIG, "float32", 5
    fixed: Any = SimpleNamespace(num_bytes=100, flops=lambda rows: 1000 * rows)
    probes._products = probes._pages = fixed
    seconds = {"stream": [1e-9, 9.0, 2e-9], "matrix": [4e-9], "pages": [5e-9]}
    overhead = {"one": [3.0], "all": [11.0]}
    disturbed = {name: [100.0] for name in (*seconds, *overhead)}
    probes.rounds = [Calm(seconds | overhead, 0.0), Calm(disturbed, 0.5)]
    rates = probes.rates()
    assert (rates.stream, rates.matrix, rates.pages) == (50e9, 1250e9, 20e9)
    assert rates.row_seconds == pytest.approx(2.0, rel=1e-3)
    assert rates.step_seconds == pytest.approx(1.0, rel=1e-3)
    probes.rounds = [Calm(seconds | {"one": [1.0], "all": [11.0]}, 0.0)]
    assert probes.rates().step_seconds == 0.0  # all of it was the row's
    # What the twin's own weights take, at a byte in 10 ms, is no overhead.
    cost = step_cost(twin_config(CONFIG), [1], [32 - TWIN_STEPS // 2 - 2], dtype="float32")
    twin = (cost.weight_bytes + cost.kv_read_bytes) / 100.0
    slow = {"stream": [1.0], "matrix": [1e-9], "pages": [1.0]}
    probes.rounds = [Calm(slow | {"one": [twin + 7.0], "all": [0.0]}, 0.0)]
    assert probes.rates().row_seconds == 0.0
    assert probes.rates().step_seconds == pytest.approx(7.0)


def test_only_dense_decoders_are_explained() -> None:
    check_explainable("preset:qwen3-0.6b", preset("qwen3-0.6b"))
    for name in ("mixtral-8x7b", "deepseek-v3"):
        with pytest.raises(UnsupportedFeatureError, match=f"dense decoders .* {name} is not one"):
            check_explainable(name, preset(name))


# ---- disturbance ------------------------------------------------------------------------------


def test_what_was_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, waited = iter([0.5, 0.3, 0.4, 0.5, 0.0, 0.9]), []

    @contextmanager
    def watching(groups: object) -> Iterator[Watch]:
        yield Watch(next(shares))

    monkeypatch.setattr(calm, "watching", watching)
    monkeypatch.setattr(calm, "sleep", waited.append)
    values = iter("abcdef")
    assert calmly(lambda: next(values)) == Calm("b", 0.3)  # the least disturbed of three
    assert calmly(lambda: next(values)) == Calm("e", 0.0)  # the first calm one
    assert len(waited) == 3
    rounds = [Calm("a", 0.4), Calm("b", 0.05), Calm("c", 0.2), Calm("d", 0.0)]
    assert [each.value for each in calmest(rounds)] == ["b", "d"]
    assert [each.value for each in calmest(rounds[::2])] == ["c"]


# ---- what it says -----------------------------------------------------------------------------


def work_of(*cases: ScaleCase, **more: Any) -> ScaleWork:
    settings: dict[str, Any] = {"steps": 8, "repeats": 2, "threads": 1, "dtype": "bfloat16"}
    return ScaleWork("preset:smollm2-135m", preset("smollm2-135m"), cases, **(settings | more))


def found_with(ratios: dict[ScaleCase, float], host: float = 0.001) -> dict[str, Any]:
    """A result whose steps took the predicted time over `ratio`."""
    work = work_of(*ratios)
    measured = []
    for case, ratio in ratios.items():
        seconds = decode_time(work.cost(case), RATES).seconds / ratio
        step = Step(seconds, seconds - host - 0.002, 0.002)
        measured.append(Measured(case, [Calm([step] * 3, 0.02)]))
    return as_json(work, measured, RATES, CEILING, ["B=9 ctx 9 is left out."])


FOUND = found_with(
    {ScaleCase(1, 128): 1.0, ScaleCase(64, 128): 0.76, ScaleCase(64, 8192): 1.4,
     ScaleCase(1, 8192): 0.74}
)  # fmt: skip


def test_a_prediction_is_compared_with_the_median() -> None:
    assert [round(one["ratio"], 6) for one in FOUND["results"]] == [1.0, 0.76, 1.4, 0.74]
    assert FOUND["explained"] == 2
    assert FOUND["worst_ratio"] == pytest.approx(1.4)
    lines = statement(FOUND)
    assert "2 of 4 steps are explained within 25%; the worst prediction is 1.40 times" in lines[1]
    assert lines[-1] == "B=9 ctx 9 is left out."
    one = FOUND["results"][2]
    cost = work_of(ScaleCase(64, 8192)).cost(ScaleCase(64, 8192))
    assert one["bound_seconds"] == cost.total_bytes / 20e9
    assert sum(one["predicted"].values()) == pytest.approx(one["predicted_seconds"])
    assert table(FOUND)[2][:4] == ["B=64 ctx 8192", *table(FOUND)[2][1:3], "1.40"]


def test_what_has_no_room_is_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probes:
        rates, close = staticmethod(lambda: RATES), staticmethod(lambda: None)

    def play(work: ScaleWork, measured: list[Measured], *ignored: object) -> None:
        for one in measured:
            one.rounds.append(Calm([Step(0.1, 0.05, 0.01)], 0.4))

    monkeypatch.setattr(scale, "measure_ceiling", lambda *ignored: CEILING)
    monkeypatch.setattr(scale, "DecodeProbes", lambda *ignored: Probes)
    monkeypatch.setattr(scale, "tokens_that_fit", lambda work: 1000)
    monkeypatch.setattr(scale, "play", play)
    found = scale.measure(work_of(ScaleCase(1, 512), ScaleCase(2, 512), ScaleCase(2, 128)))
    assert [(one["batch"], one["context"]) for one in found["results"]] == [(1, 512), (2, 128)]
    assert found["notes"] == ["B=2 ctx 512 is left out: its KV cache does not fit into memory."]
    assert "Other programs used up to 40%" in statement(found)[-1]
    nothing = scale.measure(work_of(ScaleCase(2, 512)))
    assert nothing["results"] == []
    assert nothing["host"] is None
    assert statement(nothing) == nothing["notes"]


def test_a_picture_needs_a_known_format_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--plot is 'a.bmp'; its name must end in .png, .svg"):
        check_plot("a.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedFeatureError, match="--plot needs matplotlib, which is not inst"):
        check_plot("a.png")


# ---- from end to end --------------------------------------------------------------------------


def test_from_end_to_end(tmp_path, monkeypatch, capsys, caplog):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scale, "measure_ceiling", lambda *ignored: CEILING)
    monkeypatch.setattr(calm, "TRIES", 1)
    monkeypatch.setattr(decode_rates, "PAGE_BYTES", 2**23)
    file, plot = tmp_path / "scale.json", tmp_path / "scale.svg"
    arguments = ["scale", "--quick", "--threads", "1", "--repeats", "1", "--dtype", "float32"]
    with caplog.at_level(logging.WARNING):
        code = main(["bench", *arguments, "--json", str(file), "--plot", str(plot)])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert not caplog.records  # the twin needs no tokenizer of its own
    found = json.loads(file.read_text())
    assert [(one["batch"], one["context"]) for one in found["results"]] == [
        (1, 32), (2, 32), (1, 64), (2, 64)
    ]  # fmt: skip
    for one in found["results"]:
        parts = ("model_seconds", "sampling_seconds", "host_seconds")
        assert all(0 < one[part] < one["step_seconds"]["max"] for part in parts)
        assert one["ratio"] == one["predicted_seconds"] / one["step_seconds"]["median"]
    assert "steps are explained within 25%" in " ".join(out.split())
    assert "round 1: B=2 ctx 64" in err
    assert "<svg" in plot.read_text()
    assert CALLS > 1


def test_contexts_that_nobody_asked_for_hold_the_steps_that_are_timed() -> None:
    def contexts(new_tokens: int, *asked: int) -> tuple[int, ...]:
        given, context = {"context"} if asked else set(), asked or (128, 512, 4096)
        return contexts_of(Namespace(new_tokens=new_tokens, context=context, given=given), 1024)

    assert contexts(200) == (512,)
    assert contexts(1000) == (1024,)
    with pytest.raises(ConfigError, match=r"--new-tokens is 1021; .* at most 1020"):
        contexts(1021)
    with pytest.raises(ConfigError, match=r"--context is 128; with 200 .* from 204 to 1024"):
        contexts(200, 128)
