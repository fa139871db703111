"""Chapter 12's own functions, and the claims about overhead, recomputed."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from notebook_chapter import chapters

from minillm import LLM
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import step_cost
from minillm.ops import c_library, cpu
from minillm_exercises.chapters import ch12
from minillm_exercises.chapters.ch12 import DecodeStep, Rung, calls_of
from minillm_exercises.chapters.ch12_recordings import Again, padding
from minillm_exercises.timing import measure

NO_C = cpu.functions(torch.float32) is None  # on this machine


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", enforce_eager=True, max_model_len=512)


# ---- a step and its calls --------------------------------------------------------------------


def test_a_step_computes_what_the_engine_does(tiny):
    prompt = [*range(ch12.CONTEXT), 5]
    assert int(DecodeStep.of(tiny)().argmax()) == ch12.written(tiny, prompt, 1)[0]


def test_counting_leaves_the_engine_on_its_path(tiny):
    """Whoever watches torch otherwise sees plain torch, and would count calls that nobody makes."""
    assert not any(name.startswith("C ") for name in calls_of(DecodeStep.of(tiny)))
    llm = LLM("tiny", dtype="float32", device="cpu", max_model_len=512)
    llm.engine.forward_pass.model.all_layers = None
    takes, functions = cpu.takes, cpu.ready
    counts = calls_of(DecodeStep.of(llm))
    assert (cpu.takes, cpu.ready) == (takes, functions)
    layers = llm.engine.source.config.num_layers
    if NO_C:
        pytest.skip("no C functions here")
    assert counts["C decode_attention"] == counts["C norm_rope_write"] == layers
    assert counts["C silu_mul"] == layers
    assert counts["C add_rms_norm"] + counts["C rms_norm"] == 2 * layers + 1


# ---- rungs -----------------------------------------------------------------------------------


def test_rungs_are_measured_in_turn(tiny, monkeypatch):
    ways = [ch12.Way(name, tiny, None) for name in "ab"]
    order, times = [], iter([5.0, 3.0, 7.0, 4.0, 6.0, 2.0, 8.0, 1.0])
    monkeypatch.setattr(ch12.Way, "chosen", lambda way: order.append(way.name) or way.llm)
    monkeypatch.setattr(ch12, "quietly", lambda *_: next(times))
    found = ch12.climb(ways, rounds=2)
    assert "".join(order) == "ab" + "abab" + "ab"
    assert [(one.seconds, one.products) for one in found] == [(5.0, 2.0), (7.0, 1.0)]


# ---- bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "sizes", "wanted", "calls"),
    [
        ([30.0, 50.0], 1e12, 40.0, 1),  # nothing is too fast: the ceilings keep their best
        ([30.0, 50.0, 45.0, 99.0], 4.5e11, 50.0, 2),  # until the reading is no longer slower
        ([30.0, 31.0, 32.0], 9e11, 90.0, 3),  # no more often; then the rung itself is the highest
        ([30.0, 50.0], 1.0, 40.0, 1),  # a model in a cache may be faster than the memory
    ],
)
def test_ceilings_are_measured_again_while_a_model_reads_faster(rates, sizes, wanted, calls):
    made = iter([replace(DATASHEET["h100-sxm"], bandwidth=1e9 * rate) for rate in rates])
    asked = []

    def again(refresh):
        assert refresh
        asked.append(next(made))
        return asked[-1]

    before = replace(DATASHEET["h100-sxm"], bandwidth=40e9)
    seconds = 100.0 if sizes == 1e12 else 10.0
    panels = {"a": [Rung("", seconds, 0.0, 1)]}
    assert ch12.bandwidth(panels, {"a": sizes}, before, again=again) == 1e9 * wanted
    assert len(asked) == calls


# ---- the page: cells for a GPU, run with a fake one -----------------------------------------


def source_of(start: str) -> str:
    """The chapter's code cell that begins like this."""
    (path,) = chapters.chapter_paths(wanted=("12",))
    cells = [cell["source"] for _, cell in chapters.code_cells(chapters.read_notebook(path))]
    (found,) = [source for source in cells if source.startswith(start)]
    return found


def test_the_cells_for_a_gpu_capture_replay_and_compare(monkeypatch, capsys):
    """The fake device captures by calling the step again, over the same tensors."""
    monkeypatch.setenv("MINILLM_QUICK", "1")
    names = {"DecodeStep": DecodeStep, "measure": measure, "torch": torch, "ch12": ch12}
    exec(source_of("def captured"), names)
    asked = []

    def on_cpu(model: str, device: str, **options: object) -> LLM:
        asked.append(device)
        return LLM(model, device="cpu", dtype="float32", max_model_len=512, **options)

    def ceilings_of(device: str) -> Hardware:
        asked.append(device)
        return DATASHEET["h100-sxm"]

    names |= {"LLM": on_cpu, "has_graphs": lambda device: True, "CudaCapture": lambda _: Again()}
    names |= {
        "step_cost": step_cost,
        "say": print,
        "ceilings": SimpleNamespace(measure=ceilings_of),
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    exec(source_of("if torch.cuda.is_available()"), names)
    said = capsys.readouterr().out
    assert asked == ["cuda", "cuda"]
    assert said.startswith("measured on the GPU: ")
    assert "next position right: True" in said


class FrozenLength(Again):
    """A capture that keeps the inputs of the recording, as plain torch's attention does."""

    def capture(self, run):
        run()
        return lambda: None


def test_a_replay_of_old_inputs_is_reported_as_wrong(monkeypatch, tiny):
    monkeypatch.setenv("MINILLM_QUICK", "1")
    names = {"DecodeStep": DecodeStep, "measure": measure, "torch": torch, "ch12": ch12}
    exec(source_of("def captured"), names)
    assert names["captured"](tiny, FrozenLength())[2] is False


@pytest.fixture
def forgetting(monkeypatch):
    """Which libraries there are is asked anew afterwards, in the environment of that time."""
    yield monkeypatch
    c_library.library.cache_clear()
    cpu.functions.cache_clear()


@pytest.mark.skipif(NO_C, reason="no C functions here")
@pytest.mark.parametrize("before", [None, "0", "1"])
def test_without_c_there_is_none_and_then_it_is_as_before(forgetting, monkeypatch, before):
    monkeypatch.delenv(c_library.SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(c_library.SWITCH, before)
    with ch12.without_c():
        assert cpu.functions(torch.float32) is None
    assert os.environ.get(c_library.SWITCH) == before
    assert (cpu.functions(torch.float32) is None) == (before == "0")


def test_padding_is_the_distance_to_the_next_size():
    seen = {1: 5, 3: 2, 8: 1}
    assert padding(seen, [8]) == 5 * 7 + 2 * 5
    assert padding(seen, [1, 4, 8]) == 2
    assert padding(seen, range(1, 9)) == 0


def test_rungs_make_fewer_calls_and_write_the_same():
    names, totals, texts = [], [], []
    for way in ch12.rungs("tiny", dtype="float32"):
        llm = way.chosen()
        names.append(way.name)
        totals.append(calls_of(DecodeStep.of(llm)).total())
        texts.append(ch12.written(llm, [3, 4, 5], 6))
    assert names[:2] == [ch12.PLAIN, ch12.PACKED]
    assert totals == sorted(totals, reverse=True)
    assert all(text == texts[0] for text in texts)
    if not NO_C:
        assert names[2] == ch12.FUSED
        assert totals[2] < totals[1] / 2


@pytest.mark.skipif(NO_C, reason="no C functions here")
def test_the_last_rung_is_one_call(monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "1")
    *_, fused, whole = ch12.rungs("tiny")
    assert (fused.name, whole.name) == (ch12.FUSED, ch12.WHOLE)
    counts = calls_of(DecodeStep.of(whole.chosen()))
    assert counts["C run_layers"] == 1
    assert counts["C decode_attention"] == 0
    assert calls_of(DecodeStep.of(fused.chosen()))["C run_layers"] == 0
