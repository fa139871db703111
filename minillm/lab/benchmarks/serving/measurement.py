"""Measures a server: finds the model, plans the prompts, runs the sweep or the search."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.bench import Bench, Plan
from minillm.lab.benchmarks.serving.client import Client, Fields
from minillm.lab.benchmarks.serving.prompts import Vocabulary, Writer
from minillm.lab.benchmarks.serving.reply import COLUMNS
from minillm.lab.benchmarks.serving.sweep import knee, search, sweep
from minillm.lab.benchmarks.serving.target import (
    check_request,
    find_target,
    find_vocabulary,
    key_headers,
    session,
)
from minillm.plan import machine

CHECK_SEED = 2**31  # of the prompt that is sent before the measurement


@dataclass(frozen=True)
class Wanted:
    """What is measured, and how requests are written."""

    plan: Plan
    search: bool = False
    target: float = 0.9
    tolerance: float = 0.05
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
            points, found = await search(bench, wanted.target, wanted.tolerance)
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


def collected(
    wanted: Wanted, bench: Bench, points: list[dict[str, Any]], found: dict[str, Any] | None
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
        "search": found,
        "columns": COLUMNS,
        "runs": bench.runs,
        "notes": notes(bench),
    }  # fmt: skip


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
