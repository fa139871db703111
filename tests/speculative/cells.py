"""Requests of every kind, engines of every kind, and what the plain engine gives for each request
alone. Drafts must change none of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from minillm import LLM, SamplingParams
from minillm.api.outputs import CompletionOutput, RequestOutput
from minillm.engine.live_request import LiveRequest
from tests.engine.small import BLOCK_SIZE, assert_idle, make
from tests.speculative.proposers import Known, config_of

LONGEST = 96
NUM_BLOCKS = {"ample": 200, "recompute": 40, "swap": 40}
CLOSE = 1e-5


# ---- requests --------------------------------------------------------------------------------

SMALL = 264  # the vocabulary of `small.py`, a token for each byte,
NUM_PLAIN = 94  # of which these are printable characters of ASCII
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY | {"max_tokens": 30},
    "drawn": DRAWN | {"max_tokens": 30},
    "top-k, top-p": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "max_tokens": 22},
    "min-p": {"temperature": 0.9, "min_p": 0.05, "max_tokens": 18},
    "penalties": GREEDY
    | {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.5}
    | {"max_tokens": 28},
    "counts": GREEDY  # of few tokens, so that they decide
    | {"allowed_token_ids": list(range(60, 70)), "frequency_penalty": 0.7, "max_tokens": 30},
    "repetition": DRAWN | {"repetition_penalty": 1.8, "top_k": 30, "max_tokens": 24},
    "bias": GREEDY | {"logit_bias": {70: 3.0, 5: -9.0, 100: 2.5}, "max_tokens": 20},
    "bad words": GREEDY | {"bad_words": (4, 7), "max_tokens": 26},
    "bad words, drawn": DRAWN | {"bad_words": (5, 7), "max_tokens": 24},
    "min tokens": DRAWN
    | {"min_tokens": 9, "stop_token_ids": list(range(0, 256, 3)), "max_tokens": 30},
    "stop ids": DRAWN | {"stop_token_ids": list(range(1, 256, 9)), "max_tokens": 40},
    "allowed": DRAWN | {"allowed_token_ids": list(range(20, 60)), "max_tokens": 16},
    "logprobs": GREEDY | {"logprobs": 3, "max_tokens": 20},
    "logprobs, drawn": DRAWN | {"logprobs": 1, "frequency_penalty": 0.8, "max_tokens": 24},
    "prompt logprobs": GREEDY | {"prompt_logprobs": 2, "logprobs": 0, "max_tokens": 12},
    "three": DRAWN | {"n": 3, "presence_penalty": 0.7, "logprobs": 0, "max_tokens": 16},
    "one token": GREEDY | {"max_tokens": 1},
    "two tokens": GREEDY | {"max_tokens": 2},
    "to the end": DRAWN | {"max_tokens": None},  # of the context
    # Tokens of the vocabulary are single bytes, so a string has several. These are cut out of what
    # the model writes without them, so that they are met.
    "stop text": DRAWN | {"stop": (7, 9), "max_tokens": 30},
    "stop text, shown": GREEDY
    | {"stop": (10, 12), "include_stop_str_in_output": True, "max_tokens": 30},
}


@dataclass(frozen=True)
class Job:
    """One request."""

    kind: str
    ids: tuple[int, ...]
    params: SamplingParams


def prompt_of(place: int) -> tuple[int, ...]:
    """1 to 50 bytes that repeat themselves here and there; every third begins like the first."""
    length = 1 + place * 11 % 47
    own = [(7 * place + i * i) % 60 + 20 * (i % 5 == 0) for i in range(length)]
    begin = [i % 9 + 60 for i in range(21)] if place % 3 == 0 else []
    return tuple(begin + own)[:50]


def jobs_of(llm: LLM, kinds: Sequence[str]) -> list[Job]:
    """One of each kind, with texts to stop at and to avoid from what the plain engine writes."""
    jobs, width = [], llm.engine.source.config.vocab_size
    for place, kind in enumerate(KINDS):
        if kind not in kinds:
            continue
        fields = {"seed": crc32(kind.encode()), "ignore_eos": kind != "min tokens"} | KINDS[kind]
        cuts = {name: fields.pop(name) for name in ("stop", "bad_words") if name in fields}
        ids = prompt_of(place)
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = [each for each in fields["stop_token_ids"] if each < width]
        if cuts and width == SMALL:
            fields["allowed_token_ids"] = list(range(NUM_PLAIN))
        for name, (start, end) in cuts.items():
            (output,) = generate(llm, [Job(kind, ids, SamplingParams(**fields))])
            fields[name] = [text_between(llm, output.outputs[0].token_ids, start, end)]
        jobs.append(Job(kind, ids, SamplingParams(**fields)))
    return jobs


def text_between(llm: LLM, ids: Sequence[int], start: int, end: int) -> str:
    """What some of these tokens say."""
    assert llm.tokenizer is not None
    return llm.tokenizer.decode(list(ids[start:end]))


def generate(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    """All of these together."""
    prompts = [list(job.ids) for job in jobs]
    return llm.generate(prompts, [job.params for job in jobs], use_tqdm=False)


# ---- the plain engine ------------------------------------------------------------------------


class Reference:
    """Each request alone, by an engine that never drafts."""

    def __init__(self, model: str | Path, kinds: Sequence[str] = tuple(KINDS), **arguments: Any):
        self.model, self.arguments = model, arguments
        self.llm = make(model, **fields_of(arguments))
        self.jobs = jobs_of(self.llm, kinds)
        self.outputs = [generate(self.llm, [job])[0] for job in self.jobs]
        self.known = self._known()
        assert self.llm.engine.scheduler.counters.num_drafts == 0

    def _known(self) -> Known:
        """The tokens of each completion, and those that would follow its stop text."""
        known = {}
        for job in self.jobs:
            (output,) = generate(self.llm, [replace(job, params=without_stop(job.params))])
            for one in output.outputs:
                key = job.ids, job.params.seed, one.index, repr(job.params)
                known[key] = list(one.token_ids)
        return known

    def config(self, proposer: str) -> dict[str, Any]:
        """A `speculative_config` whose proposer knows the tokens of these requests."""
        return config_of(proposer, self.known, self.llm.engine.source.config.vocab_size)

    def differences(
        self,
        outputs: Sequence[RequestOutput],
        jobs: Sequence[Job] | None = None,
        exact: bool = False,
    ) -> list[str]:
        """What differs from the plain engine; `exact`: in any bit of a log-probability."""
        mine = {job.kind: output for job, output in zip(self.jobs, self.outputs, strict=True)}
        found = []
        for job, output in zip(self.jobs if jobs is None else jobs, outputs, strict=True):
            for one, other in zip(mine[job.kind].outputs, output.outputs, strict=True):
                place = f"{job.kind}, completion {one.index}"
                found += [f"{place}: {what}" for what in unequal(one, other, exact)]
            if not alike(mine[job.kind].prompt_logprobs, output.prompt_logprobs, exact):
                found.append(f"{job.kind}: prompt logprobs")
        return found


def without_stop(params: SamplingParams) -> SamplingParams:
    """The same without texts and ids to stop at: these end a text and change no token of it, but
    for ids that are masked at first."""
    params = replace(params, stop=(), include_stop_str_in_output=False)
    return params if params.min_tokens else replace(params, stop_token_ids=())


def fields_of(arguments: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "max_model_len": LONGEST,
        "max_num_seqs": 12,
        "num_gpu_blocks_override": NUM_BLOCKS["ample"],
        "enable_prefix_caching": False,
    }
    return defaults | arguments


def unequal(one: CompletionOutput, other: CompletionOutput, exact: bool) -> list[str]:
    """Names of what differs."""
    names = ("token_ids", "text", "finish_reason", "stop_reason", "error")
    found = [
        f"{name} {getattr(one, name)!r} became {getattr(other, name)!r}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]
    if not alike(one.logprobs, other.logprobs, exact):
        found.append("logprobs")
    sums = one.cumulative_logprob, other.cumulative_logprob
    limit = 0.0 if exact else CLOSE * len(one.token_ids)
    if (sums[0] is None) != (sums[1] is None) or abs((sums[0] or 0) - (sums[1] or 0)) > limit:
        found.append("cumulative_logprob")
    return found


def alike(one: Any, other: Any, exact: bool) -> bool:
    """Whether two lists of log-probabilities agree: the chosen token in each place, and the best
    tokens but for those that are as good."""
    if one is None or other is None:
        return one is other
    if exact:
        return [list((each or {}).items()) for each in one] == [
            list((each or {}).items()) for each in other
        ]
    if len(one) != len(other):
        return False
    for mine, theirs in zip(one, other, strict=True):
        if not mine or not theirs:
            if mine != theirs:
                return False
            continue
        if next(iter(mine)) != next(iter(theirs)) or len(mine) != len(theirs):
            return False
        pairs = zip(mine.values(), theirs.values(), strict=True)
        if any(abs(a.logprob - b.logprob) > CLOSE for a, b in pairs):
            return False
    return True


# ---- engines ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One engine: tokens per chunk (0: whole prompts), prefix cache, pool, overlap."""

    chunk: int
    cache: str
    pool: str
    overlaps: bool

    def __str__(self) -> str:
        return (
            f"{self.chunk or 'whole'}-{self.cache}-{self.pool}-{'ahead' * self.overlaps or 'now'}"
        )

    def fields(self) -> dict[str, Any]:
        """Arguments of the engine."""
        cache: dict[str, Any] = {"enable_prefix_caching": False}
        if self.cache != "off":
            cache = {"enable_prefix_caching": True, "prefix_cache": self.cache}
        return cache | {
            "long_prefill_token_threshold": self.chunk,
            "num_gpu_blocks_override": NUM_BLOCKS[self.pool],
            "swap_space": 2**-7 if self.pool == "swap" else 0,
            "async_scheduling": self.overlaps,
        }


CHUNKS, CACHES, POOLS = (7, 0), ("off", "hash", "radix"), ("ample", "recompute", "swap")
CELLS = [Cell(*each) for each in itertools.product(CHUNKS, CACHES, POOLS, (False, True))]


def open_cell(reference: Reference, cell: Cell, config: dict[str, Any] | None) -> LLM:
    """The engine of a cell, with these drafts."""
    fields = fields_of(reference.arguments | cell.fields())
    return make(reference.model, speculative_config=config, **fields)


def run_cell(reference: Reference, llm: LLM) -> list[RequestOutput]:
    """All requests, in three waves a few steps apart, and two texts to score beside them."""
    engine = llm.engine
    waves = [reference.jobs[start::3] for start in range(3)]
    lives: dict[str, LiveRequest] = {}
    scored: list[LiveRequest] = []
    for number, wave in enumerate(waves):
        for place, job in enumerate(wave):
            name = f"{number}-{place}"
            request = engine.make_request(name, None, job.ids, job.params)
            lives[job.kind] = engine.add(request)
        ids = (*prompt_of(number)[:30], 5, 6)
        scored.append(engine.add(engine.make_scoring_request(f"score {number}", ids)))
        for _ in range(3):
            engine.step()
    most = 2000
    while engine.has_work:
        engine.step()
        most -= 1
        assert most, "the engine does not come to an end"
    assert_idle(engine)
    for live in scored:
        (output,) = live.output().outputs
        assert (output.finish_reason, output.token_ids) == ("length", [])
    return [lives[job.kind].output() for job in reference.jobs]


assert BLOCK_SIZE == 4  # the pools above are that small for it
