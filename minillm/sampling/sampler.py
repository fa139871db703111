"""From logits to the next token: the whole batch at once, each row with its own parameters.

The order of operations is vLLM's::

    raw log-probabilities are read off                                        logprobs.py
    allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> penalties   edits.py
    temperature -> min_p -> top_k -> top_p -> argmax(logits + Gumbel noise)   ops/sampling.py

A `Sampler` keeps parameters and edits of every persistent row of the runner. Choosing needs no
token of an earlier step on the host, so that a step can be launched before they are read.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops.sampling import Pack, choose
from minillm.ops.transfers import upload
from minillm.sampling.edits import Edits, SamplingRow
from minillm.sampling.logprobs import TokenLogprob, describe, failures
from minillm.sampling.rules import DraftedToken, Rule, drafts_at

__all__ = ["NO_TOKEN", "SampledBatch", "Sampler", "SamplingRow", "sample"]

NO_TOKEN = -1  # stands in `SampledBatch.token_ids` where a row failed
SIGN = 2**63
NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})
NO_LAWS: Mapping[int, Tensor | None] = MappingProxyType({})


class HowItDraws(NamedTuple):
    """Parameters as the columns of a `Pack` have them."""

    floats: tuple[float, float, float]  # temperature (0 is greedy), min-p, top-p
    top_k: int  # 0 is off
    truncates: bool


def how_it_draws(params: SamplingParams) -> HowItDraws:
    """The numbers by which a request draws."""
    temperature = 0.0 if params.greedy else params.temperature
    truncates = temperature > 0 and (params.top_k > 0 or params.top_p < 1)
    return HowItDraws((temperature, params.min_p, params.top_p), max(params.top_k, 0), truncates)


def signed(seed: int) -> int:
    """Any seed as a signed number of 64 bits."""
    return (seed + SIGN) % (2 * SIGN) - SIGN


class Sampler:
    """The parameters of every persistent row, and the choice of tokens for some of them.

    Where there is a `rule`, it decides which token stands at drafted positions.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.device = device
        self.rule: Rule | None = None
        self.edits = Edits(num_rows, vocab_size, device)
        self._floats = np.zeros((3, num_rows), dtype=np.float32)  # temperature, min-p, top-p
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._keys = np.zeros((2, num_rows), dtype=np.int64)  # seed, sample index
        self._truncates = np.zeros(num_rows, dtype=bool)
        self._last: tuple[object, Pack] | None = None  # the columns of the step before

    def set_row(self, row: int, request: SamplingRow) -> None:
        """A sequence has this row from now on."""
        draws, self._last = how_it_draws(request.params), None
        self._floats[:, row], self._top_k[row] = draws.floats, draws.top_k
        self._truncates[row] = draws.truncates
        self._keys[:, row] = signed(request.seed), request.sample_index
        self.edits.set_row(row, request)

    def move(self, source: int, target: int) -> None:
        """A sequence gets another row."""
        self._last = None
        for column in (self._floats, self._top_k, self._keys, self._truncates):
            column[..., target] = column[..., source]
        self.edits.move(source, target)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [K, V] of the whole vocabulary, where ranks share it (`parallel/sampler.py`)."""
        return logits

    def choose(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        forks: Sequence[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
        laws: Mapping[int, Tensor | None] = NO_LAWS,
    ) -> tuple[Tensor, Tensor]:
        """Choose tokens, without waiting for the device.

        Args:
            logits: [R, V], in any floating-point type; not changed.
            rows: R persistent rows. A row stands several times, side by side, if it has several
                logits.
            positions: of the R tokens that are chosen.
            forks: for each of the R, how many tokens more are drawn from the same logits, for the
                next sample indices; empty if none are.
            drafts: for each row with several logits that has edits, or that the rule decides on,
                the drafted tokens: its second logits follow the first of them.
            laws: for some of these rows, what the drafts were drawn from, [drafts, V].

        Returns:
            Tokens, int64 [K], those of the same logits side by side; and float32 [K], the largest
            of the logits that each was chosen from, which is not finite where the choice failed.

        A row's token depends on that row alone: its logits, parameters, seed, sample index and
        position (and its drafts, if there is a rule), and not on the other rows or on how many
        there are.
        """
        counts = [1 + each for each in forks] if any(forks) else [1] * len(rows)
        spread = len(rows) < sum(counts)
        of = [i for i, count in enumerate(counts) for _ in range(count)] if spread else []
        pack = self._pack(rows, positions, counts if spread else None)
        index = torch.tensor(of, device=self.device) if spread else None
        drafted = list(drafts_at(rows, drafts, laws)) if self.rule and drafts else []
        if drafted and spread:
            drafted = [drafted[i] for i in of]
        edits = self.edits.rows_of(rows, positions)
        later = edited_samples(edits, of if spread else None)
        now = [None if i in later else each for i, each in enumerate(drafted)]
        every = logits if index is None else logits[index]
        tokens, best = self._draw(every, self._greedy(pack, later), now)
        for members in self._edited(edits, rows, positions, drafts):
            for part in self.edits.chunks(members):
                chosen, where = set(part), part
                if index is not None:  # every token that is drawn from these logits
                    where = [place for place, i in enumerate(of) if i in chosen]
                samples = torch.tensor(where, device=self.device)
                at = [positions[i] for i in part]
                edited = self.edits.apply(_some(logits, part), [rows[i] for i in part], at)
                if index is not None:
                    each = torch.tensor([counts[i] for i in part])
                    edited = edited.repeat_interleave(each, dim=0)
                guessed = [drafted[place] for place in where] if drafted else []
                own, left = self._draw(edited, pack.select(samples), guessed, logits.dtype)
                model = best[samples]  # what is wrong with the model's own logits stays
                tokens[samples] = own
                best[samples] = torch.where(model.isfinite(), left, model)
        return tokens, best

    def _draw(
        self,
        logits: Tensor,
        pack: Pack,
        drafted: Sequence[DraftedToken | None],
        model_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One token for each of the logits, and the largest of these; what is `drafted` there is
        for the rule to decide on."""
        tokens, best = choose(logits, pack, model_dtype)
        rule, places = self.rule, [i for i, each in enumerate(drafted) if each is not None]
        if rule is None or not places:
            return tokens, best
        for part in self.edits.chunks(places):
            at = torch.tensor(part).to(self.device)
            guessed = [each for i in part if (each := drafted[i]) is not None]
            tokens[at] = rule.choose(
                tokens[at], logits[at], pack.select(at), guessed, model_dtype or logits.dtype
            )
        return tokens, best

    def _greedy(self, pack: Pack, edited: Collection[int]) -> Pack:
        """The pack for logits as the model gave them. Of rows with edits only the largest is asked,
        so these are greedy: nothing is drawn that is not used."""
        if not edited:
            return pack
        at = torch.tensor(sorted(edited)).to(self.device)
        return pack._replace(temperature=pack.temperature.index_fill(0, at, 0.0))

    def _edited(
        self,
        members: list[int],
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
    ) -> Iterator[list[int]]:
        """The `members` of `rows` whose logits are edited, those of different rows together: the
        first logits of all rows, then the second, as if the first draft had been chosen, and so
        on."""
        if len(members) == len({rows[i] for i in members}):
            yield members
            return
        groups: dict[int, list[int]] = {}
        for i in members:
            groups.setdefault(rows[i], []).append(i)
        if any(len(group) > 1 + len(drafts.get(row, ())) for row, group in groups.items()):
            raise ValueError("A row with edits has more logits than it has drafts to edit them by.")
        restore = self.edits.snapshot()
        try:
            for step in range(max(map(len, groups.values()))):
                left = {row: group[step] for row, group in groups.items() if step < len(group)}
                if step:
                    tokens = torch.tensor([drafts[row][step - 1] for row in left])
                    at = [positions[i] - 1 for i in left.values()]
                    self.edits.append(list(left), at, tokens.to(self.device))
                yield list(left.values())
        finally:
            restore()

    def append(self, rows: Sequence[int], positions: Sequence[int], tokens: Tensor) -> None:
        """The sequences in these different rows got these tokens, int64 [R], at `positions`."""
        self.edits.append(rows, positions, tokens)

    def append_run(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """The sequence in this row got several tokens, the first at `position`."""
        if self.edits.follows(row):
            for at, token in enumerate(tokens, start=position):
                self.edits.append([row], [at], torch.tensor([token]).to(self.device))

    def _pack(
        self, rows: Sequence[int], positions: Sequence[int], counts: list[int] | None
    ) -> Pack:
        """Parameters of rows, each as often as it draws. Only positions change in most steps."""
        key = (tuple(rows), counts)
        if self._last is None or self._last[0] != key:
            of = np.array(rows, dtype=np.int64)
            keys = self._keys[:, of]
            if counts is not None:
                of = of.repeat(counts)
                keys = keys.repeat(counts, axis=1)
                keys[1] += np.fromiter(chain.from_iterable(map(range, counts)), np.int64)
            columns = upload(self.device, self._floats[:, of], self._top_k[of], keys)
            floats, top_k, there = columns
            (temperature, min_p, top_p), (seed, sample_index) = floats, there
            truncates = bool(self._truncates[of].any())
            pack = Pack(temperature, min_p, top_p, top_k, seed, sample_index, seed, truncates)
            self._last = key, pack
        at = np.array(positions, dtype=np.int64)
        (position,) = upload(self.device, at if counts is None else at.repeat(counts))
        return self._last[1]._replace(position=position)


def _some(logits: Tensor, places: list[int]) -> Tensor:
    """Some rows of logits, without a copy where they are side by side."""
    first, end = places[0], places[-1] + 1
    if places == list(range(first, end)):
        return logits[first:end]
    return logits.index_select(0, torch.tensor(places).to(logits.device))


def edited_samples(members: list[int], of: list[int] | None) -> Collection[int]:
    """Which samples are drawn from edited logits: `members`, or where logits `of` these stand."""
    if of is None or not members:
        return set(members)
    chosen = set(members)
    return {place for place, i in enumerate(of) if i in chosen}


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One chosen token per row.

    Attributes:
        token_ids: K ids; `NO_TOKEN` where the row failed.
        logprobs: K entries; for a row with `logprobs=k` the chosen token, then the top k.
        failed: row -> one sentence, for rows that could not be sampled. The others are unharmed.
    """

    token_ids: list[int]
    logprobs: list[dict[int, TokenLogprob] | None]
    failed: dict[int, str]


def sample(logits: Tensor, rows: Sequence[SamplingRow], row_by_row: bool = False) -> SampledBatch:
    """Choose one token per row of logits [K, V], by a sampler that is made for this call."""
    sampler = Sampler(len(rows), logits.shape[1], logits.device)
    for row, request in enumerate(rows):
        sampler.set_row(row, request)
    tokens, best = sampler.choose(logits, range(len(rows)), [row.position for row in rows])
    failed = failures(best)
    token_ids = [NO_TOKEN if i in failed else token for i, token in enumerate(tokens.tolist())]
    logprobs: list[dict[int, TokenLogprob] | None] = [None] * len(rows)
    asked = {i: row.params.logprobs for i, row in enumerate(rows) if i not in failed}
    wanted = {i: count for i, count in asked.items() if count is not None}
    if wanted:
        where = torch.tensor(list(wanted), device=logits.device)
        entries = describe(logits[where], tokens[where], list(wanted.values()), row_by_row)
        for i, entry in zip(wanted, entries.read(), strict=True):
            logprobs[i] = entry
    return SampledBatch(token_ids, logprobs, failed)
