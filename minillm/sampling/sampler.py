"""Sampling: from logits to the next tokens, batched, with parameters per row.

The order of operations is vLLM's::

    raw log-probabilities                                                     logprobs.py
    structured_outputs -> allowed_token_ids                                   edits.py
    -> bad_words -> min_tokens -> logit_bias -> penalties
    temperature -> min_p -> top_k -> top_p -> argmax(logits + Gumbel noise)   ops/sampling.py

A `Sampler` keeps the sampling parameters and logits processors ("edits") of every row of the
persistent batch. Their state is on the device, so a step can be launched before the previous one is
collected.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops.sampling import Pack, choose, draw_params, signed
from minillm.ops.transfers import indices, upload
from minillm.sampling.edits import Edits
from minillm.sampling.rules import DraftedToken, Rule, Verification, drafts_at
from minillm.sampling.samples import Samples
from minillm.scheduling.plan import NewSequence

NO_DRAFTS: Mapping[int, Sequence[int]] = {}
NO_DISTRIBUTIONS: Mapping[int, Tensor | None] = {}


class Sampler:
    """Samples tokens for rows of the persistent batch, whose parameters it keeps.

    In speculative decoding a `rule`, if set, decides the token at each drafted position.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.device = device
        self.rule: Rule | None = None
        self.edits = Edits(num_rows, vocab_size, device)
        self._floats = np.zeros((3, num_rows), dtype=np.float32)  # temperature, min-p, top-p
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._keys = np.zeros((2, num_rows), dtype=np.int64)  # seed, sample index
        self._truncates = np.zeros(num_rows, dtype=bool)
        self._last: tuple[object, NDArray, Pack] | None = None  # key, positions, previous pack

    def set_row(self, row: int, new: NewSequence, known: Sequence[int] | None = None) -> None:
        """Assign a row to a sequence. `known`: the tokens that the host knows, a list that grows
        with the sequence (by default those of `new`)."""
        draws, self._last = draw_params(new.params), None
        self._floats[:, row], self._top_k[row] = draws.floats, draws.top_k
        self._truncates[row] = draws.truncates
        self._keys[:, row] = signed(new.seed), new.sample_index
        self.edits.set_row(row, new, new.token_ids if known is None else known)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another row."""
        self._last = None
        for column in (self._floats, self._top_k, self._keys, self._truncates):
            column[..., target] = column[..., source]
        self.edits.move(source, target)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [K, V] over the whole vocabulary. With vocabulary parallelism,
        `parallel/sampler.py` gathers them from the ranks."""
        return logits

    def choose(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        forks: Sequence[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
        dists: Mapping[int, Tensor | None] = NO_DISTRIBUTIONS,
    ) -> tuple[Tensor, Tensor]:
        """Sample tokens without waiting for the device.

        A token depends only on its row: logits, parameters, seed, sample index and position (and
        drafts, with a rule). Other rows and the batch size do not change it.

        Args:
            logits: [R, V], any floating-point dtype; not modified.
            rows: persistent-batch row of each of the R logits; equal rows are adjacent.
            positions: sequence position of each of the R sampled tokens.
            forks: number of forks of each of the R logits (one more sample per fork), or empty.
            drafts: row -> draft tokens, for rows with several logits: logits i + 1 of the row
                follow its draft i. Needed for rows with edits, and for the rule.
            dists: row -> distributions [drafts, V] that its drafts were drawn from, if known.

        Returns:
            Tokens, int64 [K], K = R + number of forks, in row order; and the largest logit of each,
            float32 [K], which is not finite if sampling failed.
        """
        samples = Samples(len(rows), forks, self.device)
        pack = self._pack(rows, positions, samples.counts)
        guesses: list[DraftedToken | None] = []  # of each sample, for the rule
        if self.rule and drafts:
            guesses = samples.spread(list(drafts_at(rows, drafts, dists)))
        for_c = None if guesses else logits  # the rule reads edited logits
        masks, edited = self.edits.masks(rows, positions, drafts, for_c)
        # 1. Every sample from unedited logits; of those with edits only `best` is used.
        again, own_masks = set(samples.of_logits(edited)), samples.spread(masks)
        plain = [None if sample in again else guess for sample, guess in enumerate(guesses)]
        packed = self._greedy(pack, again)
        tokens, best = self._draw(samples.take(logits), packed, plain, masks=own_masks)
        # 2. The samples with edits once more, from edited copies of some logits at a time.
        for part, copies in self._edited(logits, edited, rows, positions, drafts):
            own = samples.of_logits(part)
            at = indices(self.device, own)
            some = [guesses[sample] for sample in own] if guesses else []
            drawn = self._draw(samples.repeat(copies, part), pack.select(at), some, logits.dtype)
            tokens[at], before = drawn[0], best[at]  # not finite before: the model failed
            best[at] = torch.where(before.isfinite(), drawn[1], before)
        return tokens, best

    def _draw(
        self,
        logits: Tensor,
        pack: Pack,
        drafted: Sequence[DraftedToken | None],
        model_dtype: torch.dtype | None = None,
        masks: Sequence[Tensor | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """A token for each row of logits, and the largest logit. The rule decides tokens of rows
        with a draft in `drafted`."""
        tokens, best = choose(logits, pack, model_dtype, masks=masks)
        if self.rule is None:
            return tokens, best
        drafts = {row: draft for row, draft in enumerate(drafted) if draft is not None}
        for part in self.edits.chunks(list(drafts)):
            at, dtype = indices(self.device, part), model_dtype or logits.dtype
            some = [drafts[row] for row in part]
            given = Verification(tokens[at], logits[at], pack.select(at), some, dtype)
            tokens[at] = self.rule.choose(given)
        return tokens, best

    def _greedy(self, pack: Pack, edited: Collection[int]) -> Pack:
        """The pack for unedited logits. Rows with edits are greedy, so no noise is drawn for them:
        only their largest logit is used."""
        if not edited:
            return pack
        at = indices(self.device, sorted(edited))
        return pack._replace(temperature=pack.temperature.index_fill(0, at, 0.0))

    def _edited(
        self,
        logits: Tensor,
        edited: Sequence[int],
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Edited copies [P, V] of the logits at P indices, until all of `edited` had a turn: first
        of the first logits of each row, then of the second as if the first draft were accepted, and
        so on."""
        of_row: dict[int, list[int]] = {}
        for i in edited:
            of_row.setdefault(rows[i], []).append(i)
        if any(len(group) > 1 + len(drafts.get(row, ())) for row, group in of_row.items()):
            raise ValueError("A row with edits and k logits needs at least k - 1 drafts.")
        depth = max(map(len, of_row.values()), default=0)
        restore = self.edits.snapshot() if depth > 1 else None
        try:
            for step in range(depth):
                level = {row: group[step] for row, group in of_row.items() if step < len(group)}
                if step:
                    tokens = indices(self.device, [drafts[row][step - 1] for row in level])
                    self.edits.append(
                        list(level), [positions[i] - 1 for i in level.values()], tokens
                    )
                for part in self.edits.chunks(list(level.values())):
                    at = [rows[i] for i in part], [positions[i] for i in part]
                    yield part, self.edits.apply(_take_rows(logits, part), *at)
        finally:
            if restore is not None:
                restore()

    def append(self, rows: Sequence[int], positions: Sequence[int], tokens: Tensor) -> None:
        """Append tokens, int64 [R], at `positions` to the sequences in these distinct rows."""
        self.edits.append(rows, positions, tokens)

    def append_run(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """Append several tokens to the sequence in this row, the first at `position`."""
        if self.edits.follows(row):
            for at, token in enumerate(tokens, start=position):
                self.edits.append([row], [at], indices(self.device, [token]))

    def _pack(
        self, rows: Sequence[int], positions: Sequence[int], counts: list[int] | None
    ) -> Pack:
        """Parameters of the rows, repeated per sample. Cached: usually only positions change, and
        each by 1, which the device adds."""
        key, at = (tuple(rows), counts), np.array(positions, dtype=np.int64)
        if counts is not None:
            at = at.repeat(counts)
        if self._last is None or self._last[0] != key:
            of = np.array(rows, dtype=np.int64)
            keys = self._keys[:, of]
            if counts is not None:
                of = of.repeat(counts)
                keys = keys.repeat(counts, axis=1)
                keys[1] += np.fromiter(chain.from_iterable(map(range, counts)), np.int64)
            columns = upload(self.device, self._floats[:, of], self._top_k[of], keys, at)
            floats, top_k, stream, position = columns
            (temperature, min_p, top_p), (seed, index) = floats, stream
            truncates = bool(self._truncates[of].any())
            pack = Pack(temperature, min_p, top_p, top_k, seed, index, position, truncates)
        else:
            _, before, pack = self._last
            if self.device.type != "cpu" and np.array_equal(at, before + 1):
                position = pack.position + 1
            else:
                (position,) = upload(self.device, at)
            pack = pack._replace(position=position)
        self._last = key, at, pack
        return pack


def _take_rows(logits: Tensor, places: list[int]) -> Tensor:
    """Some rows of logits; a view if they are adjacent."""
    first, end = places[0], places[-1] + 1
    if places == list(range(first, end)):
        return logits[first:end]
    return logits.index_select(0, indices(logits.device, places))


def sample(
    logits: Tensor,
    params: SamplingParams,
    seed: int,
    positions: Sequence[int],
    sample_index: int = 0,
) -> list[int]:
    """The tokens that a request without edits draws from logits [K, V] at K positions."""
    sampler = Sampler(1, logits.shape[1], logits.device)
    sampler.set_row(0, NewSequence(0, sample_index, 0, (), params, seed))
    return sampler.choose(logits, [0] * len(positions), positions)[0].tolist()
