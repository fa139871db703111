"""Leak test: thousands of short requests through a pool of blocks that is far too small.

The pool has 30% of the blocks that the running requests would need, so preemptions are frequent.
After each quarter of a run the engine becomes idle: no state of any request may remain, and memory
may not grow after the first quarter.

There are two kinds of runs: the whole engine with the embedded model, and the scheduler alone with
an oracle instead of a model (`soak_oracle.py`), where every token is checked.
"""

import gc
import platform
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from minillm.api.engine_args import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.cli.terminal import Terminal
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.benchmarks.soak_oracle import Job, Load, OracleSoak, Result, Soak, require
from minillm.plan.machine import cpu_name
from minillm.scheduling.data_parallel import schedulers_of
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.soak              2,000 requests on tiny, 18,000 on the oracle
  python -m minillm.lab.benchmarks.soak --json FILE  JSON in FILE, not as the last line
  python -m minillm.lab.benchmarks.soak --tiny 0     the oracle only
"""
MOST_OBJECTS = 2_000  # allowed growth of Python objects after the first quarter
MOST_BYTES = 16 * 2**20  # allowed growth of memory after the first quarter, with a model
LEAST_PREEMPTIONS = 1_000


# ---- the whole engine, with a model -----------------------------------------------------------


class EngineSoak(Soak):
    """A soak of `Engine` with the embedded model and text. Tokens are not checked."""

    vocabulary = 4096

    def __init__(self, load: Load, model: str = "tiny"):
        super().__init__(load)
        self.engine = Engine(
            EngineArgs(
                model,
                dtype="float32",
                block_size=load.block_size,
                num_gpu_blocks_override=load.num_blocks,
                max_model_len=load.longest_prompt + load.longest_output + 1,
                max_num_seqs=load.max_num_seqs,
                max_num_batched_tokens=load.budget,
                prefix_cache=load.prefix_cache,
                swap_space=0.01 if load.preemption == "swap" else 0,
            )
        )
        # A trace that is full after a few steps, so that memory is flat after the first quarter.
        self.engine.trace = Trace(self.engine.trace.settings, capacity=200)
        tokenizer = self.engine.tokenizer
        if tokenizer is not None and tokenizer.token_bytes is not None:  # fill the lazy cache
            for token_id in range(self.engine.source.config.vocab_size):
                tokenizer.token_bytes[token_id]
        self.handles: weakref.WeakSet[LiveRequest] = weakref.WeakSet()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler whose state is checked."""
        return schedulers_of(self.engine.scheduler)[0]

    def add(self, job: Job) -> None:
        """Add a request; one that is meant to fail excludes every token."""
        end = self.engine.eos_token_ids[0]
        params = SamplingParams(
            n=job.n,
            max_tokens=job.max_tokens,
            min_tokens=job.max_tokens if job.fails else 0,
            allowed_token_ids=[end] if job.fails else None,
            ignore_eos=not job.fails,
            stop=["e"] if job.stops else [],
            logprobs=1 if job.n > 1 else None,
        )
        request = self.engine.make_request(job.name, None, job.prompt, params, 0, job.salt)
        self.handles.add(self.engine.add(request))

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.engine.abort(name)

    def step(self) -> None:
        """Run a step, and check the requests that ended."""
        for live in self.engine.step():
            if live.finished:
                output, job = live.output(), live.request
                reasons = {each.finish_reason for each in output.outputs}
                for each in output.outputs:
                    require(
                        each.finish_reason != "length" or len(each.token_ids) == job.max_tokens,
                        "ended early:", output,
                    )  # fmt: skip
                    self.new_tokens += len(each.token_ids)
                self.end(job.request_id, "failed" if "error" in reasons else "finished")

    def check_idle(self) -> None:
        """Also checks that no request handle remains."""
        super().check_idle()
        gc.collect()
        require(not self.engine.has_work, "the engine has work")
        require(not self.handles, len(self.handles), "handles are left")


# ---- runs and results -------------------------------------------------------------------------


def loads(tiny: int, oracle: int, seed: int) -> list[tuple[type[Soak], Load]]:
    """Two runs of each kind, with half of the requests each: both prefix caches and both
    preemption modes."""
    kinds = (("hash", "recompute"), ("radix", "swap"))
    return [
        (soak, Load(f"{name}: {cache}, {mode}", requests // 2, cache, mode, seed=seed))
        for soak, name, requests in ((OracleSoak, "oracle", oracle), (EngineSoak, "tiny", tiny))
        for cache, mode in kinds
        if requests
    ]


def check(result: Result, with_model: bool) -> None:
    """Check that memory is flat and that the pool was too small."""
    require(result.num_preemptions or result.requests < 100, "no request was preempted")
    grown = result.objects[-1] - result.objects[0]
    require(grown <= MOST_OBJECTS, "objects:", result.objects)
    grown = result.rss[-1] - result.rss[0]
    require(not with_model or grown <= MOST_BYTES, "bytes:", result.rss)


def table(results: Sequence[Result]) -> list[list[str]]:
    """One row per figure, one column per run."""
    outcomes = ("finished", "aborted", "failed")
    counters = {
        "steps": "num_steps",
        "mixed steps": "num_mixed_steps",
        "preempted, to recompute": "num_preemptions_recompute",
        "preempted, swapped": "num_preemptions_swap",
        "tokens recomputed": "num_recomputed_tokens",
        "prompt tokens": "num_prompt_tokens",
        "cached prompt tokens": "num_cached_tokens",
        "blocks copied": "num_copies",
        "cached blocks revived": "num_revived",
        "cached blocks evicted": "num_evicted",
    }
    columns: list[dict[str, Any]] = []
    for one in results:
        column: dict[str, Any] = {"requests": one.requests}
        column |= {name: one.outcomes.get(name, 0) for name in outcomes}
        column["blocks in the pool"] = one.num_blocks
        column["blocks in demand"] = one.demand_blocks
        column |= {name: one.counters[key] for name, key in counters.items()}
        column["new tokens"] = one.new_tokens
        column["objects, growth"] = one.objects[-1] - one.objects[0]
        column["memory, growth in kB"] = (one.rss[-1] - one.rss[0]) // 1000
        column["seconds"] = round(one.seconds)
        columns.append(column)
    return [[name, *(f"{column[name]:,}" for column in columns)] for name in columns[0]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all soaks, and print the table, the conclusion and JSON."""
    parser = benchmark_parser("soak", __doc__, EXAMPLES)
    parser.add_argument("--tiny", type=int, default=2_000, metavar="N", help="requests on tiny")
    parser.add_argument("--oracle", type=int, default=18_000, metavar="N",
                        help="requests on the oracle")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    torch.set_num_threads(1)  # a second thread only adds waiting for so small a model
    results = []
    for soak, load in loads(chosen.tiny, chosen.oracle, chosen.seed):
        with terminal.progress(f"{load.name}, {load.requests:,} requests"):
            results.append(soak(load).run())
        check(results[-1], soak is EngineSoak)
    preemptions = sum(result.num_preemptions for result in results)
    require(results[-1].requests < 1_000 or preemptions >= LEAST_PREEMPTIONS, preemptions)
    terminal.heading("Soak: every request ended, and no state remains")
    terminal.table(["", *(result.name for result in results)], table(results))
    terminal.paragraph(f"{preemptions:,} preemptions; every token of the oracle was correct.")
    report = {"benchmark": "soak", "machine": cpu_name(), "python": platform.python_version()}
    result = {**report, "runs": [asdict(result) for result in results]}
    write_result(result, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
