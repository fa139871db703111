"""`num_speculative_tokens="auto"` on a virtual clock: finds what pays, loses next to nothing.

Step times and the acceptance are made up, so what would be best is known.
"""

import pytest

from minillm.api.speculative_config import AUTO_MOST, SpeculativeConfig
from minillm.plan.step_times import StepTimes
from minillm.scheduling.adaptive_drafts import AdaptiveDrafts
from minillm.scheduling.drafts import Drafts
from minillm.speculative.setup import MODEL_PRICE, build_drafts
from tests.pairs import one_in, pairwise
from tests.scheduling.invariants import check_invariants
from tests.speculative.virtual import Habit, Machine


def small(batch, tokens, asked):
    """A small model: overhead, a jump for rows of several tokens, then each token costs."""
    more = tokens - batch
    return 0.003 + 0.0001 * batch + (0.0005 + 0.0002 * more if more else 0) + 0.0001 * asked


def roomy(batch, tokens, asked):
    """Up to 128 tokens are free."""
    return 0.008 + 0.00006 * max(0, tokens - 128) + 0.0003 * asked


def knee(batch, tokens, asked):
    """Up to 4 tokens are free, and then they are dear."""
    return 0.010 + 0.003 * max(0, tokens - 4) + 0.0003 * asked


TIMES = {"small": small, "roomy": roomy, "knee": knee}
CASES = [("small", 1), ("roomy", 1), ("roomy", 16), ("knee", 1)]


def machine(time, habits, seed=0, most=8, noise=0.0):
    made = Machine(AdaptiveDrafts(most), time, seed, noise)
    for number, habit in enumerate(habits):
        made.add(str(number), habit)
    made.step()  # prompts
    return made


def fixed_speed(time, habits, most):
    """Tokens per second of a constant number of drafts."""
    made = Machine(Drafts(most), time, seed=1)
    for number, habit in enumerate(habits):
        made.add(str(number), habit)
    made.run(400)
    return made.speed(399)


@pytest.mark.parametrize(("time", "batch"), one_in(2, CASES))
def test_it_finds_about_the_best_number(time, batch):
    habits = [Habit(0.85)] * batch
    speeds = [fixed_speed(TIMES[time], habits, most) for most in range(9)]
    assert max(speeds) > 1.5 * speeds[0]
    for noise in (0.0, 0.1):
        made = machine(TIMES[time], habits, noise=noise)
        made.run(60)
        made.run(200)
        assert made.speed(200) * (1 + noise) > 0.85 * max(speeds)


@pytest.mark.parametrize(("time", "batch", "noise"), pairwise([*TIMES], [1, 4, 16, 64], [0.0, 0.1]))
def test_wrong_drafts_cost_less_than_three_percent(time, batch, noise):
    made = machine(TIMES[time], [Habit(0.0)] * batch, noise=noise)
    made.run(500)
    plain = batch / (TIMES[time](batch, batch, False) * (1 + noise))
    assert made.speed(500) > 0.97 * plain
    assert sum(map(bool, made.asked(300))) <= 12


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("batch", one_in(2, [1, 8]))
@pytest.mark.parametrize(
    "habit", [Habit(0.5, 0.25, 0.5), Habit(0.9, 0.3, 0.9)], ids=["bad", "good"]
)
def test_drafts_that_end_where_they_are_improbable(time, batch, habit):
    """Suffixes answer seldom, and with fewer drafts than they are asked for."""
    speeds = [fixed_speed(TIMES[time], [habit] * batch, most) for most in (0, 2, 8)]
    made = machine(TIMES[time], [habit] * batch, seed=1)
    made.run(500)
    assert made.speed(500) > 0.98 * speeds[0]
    assert made.speed(300) > 0.9 * max(speeds)


@pytest.mark.parametrize("answered", [0.0, 0.3])
def test_a_proposer_without_good_answers_costs_less_than_three_percent(answered):
    for batch in (1, 16):
        made = machine(small, [Habit(0.1, answered)] * batch)
        made.run(500)
        assert made.speed(500) > 0.97 * batch / small(batch, batch, False)


def test_good_drafts_that_are_too_dear_cost_less_than_three_percent():
    """Whatever is accepted, verification takes longer than decoding would."""
    made = machine(lambda batch, tokens, asked: 0.001 * tokens, [Habit(0.9)] * 16)
    made.run(500)
    assert made.speed(500) > 0.97 * 1000


def layer(batch, tokens, asked):
    """`tiny` with an EAGLE layer: a draft costs as much as two thirds of a plain step."""
    return 0.0008 + 0.0003 * batch + (0.002 + 0.0001 * (tokens - batch) if asked else 0)


SHORT = {"max_tokens": 64, "prompt": 128}


@pytest.mark.parametrize("accepted", [0.0, 0.5])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_dear_proposer_of_short_requests_costs_less_than_1_5_percent(batch, accepted):
    """It has to compute each prompt before its first draft; the first requests count, too."""
    made = Machine(AdaptiveDrafts(8, price=MODEL_PRICE), layer, lag=25e-6)
    plain = Machine(Drafts(0), layer).serve(32, batch, Habit(accepted), **SHORT)
    assert made.serve(32, batch, Habit(accepted), **SHORT) > 0.985 * plain
    assert made.serve(32, batch, Habit(accepted), **SHORT) > 0.985 * plain
    assert batch > 8 or any(made.asked(1000))


def test_a_dear_proposer_is_used_where_it_pays():
    made = Machine(AdaptiveDrafts(8, price=MODEL_PRICE), roomy, lag=25e-6)
    made.serve(8, 1, Habit(0.85), **SHORT)
    plain = Machine(Drafts(0), roomy).serve(8, 1, Habit(0.85), **SHORT)
    assert made.serve(32, 1, Habit(0.85), **SHORT) > 2 * plain


@pytest.mark.parametrize(("batch", "lag"), [(8, 5e-4), (32, 2e-4)])
def test_rows_that_end_before_their_prompt_is_repaid_have_no_drafts(batch, lag):
    """The trial promises gains, but the proposer would compute the prompt of every row."""
    made = Machine(AdaptiveDrafts(8, price=MODEL_PRICE), roomy, lag=lag)
    plain = Machine(Drafts(0), roomy).serve(128, batch, Habit(0.85), **SHORT)
    for _ in range(2):
        assert made.serve(128, batch, Habit(0.85), **SHORT) > 0.97 * plain
    assert any(made.asked(1000))


@pytest.mark.parametrize("batch", [1, 16])
def test_it_recovers_when_acceptance_rises_and_stops_when_it_falls(batch):
    made = machine(roomy, [Habit(0.0)] * batch)
    made.run(300)
    for habit in made.habits.values():
        habit.accepted = 0.9
    made.run(150)
    made.run(100)
    plain = batch / roomy(batch, batch, False)
    assert made.speed(100) > 2.5 * plain
    for habit in made.habits.values():
        habit.accepted = 0.0
    made.run(60)
    made.run(200)
    assert made.speed(200) > 0.97 * plain


@pytest.mark.parametrize(("count", "gain"), [(1, 1.5), (4, 1.3)])
def test_requests_that_repeat_themselves_draft_beside_others(count, gain):
    made = machine(small, [Habit(0.95)] * count + [Habit(0.0)] * count)
    made.run(400)
    asked = [0, 0]
    for row in [row for record, *_ in made.steps[-200:] for row in record.rows]:
        asked[row.seq_id >= count] += row.num_logits - 1
    assert asked[0] > 10 * asked[1]
    assert made.speed(200) > gain * 2 * count / small(2 * count, 2 * count, False)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_no_row_has_more_than_it_may(most):
    made = machine(roomy, [Habit(0.99)] * 4, most=most)
    for _ in range(60):
        made.step()
        check_invariants(made.scheduler)
        for row in made.steps[-1][0].rows:
            assert row.num_logits <= 1 + most
    assert max(made.asked(40)) == 4 * most


def test_with_too_many_sequences_there_are_none():
    made = Machine(AdaptiveDrafts(8, max_num_seqs=3), roomy)
    for number in range(4):
        made.add(str(number), Habit(1.0))
    made.run(200)
    assert not any(made.asked(200))


def test_in_a_pause_nothing_is_asked_and_plans_can_be_made_ahead():
    made = machine(small, [Habit(0.0)] * 4)
    made.run(300)
    drafts, wanted = made.drafts, []
    for _ in range(200):
        wanted.append(drafts.wants(made.scheduler.running[0], 4))
        made.step()
    asked = made.asked(200)
    assert any(asked)
    assert sum(wanted) < 20
    assert all(was for was, count in zip(wanted, asked, strict=True) if count)


def test_steps_that_were_disturbed_do_not_end_drafts():
    """Something else has the processor now and then, for longer than a step takes."""
    made = machine(roomy, [Habit(0.85)])
    made.pauses = 0.2
    made.run(400)
    plain = made.run_plain(300)
    assert made.speed(300) > 2.5 * plain


def test_a_first_step_that_compiles_does_not_end_drafts():
    made = Machine(AdaptiveDrafts(8), lambda *step: roomy(*step), 0)
    made.add("0", Habit(0.9))
    slow = [True]

    def compiles(batch, tokens, asked):
        extra = 5.0 if asked and slow else 0.0
        if asked:
            slow.clear()
        return roomy(batch, tokens, asked) + extra

    made.step_time = compiles
    made.run(200)
    made.run(100)
    assert made.speed(100) > 2.5 / roomy(1, 1, False)


def test_times_of_unknown_batches_come_from_neighbours_only():
    times = StepTimes()
    assert times.plain(4) is None
    times.add_plain(4, 0.004)
    times.add_plain(8, 0.006)
    assert times.plain(6) == pytest.approx(0.005)
    assert times.plain(9) == 0.006
    assert times.plain(16) is None
    assert times.plain(1) is None


def test_auto_builds_it():
    config = SpeculativeConfig("auto", "ngram", disable_by_batch_size=3)
    found = build_drafts(config)
    assert isinstance(found, AdaptiveDrafts)
    assert (found.num_tokens, found.max_num_seqs) == (AUTO_MOST, 3)
    assert type(build_drafts(SpeculativeConfig(4, "ngram"))) is Drafts
