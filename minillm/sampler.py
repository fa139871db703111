"""From logits to the next token: the whole batch at once, each row with its own parameters.

The order of operations is vLLM's::

    raw log-probabilities are read off
    allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> penalties     edit_logits
    temperature -> min_p                                                       scale_logits
    top_k -> top_p                                                     ops.truncation
    argmax(logits + Gumbel noise)                                                    sample

An operation that no row asks for is not executed, and the vocabulary is never sorted. All but the
edits is one call: of `minillm_kernels.sampling` on a GPU, of `ops.cpu_sampling` on a CPU with a C
compiler. Both draw the same tokens as the torch below, which says what they mean.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm import ops
from minillm.argmax import first_best
from minillm.logprobs import TokenLogprob, describe, failures
from minillm.ops import cpu_sampling
from minillm.ops.philox import Purpose, random_words, random_words_of_vocabulary, to_gumbel
from minillm.ops.truncation import best_tokens, truncate_row
from minillm.penalties import History, is_penalised, penalise
from minillm.sampling_params import SamplingParams

CHUNK_VALUES_CPU = 2**21  # logits worked on at a time: temporaries stay below 100 MB,
CHUNK_VALUES_GPU = 2**23  # and here below 1 GB
NO_TOKEN = -1  # stands in `SampledBatch.token_ids` where a row failed


@dataclass(slots=True)
class SamplingRow:
    """What the sampler needs to know about the request behind one row of logits.

    All token ids are below the logit width (`validate_against_model`): the row does not check.
    Only `position` and `output_token_ids` may change, so that a sequence needs one row for all of
    its steps.

    Attributes:
        seed: of the request, any 64-bit value; the same for all its completions.
        sample_index: which of the request's `n` completions.
        position: index in the sequence of the token to choose (prompt length for the first).
        stop_ids: end-of-sequence and stop token ids, masked until `params.min_tokens`.
        bad_words_ids: `params.bad_words` as the tokenizer splits them.
        history: of a penalised sequence, which keeps it from step to step.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    history: History | None = field(init=False, default=None)
    _edits: bool = field(init=False)
    _request: bytes | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.params
        asked = params.allowed_token_ids is not None or params.logit_bias or self.bad_words_ids
        self._edits = bool(asked) or is_penalised(params)

    @property
    def edits(self) -> bool:
        """Whether something changes its logits before the choice."""
        return self._edits or len(self.output_token_ids) < self.params.min_tokens

    @property
    def request(self) -> bytes:
        """Its parameters as C reads them; made once."""
        if self._request is None:
            params = self.params
            self._request = bytes(
                cpu_sampling.Request(
                    top_p=params.top_p,
                    seed=self.seed,
                    sample_index=self.sample_index,
                    top_k=max(params.top_k, 0),
                    temperature=0 if params.greedy else params.temperature,
                    floor=math.log(params.min_p) if params.min_p else -math.inf,
                )
            )
        return self._request


# Logits [K, V] and their rows -> int64 [K].
Chooser = Callable[[Tensor, Sequence[SamplingRow]], Tensor]


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
    """Choose one token per row.

    Args:
        logits: [K, V] in any floating-point type; not changed.
        rows: K descriptions.
        row_by_row: whether each row is drawn and described alone, so that not even the rounding of
            a sum can depend on the number of rows. What is exact is done for all at once.

    A row's token depends on that row alone: its logits, parameters, seed, sample index and
    position, and not on the other rows or on how many there are.
    """
    if not (ops.uses_kernels(logits) or any(row.edits or not row.params.greedy for row in rows)):
        return _sample_best(logits, rows, row_by_row)
    if cpu_sampling.takes(logits):
        return _sample_in_c(logits, rows, row_by_row)
    raw = logits.float()
    edited = edit_logits(raw, rows)
    kernels = ops.uses_kernels(raw)
    failed = failures(_best_logit(raw, edited))
    groups: dict[Chooser, list[int]] = {}
    for index, row in enumerate(rows):
        if index not in failed:
            choose = _choose_by_kernels if kernels else _chooser(row.params, raw.shape[1])
            groups.setdefault(choose, []).append(index)
    token_ids = [NO_TOKEN] * len(rows)
    for choose, group in groups.items():
        # The best is exact, and is found without memory of the size of the logits.
        whole = kernels or choose is _choose_best
        for members in [group] if whole else _chunks(group, raw, row_by_row):
            chosen = choose(_select(edited, members), [rows[index] for index in members])
            for index, token in zip(members, chosen.tolist(), strict=True):
                token_ids[index] = token
    return SampledBatch(token_ids, _row_logprobs(raw, rows, token_ids, row_by_row), failed)


def _sample_best(logits: Tensor, rows: Sequence[SamplingRow], row_by_row: bool) -> SampledBatch:
    """Where nobody asks for more: one pass over the logits, in their own dtype."""
    best, chosen = first_best(logits)
    failed = failures(best)
    token_ids = [NO_TOKEN if i in failed else token for i, token in enumerate(chosen.tolist())]
    return SampledBatch(token_ids, _row_logprobs(logits, rows, token_ids, row_by_row), failed)


def _sample_in_c(logits: Tensor, rows: Sequence[SamplingRow], row_by_row: bool) -> SampledBatch:
    """Rows as they are in one call, in their own dtype; edited ones in parts, in float32."""

    def choose(part: Tensor, members: list[int], places: list[int] | None = None) -> Tensor:
        requests = [rows[index].request for index in members]
        positions = [rows[index].position for index in members]
        left, chosen[members] = cpu_sampling.choose_tokens(
            part, requests, positions, places, logits.dtype
        )
        return left

    best, chosen = torch.empty(len(rows)), torch.empty(len(rows), dtype=torch.int64)
    kinds: dict[bool, list[int]] = {False: [], True: []}
    for index, row in enumerate(rows):
        kinds[row.edits].append(index)
    if plain := kinds[False]:
        best[plain] = choose(logits, plain, plain)
    for members in _chunks(kinds[True], logits, alone=False):
        raw = _select(logits, members)
        left = choose(edit_logits(raw, [rows[index] for index in members]), members)
        own = cpu_sampling.best_tokens(raw)[0]  # what is wrong with the model's own stays
        best[members] = torch.where(own.isfinite(), left, own)
    failed = failures(best)
    token_ids = [NO_TOKEN if i in failed else token for i, token in enumerate(chosen.tolist())]
    return SampledBatch(token_ids, _row_logprobs(logits, rows, token_ids, row_by_row), failed)


def _chooser(params: SamplingParams, vocab_size: int) -> Chooser:
    """The cheapest way to choose for these parameters."""
    if params.greedy:
        return _choose_best
    if 0 < params.top_k < vocab_size or params.top_p < 1:
        return _choose_among_best
    return _choose_among_all


def _choose_best(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return first_best(logits)[1]


def _choose_among_all(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return _draw(scale_logits(logits, rows), rows)


def _choose_among_best(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    scaled = scale_logits(logits, rows)
    values, ids, enough = best_tokens(
        scaled, [row.params.top_k for row in rows], [row.params.top_p for row in rows]
    )
    words = random_words(*_stream(rows, logits.device), Purpose.SAMPLE, ids)
    best = (values + to_gumbel(words)).argmax(dim=-1, keepdim=True)
    chosen = ids.gather(1, best)[:, 0]
    for index in (~enough).nonzero()[:, 0].tolist():
        params = rows[index].params
        wide = truncate_row(scaled[index], params.top_k, params.top_p)
        chosen[index] = _draw(wide[None], rows[index : index + 1])[0]
    return chosen


def _choose_by_kernels(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    from minillm.ops import triton

    return triton.sample(logits, [row.params for row in rows], *_stream(rows, logits.device))


def _draw(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token per row of logits [K, V], with noise for the whole vocabulary."""
    stream = _stream(rows, scaled.device)
    words = random_words_of_vocabulary(*stream, Purpose.SAMPLE, scaled.shape[1])
    return (scaled + to_gumbel(words)).argmax(dim=-1)


def _chunks(members: list[int], logits: Tensor, alone: bool) -> Iterator[list[int]]:
    """Parts of `members`, so that the memory of a step does not grow with the batch."""
    values = CHUNK_VALUES_CPU if logits.device.type == "cpu" else CHUNK_VALUES_GPU
    rows = 1 if alone else max(1, values // logits.shape[1])
    return (members[start : start + rows] for start in range(0, len(members), rows))


def _stream(rows: Sequence[SamplingRow], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, sample index and position of every row: three int64 [K]."""
    seeds = [(row.seed + 2**63) % 2**64 - 2**63 for row in rows]  # the same 64 bits, signed
    numbers = [seeds, [row.sample_index for row in rows], [row.position for row in rows]]
    seed, sample_index, position = torch.tensor(numbers, device=device)
    return seed, sample_index, position


def _select(logits: Tensor, members: list[int]) -> Tensor:
    """The rows `members`, without a copy where that is all of them."""
    return logits if len(members) == len(logits) else logits[members]


def _best_logit(raw: Tensor, edited: Tensor) -> Tensor:
    """The largest logit of each row: NaN and +inf get through, and it is -inf where everything is
    masked. What is wrong with the model's own logits stays."""
    best = raw.amax(dim=-1)
    return best if edited is raw else torch.where(best.isfinite(), edited.amax(dim=-1), best)


# ---- edits: masks, biases, penalties ----------------------------------------------------------


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply masks, then biases, then penalties.

    Returns:
        `logits` [K, V] itself when no row asks for anything, else an edited copy in float32.
    """
    if not any(row.edits for row in rows):
        return logits
    allowed = [
        (index, row.params.allowed_token_ids)
        for index, row in enumerate(rows)
        if row.params.allowed_token_ids is not None
    ]
    banned = [(index, token) for index, row in enumerate(rows) for token in _banned_ids(row)]
    biases = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in (row.params.logit_bias or {}).items()
    ]
    penalised = any(is_penalised(row.params) for row in rows)
    if not (allowed or banned or biases or penalised):
        return logits
    logits = logits.to(torch.float32, copy=True)
    for index, ids in allowed:
        kept = torch.tensor(ids, device=logits.device)
        values = logits[index, kept]
        logits[index] = -math.inf
        logits[index, kept] = values
    if banned:
        logits[_columns(banned, logits.device)] = -math.inf
    if biases:
        places = _columns([(index, token) for index, token, _ in biases], logits.device)
        logits[places] += torch.tensor([bias for *_, bias in biases], device=logits.device)
    if penalised:
        penalise(logits, rows)
    return logits


def _columns(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, token) pairs as an index into [K, V]."""
    index, token = torch.tensor(pairs, device=device).T
    return index, token


def _banned_ids(row: SamplingRow) -> Iterator[int]:
    """Ids that must not come next: completions of a bad word, and stops before `min_tokens`."""
    output = row.output_token_ids
    for word in row.bad_words_ids:
        start = len(output) - (len(word) - 1)
        if word and start >= 0 and tuple(output[start:]) == word[:-1]:
            yield word[-1]
    if len(output) < row.params.min_tokens:
        yield from row.stop_ids


# ---- temperature ---------------------------------------------------------------


def scale_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Temperature, then min-p (Nguyen et al., 2024): a new float32 [K, V], 0 for the best token.

    With the maximum at 0, no division overflows and min-p is a plain threshold at log(min_p).
    """
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    temperature = [row.params.temperature for row in rows]
    if any(value != 1 for value in temperature):
        scaled /= torch.tensor(temperature, device=logits.device)[:, None]
    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        threshold = [math.log(share) if share else -math.inf for share in min_p]
        limit = torch.tensor(threshold, device=logits.device)[:, None]
        scaled.masked_fill_(scaled < limit, -math.inf)
    return scaled


# ---- log-probabilities ------------------------------------------------------------------------


def _row_logprobs(
    raw: Tensor, rows: Sequence[SamplingRow], token_ids: list[int], row_by_row: bool
) -> list[dict[int, TokenLogprob] | None]:
    """Log-probabilities of the chosen tokens, for the rows that ask and did not fail."""
    counts = {
        index: row.params.logprobs
        for index, row in enumerate(rows)
        if row.params.logprobs is not None and token_ids[index] != NO_TOKEN
    }
    result: list[dict[int, TokenLogprob] | None] = [None] * len(rows)
    if counts:
        members = list(counts)
        chosen = torch.tensor([token_ids[index] for index in members], device=raw.device)
        described = describe(_select(raw, members), chosen, list(counts.values()), row_by_row)
        for index, entry in zip(members, described, strict=True):
            result[index] = entry
    return result
