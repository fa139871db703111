"""Log-probabilities of tokens, and error messages for logits that are not finite."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.errors import Failure
from minillm.ops import cpu_sampling
from minillm.ops.transfers import read_later


class TokenLogprob(NamedTuple):
    """Log-probability under the raw model distribution; rank 1 is the most probable token."""

    logprob: float
    rank: int


NOT_FINITE = Failure(
    "The model's logits contain NaN or infinity; the weights or the dtype are wrong.", "model"
)


def failure_of(best: float) -> Failure | None:
    """The failure of a row with this largest logit; None if it is finite."""
    if math.isfinite(best):
        return None
    if best == -math.inf:
        return Failure(
            "No token is left to choose from: structured_outputs, allowed_token_ids, bad_words and "
            "min_tokens exclude all of them.",
            "request",
        )
    return NOT_FINITE


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log-probabilities being copied to the host: a table [T, k + 1] of the target and the top k
    tokens per row. Row t uses its first `top_k[t]` + 1 columns."""

    columns: Callable[[], list[Tensor]]  # log-probabilities float32, ids int64, ranks int64
    top_k: Sequence[int]

    def read(self) -> list[dict[int, TokenLogprob]]:
        """Wait for the copy. For each row: the target, then its top tokens."""
        logprobs, ids, ranks = self.columns()
        table = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), self.top_k, strict=True)
        return [
            {
                token: TokenLogprob(*entry)
                for token, *entry in islice(zip(*columns, strict=True), k + 1)
            }
            for *columns, k in table
        ]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Prompt log-probabilities being copied to the host, in chunks of rows."""

    parts: list[tuple[LogprobTable, Callable[[], list[Tensor]]]]

    def read(self) -> tuple[list[dict[int, TokenLogprob]], Failure | None]:
        """Wait for the copies. Returns one entry per token, or a failure."""
        result: list[dict[int, TokenLogprob]] = []
        for described, best in self.parts:
            if not best()[0].isfinite().all():
                return [], NOT_FINITE  # also -inf: no edit has excluded a token
            result += described.read()
        return result, None


def token_logprobs(
    logits_fn: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    top_k: int,
    chunk_rows: int = 64,
    row_by_row: bool = False,
) -> PromptLogprobs:
    """Log-probabilities of given tokens (a prompt's), in chunks that bound memory.

    The logits of a whole prompt can exhaust memory: 8,192 tokens with a vocabulary of 152,000 are
    5 GB in float32.

    Args:
        logits_fn: hidden states [C, d] -> logits [C, V].
        hidden: [T, d]; row t predicts `targets[t]`.
        targets: int64 [T].
        top_k: number of most probable tokens to report besides each target.
        chunk_rows: rows of logits computed at a time.
        row_by_row: as in `describe`.
    """
    parts = []
    for start in range(0, len(targets), chunk_rows):
        logits = logits_fn(hidden[start : start + chunk_rows])  # [C, V]
        part = targets[start : start + chunk_rows]
        described = describe(logits, part, [top_k] * len(part), row_by_row)
        parts.append((described, read_later(logits.amax(dim=-1).float())))
    return PromptLogprobs(parts)


def describe(
    logits: Tensor, targets: Tensor, top_k: Sequence[int], row_by_row: bool = False
) -> LogprobTable:
    """For each row of logits [T, V]: the target, then its `top_k` most probable tokens.

    A target that is also among the top k has the same float in both places, because evaluation
    harnesses compare with ``==``. With `row_by_row` the number of rows cannot change the rounding.
    """
    if cpu_sampling.takes(logits):  # the C function always computes row by row
        columns: Sequence[Tensor] = cpu_sampling.describe_tokens(logits, targets, max(top_k))
    elif row_by_row:
        rows = zip(logits.split(1), targets.split(1), strict=True)
        each = [_describe(row.clone(), target, max(top_k)) for row, target in rows]
        columns = [torch.cat(column) for column in zip(*each, strict=True)]
    else:
        columns = _describe(logits, targets, max(top_k))
    return LogprobTable(read_later(*columns), top_k)


def _describe(logits: Tensor, targets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities float32, ids and ranks int64, all [T, top_k + 1]."""
    logits = logits.float()
    peak = logits.amax(dim=-1, keepdim=True)
    total = (logits - peak).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    normaliser = total.log().float()  # [T, 1]
    value = logits.gather(1, targets[:, None])  # [T, 1]
    rank = (logits > value).sum(dim=-1, keepdim=True) + 1
    ids = _best(logits, min(top_k, logits.shape[1]))
    best = logits.gather(1, ids)
    # Equal logits share a rank. All tokens that rank above a top token are in `best`.
    ranks = (best[:, None, :] > best[:, :, None]).sum(dim=-1) + 1  # [T, top_k]
    ids = torch.cat([targets[:, None], ids], dim=1)
    ranks = torch.cat([rank, ranks], dim=1)
    logprobs = torch.cat([value, best], dim=1) - peak - normaliser
    return logprobs, ids, ranks


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids of the largest float32 logits [T, V] in descending order, int64 [T, count]. Ties go to
    the lowest id, as in C; `topk` alone breaks ties arbitrarily."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((order.long() << 32) - ids).topk(count).indices
