"""What the rows of a step get once the device is done: tokens, log-probabilities, errors."""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor

from minillm.errors import MinillmError, in_one_line
from minillm.execution.flight import StepResult
from minillm.execution.state import SequenceRow
from minillm.sampling.logprobs import Described, PromptLogprobs, TokenLogprob, failure_of
from minillm.sampling.sampler import Sampler
from minillm.sampling.verify import match, until_stop
from minillm.scheduling.plan import Row

Taken = list[tuple[Row, SequenceRow]]


def give_tokens(
    taken: Taken,
    read: Callable[[], list[Tensor]],
    entries: Described | None,
    sampler: Sampler,
    result: StepResult,
) -> None:
    """Give rows their tokens, and what is wrong with some of them; forks get theirs when they come.

    Args:
        read: waits for the tokens, int64 [K], and for the largest logit of each, float32 [K].
        entries: the log-probabilities of rows that ask for them.
    """
    tokens, best = (each.tolist() for each in read())
    entry = iter(entries.read()) if entries is not None else iter(())
    wrong = None if all(map(isfinite, best)) else [failure_of(value) for value in best]
    end = 0
    for row, state in taken:
        start, end = end, end + row.num_samples
        given: list[int | None] = tokens[start:end]
        logprobs: list[dict[int, TokenLogprob] | None] | None = None
        if state.new.params.logprobs is not None:
            logprobs = [next(entry) for _ in given]
        if state.drafts:
            given = list(verified(state, tokens[start:end], sampler, result))
        else:
            state.token_ids.append(tokens[end - row.num_forks - 1])
        if logprobs is not None:
            result.logprobs[row.seq_id] = logprobs[: len(given)]
        if row.seq_id in result.errors:  # its prompt's log-probabilities failed
            continue
        if wrong is not None and any(failed := wrong[start : start + len(given)]):
            errors = {i: why for i, why in enumerate(failed) if why is not None}
            if not row.num_forks:  # nothing follows a sample that failed
                given, errors = given[: min(errors) + 1], {min(errors): errors[min(errors)]}
            given = [None if i in errors else token for i, token in enumerate(given)]
            result.fail_samples(row, errors)
        result.token_ids[row.seq_id] = given


@torch.inference_mode()
def verified(
    state: SequenceRow, samples: list[int], sampler: Sampler, result: StepResult
) -> list[int]:
    """The samples that follow right drafts, up to a token that ends the sequence; they become its
    tokens."""
    drafts, state.drafts = state.drafts, []
    kept = samples[: match(samples, drafts)]
    kept = kept[: until_stop(kept, state.new.stop_ids)]
    sampler.append_run(state.row, len(state.token_ids), kept)
    state.token_ids += kept
    state.is_fed = False  # the next step takes the last token from the host
    result.num_drafted[state.new.seq_id] = len(drafts)
    return kept


def give_prompt(row: Row, entries: PromptLogprobs, result: StepResult) -> None:
    """The log-probabilities of a prompt are here."""
    found, wrong = entries.read()
    if wrong is not None:
        result.fail(row, wrong)
    else:
        result.prompt_logprobs[row.seq_id] = row.start + 1, found


def described(error: Exception) -> str:
    """An error of ours as it is, another with its type, in one line."""
    if isinstance(error, MinillmError):
        return " ".join(str(error).split())
    return f"The model failed on this request: {in_one_line(error)}"
