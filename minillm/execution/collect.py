"""Collecting a step: copies tokens, log-probabilities and errors into its `StepResult`."""

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor

from minillm.errors import Failure, MinillmError, in_one_line, owner_of
from minillm.execution.flight import StepResult
from minillm.execution.state import RowStates, SequenceRow
from minillm.sampling.logprobs import LogprobTable, PromptLogprobs, TokenLogprob, failure_of
from minillm.sampling.sampler import Sampler
from minillm.sampling.verify import match, until_stop
from minillm.scheduling.plan import Row

KeepPath = Callable[[int, int, Sequence[int]], None]  # `keep_path` of a row, a start and a path


def give_tokens(
    states: RowStates,
    read: Callable[[], list[Tensor]],
    entries: LogprobTable | None,
    sampler: Sampler,
    result: StepResult,
    keep_path: KeepPath,
) -> None:
    """Write the sampled tokens and the errors of the rows to `result`.

    Args:
        read: waits for the tokens, int64 [K], and the largest logit of each, float32 [K].
        entries: log-probabilities of the rows that request them.
    """
    tokens, best = (tensor.tolist() for tensor in read())
    entry = iter(entries.read()) if entries is not None else iter(())
    why_failed = None if all(map(isfinite, best)) else [failure_of(value) for value in best]
    end = 0
    for row, state in states:
        start, end = end, end + row.num_samples
        given: list[int | None] = tokens[start:end]
        logprobs: list[dict[int, TokenLogprob] | None] | None = None
        if state.new.params.logprobs is not None:
            logprobs = [next(entry) for _ in given]
        nodes: Sequence[int] = range(len(given))
        if state.drafts:
            nodes = verified(state, tokens[start:end], sampler, result, keep_path)
            given = [given[node] for node in nodes]
        else:
            state.token_ids.append(tokens[end - row.num_forks - 1])
        if logprobs is not None:
            result.logprobs[row.seq_id] = [logprobs[node] for node in nodes]
        if row.seq_id in result.errors:  # its prompt log-probabilities failed
            continue
        if why_failed is not None and any(failed := [why_failed[start + node] for node in nodes]):
            errors = {i: why for i, why in enumerate(failed) if why is not None}
            if not row.num_forks:  # tokens after a failed one are discarded
                given, errors = given[: min(errors) + 1], {min(errors): errors[min(errors)]}
            given = [None if i in errors else token for i, token in enumerate(given)]
            result.fail_samples(row, errors)
        result.token_ids[row.seq_id] = given


@torch.inference_mode()
def verified(
    state: SequenceRow,
    samples: list[int],
    sampler: Sampler,
    result: StepResult,
    keep_path: KeepPath,
) -> Sequence[int]:
    """Append the accepted samples to the sequence: the matching drafts and one more token, up to a
    stop token. Returns their indices."""
    drafts, state.drafts = state.drafts, []
    nodes: Sequence[int] = range(match(samples, drafts))
    if state.tree is not None:
        nodes = state.tree.walk(samples, drafts)
    nodes = nodes[: until_stop([samples[node] for node in nodes], state.new.stop_ids)]
    if state.tree is not None:
        keep_path(state.row, len(state.token_ids) - 1, nodes)
        state.tree = None
    kept = [samples[node] for node in nodes]
    sampler.append_run(state.row, len(state.token_ids), kept)
    state.token_ids += kept
    state.is_fed = False  # the next step takes the last token from the host
    result.num_drafted[state.new.seq_id] = len(drafts)
    return nodes


def store_prompt_logprobs(row: Row, entries: PromptLogprobs, result: StepResult) -> None:
    """Write the prompt log-probabilities of a row to `result`, or its error."""
    logprobs, wrong = entries.read()
    if wrong is not None:
        result.fail(row, wrong)
    else:
        result.prompt_logprobs[row.seq_id] = row.start + 1, logprobs


def failure(error: Exception) -> Failure:
    """An error as one line: its message if it is a `MinillmError`, otherwise type and message."""
    text = f"The model failed on this request: {in_one_line(error)}"
    if isinstance(error, MinillmError):
        text = " ".join(str(error).split())
    return Failure(text, owner_of(error))
