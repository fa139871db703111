"""The benchmarks run, say what they measured, and measure what they say. No time is checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.lab.benchmarks import deterministic, outputs
from minillm.lab.benchmarks import scheduler as bench
from minillm.lab.benchmarks.scheduler import Series, Workload, blocked_line, statement
from minillm.lab.benchmarks.step_times import Sizes, Times, measure, opened
from minillm.models.deterministic import TiledDecoder
from minillm.scheduling.invariants import check_invariants
from minillm.scheduling.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """What the command prints in a hurry, and its JSON file."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    command = [
        sys.executable,
        "-m",
        "minillm.lab.benchmarks.scheduler",
        "--quick",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text("utf-8"))


@pytest.mark.slow
def test_every_policy_and_both_indices_are_measured(quick: tuple[str, dict]) -> None:
    names = [series["name"] for series in quick[1]["series"]]
    assert len(names) == len(set(names)) == 1 + 2 * len(POLICIES) + 1 + 7
    for policy in POLICIES:
        assert sum(name.startswith(f"{policy},") for name in names) >= 2
    for kind in ("hash", "radix"):
        assert {f"{kind}: hit", f"{kind}: miss", f"{kind}: insert"} <= set(names)


@pytest.mark.slow
def test_the_json_has_what_was_measured_and_what_follows_from_it(quick: tuple[str, dict]) -> None:
    assert list(quick[1]) == [
        "benchmark", "machine", "python", "block_size", "series", "engine", "statement"
    ]  # fmt: skip
    for series in quick[1]["series"]:
        one = Series(
            series["name"], series["item"], tuple(series["sizes"]), tuple(series["microseconds"])
        )
        assert min(one.microseconds) > 0
        assert len(one.sizes) == len(one.microseconds) >= 2
        assert list(one.sizes) == sorted(set(one.sizes))
        assert (series["growth"], series["per_item"]) == (one.growth(), one.per_item())


@pytest.mark.slow
def test_all_of_an_engine_but_its_model_is_measured_in_three_ways(quick: tuple[str, dict]) -> None:
    text, result = quick
    generate, keep_up, free = result["engine"]
    assert generate["tokens_per_output"] == outputs.QUICK_LOAD.new_tokens
    assert keep_up["tokens_per_output"] == pytest.approx(1)
    assert 1 <= free["tokens_per_output"] <= outputs.QUICK_LOAD.new_tokens
    for cost in result["engine"]:
        assert cost["name"] in text
        assert list(cost["parts"]) == list(outputs.PARTS)
        for part in ("schedule", "commit", "texts"):
            assert 0 < cost["parts"][part] < cost["processor"] * 10
        assert cost["wall"] > 0


@pytest.mark.slow
def test_the_table_and_the_statement_are_printed(quick: tuple[str, dict]) -> None:
    text, result = quick
    for series in result["series"]:
        assert series["name"] in text
        assert f"{series['microseconds'][-1]:,.1f}" in text
    joined = " ".join(text.split())
    for line in result["statement"]:
        assert line in joined
    assert "{" not in text  # the JSON went into the file


def test_without_a_file_json_is_the_last_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = [Series("made up", "running", (1, 2), (2.0, 4.0))]
    monkeypatch.setattr(bench, "step_series", lambda sizes: iter(made_up))
    monkeypatch.setattr(bench, "prefix_series", lambda sizes: iter(()))
    monkeypatch.setattr(outputs, "WAYS", {})
    assert bench.main(["--quick"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["series"][0]["microseconds"] == [2.0, 4.0]
    assert result["series"][0]["growth"] == [1.0]


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    assert "--json FILE" in capsys.readouterr().out


# ---- what the numbers say ---------------------------------------------------------------------


def test_growth_is_the_exponent_between_neighbouring_sizes() -> None:
    constant, linear, square = (7.0,) * 3, (3.0, 30.0, 300.0), (3.0, 300.0, 30_000.0)
    for times, exponents in ((constant, [0, 0]), (linear, [1, 1]), (square, [2, 2])):
        assert Series("a", "blocks", (1, 10, 100), times).growth() == pytest.approx(exponents)
    mixed = Series("a", "blocks", (2, 4, 16), (5.0, 10.0, 160.0))
    assert mixed.growth() == pytest.approx([1, 2])
    assert mixed.per_item() == pytest.approx([2.5, 2.5, 10])
    assert mixed.marginal() == pytest.approx(150 / 12)


def test_linear_growth_is_called_so_with_the_steepest_step() -> None:
    flat = Series("flat", "blocks", (10, 1_000), (5.0, 5.0))
    line = Series("line", "blocks", (10, 1_000), (5.0, 500.0))
    assert statement([flat, line]) == [
        "Everything grows linearly or better; the steepest is size ** 1.00 "
        "(line, from 10 to 1,000 blocks)."
    ]


def test_a_square_hidden_among_lines_is_named_with_its_sizes() -> None:
    line = Series("line", "blocks", (10, 1_000), (5.0, 500.0))
    square = Series("square", "waiting", (10, 100, 1_000), (5.0, 50.0, 5_000.0))
    assert statement([line, square, line]) == [
        "Worse than linear: size ** 2.00 (square, from 100 to 1,000 waiting)."
    ]


@pytest.mark.parametrize(("time", "word"), [(2_100.0, "within"), (2_600.0, "above")])
def test_the_cost_of_a_running_sequence_is_what_another_one_adds(time: float, word: str) -> None:
    """A fixed cost of 100 is no sequence's: (2,600 - 500) / 600 is above 3, 1,600 / 600 below."""
    (_, line) = statement([Series("decode", "running", (400, 1_000), (500.0, time))])
    cost = (time - 500) / 600
    assert line.startswith(f"decode: {cost:.2f} microseconds for each additional running sequence")
    assert word in line


def test_a_clock_counts_what_is_timed_inside_for_the_inner_part_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(outputs, "thread_time", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    clock = outputs.Clock()
    inner = clock.around(lambda: wait(2.0), "trace")
    clock.around(lambda: (wait(1.0), inner(), wait(4.0)), "schedule")()
    assert {part: each for part, each in clock.seconds.items() if part and each} == {
        "schedule": 5.0, "trace": 2.0,
    }  # fmt: skip


# ---- what is measured -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_workload_is_what_its_name_says(policy: str) -> None:
    load = Workload(8, policy)
    load.line_up(50, num_to_come=20)
    scheduler = load.scheduler
    for _ in range(20):
        load.step_with_change()
        check_invariants(scheduler)
        assert (len(scheduler.running), len(scheduler.waiting)) == (8, 50)
        assert len(scheduler.record.admitted) == 1
    assert scheduler.counters.num_preemptions_recompute == 0


def test_a_decode_step_has_decode_only_and_blocks_grow_evenly() -> None:
    load, grown = Workload(32, "fcfs"), []
    for _ in range(16):
        free = load.scheduler.blocks.pool.num_free
        load.step()
        grown.append(free - load.scheduler.blocks.pool.num_free)
        record = load.scheduler.record
        assert (record.num_decode_tokens, record.num_prefill_tokens) == (32, 0)
    assert sum(grown) == 32
    assert max(grown) <= 4


def test_the_blocked_line_looks_nobody_up_and_admits_nobody() -> None:
    scheduler = blocked_line(4)
    bench.commit(scheduler)  # the last look at all of them: somebody else is the oldest now
    looked = []
    admission = scheduler.admission
    match = admission.match
    admission.match = lambda sequence: looked.append(match(sequence)) or looked[-1]
    for _ in range(7):
        bench.commit(scheduler)
        assert scheduler.record.blocked.what == "blocks"
        assert (scheduler.record.admitted, scheduler.record.preempted) == ([], [])
    assert looked == []


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_the_index_of_a_lookup_knows_the_text_and_its_siblings(kind: str) -> None:
    tokens = bench.text(4)
    index = bench.filled(kind, tokens, siblings=30)
    assert len(index) == 34
    assert index.match(tokens, len(tokens), "").blocks == [0, 1, 2, 3]
    almost = index.match(tokens, len(tokens) - 1, "")
    assert almost.num_tokens == (63 if kind == "radix" else 48)


# ---- engines that take turns ------------------------------------------------------------------


def test_the_cost_of_deterministic_mode_is_measured_for_both_dtypes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert deterministic.main(["--quick", "--json", str(path)]) == 0
    printed, result = capsys.readouterr().out, json.loads(path.read_text("utf-8"))
    steps = ["decode, 1", "decode, 3", "prefill, 20"]
    assert [(cost["dtype"], cost["step"]) for cost in result["costs"]] == [
        (dtype, step) for dtype in ("float32", "bfloat16") for step in steps
    ]
    for cost in result["costs"]:
        assert len(cost["base"]) == len(cost["own"]) == deterministic.QUICK.turns
        assert min(*cost["base"], *cost["own"]) > 0
        assert f"{cost['ratio'][1]:.2f}" in printed
    assert result["statement"][0] == "tiny, float32: every row by itself."
    ratios = sorted(cost["ratio"][1] for cost in result["costs"])
    assert f"from {ratios[0]:.2f} (tiny, " in result["statement"][-1]
    assert f"to {ratios[-1]:.2f} (tiny, " in result["statement"][-1]


def test_neighbours_are_compared() -> None:
    one = Times("decode, 1", "on", (1.0, 2.0, 4.0), (2.0, 5.0, 12.0))
    assert one.ratio == (2.0, 2.5, 3.0)
    assert one.row() == ["decode, 1", "on", "2,000.0", "5,000.0", "2.50", "2.00 to 3.00"]
    assert one.row(inverse=True)[4:] == ["0.40", "0.33 to 0.50"]


def test_the_engines_that_are_compared_do_the_step_that_is_named() -> None:
    sizes = Sizes(batches=(3,), context=8, steps=2, turns=2, prefill=20)
    plans: list[list[int]] = []
    with opened("tiny", "float32", sizes, deterministic.VARIANTS) as engines:
        for llm in engines.values():
            launch = llm.engine.runner.launch
            llm.engine.runner.launch = lambda plan, launch=launch: (
                plans.append([row.num_tokens for row in plan.rows]) or launch(plan)
            )
        found = list(measure(engines, sizes))
        assert not any(llm.engine.has_work for llm in engines.values())
        assert [isinstance(llm.engine.runner.model, TiledDecoder) for llm in engines.values()] == [
            False, True,
        ]  # fmt: skip
    turn = [[8, 8, 8], *[[1, 1, 1]] * 4]  # three steps warm up, two are timed
    assert plans == turn * 4 + [[20]] * 6
    assert [(one.step, one.engine) for one in found] == [("decode, 3", "on"), ("prefill, 20", "on")]
