"""`minillm bench decode|prefill|offline`: this engine, alone or beside others, over the bound.

What must happen at least is counted by `minillm.plan.cost` (bytes of weights and cache,
operations of products), how fast it could happen is measured before and after (`ceiling.py`), and
how it is measured fairly is in `contest.py`.
"""

import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from minillm.config import ModelConfig
from minillm.lab.benchmarks.ceiling import Ceiling, best_of, measure_ceiling
from minillm.lab.benchmarks.checkpoint import cache_folder
from minillm.lab.benchmarks.contest import Case, Contest, Run, Score, spread
from minillm.lab.benchmarks.engine_process import OWN, EngineProcess, MissingPeerError
from minillm.lab.benchmarks.lengths import LENGTHS
from minillm.plan.cost import StepCost, kv_bytes_per_token, step_cost

BUDGET = 2048  # tokens of a step, or all prompts of the batch: no engine cuts them up
SLACK = 160  # tokens of cache beyond the sequences: a block of the engine with the largest ones
OFFLINE_SEED = 9


@dataclass(frozen=True)
class Work:
    """What is asked for."""

    what: str  # "decode", "prefill" or "offline"
    name: str  # of the model, as it was given
    model: str  # what the engines open: a folder, or a preset where only ours takes part
    config: ModelConfig
    cases: tuple[Case, ...]
    repeats: int
    engines: tuple[str, ...]
    threads: int
    dtype: str
    device: str = "cpu"
    timeout: float = 900.0
    requests: int = 0
    lengths: str = "lognormal"  # of the offline requests
    extra: int = 0  # further repeats, where others disturbed some
    fresh: bool = True  # measure the ceilings now; else those known of this machine are enough


Start = Callable[[str, Work, Path], Any]


def start_process(name: str, work: Work, log: Path) -> EngineProcess:
    """The engine in its own environment."""
    return EngineProcess.start(name, work.threads, log, work.timeout)


def options(work: Work) -> dict[str, Any]:
    """What every engine is told when it loads the model."""
    longest = max(case.context + case.new_tokens for case in work.cases)
    batch = max(case.batch for case in work.cases)
    prompts = max(case.batch * case.context for case in work.cases)
    num_tokens = batch * (longest + SLACK)
    if work.what == "offline":  # steps as every engine likes them, room for the requests there are
        ids, lengths = offline_requests(work, work.cases[0])
        prompts, sums = 0, sorted(len(each) + n for each, n in zip(ids, lengths, strict=True))
        num_tokens = sum(sums[-batch:]) + batch * SLACK
    return {
        "model": work.model,
        "dtype": work.dtype,
        "device": work.device,
        "threads": work.threads,
        "max_model_len": min(longest + 16, work.config.longest_context),
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(BUDGET, prompts),
        "kv_cache_bytes": max(2**28, num_tokens * kv_bytes_per_token(work.config, work.dtype)),
        "cache": str(cache_folder()),
    }


@contextmanager
def contest_of(
    work: Work, say: Callable[[str], Any], start: Start = start_process
) -> Iterator[Contest]:
    """The engines that are there, with the model loaded; they end with the block."""
    contestants, skipped = [], {}
    contest = Contest([], work.config.vocab_size, say)
    try:
        for name in work.engines:
            try:
                log = cache_folder() / "logs" / f"{name}.log"
                contestants.append(start(name, work, log))
            except MissingPeerError as error:
                skipped[name] = str(error)
        contest.active = contestants
        contest.failed |= skipped
        contest.open(options(work))
        yield contest
    finally:
        contest.active = contestants
        contest.close()


def measure(
    work: Work, say: Callable[[str], Any] = lambda what: None, start: Start = start_process
) -> dict[str, Any]:
    """Everything about this work as plain data; see `as_json`."""
    say("measuring the ceilings")
    before = measure_ceiling(work.device, work.threads, work.fresh)
    scores: list[Score] = []
    results: list[dict[str, Any]] = []
    with contest_of(work, say, start) as contest:
        if work.what == "offline":
            results = offline(work, contest)
        else:
            for case in work.cases:
                scores += contest.play(case, work.repeats, work.extra)
    say("measuring the ceilings again")
    after = measure_ceiling(work.device, work.threads, work.fresh)
    results += [result(work, score, best_of(before, after)) for score in scores]
    return {
        "benchmark": work.what,
        "machine": before.machine,
        "python": platform.python_version(),
        "model": work.name,
        "dtype": work.dtype,
        "threads": work.threads,
        "repeats": work.repeats,
        **({"lengths": work.lengths} if work.what == "offline" else {}),
        "settings": options(work) | {"cache": "", "model": work.name},
        "engines": contest.facts,
        "left_out": contest.failed,
        "ceiling": {"before": before.as_json(), "after": after.as_json()},
        "results": results,
        "statement": statement(results),
    }


def cost_of(work: Work, case: Case) -> StepCost:
    """What a step must do at least: a decode step in the middle, or the step of the prompts."""
    if work.what == "prefill":
        lengths = [case.context] * case.batch
        return step_cost(work.config, lengths, lengths, dtype=work.dtype)
    middle = case.context + (case.new_tokens + 1) // 2
    return step_cost(work.config, [1] * case.batch, [middle] * case.batch, dtype=work.dtype)


def step_seconds(work: Work, run: Run) -> float:
    """Of one decode step, or of all prompts."""
    return run.prefill_seconds if work.what == "prefill" else run.decode_seconds / run.steps


def rate(work: Work, case: Case, run: Run) -> float:
    """Tokens per second over all sequences."""
    if work.what == "prefill":
        return case.batch * case.context / run.prefill_seconds
    return run.tokens / run.decode_seconds


def result(work: Work, score: Score, ceiling: Ceiling) -> dict[str, Any]:
    """One engine at one case: every repeat, and the share of the bound of the median."""
    case, cost = score.case, cost_of(work, score.case)
    times = [step_seconds(work, run) for run in score.runs]
    memory, compute = cost.total_bytes / ceiling.bandwidth, cost.flops / ceiling.rate(work.dtype)
    bound = max(memory, compute)
    return {
        "engine": score.engine,
        **asdict(case),
        "tokens_per_second": spread([rate(work, case, run) for run in score.runs]),
        "step_seconds": spread(times),
        "bytes": cost.total_bytes,
        "flops": cost.flops,
        "bytes_per_second": cost.total_bytes / median(times),
        "flops_per_second": cost.flops / median(times),
        "bound": "memory" if memory >= compute else "compute",
        "bound_seconds": bound,
        "share_of_bound": bound / median(times),
        "others": max(run.others for run in score.runs),
        "runs": [asdict(run) for run in score.runs],
    }


def offline(work: Work, contest: Contest) -> list[dict[str, Any]]:
    """Requests of mixed lengths, all at once, through the whole of each engine."""
    (case,) = work.cases
    prompts, lengths = offline_requests(work, case)
    runs = contest.play_offline(prompts, lengths, work.repeats, work.extra)
    return [
        {
            "engine": name,
            "requests": len(lengths),
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": sum(lengths),
            "tokens_per_second": spread([sum(lengths) / run.seconds for run in each]),
            "seconds": spread([run.seconds for run in each]),
            "others": max(run.others for run in each),
            "outside_model": spread(shares)["median"] if shares else None,
            "runs": [asdict(run) for run in each],
        }
        for name, each in runs.items()
        for shares in [[run.outside_model for run in each if run.outside_model is not None]]
    ]


def offline_requests(work: Work, case: Case) -> tuple[list[list[int]], list[int]]:
    """Prompts and lengths of answers: `case` has the most that either may have."""
    rng = random.Random(OFFLINE_SEED)
    draw = LENGTHS[work.lengths]
    prompts, lengths = draw(work.requests, OFFLINE_SEED, case.context, case.new_tokens)
    ids = range(max(1, work.config.vocab_size - 1))
    return [rng.choices(ids, k=length) for length in prompts], lengths


def statement(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """This engine beside the best of the others, case by case, medians."""
    lines = []
    for own in results:
        if own["engine"] != OWN:
            continue
        peers = [
            one for one in results
            if one["engine"] != OWN and all(one.get(key) == own.get(key) for key in KEYS)
        ]  # fmt: skip
        where = f"B={own['batch']} ctx {own['context']}" if "batch" in own else "offline"
        if peers:
            best = max(peers, key=lambda one: one["tokens_per_second"]["median"])
            ratio = own["tokens_per_second"]["median"] / best["tokens_per_second"]["median"]
            lines.append(f"{where}: {ratio:.2f} times the best peer, {best['engine']}.")
        if own.get("outside_model") is not None:
            lines.append(
                f"{own['outside_model']:.1%} of the time of {OWN} went outside the model: "
                "scheduling, books and texts."
            )
    return lines


KEYS = ("batch", "context", "new_tokens")
