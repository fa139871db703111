"""Deliberate bugs of verification: each changes what a run of `test_same_tokens.py` gives.

Most are bugs that other engines shipped (numbers are issues of their repositories). A bug names the
cell and the proposer of `test_the_outputs_are_those_without_drafts` that catches it, or the other
test that does.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm.engine.loop import Engine
from minillm.execution import collect, runner
from minillm.execution.runner import Runner
from minillm.execution.state import SequenceRow
from minillm.sampling.edits import Edits
from minillm.sampling.sampler import Sampler
from minillm.scheduling import drafts
from minillm.scheduling.drafts import Drafts
from minillm.speculative.speculator import Speculator
from tests.engine.small import write_model
from tests.scheduling.planted_draft_bugs import changed
from tests.speculative import test_failures, test_same_tokens
from tests.speculative.cells import Cell, Reference, open_cell, run_cell

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

NOW, AHEAD = Cell(7, "off", "ample", False), Cell(7, "off", "ample", True)
STARVED, SWAPPED = Cell(7, "radix", "recompute", False), Cell(0, "hash", "swap", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


# ---- edits -------------------------------------------------------------------------------------


def edits_ignore_earlier_drafts(patch: Patch) -> None:
    changed(Sampler, "_edited", "self.edits.append(list(left), at, tokens.to(self.device))", "...")(
        patch
    )


def rejected_drafts_stay_in_the_counts(patch: Patch) -> None:
    patch.setattr(Edits, "snapshot", lambda self: lambda: None)


def accepted_tokens_are_not_counted(patch: Patch) -> None:
    patch.setattr(Sampler, "append_run", lambda self, row, position, tokens: None)


def all_samples_are_counted(patch: Patch) -> None:
    verified(patch, "len(state.token_ids), kept)", "len(state.token_ids), samples)")


def the_last_token_is_counted_twice(patch: Patch) -> None:
    verified(patch, "len(state.token_ids), kept)", "len(state.token_ids), [*kept, kept[-1]])")


def recent_tokens_begin_a_place_late(patch: Patch) -> None:
    verified(patch, "len(state.token_ids), kept)", "len(state.token_ids) + 1, kept)")


def verified(patch: Patch, old: str, new: str) -> None:
    """Change how the host takes what was accepted."""
    changed(collect, "verified", old, new)(patch)
    patch.setattr(collect, "verified", torch.inference_mode()(collect.verified))


# ---- which token is drawn ----------------------------------------------------------------------


def positions_are_one_too_small(patch: Patch) -> None:
    changed(
        Runner,
        "_sample",
        "positions += range(end - row.num_logits + 1, end + 1)",
        "positions += range(end - row.num_logits + (not state.drafts), end + (not state.drafts))",
    )(patch)


def all_drafts_of_a_row_draw_at_one_position(patch: Patch) -> None:
    changed(
        Runner,
        "_sample",
        "positions += range(end - row.num_logits + 1, end + 1)",
        "positions += [row.start + 1 if state.drafts else end] * row.num_logits",
    )(patch)


def noise_by_row(patch: Patch) -> None:
    pack = Sampler._pack

    def keyed(self: Sampler, rows: Any, positions: Any, counts: Any) -> Any:
        right = pack(self, rows, positions, counts)
        if len(set(rows)) == len(rows):
            return right
        return right._replace(sample_index=right.sample_index + torch.arange(len(rows)) % 2)

    patch.setattr(Sampler, "_pack", keyed)


def noise_by_step(patch: Patch) -> None:
    choose, steps = Sampler.choose, [0]

    def later(self: Sampler, logits: Any, rows: Any, positions: Any, *rest: Any) -> Any:
        steps[0] += 1
        several = len(set(rows)) < len(rows)
        at = [position + several * steps[0] for position in positions]
        return choose(self, logits, rows, at, *rest)

    patch.setattr(Sampler, "choose", later)


def logits_of_the_position_before(patch: Patch) -> None:
    changed(
        Runner,
        "_wanted",
        "range(ends[row.seq_id] - row.num_logits, ends[row.seq_id])",
        "range(ends[row.seq_id] - row.num_logits - (row.num_logits > 1), "
        "ends[row.seq_id] - (row.num_logits > 1))",
    )(patch)


# ---- what is accepted --------------------------------------------------------------------------


def a_wrong_draft_is_accepted(patch: Patch) -> None:
    patch.setattr(
        collect, "match", lambda samples, drafted: min(match(samples, drafted) + 1, len(samples))
    )


def everything_is_accepted(patch: Patch) -> None:
    patch.setattr(collect, "match", lambda samples, drafted: len(samples))


def drafts_are_emitted_in_place_of_samples(patch: Patch) -> None:
    verified(
        patch,
        "kept = samples[: match(samples, drafts)]",
        "kept = [*drafts, samples[-1]][: match(samples, drafts)]",
    )


match = collect.match


def the_bonus_token_is_lost(patch: Patch) -> None:
    """It is drawn again in the next step: the same tokens, in more steps."""
    patch.setattr(
        collect, "match", lambda samples, drafted: min(match(samples, drafted), len(drafted))
    )


def a_text_goes_on_behind_its_stop(patch: Patch) -> None:
    """The end of a run belongs to no text, but is delivered."""
    deliver = Engine._deliver

    def all_of_it(self: Engine, row: Any, sequence: Any, live: Any, result: Any, now: Any) -> None:
        deliver(self, row, sequence, live, result, now)
        tokens = result.token_ids.get(row.seq_id, [])
        completion = live.completions[sequence.index]
        cut = completion.finish_reason == "stop" and not row.num_forks
        if cut and completion.token_ids[-1:] != tokens[-1:]:
            completion.token_ids.extend(tokens[-1:])

    patch.setattr(Engine, "_deliver", all_of_it)


def nothing_is_delivered_but_the_last_token(patch: Patch) -> None:
    changed(Engine, "_deliver", "enumerate(tokens)", "enumerate(tokens[-1:])")(patch)


def log_probabilities_of_the_first_row(patch: Patch) -> None:
    changed(Runner, "_logprobs", "(first + each, sample + i, top_k)", "(first, sample + i, top_k)")(
        patch
    )


def log_probabilities_of_the_bonus_from_the_row_before(patch: Patch) -> None:
    changed(
        Runner,
        "_logprobs",
        "(first + each, sample + i, top_k)",
        "(first + max(each - (each == len(state.drafts)), 0), sample + i, top_k)",
    )(patch)


# ---- rows and what is in them ------------------------------------------------------------------


def more_drafts_than_there_is_room_for(patch: Patch) -> None:
    changed(Speculator, "_valid", "ids[: row.num_drafts]", "ids")(patch)


def drafts_of_the_next_row(patch: Patch) -> None:
    """The tokens are fed to another row than the one whose samples they are compared with."""
    batch = Runner.batch

    def turned(self: Runner, rows: Any) -> Any:
        states = [self._rows[row.seq_id] for row in rows if row.num_logits > 1]
        own = [state.drafts for state in states]
        for state, other in zip(states, own[1:] + own[:1], strict=True):
            state.drafts = [*other, *state.drafts][: len(state.drafts)]
        made = batch(self, rows)
        for state, right in zip(states, own, strict=True):
            state.drafts = right
        return made

    patch.setattr(Runner, "batch", turned)


def a_row_with_a_token_on_the_device_drafts(patch: Patch) -> None:
    """Its last token is not known when it is planned ahead."""
    patch.setattr(Drafts, "wants", lambda self, sequence, num_running: False)
    changed(drafts, "can_draft", " and not sequence.num_pending", "")(patch)


def the_next_step_takes_an_old_token_from_the_device(patch: Patch) -> None:
    verified(patch, "state.is_fed = False", "...")


def resumed_rows_keep_their_drafts(patch: Patch) -> None:
    """vLLM#28558: what was proposed before a preemption is verified after it."""
    of, kept = SequenceRow.of.__func__, {}  # type: ignore[attr-defined]
    draft = Speculator.draft

    def remember(self: Speculator, plan: Any, states: Any) -> Any:
        rows = draft(self, plan, states)
        drafted = {seq_id: state.drafts for seq_id, state in states.items() if state.drafts}
        kept.update(drafted)
        return rows

    def resumed(cls: Any, row: int, new: Any) -> SequenceRow:
        state = of(cls, row, new)
        state.drafts = kept.get(new.seq_id, [])
        return state

    patch.setattr(Speculator, "draft", remember)
    patch.setattr(SequenceRow, "of", classmethod(resumed))


def drafts_of_an_aborted_row_are_verified(patch: Patch) -> None:
    update = Runner._update_rows

    def kept(self: Runner, plan: Any) -> None:
        states = {seq_id: self._rows[seq_id] for seq_id in plan.dropped}
        flying = {seq_id: state.drafts for seq_id, state in states.items()}
        update(self, plan)
        for seq_id, state in states.items():
            state.drafts = flying[seq_id]

    patch.setattr(Runner, "_update_rows", kept)


def a_rejected_position_that_is_not_finite_fails_its_row(patch: Patch) -> None:
    plant = changed(
        runner,
        "give_tokens",
        "any(failed := why_failed[start : start + len(given)])",
        "any(failed := why_failed[start:end])",
    )
    plant(patch)


def only_the_first_token_of_a_run_may_fail(patch: Patch) -> None:
    plant = changed(
        runner,
        "give_tokens",
        "any(failed := why_failed[start : start + len(given)])",
        "any(failed := why_failed[start : start + 1])",
    )
    plant(patch)


BY_A_RUN: Mapping[str, tuple[Plant, Cell, str]] = {
    each.__name__: (each, cell, proposer)
    for each, cell, proposer in (
        (edits_ignore_earlier_drafts, NOW, "right"),
        (rejected_drafts_stay_in_the_counts, NOW, "wrong"),
        (accepted_tokens_are_not_counted, NOW, "right"),
        (all_samples_are_counted, NOW, "mostly right"),
        (the_last_token_is_counted_twice, NOW, "right"),
        (recent_tokens_begin_a_place_late, NOW, "right"),
        (positions_are_one_too_small, NOW, "right"),
        (all_drafts_of_a_row_draw_at_one_position, NOW, "right"),
        (noise_by_row, NOW, "right"),
        (noise_by_step, NOW, "right"),
        (logits_of_the_position_before, NOW, "mostly right"),
        (a_wrong_draft_is_accepted, NOW, "mostly right"),
        (everything_is_accepted, NOW, "mostly right"),
        (the_bonus_token_is_lost, NOW, "right"),
        (a_text_goes_on_behind_its_stop, NOW, "right"),
        (nothing_is_delivered_but_the_last_token, NOW, "right"),
        (log_probabilities_of_the_first_row, NOW, "right"),
        (log_probabilities_of_the_bonus_from_the_row_before, NOW, "right"),
        (more_drafts_than_there_is_room_for, STARVED, "too many"),
        (drafts_of_the_next_row, NOW, "right"),
        (a_row_with_a_token_on_the_device_drafts, AHEAD, "right"),
        (resumed_rows_keep_their_drafts, STARVED, "mostly right"),
    )
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_A_RUN)
def test_a_planted_bug_changes_outputs(
    name: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, cell, proposer = BY_A_RUN[name]
    assert (cell, proposer) in (*test_same_tokens.USUAL, *test_same_tokens.REST)
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017,PT011  (a difference, or the engine itself notices)
        test_same_tokens.test_the_outputs_are_those_without_drafts(cell, proposer, reference)


@pytest.mark.mutation
def test_the_bonus_changes_no_token_but_the_number_of_steps(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run with a proposer that is right also compares what was accepted."""
    the_bonus_token_is_lost(monkeypatch)
    llm = open_cell(reference, NOW, reference.config("right"))
    assert not reference.differences(run_cell(reference, llm))


@pytest.mark.mutation
def test_drafts_equal_the_samples_that_accept_them(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a bug, so that the table above is not taken for all there is: either may be emitted."""
    drafts_are_emitted_in_place_of_samples(monkeypatch)
    llm = open_cell(reference, NOW, reference.config("right"))
    assert not reference.differences(run_cell(reference, llm))


BY_A_TEST: Mapping[str, tuple[Plant, Callable[[Path, Reference], None]]] = {
    each.__name__: (each, test)
    for each, test in (
        (
            drafts_of_an_aborted_row_are_verified,
            lambda folder, reference: (
                test_same_tokens.test_an_abort_in_the_middle_leaves_the_others_as_they_were(
                    True, reference
                )
            ),
        ),
        (
            the_next_step_takes_an_old_token_from_the_device,
            test_same_tokens.test_graphs_replay_the_steps_that_have_no_drafts,
        ),
        (
            a_rejected_position_that_is_not_finite_fails_its_row,
            lambda folder, reference: test_failures.test_rejected_positions_may_be_nan(reference),
        ),
        (
            only_the_first_token_of_a_run_may_fail,
            lambda folder, reference: (
                test_failures.test_nan_ends_a_run_where_it_ends_plain_decoding(4, False, reference)
            ),
        ),
    )
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_A_TEST)
def test_a_planted_bug_is_caught_by_its_test(
    name: str, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, test = BY_A_TEST[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test(folder, reference)
