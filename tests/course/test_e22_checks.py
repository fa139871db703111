"""e22: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

import random
import runpy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from submissions import Graded, failed, said

from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.reply import Reply
from minillm_exercises.chapters import ch22
from minillm_exercises.manifest import load_manifest

EXERCISES = ("e22.1", "e22.2")  # for the fixture `graded`

# Written with numpy's words and explicit loops; every blank is a place where people go wrong.
TRACE = """
import math

def tokens_of(r):
    return [(t, n) for t, n in r.chunks if KEPT]

def measures(r):
    out = {"ttft": None, "e2e": None, "tpot_vllm": None, "tpot_guidellm": None}
    chunks = tokens_of(r)
    if r.outcome != "ok" or not chunks or COUNT == 0:
        return out
    n = COUNT
    out["ttft"] = chunks[0][0] - r.BEGIN
    out["e2e"] = LAST - r.BEGIN
    if n > 1:
        out["tpot_vllm"] = (out["e2e"] - out["ttft"]) / DIVIDED
    out["tpot_guidellm"] = out["e2e"] / n
    return out

def percentile(values, percent):
    if not values:
        return None
    v = sorted(values)
    at = percent / 100 * (len(v) - 1)
    i, j = math.floor(at), math.ceil(at)
    return v[i] if i == j else v[i] * (j - at) + v[j] * (at - i)

def summary(requests, percent):
    columns = {key: [] for key in ("ttft", "e2e", "tpot_vllm", "tpot_guidellm")}
    gaps = []
    for r in requests:
        for key, value in measures(r).items():
            if value is not None:
                columns[key].append(value)
        if r.outcome != "ok":
            continue
        own = [t for t, _ in tokens_of(r)]
        for k in range(1, len(own)):
            gaps.append(own[k] - own[k - 1])
    out = {key: percentile(column, percent) for key, column in columns.items()}
    out["itl"] = percentile(gaps, percent)
    return out

def throughput(requests, start, end):
    n = tokens = 0
    for r in requests:
        if r.outcome == "ok":
            n += 1 if start <= r.end < end else 0
            for t, count in r.chunks:
                if t >= start and UNTIL:
                    tokens += count
    return n / (end - start), tokens / (end - start)
"""
TRACE_RIGHT = {
    "KEPT": "n",
    "COUNT": "sum(n for _, n in chunks)",
    "BEGIN": "due",
    "LAST": "chunks[-1][0]",
    "DIVIDED": "(n - 1)",
    "UNTIL": "t < end",
}

CHOICE = """
import math

def goodput(requests, limits, seconds):
    good = 0
    for r in requests:
        if r is None:
            continue
        ok = True
        for name, most in limits.items():
            if UNDEFINED:
                continue
            if r[name] > most:
                ok = False
        good += ok
    return good / seconds, (good / ALL if requests else 0)

def highest_rate(run, rates, share):
    def holds(rate):
        return VERDICT

    best, rest = None, list(rates)
    while rest:
        half = PLACE
        if holds(rest[half]):
            best, rest = rest[half], rest[half + 1 :]
        else:
            rest = rest[:half]
    return best

def tokens_per_dollar(c):
    return 0 if c.rate is None else c.tokens * 3600 / (c.gpus * c.cents / 100)

def cheapest(configurations, demand, gpus):
    best = None
    for c in configurations:
        if c.rate:
            n = ROUNDED
            total = n * c.gpus
            if total <= gpus:
                key = (TOTAL, total)
                if best is None or key < best[0]:
                    best = key, c.name, n
    return None if best is None else (best[1], best[2])
"""
CHOICE_RIGHT = {
    "UNDEFINED": "r[name] is None",
    "ALL": "len(requests)",
    "VERDICT": "sorted(run(rate) for _ in range(3))[1] >= share",
    "PLACE": "len(rest) // 2",
    "ROUNDED": "math.ceil(demand / c.rate)",
    "TOTAL": "total * c.cents",
}


def written(template: str, right: dict[str, str], **changes: str) -> str:
    for name, text in (right | changes).items():
        template = template.replace(name, text)
    return template


def loaded(exercise_id: str) -> Any:
    """Our solution of an exercise, to be called."""
    answers = load_manifest()[exercise_id].answers
    return SimpleNamespace(**runpy.run_path(str(answers / "solution.py")))


def test_the_percentile_is_numpys() -> None:
    ours, draw = loaded("e22.1"), random.Random(22)
    for _ in range(200):
        values = [draw.expovariate(1.0) for _ in range(draw.randint(1, 40))]
        percent = draw.choice([0, 1, 25, 50, 90, 95, 99, 99.9, 100])
        assert ours.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_measures_are_those_of_our_load_generator() -> None:
    """The exercise's two times per token mean what `minillm.lab` reports under these names."""
    chunks = [(1.5, 1), (2.0, 1), (3.5, 1)]
    request = SimpleNamespace(due=1.0, sent=1.25, chunks=chunks, end=4.0, outcome="ok")
    times = [time for time, _ in chunks]
    reply = Reply(0, 0, 1.0, 1.25, 4.0, frames=times, texts=times, output_tokens=3)
    ours = loaded("e22.1").measures(request)
    vllm, guidellm = measures.vllm(reply), ch22.guidellm(reply)
    assert ours["ttft"] == vllm["ttft"]
    assert ours["e2e"] == vllm["e2el"]
    assert ours["tpot_vllm"] == vllm["tpot"]
    assert ours["tpot_guidellm"] == guidellm["time_per_output_token"]


def test_another_way_to_measure_is_right(graded: Graded) -> None:
    assert graded("e22.1", source=written(TRACE, TRACE_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"KEPT": "n >= 0"}, "empty_chunks"),
        ({"COUNT": "len(chunks)"}, "chunks_for_tokens"),
        ({"BEGIN": "sent"}, "sent"),
        ({"LAST": "r.end"}, "closed"),
        ({"DIVIDED": "n"}, "tokens_per_token"),
        ({"DIVIDED": "max(n - chunks[0][1], 1)"}, "after_the_first_chunk"),
    ],
)
def test_a_wrong_measure_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e22.1", source=written(TRACE, TRACE_RIGHT, **changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_a_window_with_its_end_fails_at_the_border(graded: Graded) -> None:
    verdict = graded("e22.1", source=written(TRACE, TRACE_RIGHT, UNTIL="t <= end"))
    assert "test_window" in failed(verdict)
    assert "test_measures" not in failed(verdict)


def test_percentiles_of_the_standard_library_are_right(graded: Graded) -> None:
    source = (
        written(TRACE, TRACE_RIGHT)
        + """
from statistics import quantiles

def percentile(values, percent):
    if len(values) < 2 or percent in (0, 100):
        return sorted(values)[-1 if percent else 0] if values else None
    return quantiles(values, n=1000, method="inclusive")[round(percent * 10) - 1]
"""
    )
    assert graded("e22.1", source=source).status == "pass"


def test_a_request_that_is_changed_is_noticed(graded: Graded) -> None:
    source = written(TRACE, TRACE_RIGHT).replace("    n = ", "    r.chunks.pop()\n    n = ", 1)
    assert "may not change the request" in said(graded("e22.1", source=source))


def test_another_choice_is_right(graded: Graded) -> None:
    assert graded("e22.2", source=written(CHOICE, CHOICE_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"ALL": "max(1, sum(r is not None for r in requests))"}, "failures_left_out"),
        ({"VERDICT": "run(rate) >= share"}, "one_run"),
        ({"VERDICT": "sum(run(rate) for _ in range(3)) >= 3 * share"}, "mean_of_runs"),
        ({"PLACE": "0"}, "upwards"),
        ({"ROUNDED": "max(1, demand // c.rate)"}, "rounds_down"),
        ({"TOTAL": "-c.tokens / (c.gpus * c.cents)"}, "most_tokens_per_dollar"),
        ({"TOTAL": "c.cents"}, "cheapest_gpu"),
    ],
)
def test_a_wrong_choice_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e22.2", source=written(CHOICE, CHOICE_RIGHT, **changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_a_comparison_with_none_is_told_with_the_request(graded: Graded) -> None:
    verdict = graded("e22.2", source=written(CHOICE, CHOICE_RIGHT, UNDEFINED="False"))
    assert "test_good" in failed(verdict)
    assert "NoneType" in said(verdict)


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("sorted(run(rate) for _ in range(5))[2] >= share", "a fourth run"),
        ("run(rate + 10_000) >= share", "only for rates of the list"),
    ],
)
def test_a_run_that_is_not_allowed_is_told(graded: Graded, verdict: str, sentence: str) -> None:
    got = graded("e22.2", source=written(CHOICE, CHOICE_RIGHT, VERDICT=verdict))
    assert any(sentence in check.message for check in got.checks)


def test_an_endless_search_ends_with_a_sentence(graded: Graded) -> None:
    """A range that never shrinks asks for one rate again and again."""
    source = written(CHOICE, CHOICE_RIGHT).replace("rest[half + 1 :]", "rest[half:]")
    verdict = graded("e22.2", source=source)
    assert verdict.status == "fail"
    assert any("a fourth run" in check.message for check in verdict.checks)
