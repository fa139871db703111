"""Log-probabilities of tokens, and what is wrong with logits that have none."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.ops import cpu_sampling
from minillm.ops.transfers import read_later


class TokenLogprob(NamedTuple):
    """Log-probability under the raw model distribution; rank 1 is the most probable token."""

    logprob: float
    rank: int


def failures(best: Tensor) -> dict[int, str]:
    """What is wrong with rows whose largest logit is not finite."""
    listed = best.tolist()
    if all(map(math.isfinite, listed)):
        return {}
    return {row: why for row, value in enumerate(listed) if (why := failure_of(value)) is not None}


NOT_FINITE = "The model's logits contain NaN or infinity; the weights or the dtype are wrong."


def failure_of(best: float) -> str | None:
    """What is wrong with a row whose largest logit this is; None if it is finite."""
    if math.isfinite(best):
        return None
    if best == -math.inf:
        return (
            "No token is left to choose from: allowed_token_ids, bad_words and min_tokens "
            "exclude all of them."
        )
    return NOT_FINITE


@dataclass(frozen=True, slots=True)
class Described:
    """Log-probabilities on their way to the host: rows of a table [T, k + 1] of targets and best
    tokens, of which row t wants its first `top_k[t]` + 1 columns."""

    columns: Callable[[], list[Tensor]]  # log-probabilities float32; ids and ranks int64
    top_k: Sequence[int]

    def read(self) -> list[dict[int, TokenLogprob]]:
        """For each row: the target, then its best tokens. Waits for the device."""
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
    """Log-probabilities of a prompt's tokens, on their way to the host, some rows at a time."""

    parts: list[tuple[Described, Callable[[], list[Tensor]]]]

    def read(self) -> tuple[list[dict[int, TokenLogprob]], str | None]:
        """One entry per token; or what is wrong with the model's logits."""
        result: list[dict[int, TokenLogprob]] = []
        for described, best in self.parts:
            for message in failures(best()[0]).values():
                return [], message
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
    """Log-probabilities of given tokens (a prompt's), `chunk_rows` rows of logits at a time.

    The logits of a whole prompt are the classic way to run out of memory: 8,192 tokens of a
    152,000-entry vocabulary are 5 GB, and nothing else in the engine has that size.

    Args:
        logits_fn: hidden states [C, d] -> logits [C, V].
        hidden: [T, d]; row t predicts `targets[t]`.
        targets: int64 [T].
        top_k: how many of the most probable tokens to report beside each target.
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
) -> Described:
    """For each row of logits [T, V]: the target, then its `top_k` best tokens.

    A token in both places has the same float in both: evaluation harnesses compare with ``==``.
    With `row_by_row` not even the rounding of a sum can depend on the number of rows.
    """
    if cpu_sampling.takes(logits):  # a row of which depends on no other anyway
        found: Sequence[Tensor] = cpu_sampling.describe_tokens(logits, targets, max(top_k))
    elif row_by_row:
        rows = zip(logits.split(1), targets.split(1), strict=True)
        each = [_describe(row.clone(), target, max(top_k)) for row, target in rows]
        found = [torch.cat(column) for column in zip(*each, strict=True)]
    else:
        found = _describe(logits, targets, max(top_k))
    return Described(read_later(*found), top_k)


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
    # Equal logits share a rank; everything better than a top token is in `best` too.
    ranks = (best[:, None, :] > best[:, :, None]).sum(dim=-1) + 1  # [T, top_k]
    ids = torch.cat([targets[:, None], ids], dim=1)
    ranks = torch.cat([rank, ranks], dim=1)
    logprobs = torch.cat([value, best], dim=1) - peak - normaliser
    return logprobs, ids, ranks


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids of the largest float32 logits [T, V] in falling order, int64 [T, count]; of equals the
    lowest id first, as in C. `topk` may take any of them, and others with another count."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # whole numbers in the order of the floats
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((order.long() << 32) - ids).topk(count).indices
