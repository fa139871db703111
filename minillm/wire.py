"""Plans and results as bytes, for an executor in another process.

JSON of plain data: no pickle, so that reading bytes runs no code. Parameters of a request are
checked again when they are read (`SamplingParams`).
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from minillm.cache.manager import BlockCopy
from minillm.flight import StepResult
from minillm.logprobs import TokenLogprob
from minillm.sampling_params import SamplingParams
from minillm.scheduling.plan import NewSequence, Row, StepPlan

DEFAULTS = SamplingParams()


def plan_to_bytes(plan: StepPlan) -> bytes:
    """A plan, of which only the parameters that are not the defaults are written."""
    new = [
        [*each[:4], params_to_plain(each.params), each.seed, each.stop_ids, each.bad_words_ids]
        for each in plan.new
    ]
    moves = [plan.swap_out, plan.copies, plan.swap_in]
    learned = list(plan.learned.items())
    return json.dumps([plan.step, plan.dropped, new, moves, plan.rows, learned]).encode()


def plan_from_bytes(data: bytes) -> StepPlan:
    """What `plan_to_bytes` wrote."""
    step, dropped, new, moves, rows, learned = json.loads(data)
    swap_out, copies, swap_in = ([BlockCopy(*pair) for pair in pairs] for pairs in moves)
    return StepPlan(
        step,
        dropped,
        [_new_sequence(*each) for each in new],
        swap_out,
        copies,
        swap_in,
        [Row(*row)._replace(blocks=tuple(row[-1])) for row in rows],
        dict(learned),
    )


def _new_sequence(
    seq_id: int,
    sample_index: int,
    num_prompt_tokens: int,
    token_ids: list[int],
    params: dict[str, Any],
    seed: int,
    stop_ids: list[int],
    bad_words_ids: list[list[int]],
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
    )


def params_to_plain(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not the defaults. JSON has no numbers as keys, so a bias is pairs."""
    given = {each.name: getattr(params, each.name) for each in fields(params)}
    plain = {name: value for name, value in given.items() if value != getattr(DEFAULTS, name)}
    if params.logit_bias is not None:
        plain["logit_bias"] = list(params.logit_bias.items())
    return plain


def params_from_plain(plain: dict[str, Any]) -> SamplingParams:
    """What `params_to_plain` gave."""
    if "logit_bias" in plain:
        plain = plain | {"logit_bias": dict(plain["logit_bias"])}
    return SamplingParams(**plain)


def result_to_bytes(result: StepResult) -> bytes:
    """What came out of a step."""
    dictionaries = result.token_ids, result.logprobs, result.prompt_logprobs, result.errors
    drafted = list(result.num_drafted.items())
    rest = sorted(result.suspect), drafted, result.graph_rows, result.why_eager
    return json.dumps([*map(_plain, dictionaries), *rest]).encode()


def result_from_bytes(data: bytes) -> StepResult:
    """What `result_to_bytes` wrote."""
    token_ids, logprobs, prompts, errors, suspect, drafted, *graph = json.loads(data)
    return StepResult(
        {seq_id: tokens for seq_id, tokens in token_ids},
        {seq_id: [each and _entry(each) for each in some] for seq_id, some in logprobs},
        {seq_id: (start, [_entry(each) for each in some]) for seq_id, (start, some) in prompts},
        {seq_id: {index: why for index, why in each} for seq_id, each in errors},
        set(suspect),
        dict(drafted),
        *graph,
    )


def _entry(pairs: Iterable[tuple[int, list[Any]]]) -> dict[int, TokenLogprob]:
    return {token: TokenLogprob(*numbers) for token, numbers in pairs}


def _plain(value: Any) -> Any:
    """Dictionaries by number as pairs, at any depth."""
    if isinstance(value, dict):
        return [[key, _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
