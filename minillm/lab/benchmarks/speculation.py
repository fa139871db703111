"""`minillm bench speculation`: tokens per second with and without speculative decoding.

All variants are engines of this process over the same checkpoint. In a repeat, every variant runs
the same prompts, starting with a different variant each time; a ratio compares two runs of the same
repeat. Timing starts when every sequence has its first token and stops when all are complete.
Workloads:

    held-out    code that the embedded models were not trained on, greedy
    sampled     the same at temperature 1
    copy        a function followed by its beginning: text that repeats itself
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any

import torch

from minillm.api.sampling_params import SamplingParams
from minillm.errors import MinillmError
from minillm.lab.benchmarks.contest import rotated, spread
from minillm.lab.benchmarks.others import disturbance, watching
from minillm.lab.benchmarks.report import about_machine
from minillm.lab.training import corpus
from minillm.lab.training.prompts import TEN_PROMPTS, held_out_prompts
from minillm.llm import LLM
from minillm.speculative.proposer import DraftRow

PLAIN = "plain"
COUNTS = ("num_steps", "num_drafts", "num_draft_tokens")  # of the scheduler's counters
PROMPT_TOKENS = 128
SEED = 16


class RandomDrafts:
    """A proposer of random tokens: the worst case, drafts that are almost never accepted."""

    def __init__(self, vocab_size: int):
        self._random, self._vocab_size = random.Random(SEED), vocab_size

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Propose random tokens, as many as each row asks for."""
        pick = self._random.randrange
        return [[pick(self._vocab_size) for _ in range(row.num_drafts)] for row in rows]


@dataclass(frozen=True)
class SpeculationWork:
    """The benchmark to run; `variants` maps names to speculative configs (None: plain decoding)."""

    model: str
    variants: Mapping[str, Mapping[str, Any] | None]
    workloads: tuple[str, ...]
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    threads: int
    dtype: str


@dataclass
class Run:
    """One run of one variant; `counts` has the engine's numbers of steps and drafts, and
    `accepted_at` the accepted drafts by their place."""

    seconds: float
    num_tokens: int
    counts: Mapping[str, int]
    accepted_at: list[int]
    step_seconds: dict[int, float]  # median time of steps by tokens computed in them
    others: float
    token_ids: list[list[int]]


def measure(work: SpeculationWork, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all batches of all workloads."""
    torch.set_num_threads(work.threads)
    engines = {}
    for name, config in work.variants.items():
        say(f"loading {work.model} for {name}")
        engines[name] = open_engine(work, config)
    results = []
    for workload in work.workloads:
        for batch in work.batches:
            prompts = prompts_of(workload, batch, engines[PLAIN])
            params = params_of(workload, work.new_tokens)
            run = partial(timed, prompts=prompts, params=params)
            runs = in_turn(engines, work.repeats, f"{workload} B={batch}", say, run)
            for name, config in work.variants.items():
                free = config is not None and "model" not in config
                row = {"workload": workload, "batch": batch, "variant": name, "free_drafts": free}
                results.append(row | result(runs[name], runs[PLAIN], batch))
    return about_machine("speculation") | {
        "model": work.model,
        "threads": work.threads,
        "dtype": work.dtype,
        "new_tokens": work.new_tokens,
        "repeats": work.repeats,
        "results": results,
        "statement": disturbance(results),
        "left_out": {},
    }


def open_engine(work: SpeculationWork, config: Mapping[str, Any] | None) -> LLM:
    """The engine of a variant, without a prefix cache, so that every run computes its prompts."""
    return LLM(
        work.model,
        dtype=work.dtype,
        speculative_config=config,
        enable_prefix_caching=False,
        max_num_seqs=max(work.batches),
        max_model_len=min(1024, PROMPT_TOKENS * 3 + work.new_tokens),
        disable_log_stats=True,
    )


def in_turn(
    variants: Mapping[str, LLM],
    repeats: int,
    what: str,
    say: Callable[[str], None],
    run: Callable[[LLM], Run],
) -> dict[str, list[Run]]:
    """Run the variants in turn, after one warm-up run of each."""
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name in rotated(list(variants), number):
            say(f"{what}: {name}, run {number} of {repeats}")
            result = run(variants[name])
            if number:
                runs[name].append(result)
    return runs


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Run:
    """One run, timed from the moment when every sequence has its first token."""
    engine = llm.engine
    lives = [
        engine.add(engine.make_request(f"s{number}", None, ids, params))
        for number, ids in enumerate(prompts)
    ]

    def num_tokens() -> int:
        return sum(len(one.completions[0].token_ids) for one in lives)

    while any(not one.completions[0].token_ids for one in lives):
        engine.step()
    before = asdict(engine.scheduler.counters)
    start_tokens, times = num_tokens(), defaultdict[int, list[float]](list)
    with watching([]) as watch:
        start = last = perf_counter()
        while engine.has_work:
            engine.step()
            now = perf_counter()
            computed = sum(row.num_tokens for row in engine.scheduler.record.rows)
            times[computed].append(now - last)
            last = now
    after = asdict(engine.scheduler.counters)
    places = zip_longest(after["num_accepted_at"], before["num_accepted_at"], fillvalue=0)
    return Run(
        seconds=last - start,
        num_tokens=num_tokens() - start_tokens,
        counts={name: after[name] - before[name] for name in COUNTS},
        accepted_at=[new - old for new, old in places],
        step_seconds={computed: median(time) for computed, time in times.items()},
        others=watch.share,
        token_ids=[list(one.completions[0].token_ids) for one in lives],
    )


def result(own: Sequence[Run], plain: Sequence[Run], batch: int) -> dict[str, Any]:
    """The results of one variant: throughput, its ratio to plain decoding in the same repeats, and
    acceptance."""
    rates, bases = ([run.num_tokens / run.seconds for run in runs] for runs in (own, plain))
    ratios = [rate / base for rate, base in zip(rates, bases, strict=True)]
    counts = {name: sum(run.counts[name] for run in own) for name in COUNTS}
    accepted = [sum(each) for each in zip(*(run.accepted_at for run in own), strict=False)]
    drafts, last = counts["num_drafts"], own[-1]
    num_tokens = sum(run.num_tokens for run in own)
    return {
        "tokens_per_second": spread(rates),
        "ratio": {**spread(ratios), "interval": interval(ratios)},
        "tokens_per_step": num_tokens / max(counts["num_steps"], 1) / batch,
        "num_drafts": drafts,
        "num_draft_tokens": counts["num_draft_tokens"],
        "acceptance": [count / drafts for count in accepted] if drafts else [],
        "step_seconds": {str(key): last.step_seconds[key] for key in sorted(last.step_seconds)},
        "same_tokens": last.token_ids == plain[-1].token_ids,
        "others": median(run.others for run in own),
    }


def verification_cost(result: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Verification cost at batch 1: (number of positions, step time relative to a plain step), the
    median over all variants without a draft model."""
    results = [one for one in result["results"] if one["batch"] == 1]
    plain = {one["workload"]: one for one in results if one["variant"] == PLAIN}
    costs: dict[int, list[float]] = {}
    for one in results:
        base = plain[one["workload"]]["step_seconds"].get("1")
        for computed, seconds in one["step_seconds"].items():
            if base and one["free_drafts"] and int(computed) > 1:
                costs.setdefault(int(computed), []).append(seconds / base)
    return [(computed, median(ratios)) for computed, ratios in sorted(costs.items())]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median: for 9 values the 2nd and the 8th, with probability 0.96
    (order statistics, binomial distribution); below 6 values the minimum and maximum."""
    ordered = sorted(values)
    skipped = max((len(ordered) - 5) // 4, 0)
    return ordered[skipped], ordered[-1 - skipped]


# ---- prompts ----------------------------------------------------------------------------------


def params_of(workload: str, new_tokens: int) -> SamplingParams:
    """Sampling parameters: greedy, or temperature 1 for the workload "sampled"."""
    temperature = 1.0 if workload == "sampled" else 0.0
    return SamplingParams(
        temperature=temperature, seed=SEED, max_tokens=new_tokens, ignore_eos=True
    )


def prompts_of(workload: str, batch: int, llm: LLM) -> list[list[int]]:
    """`batch` prompts as token ids."""
    ids = code(batch, llm, PROMPT_TOKENS)
    return [copy_prompt(prompt) for prompt in ids] if workload == "copy" else ids


def copy_prompt(ids: list[int]) -> list[int]:
    """A text followed by its first quarter, so that the prompt contains the continuation."""
    return [*ids, *ids[: len(ids) // 4]]


def code(count: int, llm: LLM, length: int) -> list[list[int]]:
    """Code that the embedded models were not trained on. If the Python version differs from that
    of their training corpus, the ten prompts of the model card are used, repeatedly."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise MinillmError("This model has no tokenizer, which the prompts need.")
    with suppress(MinillmError, OSError):
        return held_out_prompts(corpus.load_manifest(), tokenizer, max(count, 8), length)[:count]
    texts = [TEN_PROMPTS[number % len(TEN_PROMPTS)] for number in range(count)]
    return [tokenizer.encode(text) for text in texts]
