"""Requests of every kind, and what makes two answers to a request equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from minillm import LLM, SamplingParams
from minillm.api.outputs import CompletionOutput, RequestOutput

CLOSE = 1e-4  # of log-probabilities, whose last bits depend on the batch
BYTES = 264  # the vocabulary of `engine/small.py`, a token for each byte,
NUM_PLAIN = 94  # of which these are printable characters of ASCII
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": [None, "x", []]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{3}(-[0-9]{1,4}){2,4}é?"
CHOICES = ["abcdefghij", "abcdefgh", "abcdx", "zzz"]
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
    "long prompt": GREEDY | {"max_tokens": 6},
    "text of a schema": DRAWN
    | {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40, "ignore_eos": False},
    "text of a pattern": GREEDY  # which ends at a stop token, and what is allowed besides changes
    | {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False, "max_tokens": 40}
    | {"frequency_penalty": 0.7, "logprobs": 2, "stop_token_ids": [BYTES - 1]},
    "texts to choose from": DRAWN
    | {"structured_outputs": {"choice": CHOICES}, "ignore_eos": False, "max_tokens": 16}
    | {"n": 3, "logprobs": 0},
}
# Completions of prompts of 37 part within a block.
LENGTHS = {"long prompt": 80, "three": 37, "texts to choose from": 37}
WITHOUT_TEXT = tuple(kind for kind in KINDS if "text" not in kind and "bad" not in kind)
FEWER = (  # for models that differ in what is computed, not in what is asked for
    *("greedy", "drawn", "penalties", "repetition", "min tokens", "logprobs, drawn"),
    *("prompt logprobs", "three", "one token", "to the end", "stop ids", "long prompt"),
)
SOME = (  # for a model that takes long
    *("greedy", "min-p", "repetition", "bad words, drawn", "logprobs", "stop text", "three"),
    *("long prompt", "text of a schema", "text of a pattern"),
)


@dataclass(frozen=True)
class Job:
    """One request."""

    kind: str
    ids: tuple[int, ...]
    params: SamplingParams


def prompt_of(place: int, length: int = 0) -> tuple[int, ...]:
    """1 to 50 bytes that repeat themselves here and there; every third begins like the first."""
    count = length or 1 + place * 11 % 47
    own = [(7 * place + i * i) % 60 + 20 * (i % 5 == 0) for i in range(count)]
    begin = [i % 9 + 60 for i in range(21)] if place % 3 == 0 else []
    return tuple(begin + own)[: length or 50]


def jobs_of(llm: LLM, kinds: Sequence[str]) -> list[Job]:
    """One of each kind, with texts to stop at and to avoid from what the plain engine writes."""
    jobs, width = [], llm.engine.source.config.vocab_size
    for place, kind in enumerate(KINDS):
        if kind not in kinds:
            continue
        fields = {"seed": crc32(kind.encode()), "ignore_eos": kind != "min tokens"} | KINDS[kind]
        cuts = {name: fields.pop(name) for name in ("stop", "bad_words") if name in fields}
        ids = prompt_of(place, LENGTHS.get(kind, 0))
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = [each for each in fields["stop_token_ids"] if each < width]
        if cuts and width == BYTES:
            fields["allowed_token_ids"] = list(range(NUM_PLAIN))
        for name, (start, end) in cuts.items():
            (output,) = generate(llm, [Job(kind, ids, SamplingParams(**fields))])
            assert llm.tokenizer is not None
            fields[name] = [llm.tokenizer.decode(list(output.outputs[0].token_ids[start:end]))]
        jobs.append(Job(kind, ids, SamplingParams(**fields)))
    return jobs


def generate(llm: LLM, jobs: Sequence[Job]) -> list[RequestOutput]:
    """All of these together."""
    prompts = [list(job.ids) for job in jobs]
    return llm.generate(prompts, [job.params for job in jobs], use_tqdm=False)


def everything(output: RequestOutput) -> list[object]:
    """All that an output says but for times, with every bit of its numbers."""
    entries = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    numbers = [
        [[(token, one.logprob, one.rank) for token, one in (entry or {}).items()] for entry in part]
        for part in entries
        if part is not None
    ]
    names = ("token_ids", "text", "finish_reason", "stop_reason", "error", "cumulative_logprob")
    return [*([getattr(each, name) for name in names] for each in output.outputs), numbers]


def unequal(one: CompletionOutput, other: CompletionOutput) -> list[str]:
    """What differs between two completions but for rounding."""
    names = ("token_ids", "text", "finish_reason", "stop_reason", "error")
    found = [
        f"{name} {getattr(one, name)!r} became {getattr(other, name)!r}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]
    if not alike(one.logprobs, other.logprobs):
        found.append("logprobs")
    sums = one.cumulative_logprob, other.cumulative_logprob
    limit = CLOSE * len(one.token_ids)
    if (sums[0] is None) != (sums[1] is None) or abs((sums[0] or 0) - (sums[1] or 0)) > limit:
        found.append("cumulative_logprob")
    return found


def alike(one: Any, other: Any) -> bool:
    """Whether two lists of log-probabilities agree: the chosen token in each place, and the best
    tokens but for those that are as good."""
    if one is None or other is None:
        return one is other
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
