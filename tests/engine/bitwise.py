"""Models, requests and engine configurations of deterministic mode's tests. Equal means `==`."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.scheduling.plan import StepPlan
from tests.models.tiny import VOCAB_SIZE, Tiny

BLOCK = 4
LONGEST = 128
SEATS = 8
# GQA, GQA with a sliding window, MLA with experts beside a dense layer, experts in every layer.
FAMILIES = {
    "llama": Tiny("llama", {"num_hidden_layers": 2}),
    "mistral": Tiny("mistral", {"num_hidden_layers": 2}, seed=1),
    "deepseek_v2": Tiny("deepseek_v2", {"num_hidden_layers": 2}, seed=2),
    "qwen3_moe": Tiny("qwen3_moe", {"num_hidden_layers": 2}, seed=3),
}
DTYPES = ("float32", "bfloat16")
MODELS = tuple(itertools.product(FAMILIES, DTYPES))
CHUNKS, CACHES = (1, 7, 64, 0), ("off", "hash", "radix")
POOLS = ("ample", "recompute", "swap")
BLOCKS = {"ample": 300, "recompute": 34, "swap": 34}


@dataclass(frozen=True)
class Job:
    """One request."""

    ids: list[int]
    params: SamplingParams


def jobs() -> list[Job]:
    """Prompts of 1 to 80 tokens, three with a common beginning; greedy and drawn in every way."""
    rng = random.Random(5)

    def own(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    shared, greedy, drawn = own(30), {"temperature": 0.0}, {"temperature": 0.8}
    table = [
        (own(1), greedy | {"max_tokens": 24}),
        (shared + own(3), greedy | {"max_tokens": 10}),
        (shared + own(9), drawn | {"seed": 1, "top_p": 0.9, "max_tokens": 12}),
        (own(80), greedy | {"max_tokens": 5}),
        (own(17), drawn | {"seed": 2, "min_p": 0.05, "max_tokens": 14}),
        (own(31), greedy | {"prompt_logprobs": 3, "max_tokens": 6}),
        (own(5), drawn | {"seed": 3, "max_tokens": 20, "n": 3}),
        (own(40), drawn | {"seed": 4, "top_k": 20, "prompt_logprobs": 0, "max_tokens": 7}),
        (shared[:], greedy | {"repetition_penalty": 1.3, "logit_bias": {7: 1.5}, "max_tokens": 9}),
        (own(16), greedy | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "max_tokens": 18}),
    ]
    return [
        Job(ids, SamplingParams(**{"logprobs": 5, "ignore_eos": True} | params))
        for ids, params in table
    ]


def open_engine(model: str | Path, dtype: str, **arguments: object) -> LLM:
    """An engine in deterministic mode, unless it is to be off."""
    defaults = {
        "dtype": dtype,
        "deterministic": True,
        "block_size": BLOCK,
        "max_model_len": LONGEST,
        "max_num_seqs": SEATS,
        "num_gpu_blocks_override": BLOCKS["ample"],
        "enable_prefix_caching": False,
    }
    return LLM(model, **(defaults | arguments))  # type: ignore[arg-type]


def generate(llm: LLM, listed: list[Job]) -> list[RequestOutput]:
    """All of these together."""
    return llm.generate([j.ids for j in listed], [j.params for j in listed], use_tqdm=False)


@dataclass(frozen=True)
class Cell:
    """One configuration: tokens per chunk (0: whole prompts), prefix cache, pool."""

    chunk: int
    cache: str
    pool: str

    def __str__(self) -> str:
        return f"{self.chunk or 'whole'}-{self.cache}-{self.pool}"

    def open(self, model: str | Path, dtype: str, **arguments: object) -> LLM:
        """The engine of this cell."""
        cache: dict[str, object] = {"enable_prefix_caching": False}
        if self.cache != "off":
            cache = {"enable_prefix_caching": True, "prefix_cache": self.cache}
        return open_engine(
            model,
            dtype,
            **cache,
            long_prefill_token_threshold=self.chunk,
            num_gpu_blocks_override=BLOCKS[self.pool],
            swap_space=2**-7 if self.pool == "swap" else 0,
            **arguments,
        )


MATRIX = [Cell(*each) for each in itertools.product(CHUNKS, CACHES, POOLS)]
# 12 cells in which any two settings meet.
PAIRWISE = [
    Cell(chunk, cache, POOLS[(i + j) % 3])
    for i, chunk in enumerate(CHUNKS)
    for j, cache in enumerate(CACHES)
]


def run_cell(llm: LLM, cell: Cell) -> list[tuple[Job, RequestOutput]]:
    """All requests together, twice if a cache may know them; and the cell did what it is for."""
    longest = [0]
    swapped = [0]
    launch = llm.engine.runner.launch

    def watched(plan: StepPlan):
        longest[0] = max(longest[0], *(row.num_tokens for row in plan.rows))
        swapped[0] += len(plan.swap_in)
        return launch(plan)

    llm.engine.runner.launch = watched  # type: ignore[method-assign]
    listed = jobs()
    outputs = [*zip(listed, generate(llm, listed), strict=True)]
    if cell.cache != "off":
        listed.reverse()
        outputs += zip(listed, generate(llm, listed), strict=True)
    counters = llm.engine.scheduler.counters
    assert counters.num_mixed_steps > 0
    assert longest[0] == cell.chunk if cell.chunk else longest[0] > 64
    assert (counters.num_cached_tokens > 0) == (cell.cache != "off")
    preempted = counters.num_preemptions_recompute, counters.num_preemptions_swap
    assert [count > 0 for count in preempted] == [cell.pool == "recompute", cell.pool == "swap"]
    assert (swapped[0] > 0) == (cell.pool == "swap")
    return outputs


def everything(output: RequestOutput) -> list[object]:
    """All numbers of an output, in their order, with every bit of them."""
    entries = [output.prompt_logprobs or [], *(each.logprobs or [] for each in output.outputs)]
    numbers = [
        [[(token, one.logprob, one.rank) for token, one in (entry or {}).items()] for entry in part]
        for part in entries
    ]
    tokens = [(list(each.token_ids), each.cumulative_logprob) for each in output.outputs]
    return [tokens, [each.finish_reason for each in output.outputs], numbers]


class Reference:
    """Each request alone, its prompt whole: as lists of numbers."""

    def __init__(self, model: str | Path, dtype: str):
        self.llm = open_engine(model, dtype)
        self.numbers = [everything(generate(self.llm, [job])[0]) for job in jobs()]
        assert self.llm.engine.scheduler.counters.num_mixed_steps == 0

    def differences(self, outputs: list[tuple[Job, RequestOutput]]) -> list[str]:
        """Which requests have other bits."""
        known = {tuple(job.ids): place for place, job in enumerate(jobs())}
        return [
            f"request {known[tuple(job.ids)]}"
            for job, output in outputs
            if everything(output) != self.numbers[known[tuple(job.ids)]]
        ]
