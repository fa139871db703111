"""Traces of any size without a model: the real scheduler, made-up tokens and a made-up clock."""

import random
from typing import Any

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.lab.drawings.timeline import timeline
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.record import RankTime
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace, TraceSettings


def simulate(
    num_requests: int,
    num_blocks: int,
    mode: str = "recompute",
    seats: int = 8,
    tokens: int = 60,
    pause: int = 8,
    most_steps: int = 10**6,
    seed: int = 0,
    names: tuple[str, ...] = (),
) -> Trace:
    """Requests of up to `tokens` tokens in blocks of 4, one every `pause` steps or so. All end by
    length, but some of them are aborted or stopped."""
    rng = random.Random(seed)
    manager = BlockManager(num_blocks, 4, "hash", num_blocks // 3 if mode == "swap" else 0)
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=seats + 24, preemption_mode=mode
    )
    settings = TraceSettings(
        model="simulated", preemption=mode, policy="fcfs", prefix_cache="hash", block_size=4,
        num_blocks=num_blocks, num_host_blocks=manager.host.num_blocks, max_num_seqs=seats,
        max_num_batched_tokens=seats + 24, clock=None, wall=None,
    )  # fmt: skip
    scheduler, trace, now = Scheduler(config, manager), Trace(settings, capacity=2**40), 0.0
    shared, added, step = [rng.randrange(99) for _ in range(tokens // 4)], 0, 0
    arrivals = sorted(rng.randrange(num_requests * pause) for _ in range(num_requests))
    while (added < num_requests or scheduler.has_work) and len(trace) < most_steps:
        for number in range(added, num_requests):
            if arrivals[number] > step:
                break
            prompt = shared * rng.choice([0, 1]) + rng.choices(range(99), k=1 + tokens // 4)
            name = names[number] if number < len(names) else f"request-{number}"
            params = SamplingParams(n=rng.choice([1, 1, 1, 1, 2]), temperature=1.0)
            length = rng.randint(2, tokens // 2)
            scheduler.add(Request(name, tuple(prompt), params, length, arrival=now))
            added += 1
        step += 1
        if scheduler.has_work:
            now = one_step(scheduler, trace, rng, now)
        else:
            now += 0.05
    return trace


def one_step(scheduler: Scheduler, trace: Trace, rng: random.Random, now: float) -> float:
    """Plan, pretend to run, commit; returns the time when it is over."""
    plan = scheduler.schedule()
    record = scheduler.record
    trace.append(record)
    record.started, record.planned = now, now + 0.0002
    record.computed = record.planned + 0.004 + 0.0001 * sum(row.num_tokens for row in plan.rows)
    record.delivered = record.computed + 0.0003
    draws: dict[int, list[int | None]] = {
        row.seq_id: [rng.randrange(99) for _ in range(row.num_samples)] for row in plan.rows
    }
    scheduler.commit(plan, draws)
    if rng.random() < 0.02 and scheduler.running:
        scheduler.finish(rng.choice(scheduler.running).seq_id, rng.choice(["stop", "abort"]))
    return record.delivered


def data(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The drawing of such a trace."""
    return timeline(simulate(*args, **kwargs))


def with_ranks(trace: Trace, number: int, slow: int | None = None) -> Trace:
    """Give the steps of a trace the times of so many ranks. They compute for 4 to 6 ms and wait for
    the slowest, except that rank 0 is done half a millisecond sooner; `slow` computes for 9 ms."""
    rng = random.Random(number)
    for record in trace:
        own = [rng.uniform(4e-3, 6e-3) if rank != slow else 9e-3 for rank in range(number)]
        tooks = [max(own) + (1e-3 if rank else 5e-4) for rank in range(number)]
        record.ranks = [
            RankTime(rank, took, took - each)
            for rank, (took, each) in enumerate(zip(tooks, own, strict=True))
        ]
    return trace
