"""The pieces of chapter 00: bounds, and what is timed where."""

import ast
import time
from dataclasses import replace

import pytest
from notebook_chapter import NOTEBOOKS, Chapter, called, chapters

from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost, step_time
from minillm.models.presets import preset
from minillm.ops import c_library
from minillm.plan import machine
from minillm_exercises.chapters import ch00

LAPTOP = DATASHEET["laptop-ddr5"]
TOKEN = step_cost(preset("smollm2-135m"), [1], [ch00.CONTEXT], dtype="bfloat16")


@pytest.fixture(scope="module")
def chapter():
    """The committed chapter."""
    return Chapter.load(NOTEBOOKS / "00_measuring.ipynb")


def first_cell(chapter, *calls):
    """The first code cell that calls one of these functions."""
    found = (i for i, cell in chapter.code() if list(called(chapters.parsed(cell), *calls)))
    return next(found)


@pytest.mark.parametrize("overhead", [1e-9, 1.0])
def test_calls_are_no_part_of_a_bound(overhead):
    """A bound is a time that no program can beat, and a program can overlap or record its calls."""
    hardware = replace(LAPTOP, overhead=overhead)
    predicted = step_time(TOKEN, hardware)
    least = max(predicted.memory_seconds, predicted.compute_seconds)
    assert ch00.bound_seconds(TOKEN, hardware) == least < predicted.seconds
    prompt = step_cost(preset("smollm2-135m"), [512], [512], dtype="bfloat16")
    assert ch00.bound_seconds(prompt, hardware) == step_time(prompt, hardware).compute_seconds


def test_the_compiler_runs_before_the_first_clock(chapter, monkeypatch):
    """Otherwise the first call of a fresh installation is the time of a compiler."""
    compiler = first_cell(chapter, "build_c_functions")
    assert compiler < first_cell(chapter, "perf_counter", "measure", "LLM")
    built = []

    def library(element):
        time.sleep(0.2)
        built.append(element)
        return c_library.NoLibrary("none")

    monkeypatch.setattr(c_library, "library", library)
    assert "no C functions" in ch00.build_c_functions()
    assert built == ["BF16", "F32"]
    loaded = object.__new__(c_library.Library)
    monkeypatch.setattr(c_library, "library", lambda _: time.sleep(0.2) or loaded)
    assert ch00.build_c_functions() == "The engine's C functions were compiled or loaded in 0.4 s."


def test_everything_is_measured_on_the_device_of_the_model(chapter):
    """Times of a GPU divided by the ceilings of a processor mean nothing."""
    sources = [cell["source"] for _, cell in chapter.code()]
    assert sum("device = str(tiny.engine.device)" in source for source in sources) == 1
    seen = 0
    for _, cell in chapter.code():
        tree = chapters.parsed(cell)
        makers = called(tree, "ones", "rand", "randn", "zeros", "empty")
        for call in [*called(tree, "measure"), *makers]:
            if "generate" in ast.unparse(call):  # tokens come back, so the device is done
                continue
            seen += 1
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert named.get("device") == "device", ast.unparse(call)
    assert seen >= 8


def test_the_cache_of_a_processor_and_of_a_gpu(monkeypatch):
    assert ch00.cache_bytes("cpu") == machine.last_level_cache_bytes()
    gpu = type("Properties", (), {"L2_cache_size": 50 * 2**20})
    monkeypatch.setattr("torch.cuda.get_device_properties", {"cuda:1": gpu}.__getitem__)
    assert ch00.cache_bytes("cuda:1") == 50 * 2**20


def test_a_verdict_names_what_is_impossible_and_grants_a_fifth():
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.1, 1, LAPTOP, "float32") == "possible"
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.3, 1, LAPTOP, "float32").startswith(
        "impossible. The bytes of this measurement need"
    )
    assert "operations" in ch00.verdict(2e12, 1, 1, LAPTOP, "float32")
