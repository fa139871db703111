"""`minillm bench decode|prefill|offline`: minillm and other engines against the roofline bound.

`lab/roofline.py` counts the bytes and operations of a step, `ceiling.py` measures the machine's
rates before and after, and `contest.py` runs the engines in turn.
"""

import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from minillm.config import ModelConfig
from minillm.lab.benchmarks.beside import report
from minillm.lab.benchmarks.ceiling import Ceiling, best_of, measure_ceiling
from minillm.lab.benchmarks.checkpoint import cache_folder
from minillm.lab.benchmarks.contest import Case, Contest, OfflineRun, Run, Score, spread
from minillm.lab.benchmarks.engine_process import OWN, EngineProcess, MissingPeerError
from minillm.lab.benchmarks.processor import processor
from minillm.lab.roofline import StepCost, step_cost
from minillm.plan.cost import kv_bytes_per_token
from minillm.plan.weight_sizes import WeightSizes

BUDGET = 2048  # tokens of a step, or all prompts of the batch: prompts are not chunked
SLACK = 160  # spare KV-cache tokens per sequence: one block of the engine with the largest blocks
OFFLINE_SEED = 9
LEAST = 8  # tokens of a prompt or an output


@dataclass(frozen=True)
class Work:
    """The comparison to run."""

    what: str  # "decode", "prefill" or "offline"
    name: str  # the model as it was given
    model: str  # what the engines load: a folder, or a preset if minillm runs alone
    config: ModelConfig
    cases: tuple[Case, ...]
    repeats: int
    engines: tuple[str, ...]
    threads: int
    dtype: str
    device: str = "cpu"
    timeout: float = 900.0
    requests: int = 0
    extra: int = 0  # additional repeats to replace disturbed ones
    fresh: bool = True  # measure the ceilings now instead of using stored ones
    beside: int = 0  # number of busy processes, beside which every engine runs, too
    isa: str | None = None  # the instruction set to which all engines are limited
    quantization: str | None = None  # of 16-bit weights while they are loaded
    weights: WeightSizes | None = None  # of quantised weights
    kv_cache_dtype: str = "auto"
    gguf: str = ""  # the model's file for llama.cpp


Start = Callable[[str, Work, Path], Any]


def start_process(name: str, work: Work, log: Path) -> EngineProcess:
    """Start an engine in its own environment."""
    return EngineProcess.start(name, work.threads, log, work.timeout)


def options(work: Work) -> dict[str, Any]:
    """The options with which every engine loads the model."""
    longest = max(case.context + case.new_tokens for case in work.cases)
    batch = max(case.batch for case in work.cases)
    prompts = max(case.batch * case.context for case in work.cases)
    num_tokens = batch * (longest + SLACK)
    if work.what == "offline":  # each engine's own step size, and a KV cache for all requests
        ids, lengths = offline_requests(work, work.cases[0])
        prompts, sums = 0, sorted(len(prompt) + n for prompt, n in zip(ids, lengths, strict=True))
        num_tokens = sum(sums[-batch:]) + batch * SLACK
    return {
        "model": work.model,
        "gguf": work.gguf,
        "dtype": work.dtype,
        "quantization": work.quantization,
        "weights": work.weights and work.weights.name,
        "kv_cache_dtype": work.kv_cache_dtype,
        "device": work.device,
        "threads": work.threads,
        "max_model_len": min(longest + 16, work.config.longest_context),
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(BUDGET, prompts),
        "kv_cache_bytes": max(2**28, num_tokens * kv_bytes_per_token(work.config, work.dtype)),
        "cache": str(cache_folder()),
        "isa": work.isa,
    }


@contextmanager
def contest_of(
    work: Work, say: Callable[[str], Any], start: Start = start_process
) -> Iterator[Contest]:
    """The installed engines, with the model loaded; they are closed at the end of the block."""
    contestants, skipped = [], {}
    contest = Contest([], work.config.vocab_size, say, work.beside)
    try:
        for name in work.engines:
            try:
                contestants.append(start(name, work, cache_folder() / "logs" / f"{name}.log"))
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
    """Run the comparison; returns JSON data."""
    say("measuring the ceilings")
    before = measure_ceiling(work.device, work.threads, work.fresh)
    with contest_of(work, say, start) as contest:
        repeats = work.repeats, work.extra
        if work.what == "offline":
            asked = offline_requests(work, work.cases[0])
            runs = [
                (score.beside, offline_result(score, *asked))
                for score in contest.play_offline(*asked, *repeats)
            ]
        else:
            scores = [
                (case, score) for case in work.cases for score in contest.play(case, *repeats)
            ]
    say("measuring the ceilings again")
    after = measure_ceiling(work.device, work.threads, work.fresh)
    if work.what != "offline":
        best = best_of(before, after)
        runs = [(score.beside, result(work, case, score, best)) for case, score in scores]
    return {
        "benchmark": work.what,
        "machine": before.machine,
        "processor": processor(work.isa),
        "python": platform.python_version(),
        "model": work.name,
        "dtype": work.dtype,
        "weights": work.weights and asdict(work.weights),
        "threads": work.threads,
        "repeats": work.repeats,
        "settings": options(work) | {"cache": "", "gguf": "", "model": work.name},
        "engines": contest.facts,
        "left_out": contest.failed,
        "ceiling": {"before": before.as_json(), "after": after.as_json()},
        **outcome(work, runs),
    }


def outcome(work: Work, runs: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """JSON data of the results and their conclusions, from results and their number of busy
    processes."""
    results = [one for load, one in runs if not load]
    found: dict[str, Any] = {"results": results, "statement": statement(results)}
    if work.beside:
        loaded = [one for load, one in runs if load]
        found["beside"] = report(loaded, results, work.threads, work.beside)
        found["statement"] += statement(loaded, f", beside {work.beside}")
    return found


def cost_of(work: Work, case: Case) -> StepCost:
    """Bytes and operations of the decode step in the middle of a run, or of the prefill: those of
    minillm's weights and cache, also for other engines."""
    kv_dtype = None if work.kv_cache_dtype == "auto" else work.kv_cache_dtype
    counted = partial(step_cost, work.config, dtype=work.dtype, kv_dtype=kv_dtype,
                      weights=work.weights)  # fmt: skip
    if work.what == "prefill":
        lengths = [case.context] * case.batch
        return counted(lengths, lengths)
    middle = case.context + (case.new_tokens + 1) // 2
    return counted([1] * case.batch, [middle] * case.batch)


def step_seconds(work: Work, run: Run) -> float:
    """Seconds of one decode step, or of the prefill of all prompts."""
    return run.prefill_seconds if work.what == "prefill" else run.decode_seconds / run.steps


def rate(work: Work, case: Case, run: Run) -> float:
    """Tokens per second over all sequences."""
    if work.what == "prefill":
        return case.batch * case.context / run.prefill_seconds
    return run.tokens / run.decode_seconds


def result(work: Work, case: Case, score: Score[Run], ceiling: Ceiling) -> dict[str, Any]:
    """JSON data of one engine at one case: all repeats, and the median over the bound."""
    cost = cost_of(work, case)
    times = [step_seconds(work, run) for run in score.runs]
    memory, compute = cost.total_bytes / ceiling.bandwidth, cost.flops / ceiling.rate(cost.dtype)
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
        "busy": median(run.busy for run in score.runs),
        "runs": [asdict(run) for run in score.runs],
    }


def offline_result(
    score: Score[OfflineRun], prompts: list[list[int]], lengths: list[int]
) -> dict[str, Any]:
    """JSON data of one engine: all repeats."""
    runs = score.runs
    shares = [run.outside_model for run in runs if run.outside_model is not None]
    return {
        "engine": score.engine,
        "requests": len(lengths),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(lengths),
        "tokens_per_second": spread([sum(lengths) / run.seconds for run in runs]),
        "seconds": spread([run.seconds for run in runs]),
        "others": max(run.others for run in runs),
        "busy": median(run.busy for run in runs),
        "outside_model": median(shares) if shares else None,
        "runs": [asdict(run) for run in runs],
    }


def offline_requests(work: Work, case: Case) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths; `case` holds their maximum lengths."""
    rng = random.Random(OFFLINE_SEED)
    longest = case.context, case.new_tokens
    prompts, lengths = lognormal_lengths(work.requests, OFFLINE_SEED, *longest)
    ids = range(max(1, work.config.vocab_size - 1))
    return [rng.choices(ids, k=length) for length in prompts], lengths


def lognormal_lengths(
    count: int, seed: int, most_prompt: int, most_new: int
) -> tuple[list[int], list[int]]:
    """Prompt and output lengths similar to chats: log-normal with medians of 160 and 96 tokens and
    sigmas of 0.8 and 0.7, clipped at both ends."""
    rng = random.Random(seed)

    def draw(middle: int, sigma: float, most: int) -> int:
        return int(min(max(middle * rng.lognormvariate(0.0, sigma), LEAST), most))

    lengths = [(draw(160, 0.8, most_prompt), draw(96, 0.7, most_new)) for _ in range(count)]
    return [prompt for prompt, _ in lengths], [new for _, new in lengths]


def statement(results: Sequence[Mapping[str, Any]], under: str = "") -> list[str]:
    """minillm against the best peer, for each case, by medians; `under` names the condition."""
    lines = []
    for own in results:
        if own["engine"] != OWN:
            continue
        peers = [
            one for one in results
            if one["engine"] != OWN and all(one.get(key) == own.get(key) for key in KEYS)
        ]  # fmt: skip
        where = f"B={own['batch']} ctx {own['context']}" if "batch" in own else "offline"
        where += under
        if peers:
            best = max(peers, key=lambda one: one["tokens_per_second"]["median"])
            ratio = own["tokens_per_second"]["median"] / best["tokens_per_second"]["median"]
            lines.append(f"{where}: {ratio:.2f} times the best peer, {best['engine']}.")
        if own.get("outside_model") is not None:
            lines.append(
                f"{own['outside_model']:.1%} of {OWN}'s time was host overhead outside the model: "
                "scheduling, bookkeeping and detokenization."
            )
    return lines


KEYS = ("batch", "context", "new_tokens")
