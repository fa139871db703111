"""Chapter 23: distributions of texts with and without a mask, models' records, times of masks."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.models.forward_pass import Chunk
from minillm.structured.dfa import Dfa
from minillm.structured.matcher import DfaMatcher, Guidance
from minillm.structured.vocabulary import Vocabulary, pack
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.timing import measure

REAL = Path(__file__).with_name("ch23_smollm2.json")
RECORD = r'\{"name": "[A-Za-z ]{1,20}", "age": [0-9]{1,3}\}'
Number = Fraction | float
NextDist = Callable[[tuple[int, ...]], Sequence[Number]]


# Distributions of texts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A complete text as tokens, and its probability without a mask and with one."""

    tokens: tuple[int, ...]
    alone: Number
    masked: Number


def ways(
    dist: NextDist, dfa: Dfa, words: Vocabulary, state: int = 1, known: tuple[int, ...] = ()
) -> Iterator[Way]:
    """All complete texts of a pattern none of whose texts begins another one. `dist(known)` is the
    model's distribution [V] of the token after `known`."""
    allowed = np.flatnonzero(dfa.mask(state, words)).tolist()
    if not allowed:
        yield Way(known, 1, 1)
        return
    shares = dist(known)
    kept = sum(shares[token] for token in allowed)
    for token in allowed:
        if shares[token]:
            after = dfa.after(state, words.tokens[token])
            for rest in ways(dist, dfa, words, after, (*known, token)):
                yield Way(
                    rest.tokens, shares[token] * rest.alone, shares[token] / kept * rest.masked
                )


def two_dists(
    found: Sequence[Way], words: Vocabulary
) -> tuple[dict[str, Number], dict[str, Number]]:
    """The distributions of the texts where invalid ones are thrown away, and under a mask."""
    valid = sum(way.alone for way in found)
    rejected: dict[str, Number] = {}
    masked: dict[str, Number] = {}
    for way in found:
        text = b"".join(words.tokens[token] for token in way.tokens).decode()
        rejected[text] = rejected.get(text, 0) + way.alone / valid
        masked[text] = masked.get(text, 0) + way.masked
    return rejected, masked


def distance(one: Mapping[str, Number], other: Mapping[str, Number]) -> Number:
    """The total variation distance: the largest error in the probability of any set of texts."""
    differences: list[Any] = [abs(one[text] - other[text]) for text in one]
    return sum(differences) / 2


def scores_of(llm: LLM, ids: Sequence[int]) -> Tensor:
    """Logits of the token after `ids`, float32 [V]."""
    run = llm.engine.forward_pass
    _, logits = run.run([Chunk(0, 0, list(ids))], run.allocate(1, len(ids)))
    return logits[0].float().cpu()


def dist_of(llm: LLM, prompt: str) -> NextDist:
    """What a model may write after a prompt, at temperature 1; all are computed once."""
    start = llm.engine.encode(prompt)

    @cache
    def dist(known: tuple[int, ...]) -> list[float]:
        return scores_of(llm, [*start, *known]).double().softmax(0).tolist()

    return dist


def largest(rest: Fraction) -> tuple[Fraction, Fraction]:
    """Where one of two beginnings has a valid rest of this probability (a square) and the other is
    always valid: the probability of the first at which both differ most, and how much."""
    root = Fraction(isqrt(rest.numerator), isqrt(rest.denominator))
    return 1 / (1 + root), (1 - root) / (1 + root)


# Records that a model writes ------------------------------------------------------------------


def write(llm: LLM, prompt: str, count: int, **options: Any) -> list[Any]:
    """`count` completions of a prompt at temperature 1, each with a seed of its own."""
    params = [
        SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 64} | options)
        for seed in range(count)
    ]
    outs = llm.generate([prompt] * count, params, use_tqdm=False)
    return [out.outputs[0] for out in outs]


def fault(text: str, fields: Mapping[str, type]) -> str:
    """What is wrong with a text that should be a JSON object of these fields, or ""."""
    try:
        found = json.loads(text)
    except ValueError:
        return "no JSON"
    if not isinstance(found, dict) or list(found) != list(fields):
        return "other fields"
    return (
        "" if [type(value) for value in found.values()] == list(fields.values()) else "other types"
    )


def measure_real(name: str) -> dict[str, Any]:
    """What `REAL` holds for the chat model `name`: its greedy answers to the sentences there, free
    and under the pattern `RECORD`. About a minute."""
    llm, known = LLM(name), real()
    found: dict[str, Any] = known | {"model": name, "answers": {}}
    for asked, question in known["questions"].items():
        chats = [[{"role": "user", "content": question + each[0]}] for each in known["people"]]
        for way, how in (("free", None), ("masked", {"regex": RECORD})):
            params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=how)
            outs = llm.chat(chats, params, use_tqdm=False)
            found["answers"][f"{asked}, {way}"] = [out.outputs[0].text for out in outs]
    return found


def real() -> dict[str, Any]:
    """`measure_real("smollm2")`, as it was measured, with the sentences and the right answers.
    `make test-external` measures it again."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def judged(texts: Sequence[str], people: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """How many answers are records, and how many are the right one of their sentence."""
    valid = [fault(text, {"name": str, "age": int}) == "" for text in texts]
    right = [
        fine and json.loads(text) == {"name": name, "age": age}
        for fine, text, (_, name, age) in zip(valid, texts, people, strict=True)
    ]
    return {"valid": sum(valid), "right": sum(right)}


# What a mask costs, and what it saves ----------------------------------------------------------


def choices(dfa: Dfa, words: Vocabulary, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """For each token of a text: how many tokens were allowed, and how many first bytes they
    have."""
    found, state = [], 1
    for token in tokens:
        allowed = np.flatnonzero(dfa.mask(state, words))
        found.append((len(allowed), len(set(words.first[allowed].tolist()))))
        state = dfa.after(state, words.tokens[token])
    return found


def larger(words: Vocabulary, size: int) -> Vocabulary:
    """A vocabulary of `size` tokens: these ones, and further tokens of two of them."""
    texts = [words.tokens[token] for token in words.with_text.tolist()]
    draw = np.random.default_rng(0)
    pairs = draw.integers(len(texts), size=(max(size - len(words), 0), 2)).tolist()
    return Vocabulary([*words.tokens, *(texts[a] + texts[b] for a, b in pairs)][:size])


def mask_bytes(words: Vocabulary) -> int:
    """Bytes that a mask needs if every token is looked at once: where it begins and its first byte
    are read, and a bit is written."""
    return words.start.nbytes + len(words) + len(pack(words.length > 0))


def mask_seconds(words: Vocabulary, pattern: str, tokens: Sequence[int]) -> dict[str, float]:
    """Seconds per mask, over the places of a text: in plain Python with states that are new, with
    states that were seen, and of llguidance if it is installed."""
    bits = np.zeros(-(-len(words) // 8), dtype=np.uint8)
    dfa = Dfa(pattern)

    def seconds(matcher: Any, new: bool = False) -> float:
        def fill() -> None:
            for token in tokens:
                if new:
                    matcher._masks.clear()
                matcher.fill(bits)
                matcher.accept(token)
            matcher.rollback(len(tokens))

        return measure(fill, budget=0.25).median / len(tokens)

    plain = DfaMatcher(dfa, words)
    found = {"dfa.py, new state": seconds(plain, new=True), "dfa.py, kept": seconds(plain)}
    if find_spec("llguidance") is not None:
        found["llguidance"] = seconds(Guidance(words).pattern(pattern))
    return found


def per_step(texts: Sequence[Sequence[int]], accepted: int) -> Fraction:
    """Tokens per step of texts of which so many tokens were accepted drafts. The first token of
    each comes with the prompt."""
    tokens = sum(len(text) - 1 for text in texts)
    return Fraction(tokens, tokens - accepted)
