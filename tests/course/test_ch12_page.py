"""Chapter 12's page: its cells for a GPU, run with a fake one, and what it calls a bound."""

from types import SimpleNamespace

import pytest
import torch
from notebook_chapter import chapters

from minillm import LLM
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import step_cost
from minillm_exercises.chapters import ch12
from minillm_exercises.chapters.ch12 import DecodeStep
from minillm_exercises.chapters.ch12_recordings import Again
from minillm_exercises.timing import measure


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", enforce_eager=True, max_model_len=512)


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
