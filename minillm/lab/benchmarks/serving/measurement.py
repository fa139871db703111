"""Measures a server: finds the model, plans the prompts, runs the sweep or the search."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.bench import Bench, Plan, name_of, point, sweep
from minillm.lab.benchmarks.serving.client import Client, Fields
from minillm.lab.benchmarks.serving.knee import knee
from minillm.lab.benchmarks.serving.prompts import Vocabulary
from minillm.lab.benchmarks.serving.reply import COLUMNS
from minillm.lab.benchmarks.serving.search import Found, cost, highest_rate
from minillm.lab.benchmarks.serving.target import (
    check_request,
    find_target,
    find_vocabulary,
    key_headers,
    session,
)
from minillm.lab.benchmarks.serving.writer import Writer
from minillm.plan import machine

CHECK_SEED = 2**31  # of the prompt that is sent before the measurement


@dataclass(frozen=True)
class Wanted:
    """What is measured, and how requests are written."""

    plan: Plan
    search: bool = False
    target: float = 0.9
    tolerance: float = 0.05
    dollars_per_hour: float | None = None
    model: str | None = None
    api_key: str | None = None
    timeout: float = 600.0
    chat: bool = False
    kind: str | None = None
    ignore_eos: bool = True
    vocab_size: int | None = None
    hardware: str | None = None
    dtype: str | None = None


async def measure(
    wanted: Wanted, url: str, say: Callable[[str], None], live: bool = False
) -> dict[str, Any]:
    """Measure the server at `url`; returns JSON data with a row for each request."""
    headers = key_headers(wanted.api_key)
    async with session() as http:
        target = await find_target(http, url, headers, wanted.model)
        vocabulary = await find_vocabulary(
            http, target, headers, wanted.plan.seed, wanted.vocab_size
        )
        writer = Writer(
            Fields(target.model, wanted.chat, wanted.ignore_eos),
            vocabulary,
            as_ids(wanted, vocabulary),
        )
        client = Client(http, url, wanted.timeout, headers)
        bench = Bench(wanted.plan, target, client, writer, say, live)
        first = bench.conversations(wanted.plan.count, 0)[0]
        check = replace(writer, vocabulary=replace(vocabulary, seed=CHECK_SEED))
        await check_request(http, target, headers, writer.path, check.body(first, 0, []))
        if wanted.search:
            points, found = await search(bench, wanted)
        else:
            points, found = await sweep(bench), None
    return collected(wanted, bench, points, found)


def as_ids(wanted: Wanted, vocabulary: Vocabulary) -> bool:
    """Whether prompts are sent as token ids."""
    if wanted.kind == "ids" and not vocabulary.ids:
        raise ConfigError(
            "--prompts ids needs a server with POST /tokenize, or --vocab-size N; leave it out."
        )
    if wanted.kind is not None:
        return wanted.kind == "ids"
    return bool(vocabulary.ids) and not wanted.chat


async def search(bench: Bench, wanted: Wanted) -> tuple[list[dict[str, Any]], Found]:
    """Points at all rates that the search tried, and its result. Attainment is over all requests of
    the repeats."""
    plan, points = bench.plan, []

    async def attainment(rate: float) -> float:
        for repeat in range(plan.repeats):
            await bench.run(rate, repeat, f"search, {name_of(rate, False)}")
        runs = bench.runs[-plan.repeats :]
        points.append(point(rate, runs))
        good = sum(run["summary"]["slo"]["good"] for run in runs)
        return good / sum(run["summary"]["sent"] for run in runs)

    found = await highest_rate(attainment, plan.loads[0], wanted.target, wanted.tolerance)
    return sorted(points, key=lambda one: one["load"]), found


def collected(
    wanted: Wanted, bench: Bench, points: list[dict[str, Any]], found: Found | None
) -> dict[str, Any]:
    """JSON data of the whole benchmark."""
    plan, target = bench.plan, bench.target
    closed = plan.arrivals is None
    return {
        "benchmark": "serve",
        "target": {"url": target.url, "model": target.model, "root": target.root,
                   "max_model_len": target.longest, "server": target.header},
        "hardware": wanted.hardware or f"client on {machine.cpu_name()}",
        "dtype": wanted.dtype or "dtype of the server",
        "plan": {
            "process": plan.describe(), "closed": closed, "workload": plan.workload.describe(),
            "limited": plan.concurrency is not None, "seed": plan.seed, "repeats": plan.repeats,
            "warmup": plan.evaluation.warmup, "endpoint": bench.writer.path,
            "prompts": "ids" if bench.writer.as_ids else "text",
            "requests": f"{plan.count} requests per run" if plan.seconds is None
            else f"{plan.seconds:g} s of arrivals per run",
        },
        "slo": dict(plan.evaluation.objectives),
        "target_attainment": wanted.target,
        "points": points,
        "knee": knee(points, wanted.target),
        "search": None if found is None else search_data(wanted, found),
        "cost": None if wanted.dollars_per_hour is None else cost_data(wanted, bench, points),
        "columns": COLUMNS,
        "runs": bench.runs,
        "notes": notes(bench),
    }  # fmt: skip


def search_data(wanted: Wanted, found: Found) -> dict[str, Any]:
    """JSON data of the search."""
    probes = found.probes
    return {
        "target": wanted.target,
        "tolerance": wanted.tolerance,
        "keeps": found.keeps,
        "misses": found.misses,
        "keeps_attainment": None if found.keeps is None else probes[found.keeps],
        "misses_attainment": None if found.misses is None else probes[found.misses],
        "probes": len(probes),
        "attainment_by_rate": list(probes.items()),
    }


def cost_data(wanted: Wanted, bench: Bench, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per dollar at the highest load that meets the SLO, up to which all loads do."""
    price = float(wanted.dollars_per_hour or 0.0)
    best = None
    ordered = [one for one in points if one["load"] is not None]
    for one in sorted(ordered, key=lambda one: one["load"]):
        if one["attainment"]["median"] < wanted.target:
            break
        best = one["load"]
    if best is None:
        return {"missing": f"no load keeps an attainment of {wanted.target:.0%}"}
    runs = [run["summary"] for run in bench.runs if run["load"] == best]
    mean = {
        name: sum(run[name] for run in runs) / len(runs)
        for name in ("input_throughput", "output_throughput")
    }
    return {"load": best, **cost(mean, price)}


def notes(bench: Bench) -> list[str]:
    """What the reader of the figures must know."""
    found = []
    if bench.shortened:
        found.append(
            f"{bench.shortened} of the conversations were shortened to the context of "
            f"{bench.target.longest} tokens."
        )
    exact = bench.writer.as_ids or bench.writer.vocabulary.exact
    if not exact:
        found.append(
            "Prompt lengths are in words, because the server does not answer POST /tokenize as "
            "vLLM does; token counts are those of the server's usage."
        )
    elif not bench.writer.as_ids:
        found.append("Prompts are text of words of one token each; a chat template adds tokens.")
    return found
