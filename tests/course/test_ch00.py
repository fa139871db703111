"""The pieces of chapter 00: what they draw of the bound, what they refuse, and what is timed."""

import ast
import time
from dataclasses import replace

import pytest
from notebook_chapter import NOTEBOOKS, Chapter, called, chapters

from minillm.models.presets import preset
from minillm.ops import c_library
from minillm.plan import machine
from minillm.plan.cost import step_cost, step_time
from minillm.plan.hardware import DATASHEET
from minillm_exercises.chapters import ch00

LAPTOP = DATASHEET["laptop-ddr5"]
TOKEN = step_cost(preset("smollm2-135m"), [1], [ch00.CONTEXT], dtype="bfloat16")


@pytest.fixture
def shown(monkeypatch):
    """Figures and captions instead of pictures."""
    drawn = []
    monkeypatch.setattr(ch00, "show", lambda fig, caption: drawn.append((fig, caption)))
    return drawn


@pytest.fixture(scope="module")
def chapter():
    """The committed chapter."""
    return Chapter.load(NOTEBOOKS / "00_measuring.ipynb")


def first_cell(chapter, *calls):
    """The first code cell that calls one of these functions."""
    found = (i for i, cell in chapter.code() if list(called(chapters.parsed(cell), *calls)))
    return next(found)


def test_a_verdict_names_what_is_impossible_and_grants_a_fifth():
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.1, 1, LAPTOP, "float32") == "possible"
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.3, 1, LAPTOP, "float32").startswith(
        "impossible. The bytes of this measurement need"
    )
    assert "operations" in ch00.verdict(2e12, 1, 1, LAPTOP, "float32")


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


def test_the_first_call_and_the_later_runs_do_the_same_work(chapter):
    """With a prefix cache, or with another sampler, the first call would be another program."""
    (cold,) = (c["source"] for _, c in chapter.code() if "first_call = " in c["source"])
    (warm,) = (c["source"] for _, c in chapter.code() if "for _ in range(120)" in c["source"])
    assert "enable_prefix_caching=False" in cold
    call = "tiny.generate(PROMPT, first_token, use_tqdm=False)"
    assert call in cold
    assert call in warm


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


def test_of_two_lanes_the_longer_is_marked(shown):
    ch00.draw_lanes(10**6, bandwidth=2e9, rate=20e9, tokens=(1, 100))
    fig, caption = shown[0]
    widths = [bar.get_width() for bar in fig.axes[0].patches]
    assert widths == pytest.approx([1.0, 0.1, 1.0, 10.0])  # ms
    assert [line.get_xdata()[0] for line in fig.axes[0].lines] == pytest.approx([1.0, 10.0])
    assert "the bytes for 1 token, the operations for 100" in caption


def test_the_roofline_has_two_bounds_and_the_runs_under_them(shown):
    runs = [ch00.Run("quick", TOKEN, 0.01), ch00.Run("slow", TOKEN, 0.02)]
    ch00.draw_roofline(LAPTOP, runs)
    (fig, _), lines = shown[0], shown[0][0].axes[0].lines
    slope, ceiling = lines[0].get_xydata(), lines[1].get_xydata()
    assert slope[:, 1] / slope[:, 0] == pytest.approx(LAPTOP.bandwidth / 1e9)
    assert ceiling[:, 1] == pytest.approx(LAPTOP.peak_flops / 1e9)
    assert tuple(slope[-1]) == pytest.approx(tuple(ceiling[0]))
    for run, dot in zip(runs, lines[2:], strict=True):
        assert dot.get_ydata() == pytest.approx(TOKEN.flops / run.seconds / 1e9)
        assert dot.get_xdata() == pytest.approx(TOKEN.intensity)
        share = 100 * ch00.bound_seconds(TOKEN, LAPTOP) / run.seconds
        assert dot.get_label() == f"{run.name}: {share:.2g} % of the bound"
    assert len(fig.axes) == 1


def test_the_slope_of_the_memory_is_no_bound_of_what_fits_into_the_cache(shown):
    run = ch00.Run("tiny", TOKEN, 0.01)
    for cache, said in ((TOKEN.total_bytes, False), (TOKEN.total_bytes + 1, True)):
        ch00.draw_roofline(LAPTOP, [run], cache)
        label = shown[-1][0].axes[0].lines[-1].get_label()
        assert ("fits the cache: not its bound" in label) == said


def test_the_bounds_of_a_token_stand_in_one_row_per_machine(shown):
    here = replace(LAPTOP, bandwidth=1e9)
    ch00.draw_token_bounds("smollm2-135m", here)
    fig, caption = shown[0]
    memory, compute, overhead, *together = fig.axes[0].lines
    rows = [band.get_y() + band.get_height() / 2 for band in fig.axes[0].patches]
    assert rows == pytest.approx([3, 4, 5, 6])  # grey: from the Apple M1 Max on
    machines = [here, *(DATASHEET[key] for key in ch00.MACHINES)]
    times = [step_time(TOKEN, machine) for machine in machines]
    assert memory.get_xdata() == pytest.approx([1e3 * t.memory_seconds for t in times])
    assert compute.get_xdata() == pytest.approx([1e3 * t.compute_seconds for t in times])
    assert overhead.get_xdata() == pytest.approx([1e3 * t.overhead_seconds for t in times])
    for line, machine_ in zip(together[: len(times)], machines, strict=True):
        assert line.get_xdata() == pytest.approx([1e3 * ch00.bound_seconds(TOKEN, machine_)] * 2)
    assert "longer than that on 4 of 7 machines" in caption
    assert fig.axes[0].get_yticklabels()[0].get_text() == "this machine"


def test_without_a_machine_at_hand_only_the_datasheets_are_drawn(shown):
    ch00.draw_token_bounds("llama-3.1-70b")
    fig, caption = shown[0]
    assert len(fig.axes[0].get_yticks()) == len(ch00.MACHINES)
    assert f"longer than that on 0 of {len(ch00.MACHINES)} machines" in caption


def test_runs_are_drawn_with_their_median_middle_half_and_the_first_call(shown):
    ch00.draw_runs([1.0, 1.0, 2.0, 4.0], median=1.5, lone=1360.1)
    fig, caption = shown[0]
    ax = fig.axes[0]
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["middle half: 1 to 2.5 ms", "median: 1.5 ms"]
    assert sum(bar.get_height() for bar in ax.patches) == 4
    half, median = ax.lines
    assert list(half.get_xdata()) == pytest.approx([1, 1, 2.5, 2.5])
    assert min(half.get_ydata()) > max(bar.get_height() for bar in ax.patches)  # above the bars
    assert median.get_xdata() == [1.5, 1.5]
    (arrow,) = ax.texts
    assert arrow.get_text() == "the first call: 1,360 ms,\n910 times the median"
    assert "the fastest took 1 ms, the slowest 4 ms, the very first call 1,360 ms" in caption


def test_very_long_runs_are_counted_in_the_last_bar(shown):
    ch00.draw_runs([1.0, 1.0, 2.0, 2.0, 400.0], median=1.5, lone=2.0)
    fig, caption = shown[0]
    ax = fig.axes[0]
    assert sum(bar.get_height() for bar in ax.patches) == 5
    assert ax.get_xlim()[1] < 7
    assert "with 1 longer than 6 ms in the last bar" in caption
    assert not ax.texts  # the first call lies among the others: a line, no arrow
    assert ax.get_legend().get_texts()[-1].get_text().startswith("the first call: 2 ms")


def test_read_rates_are_drawn_with_the_memory_a_call_and_the_cache(shown):
    ch00.draw_read_rates([10**4, 10**6, 10**8], [1e9, 9e9, 3e9], call=1e-5, cache=2 * 10**7)
    fig, caption = shown[0]
    measured, memory, call, cache = fig.axes[0].lines
    assert list(measured.get_xdata()) == [0.01, 1.0, 100.0]
    assert list(memory.get_ydata()) == [3.0, 3.0, 3.0]
    assert call.get_ydata() / call.get_xdata() == pytest.approx(100.0)  # MB in 10 us, as GB/s
    assert cache.get_xdata() == [20.0, 20.0]
    assert "the memory with 3 GB/s; between them the cache delivers up to 9 GB/s" in caption


def test_the_glossary_says_the_same_of_a_bound():
    rows = (NOTEBOOKS / "GLOSSARY.md").read_text(encoding="utf-8").splitlines()
    meanings = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in rows[7:]}
    assert "no program can beat" in meanings["bound"]
    assert not any(word in meanings["bound"] for word in ("overhead", "call", "launch"))
    assert "no bound" in meanings["host overhead"]
