"""The simulation decides what the engine decides, on a clock that can be checked by hand."""

import subprocess
import sys

import pytest

from minillm import SamplingParams
from minillm.api.outputs import PrefixReport
from minillm.errors import ConfigError, InvalidRequestError, UnknownArgumentError
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost, step_time
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.lab.simulation import Simulation, every_step, linear, roofline
from minillm.models.presets import preset
from minillm.scheduling.plan import Row
from minillm.scheduling.policies import Policy
from minillm.scheduling.record import StepRecord
from tests.trace import workload
from tests.trace.drafts import LONGEST, Truth, speculating


def ends(sim: Simulation) -> dict[str, float]:
    """When each request ended; all of them arrived at 0."""
    return {one.request_id: one.e2e for one in sim.run().requests()}


def test_two_seats_three_requests_by_hand():
    """a and b start; b ends in step 2, so c runs in steps 3 and 4, a until 5."""
    sim = Simulation(8, 4, max_num_seqs=2)
    for name, new in (("a", 5), ("b", 2), ("c", 2)):
        sim.add(3, new, name=name)
    assert ends(sim) == {"b": 2.0, "c": 4.0, "a": 5.0}
    assert sim.trace.token_times() == {"a": [1, 2, 3, 4, 5], "b": [1, 2], "c": [3, 4]}


def test_the_clock_waits_for_arrivals():
    sim = Simulation(8, 4, seconds=linear(1.0, 0.5))
    sim.add(2, 2, arrival=10.0)
    sim.add(1, 1, arrival=11.0)  # in the middle of the first step: it waits for the second
    sim.run()
    assert [one.started for one in sim.trace] == [10.0, 12.0]
    assert sim.now == 14.0  # 1 + 2 * 0.5, then 1 + 2 * 0.5
    assert [(one.request_id, one.queue_time) for one in sim.trace.requests()] == [
        ("r0", 0.0),
        ("r1", 1.0),
    ]


def test_until_leaves_the_rest_for_later():
    """A step that would begin at `until` or later is not made, also after a wait."""
    sim = Simulation(8, 4)
    sim.add(2, 6)
    sim.add(2, 2, arrival=9.0)
    for until, steps, now in ((3, 3, 3.0), (9.0, 6, 6.0), (9.5, 7, 10.0)):
        assert (len(sim.run(until)), sim.now, sim.has_work) == (steps, now, True)
    assert len(sim.run()) == 8
    assert not sim.has_work


def test_an_answer_may_stop_before_the_limit():
    """The scheduler reserves for max_tokens, and learns of the end only when it is there."""
    sim = Simulation(8, 4, admission="reserve_max", max_num_seqs=4)
    sim.add(4, 2, max_tokens=28)
    sim.add(4, 2)
    trace = sim.run()
    assert trace[0].blocked is not None
    assert trace[0].blocked.what == "blocks"
    assert [one.ends for one in trace.requests()] == [("stop",), ("length",)]
    assert sim.blocks.pool.num_free == 8


def test_given_tokens_are_found_again_and_made_up_ones_never():
    turn, answer = list(range(8)), [90, 91, 92, 93, 94]
    for cache, cached in (("hash", 12), (None, 0)):
        sim = Simulation(16, 4, prefix_cache=cache)
        sim.add(turn, answer)
        sim.run()
        sim.add(turn + answer + [7], 1)
        sim.add(20, 1)
        found = {one.request_id: one.num_cached_tokens for one in sim.run().requests()}
        assert found == {"r0": 0, "r1": cached, "r2": 0}


def test_completions_part_and_stop_together():
    sim = Simulation(16, 4, max_num_seqs=3)
    sim.add(5, 3, n=3, max_tokens=9, name="x")
    trace = sim.run()
    (one,) = trace.requests()
    assert one.num_tokens == (3, 3, 3)
    assert one.ends == ("stop",) * 3
    assert trace.token_times() == {"x": [1, 2, 3], "x #1": [1, 2, 3], "x #2": [1, 2, 3]}
    assert sim.blocks.num_copies == 2  # of the block with the prompt's last token
    sim.add(5, 1, n=3, max_tokens=9, name="first token")
    assert sim.run().requests()[1].num_tokens == (1, 1, 1)


def test_preemption_by_swap_takes_time_on_the_link():
    config, device = preset("smollm2-135m"), DATASHEET["h100-sxm"]
    runs = {}
    for link in (1e9, 1e12):
        seconds = roofline(config, device, 4, link=link)
        sim = Simulation(
            6, 4, num_host_blocks=6, seconds=seconds, preemption_mode="swap", max_num_seqs=2
        )
        sim.add(8, 8)
        sim.add(8, 8)
        sim.run()
        runs[link] = sim
    moved = sum(len(one.swap_out) + len(one.swap_in) for one in runs[1e9].trace)
    assert runs[1e9].scheduler.counters.num_preemptions_swap == 1
    assert moved > 0
    block = 4 * 2 * 30 * 3 * 64 * 2  # tokens, K and V, layers, heads, width, bytes
    slower = moved * block * (1 / 1e9 - 1 / 1e12)
    assert runs[1e9].now - runs[1e12].now == pytest.approx(slower, rel=1e-9)


def test_a_roofline_step_is_cost_over_hardware():
    """By hand: what a token after 16,001 costs more than one after 1 is reading 16,000 of them."""
    config, device = preset("llama-3.1-8b"), DATASHEET["h100-sxm"]
    took = []
    for length in (1, 16_001):
        sim = Simulation(2_000, 16, seconds=roofline(config, device), max_num_batched_tokens=20_000)
        sim.add(length, 2)
        _, second = sim.run()
        took.append(second.computed - second.started)
    weights = 15.0e9 / device.bandwidth
    assert took[0] == pytest.approx(weights + 161 * device.overhead, rel=1e-2)
    assert took[1] - took[0] == pytest.approx(16_000 * 131_072 / device.bandwidth, rel=1e-6)


def test_a_chunk_in_mid_prompt_pays_for_no_logits():
    """The engine computes none, so the head is neither read nor multiplied."""
    config, device = preset("llama-3.1-8b"), DATASHEET["h100-sxm"]
    seconds = roofline(config, device)
    sim = Simulation(64, 16, seconds=seconds, max_num_seqs=1, max_num_batched_tokens=64)
    sim.add(128, 1)
    first, second = sim.run()
    took = [record.computed - record.started for record in (first, second)]
    head = config.hidden_size * config.vocab_size * 2  # bytes
    cache = 64 * 131_072  # the second chunk also reads the first
    more = (head + cache) / device.bandwidth + device.overhead
    assert took[1] - took[0] == pytest.approx(more, rel=1e-6)


def beside(llm, **more):
    """A simulation with the limits of an engine."""
    scheduler = llm.engine.scheduler
    return Simulation(
        llm.trace.settings.num_blocks, scheduler.blocks.block_size,
        prefix_cache=scheduler.blocks.prefix_cache, **vars(scheduler.config), **more,
    )  # fmt: skip


def test_the_engine_decides_the_same(folder):
    """The same requests through a real engine: rows, blocks, waits and preemptions are equal."""
    llm = workload.engine(folder)
    sim = beside(llm)
    prompts = [[(7 * r + 3 * p) % 200 for p in range(5 + 3 * r)] for r in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True)
    outs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, out in zip(prompts, outs, strict=True):
        sim.add(prompt, out.outputs[0].token_ids, name=out.request_id)
    made, real = list(sim.run()), list(llm.trace)
    assert any(one.preempted for one in made)
    for one, other in zip(made, real, strict=True):
        for name in ("rows", "copies", "admitted", "preempted", "stalled", "num_free_blocks"):
            assert getattr(one, name) == getattr(other, name), (one.step, name)
        assert str(one.blocked) == str(other.blocked)


def test_completions_that_stop_together_free_their_blocks_in_the_engines_order(folder):
    """All of one request, and then those of the next: who is free first is used first."""
    llm = workload.engine(folder)
    core, sim = llm.engine, beside(llm)
    params = SamplingParams(n=2, max_tokens=9, allowed_token_ids=[7], stop_token_ids=[7])
    for name in ("a", "b", "c"):
        core.add(core.make_request(name, None, [ord(name), 2, 3], params))
        sim.add([ord(name), 2, 3], [7], n=2, max_tokens=9, name=name)
    core.add(core.make_request("d", None, list(range(20)), SamplingParams(max_tokens=1)))
    sim.add(list(range(20)), 1, name="d")
    while core.has_work:
        core.step()
    made, real = list(sim.run()), list(llm.trace)
    assert [one.seq_id for one in real[0].ended] == [0, 4, 1, 5, 2, 6]
    for one, other in zip(made, real, strict=True):
        assert one.rows == other.rows
        assert [end.seq_id for end in one.ended] == [end.seq_id for end in other.ended]


def test_drafts_by_hand():
    """The first token comes with the prompt; then each row yields three, or one."""
    for survival, times in (((1.0, 1.0), [1, 2, 2, 2, 3, 3, 3]), ((0.0, 0.0), range(1, 8))):
        sim = Simulation(16, 4, speculation=SimulatedDrafts(survival))
        sim.add(3, 7, name="a")
        assert sim.run().token_times() == {"a": list(times)}
        (one,) = sim.trace.requests()
        counters = sim.scheduler.counters
        assert one.num_draft_tokens == counters.num_draft_tokens == (4 if survival[0] else 9)
        assert one.num_accepted_tokens == counters.num_accepted_tokens == 4 * survival[0]
        assert sim.blocks.pool.num_free == 16


def test_the_cost_of_a_step_is_that_of_its_drafts():
    sim = Simulation(16, 4, seconds=linear(1.0, 0.5), speculation=SimulatedDrafts((0.0, 0.0)))
    sim.add(2, 4)
    sim.run()
    took = [record.computed - record.planned for record in sim.trace]
    assert took == [2.0, 2.5, 2.0, 1.5]  # 2; 1 + 2; 1 + 1, because one token is left; 1


def test_a_roofline_has_logits_for_every_draft():
    config, hardware = preset("qwen3-0.6b"), DATASHEET["h100-sxm"]
    seconds = roofline(config, hardware)
    for k in (0, 3):  # so many rows that arithmetic takes longer than reading weights
        record = StepRecord(1, rows=[Row(i, 10, 1 + k, 1 + k, 0, 0) for i in range(1000)])
        cost = step_cost(config, [1 + k] * 1000, [11 + k] * 1000, num_logits=1000 * (1 + k))
        assert seconds(record) == step_time(cost, hardware).seconds


def test_acceptance_follows_the_table_whatever_the_schedule():
    table, found = (0.9, 0.6, 0.5), []
    for seats in (3, 40):
        sim = Simulation(4000, 4, max_num_seqs=seats, speculation=SimulatedDrafts(table))
        for _ in range(40):
            sim.add(3, 100)
        counts = {}
        for record in sim.run():
            starts = {row.seq_id: row.start for row in record.rows}
            for one in record.drafted:
                counts[one.seq_id, starts[one.seq_id]] = one.num_accepted
        found.append(counts)
        full = [counts[seq, at] for seq, at in counts if at < 90]  # room for three drafts
        assert len(full) > 1000
        for place, survives in enumerate(table, start=1):
            share = sum(accepted >= place for accepted in full) / len(full)
            assert share == pytest.approx(survives, abs=4 * (0.25 / len(full)) ** 0.5)
    assert found[0] == found[1]
    other = Simulation(4000, 4, speculation=SimulatedDrafts(table, seed=1))
    other.add(3, 100)
    accepted = [one.num_accepted for record in other.run() for one in record.drafted]
    assert accepted != [found[0][key] for key in sorted(found[0]) if key[0] == 0]


def test_right_drafts_decide_as_in_the_engine(folder):
    """Row for row, with a pool that is too small, and answers that stop in the middle of drafts."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = workload.engine(folder, **limits, **speculating(Truth(folder), 3))
    core, sim = llm.engine, beside(llm, speculation=SimulatedDrafts((1.0, 1.0, 1.0)))
    prompts = [[number, 2, 3, 5, 8][: 2 + number % 4] for number in range(8)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=LONGEST, seed=number, stop_token_ids=list(range(number * 3)), ignore_eos=True
        )
        core.add(core.make_request(f"r{number}", None, prompt, params))
    while core.has_work:
        core.step()
    lengths = {one.request_id: one.num_tokens[0] for one in llm.trace.requests()}
    assert min(lengths.values()) < LONGEST
    for number, prompt in enumerate(prompts):
        sim.add(prompt, lengths[f"r{number}"], max_tokens=LONGEST)
    made, real = list(sim.run()), list(llm.trace)
    assert sum(len(record.drafted) for record in real) > 20
    assert any(record.preempted for record in real)
    for one, other in zip(made, real, strict=True):
        assert one.rows == other.rows
        ours, theirs = (  # the proposer drafts nothing after the end of its text
            [each._replace(num_drafted=0) for each in record.drafted] for record in (one, other)
        )
        assert ours == theirs
        assert one.ended == [each._replace(time=None) for each in other.ended]


def test_a_name_of_ones_own_is_not_given_to_another():
    sim = Simulation(8, 4)
    assert [sim.add(1, 1, name="r1"), sim.add(1, 1), sim.add(1, 1)] == ["r1", "r2", "r3"]


def test_a_policy_of_ones_own():
    """The last to come is served first."""
    newest_first = Policy(lambda request, arrival, cached: (-arrival,))
    sim = Simulation(8, 4, policy=newest_first, max_num_seqs=1)
    sim.add(1, 1, name="a")
    sim.add(1, 1, name="b")
    assert ends(sim) == {"b": 1.0, "a": 2.0}


def test_reports_say_where_each_prompt_came_from():
    sim = Simulation(20, 4, prefix_cache="radix")
    for name in "ab":
        sim.add((1, 2, 3, 4, 5), 1, name=name)
        sim.run()
    first, second = PrefixReport(partial_block=1, new=4), PrefixReport(cached=4, partial_block=1)
    assert sim.reports == {"a": first, "b": second}


@pytest.mark.parametrize(("modules", "absent"), [
    ("lab.simulation trace.recorder trace.file lab.drawings.timeline lab.drawings.chrome "
     "lab.drawings.table lab.parallel_cost lab.commands.plan", {"torch"}),
    ("lab.gpu.__main__", {"torch", "numpy", "triton"}),  # it lives when CUDA does not
])  # fmt: skip
def test_what_counts_and_draws_and_the_parent_of_a_gpu_run_need_no_torch(modules, absent):
    names = ", ".join(f"minillm.{name}" for name in modules.split())
    code = f"import sys, {names}; sys.exit(not {absent}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NAN, INF = float("nan"), float("inf")
MISTAKES = [  # (of what, arguments, what the error says)
    ("drafts", {"survival": ()}, r"survival is \(\); it must be probabilities"),
    ("drafts", {"survival": 0.5}, "survival is 0.5"),
    ("drafts", {"survival": (0.5, 0.6)}, "that do not rise"),
    ("drafts", {"survival": (NAN,)}, "survival is"),
    ("add", {"prompt": 0}, "0 prompt tokens"),
    ("add", {"new": 0}, "0 new tokens and"),
    ("add", {"new": 5, "max_tokens": 4}, "max_tokens 4; each"),
    ("add", {"arrival": -1.0}, "arrival is -1.0; it must be from 0.0"),
    ("add", {"name": "taken"}, "already a request 'taken'"),
    ("add", {"name": 7}, "name is 7"),
    ("add", {"prompt": "a text"}, "prompt is 'a text'; it must be a number of tokens"),
    ("add", {"prompt": [1, -1]}, "prompt is .* from 0 to 999,999,999"),
    ("add", {"prompt": 30, "new": 10, "arrival": 5.0}, "can never fit"),
    ("add", {"priority": "high"}, "priority is 'high'"),
    ("add", {"cache_salt": 7}, "cache_salt is 7"),
    ("simulation", {"num_blocks": 0}, "num_blocks is 0; it must be a whole number of at least 1"),
    ("simulation", {"num_host_blocks": -1}, "num_host_blocks is -1; .* of at least 0"),
    ("simulation", {"max_seqs": 3}, r"'max_seqs'\. Did you mean 'max_num_seqs'"),
    ("simulation", {"policy": "fifo"}, "policy is 'fifo'; it must be one of fcfs"),
    ("simulation", {"policy": None}, "policy is None; it must be a name or a Policy"),
    ("simulation", {"scheduler": int}, "it must be Scheduler or a class derived from it"),
    ("simulation", {"speculation": (0.5,)}, r"speculation is \(0.5,\); .* a SimulatedDrafts"),
    ("simulation", {"seconds": 0.1}, r"seconds is 0.1; .* such as every_step\(0.1\)"),
    *(("time", {"seconds": x}, "seconds for step 1; it must") for x in (-1.0, NAN, INF, None)),
    *(("run", {"until": each}, "until is") for each in (NAN, "3", None)),
    ("link", {"link": 0}, "link is 0; it must be above 0"),
]


@pytest.mark.parametrize(("what", "arguments", "says"), MISTAKES)
def test_what_makes_no_sense_is_refused(what, arguments, says):
    def time(seconds):
        sim = Simulation(8, 4, seconds=every_step(seconds))
        sim.add(1, 1)
        sim.run()

    sim = Simulation(8, 4)
    sim.add(1, 1, name="taken")
    call = {
        "drafts": SimulatedDrafts,
        "add": lambda **more: sim.add(**({"prompt": 3, "new": 1} | more)),
        "simulation": lambda **more: Simulation(**({"num_blocks": 8} | more)),
        "time": time,
        "run": sim.run,
        "link": lambda link: roofline(preset("llama-3.1-8b"), DATASHEET["h100-sxm"], link=link),
    }[what]
    with pytest.raises((ConfigError, InvalidRequestError, UnknownArgumentError), match=says):
        call(**arguments)
