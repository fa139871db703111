"""Log-probabilities of tokens, and what is wrong with logits that have none."""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.argmax import first_best
from minillm.errors import InvalidRequestError
from minillm.ops import cpu_sampling


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


def token_logprobs(
    logits_fn: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    top_k: int,
    chunk_rows: int = 64,
    row_by_row: bool = False,
) -> list[dict[int, TokenLogprob]]:
    """Log-probabilities of given tokens (a prompt's), `chunk_rows` rows of logits at a time.

    The logits of a whole prompt are the classic way to run out of memory: 8,192 tokens of a
    152,000-entry vocabulary are 5 GB, and nothing else in the engine has that size.

    Args:
        logits_fn: hidden states [C, d] -> logits [C, V].
        hidden: [T, d]; row t predicts `targets[t]`.
        targets: int64 [T].
        top_k: how many of the most probable tokens to report beside each target.
        row_by_row: as in `sample`.

    Raises:
        InvalidRequestError: the model's logits contain NaN or infinity.
    """
    result: list[dict[int, TokenLogprob]] = []
    for start in range(0, len(targets), chunk_rows):
        logits = logits_fn(hidden[start : start + chunk_rows])  # [C, V]
        for message in failures(first_best(logits)[0]).values():
            raise InvalidRequestError(message)
        part = targets[start : start + chunk_rows]
        result += describe(logits, part, [top_k] * len(part), row_by_row)
    return result


def describe(
    logits: Tensor, targets: Tensor, top_k: Sequence[int], row_by_row: bool
) -> list[dict[int, TokenLogprob]]:
    """For each row of logits [T, V]: the target, then its `top_k` best tokens.

    A token in both places has the same float in both: evaluation harnesses compare with ``==``.
    """
    if cpu_sampling.takes(logits):  # a row of which depends on no other anyway
        found = cpu_sampling.describe_tokens(logits, targets, max(top_k))
        return _entries(*found, top_k)
    logits = logits.float()
    if row_by_row and len(logits) > 1:
        return [
            entry
            for row, target, k in zip(logits, targets, top_k, strict=True)
            for entry in describe(row[None].clone(), target[None], [k], row_by_row)
        ]
    peak = logits.amax(dim=-1, keepdim=True)
    total = (logits - peak).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    normaliser = total.log().float()  # [T, 1]
    value = logits.gather(1, targets[:, None])  # [T, 1]
    rank = (logits > value).sum(dim=-1, keepdim=True) + 1
    best, ids = logits.topk(min(max(top_k), logits.shape[1]))
    # Equal logits share a rank; everything better than a top token is in `best` too.
    ranks = (best[:, None, :] > best[:, :, None]).sum(dim=-1) + 1  # [T, top_k]
    ids = torch.cat([targets[:, None], ids], dim=1)
    ranks = torch.cat([rank, ranks], dim=1)
    logprobs = torch.cat([value, best], dim=1) - peak - normaliser
    return _entries(logprobs, ids, ranks, top_k)


def _entries(
    logprobs: Tensor, ids: Tensor, ranks: Tensor, top_k: Sequence[int]
) -> list[dict[int, TokenLogprob]]:
    """Rows of a table, of which each wants its first k + 1 columns, as dictionaries."""
    table = zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), top_k, strict=True)
    return [
        {token: TokenLogprob(*entry) for token, *entry in islice(zip(*columns, strict=True), k + 1)}
        for *columns, k in table
    ]
