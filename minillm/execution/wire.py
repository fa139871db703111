"""Serialisation of plans and results, for executors in other processes.

The format is JSON, not pickle, so reading it runs no code. Sampling parameters are validated again
when they are read (`SamplingParams`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import repeat
from typing import Any

from minillm.api.sampling_params import SamplingParams
from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.cache.manager import BlockCopy
from minillm.errors import Failure
from minillm.execution.flight import StepResult
from minillm.sampling.logprobs import TokenLogprob
from minillm.scheduling.plan import NewSequence, Row, StepPlan

DEFAULTS = SamplingParams()


def plan_to_bytes(plan: StepPlan) -> bytes:
    """Serialise a plan. Sampling parameters with default values are omitted."""
    new = [[*each[:4], params_to_plain(each.params), *each[5:]] for each in plan.new]
    moves = [plan.swap_out, plan.copies, plan.swap_in]
    rows, learned = _columns(plan.rows), list(plan.learned.items())
    parts = [plan.step, plan.dropped, new, moves, rows, learned, plan.rebalance]
    return json.dumps(parts).encode()


def plan_from_bytes(data: bytes) -> StepPlan:
    """The inverse of `plan_to_bytes`."""
    step, dropped, new, moves, columns, learned, rebalance = json.loads(data)
    swap_out, copies, swap_in = ([BlockCopy(*pair) for pair in pairs] for pairs in moves)
    return StepPlan(
        step,
        dropped,
        [_new_sequence(*each) for each in new],
        swap_out,
        copies,
        swap_in,
        _rows(*columns) if columns else [],
        dict(learned),
        rebalance=rebalance,
    )


def _columns(rows: Sequence[Row]) -> list[Any]:
    """Rows as columns. A constant column is written as one number, and blocks only for rows that
    have new ones. For decode rows this takes a third of the time of seven values per row."""
    if not rows:
        return []
    *columns, blocks = zip(*rows, strict=True)
    short = [each if each.count(each[0]) < len(each) else each[0] for each in columns]
    return [len(rows), short, [(place, some) for place, some in enumerate(blocks) if some]]


def _rows(count: int, columns: list[Any], blocks: Iterable[tuple[int, list[int]]]) -> list[Row]:
    """The inverse of `_columns`."""
    full = [each if isinstance(each, list) else repeat(each, count) for each in columns]
    rows = list(map(Row, *full))
    for place, some in blocks:
        rows[place] = rows[place]._replace(blocks=tuple(some))
    return rows


def _new_sequence(
    seq_id: int,
    sample_index: int,
    num_prompt_tokens: int,
    token_ids: list[int],
    params: dict[str, Any],
    seed: int,
    stop_ids: list[int],
    bad_words_ids: list[list[int]],
    cache_salt: str,
) -> NewSequence:
    return NewSequence(
        seq_id,
        sample_index,
        num_prompt_tokens,
        tuple(token_ids),
        params_from_plain(params),
        seed,
        tuple(stop_ids),
        tuple(map(tuple, bad_words_ids)),
        cache_salt,
    )


def params_to_plain(params: SamplingParams) -> dict[str, Any]:
    """Parameters without defaults. JSON keys are strings, so `logit_bias` is a list of pairs."""
    given = {each.name: getattr(params, each.name) for each in fields(params)}
    plain = {name: value for name, value in given.items() if value != getattr(DEFAULTS, name)}
    if params.logit_bias is not None:
        plain["logit_bias"] = list(params.logit_bias.items())
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        plain["structured_outputs"] = params.structured_outputs.plain()
    return plain


def params_from_plain(plain: dict[str, Any]) -> SamplingParams:
    """The inverse of `params_to_plain`."""
    if "logit_bias" in plain:
        plain = plain | {"logit_bias": dict(plain["logit_bias"])}
    return SamplingParams(**plain)


def result_to_bytes(result: StepResult) -> bytes:
    """Serialise the result of a step."""
    dictionaries = result.logprobs, result.prompt_logprobs, result.errors
    tokens, drafted = list(result.token_ids.items()), list(result.num_drafted.items())
    rest = sorted(result.suspect), drafted, result.graph_rows, result.why_eager
    return json.dumps([tokens, *map(_plain, dictionaries), *rest]).encode()


def result_from_bytes(data: bytes) -> StepResult:
    """The inverse of `result_to_bytes`."""
    token_ids, logprobs, prompts, errors, suspect, drafted, *graph = json.loads(data)
    return StepResult(
        dict(token_ids),
        {seq_id: [each and _entry(each) for each in some] for seq_id, some in logprobs},
        {seq_id: (start, [_entry(each) for each in some]) for seq_id, (start, some) in prompts},
        {seq_id: {index: Failure(*why) for index, why in each} for seq_id, each in errors},
        set(suspect),
        dict(drafted),
        *graph,
    )


def _entry(pairs: Iterable[tuple[int, list[Any]]]) -> dict[int, TokenLogprob]:
    return {token: TokenLogprob(*numbers) for token, numbers in pairs}


def _plain(value: Any) -> Any:
    """Replace dictionaries, at any depth, by lists of pairs."""
    if isinstance(value, dict):
        return [[key, _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
