"""Chapter 16: proposers that are watched, a draft model in a dozen lines, and distributions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.lab.hardware import Hardware
from minillm.lab.roofline import StepCost, step_cost, step_time
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.sampling.sampler import sample
from minillm.speculative.proposer import DraftRow
from minillm_exercises.chapters import common
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.timing import measure

Dist = Sequence[Fraction]
CONTEXT = 256  # tokens in the cache before a verification that is timed
MOST = 4096  # where a search for rows or a batch ends


# Proposers -----------------------------------------------------------------------------------


@dataclass
class Round:
    """One step of one sequence: the drafts that a proposer gave after `start` known tokens."""

    start: int
    drafts: list[int]


class Watched:
    """A proposer that asks another one and notes what it answered. While `asked` is None it
    proposes nothing, so one engine can serve several proposers."""

    def __init__(self, asked: Any = None):
        self.asked, self.rounds = asked, list[Round]()

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The drafts of each row."""
        given = self.asked.propose(rows) if self.asked else [[] for _ in rows]
        drafts = [list(map(int, each)) for each in given]
        for row, each in zip(rows, drafts, strict=True):
            self.rounds.append(Round(len(row.token_ids), each))
        return drafts

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        forget = getattr(self.asked, "forget", None)
        if forget is not None:
            forget(seq_id)


class Dice:
    """Proposes tokens at random."""

    def __init__(self, vocab_size: int, seed: int = 0):
        self.vocab_size, self.draw = vocab_size, torch.Generator().manual_seed(seed)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Any tokens."""
        return [self._tokens(row.num_drafts) for row in rows]

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(self.vocab_size, (count,), generator=self.draw).tolist()


class Oracle:
    """Proposes what it knows to come: `text` is that of the only sequence, prompt included."""

    def __init__(self, text: Sequence[int] = ()):
        self.text = text

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The next tokens of the text."""
        starts = [len(row.token_ids) for row in rows]
        return [
            list(self.text[start : start + row.num_drafts])
            for start, row in zip(starts, rows, strict=True)
        ]


class SmallModel:
    """Proposes what a small model writes, drawn with the noise of the row's own sampling, or with
    noise of another seed. It keeps no cache from step to step, which the engine's does."""

    def __init__(self, llm: LLM, same_noise: bool = True):
        self.run, self.other = llm.engine.forward_pass, 0 if same_noise else 1

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """What the small model writes after each row."""
        return [self._write(row) for row in rows]

    def _write(self, row: DraftRow) -> list[int]:
        ids, start = list(row.token_ids), 0
        cache = self.run.allocate(1, len(ids) + row.num_drafts)
        for _ in range(row.num_drafts):
            _, logits = self.run.run([Chunk(0, start, ids[start:])], cache)
            start, new = len(ids), row.new
            ids += sample(logits, new.params, new.seed + self.other, [start], new.sample_index)
        return ids[-row.num_drafts :]


# Rounds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """A round with its outcome: the first `accepted` drafts were right, and `last` came after."""

    drafts: tuple[int, ...]
    accepted: int
    last: int


def verified(rounds: Sequence[Round], text: Sequence[int]) -> list[Verified]:
    """The steps of one sequence, judged by the text that it became, prompt included. A step for
    which nothing was asked, as the last one of a text may be, is one without drafts."""
    found: list[Verified] = []
    place = rounds[0].start
    asked = {each.start: each.drafts for each in rounds}
    while place < len(text):
        drafts, accepted = asked.get(place, []), 0
        while accepted < len(drafts) and drafts[accepted] == text[place + accepted]:
            accepted += 1
        place += accepted
        found.append(Verified(tuple(drafts), accepted, text[place]))
        place += 1
    return found


def write(
    llm: LLM, prompt: Sequence[int], watched: Watched | None = None, **params: Any
) -> tuple[list[int], list[Verified]]:
    """The tokens that `llm` writes after `prompt`, and its rounds where it has a `watched`
    proposer. The first token comes with the prompt, so rounds begin after it."""
    if watched is not None:
        watched.rounds.clear()
    options = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "seed": 0} | params)
    out = llm.generate([{"prompt_token_ids": list(prompt)}], options, use_tqdm=False)[0]
    tokens = list(out.outputs[0].token_ids)
    text = [*prompt, *tokens]
    return tokens, verified(watched.rounds, text) if watched else []


def per_step(rounds: Sequence[Verified]) -> Fraction:
    """Tokens per step: the accepted drafts and one more."""
    return Fraction(sum(each.accepted + 1 for each in rounds), len(rounds))


def survival(rounds: Sequence[Verified], k: int) -> list[Fraction]:
    """For each of k places the share of all rounds in which that many drafts were accepted."""
    return [Fraction(sum(r.accepted >= i for r in rounds), len(rounds)) for i in range(1, k + 1)]


def mean_length(llm: LLM, openings: Sequence[Sequence[int]], seeds: int, new: int) -> Fraction:
    """Tokens per step with drafts, by the counters of the scheduler, over texts of `new` tokens at
    temperature 1: after each opening (token ids) as many as there are `seeds`."""
    prompts = [list(opening) for opening in openings for _ in range(seeds)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=new, ignore_eos=True)
        for _ in openings
        for seed in range(seeds)
    ]
    counters = llm.engine.scheduler.counters
    before = counters.num_accepted_tokens, counters.num_drafts
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    accepted = counters.num_accepted_tokens - before[0]
    return 1 + Fraction(accepted, counters.num_drafts - before[1])


# Two models on one text ----------------------------------------------------------------------


def next_logits(run: ForwardPass, text: Sequence[int]) -> Tensor:
    """Logits after each token of a text, float64 [N, V]."""
    cache = run.allocate(1, len(text))
    hidden, _ = run.run([Chunk(0, 0, list(text))], cache)
    return run.logits(hidden).double()


def draws(logits: Tensor, seed: int) -> list[int]:
    """The token that the engine draws at each position with this seed, at temperature 1."""
    params = SamplingParams(temperature=1.0)
    return sample(logits.float(), params, seed, range(len(logits)))


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """The probability that two distributions [N, V] draw the same token with the same Gumbel noise:
    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), by sorting instead of V x V quotients; [N]."""
    order = (p / q).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above = p.cumsum(-1)  # of the j with p_j / q_j >= p_i / q_i
    below = q.sum(-1, keepdim=True) - q.cumsum(-1)  # of the others
    terms = 1 / (above / p + below / q)
    return terms.where((p > 0) & (q > 0), 0.0).sum(-1)


def agreed(ours: Tensor, theirs: Tensor, seeds: int, shift: int) -> float:
    """The share of positions where both logits give the same token, for so many seeds; `shift` is
    what the second one adds to the seed."""
    pairs = [(draws(ours, seed), draws(theirs, seed + shift)) for seed in range(seeds)]
    equal = sum(a == b for pair in pairs for a, b in zip(*pair, strict=True))
    return equal / (seeds * len(ours))


# Distributions of the standard rule ---------------------------------------------------------------


def distance(one: Dist, other: Dist) -> Fraction:
    """The total variation distance of two distributions: the largest error in the probability of
    any set of tokens."""
    return sum((abs(a - b) for a, b in zip(one, other, strict=True)), Fraction(0)) / 2


def batch_dist(p: Dist, q: Dist, residual: Dist, batch: int) -> list[Fraction]:
    """The first token's distribution of a row where one rejection in a batch sends *all* rows to
    the residual: all rows have these distributions."""
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    all_accept = sum(kept, Fraction(0)) ** batch
    others = sum(kept, Fraction(0)) ** (batch - 1)
    return [k * others + (1 - all_accept) * r for k, r in zip(kept, residual, strict=True)]


def shared_noise_dist(p: Dist, q: Dist, residual: Dist, rows: int = 400_000) -> list[float]:
    """The first token's distribution where the residual is drawn with the Gumbel noise that drew
    the draft: the shares of so many draws, coins apart."""
    generator = torch.Generator().manual_seed(0)
    dist = [torch.tensor([float(each) for each in one], dtype=torch.float64) for one in (p, q)]
    left = torch.tensor([float(each) for each in residual], dtype=torch.float64)
    noise = -torch.rand(rows, len(p), generator=generator, dtype=torch.float64).log()
    draft = (noise / dist[1]).argmin(1)  # exponential races are the Gumbel trick
    coin = torch.rand(rows, generator=generator, dtype=torch.float64)
    accepted = coin < (dist[0] / dist[1])[draft]
    token = torch.where(accepted, draft, (noise / left).argmin(1))
    return (token.bincount(minlength=len(p)) / rows).tolist()


# What a step costs ---------------------------------------------------------------------------


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int = 4) -> dict[str, float]:
    """Median seconds of each of `runs`. They are measured in turn, so that a disturbance that
    lasts for some time meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(common.rounds(rounds + 1)):
        for name, run in runs.items():
            found[name] += measure(run, repeats=1, warmup=0, budget=1e-9).times
    return {name: median(times[1:] or times) for name, times in found.items()}  # [0] is a warm-up


def row_seconds(llm: LLM, counts: Sequence[int], batch: int = 1) -> dict[int, float]:
    """Median seconds of a pass over that many new tokens of each of `batch` sequences that have
    `CONTEXT` tokens in the cache, with a logit for every one of them."""
    run = llm.engine.forward_pass
    cache = run.allocate(batch, CONTEXT + max(counts))
    run.run([Chunk(b, 0, [b + 1] * CONTEXT) for b in range(batch)], cache)

    def verify(count: int) -> None:
        hidden, _ = run.run([Chunk(b, CONTEXT, [1] * count) for b in range(batch)], cache)
        run.logits(hidden)

    return sweeps(verify, counts, str(run.device))


def sweeps(run: Callable[[int], object], counts: Sequence[int], device: str) -> dict[int, float]:
    """Median seconds of `run` for each of `counts`, in the less disturbed of two sweeps."""
    found = [
        [measure(lambda c=count: run(c), budget=0.25, device=device).median for count in counts]
        for _ in range(common.rounds(2))
    ]
    return dict(zip(counts, map(min, zip(*found, strict=True)), strict=True))


def row_cost(config: ModelConfig, rows: int, batch: int = 1) -> StepCost:
    """Bytes and operations of such a pass in bfloat16."""
    lengths = [CONTEXT + rows] * batch
    logits = rows * batch
    return step_cost(config, [rows] * batch, lengths, num_logits=logits, dtype="bfloat16")


def row_bound(config: ModelConfig, machine: Hardware, rows: int, batch: int = 1) -> float:
    """Seconds that no such pass can be faster than: its bytes or its operations."""
    return step_time(row_cost(config, rows, batch), machine, num_operations=0).seconds


def knee(config: ModelConfig, machine: Hardware) -> int:
    """From how many rows on the operations of such a pass take longer than its bytes; at most
    `MOST`."""

    def turned(rows: int) -> bool:
        cost = row_cost(config, rows)
        return cost.flops / machine.rate("bfloat16") >= cost.total_bytes / machine.bandwidth

    return next((rows for rows in range(1, MOST) if turned(rows)), MOST)


def gain(
    survived: Sequence[Fraction | float], config: ModelConfig, machine: Hardware, batch: int,
    draft: float = 0.0,
) -> float:  # fmt: skip
    """Tokens per second with drafts over those without, by bounds; `draft` is the time of all
    drafts of a step in units of a plain step."""
    k = len(survived)
    plain = row_bound(config, machine, 1, batch)
    cost = row_bound(config, machine, k + 1, batch) / plain
    return float(1 + sum(survived)) / (cost + draft)


def break_even(survived: Sequence[Fraction | float], config: ModelConfig, machine: Hardware) -> int:
    """The largest batch up to which drafts gain, by bounds; at most `MOST`."""
    for batch in range(1, MOST):
        if gain(survived, config, machine, batch + 1) <= 1:
            return batch
    return MOST


def speed_up(acceptance: Fraction, k: int, draft: Fraction) -> Fraction:
    """The published gain: each draft accepted with the same probability, verification for the
    price of a plain step, `draft` plain steps for each of k drafts."""
    return sum((acceptance**i for i in range(k + 1)), Fraction(0)) / (1 + k * draft)


def acceptance_for(gain: int, k: int, draft: Fraction) -> Fraction:
    """The acceptance, to a thousandth, at which `speed_up` is this gain."""
    grid = (Fraction(i, 1000) for i in range(1001))
    return min(grid, key=lambda each: abs(speed_up(each, k, draft) - gain))


def rounded(value: Fraction | float, digits: int = 2) -> str:
    """A number with so many decimals, for a fact."""
    return f"{float(value):.{digits}f}"
