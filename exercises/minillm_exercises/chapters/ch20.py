"""Chapter 20: timetables of stages, plans in flight, cuts, links, and where experts lie."""

import json
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm import LLM, SamplingParams, ops
from minillm.cache.manager import BlockManager
from minillm.config import ModelConfig, MoEConfig
from minillm.lab.hardware import Hardware
from minillm.lab.links import LINKS
from minillm.lab.parallel_cost import Devices, ParallelTime, decode_time, prefill_time
from minillm.lab.parallel_layout import Layout, device_memory, matrices_in
from minillm.parallel.split import cut_layers, layer_costs
from minillm.scheduling import scheduler as scheduler_file
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from minillm_exercises.chapters.ch19 import on_ranks as on_ranks
from minillm_exercises.chapters.ch19 import rounded as rounded
from minillm_exercises.chapters.ch19 import share as share
from minillm_exercises.chapters.ch19 import write as write
from minillm_exercises.chapters.common import show_table as show_table

CONTEXT = 1024  # tokens in the cache of each sequence of a decode step
PROMPT = 2048
BLOCK_SIZE = 16


# Timetables ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A plan on a stage, from `start` to `end`; `rows` has the tokens of each sequence."""

    stage: int
    start: Fraction
    end: Fraction
    plan: int
    rows: tuple[tuple[int, int], ...] = ()


class Pipeline:
    """Stages on a virtual clock, all as fast as each other; plans follow each other in order."""

    def __init__(self, stages: int):
        self.free = [Fraction(0)] * stages
        self.boxes: list[Box] = []

    def send(self, at: Fraction, cost: Fraction, plan: int, rows: Any = ()) -> Fraction:
        """A plan that is known at a time and costs so much on each stage; returns its end."""
        for stage, free in enumerate(self.free):
            start, at = max(at, free), max(at, free) + cost
            self.free[stage] = at
            self.boxes.append(Box(stage, start, at, plan, rows))
        return at


def rounds_of(costs: Sequence[int], stages: int, rounds: int) -> list[Box]:
    """Plans of these costs, in order, each of which begins again when it has left the last
    stage; chunks of a prompt are one round."""
    pipeline, ready = Pipeline(stages), [Fraction(0)] * len(costs)
    for _ in range(rounds):
        for plan, cost in enumerate(costs):
            ready[plan] = pipeline.send(ready[plan], Fraction(cost), plan)
    return pipeline.boxes


def busy(boxes: Sequence[Box], stages: int, start: Any = 0, end: Any = None) -> Fraction:
    """The share of the stages' time, from `start` to `end` (default: of the last box), in which
    they compute."""
    end = max(box.end for box in boxes) if end is None else Fraction(end)
    spans = (min(box.end, end) - max(box.start, Fraction(start)) for box in boxes)
    return sum((max(each, Fraction(0)) for each in spans), Fraction(0)) / (stages * (end - start))


def steady(costs: Sequence[int], stages: int, rounds: int = 12) -> Fraction:
    """The share of the time in which stages compute, once plans of these costs go round and round:
    of the rounds after the first half, whose ends are equally far apart."""
    boxes = rounds_of(costs, stages, rounds)
    last = [box.end for box in boxes if box.stage == stages - 1]
    ends = last[len(costs) - 1 :: len(costs)]
    return sum(costs) * (rounds - rounds // 2) / (ends[-1] - ends[rounds // 2 - 1])


# The engine's scheduler ------------------------------------------------------------------------


def planner(stages: int, prompts: Sequence[int], budget: int = 64, answer: int = 200) -> Scheduler:
    """The engine's scheduler, with requests whose prompts have these lengths, in tokens.

    Args:
        budget: tokens of a plan, at most.
        answer: tokens that each request gets.
    """
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, num_stages=stages)
    scheduler = Scheduler(config, BlockManager(1024, BLOCK_SIZE, None))
    for number, length in enumerate(prompts):
        add(scheduler, number, length, answer)
    return scheduler


def add(scheduler: Scheduler, number: int, length: int, answer: int = 200) -> None:
    """One more request, which shares no beginning with another."""
    ids = tuple(range(1000 * number, 1000 * number + length))
    scheduler.add(Request(f"{number}", ids, SamplingParams(), answer))


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """The plan was carried out: each row that samples got a token."""
    scheduler.commit(plan, {row.seq_id: [1] for row in plan.rows if row.num_logits})


def all_plans(scheduler: Scheduler, flying: int) -> Iterator[StepPlan]:
    """The plans that can be made now, where so many are in flight."""
    if not flying and scheduler.has_work:
        yield scheduler.schedule()
    while (plan := scheduler.schedule_ahead()) is not None:
        yield plan


def rows_of(plan: StepPlan) -> tuple[tuple[int, int], ...]:
    """Tokens of each sequence."""
    return tuple((row.seq_id, row.num_tokens) for row in plan.rows)


def in_flight(scheduler: Scheduler, steps: int) -> list[list[Any]]:
    """For each of so many steps: the rows of the plans in flight before its commit."""
    plans: deque[StepPlan] = deque()
    found = []
    for _ in range(steps):
        plans.extend(all_plans(scheduler, len(plans)))
        found.append([rows_of(plan) for plan in plans])
        commit(scheduler, plans.popleft())
    return found


def shown(rows: Sequence[tuple[int, int]]) -> str:
    """a b c, or a: 64 for a chunk of 64 tokens."""
    names = [(chr(ord("a") + seq_id), tokens) for seq_id, tokens in rows]
    return " ".join(name if tokens == 1 else f"{name}: {tokens}" for name, tokens in names)


def plans_table(steps: Sequence[Sequence[Any]], stages: int) -> list[list[str]]:
    """One row for each step: its number and the plans in flight, the oldest first."""
    return [
        [f"{number}", *(shown(rows) for rows in plans), *[""] * (stages - len(plans))]
        for number, plans in enumerate(steps)
    ]


def drive(
    scheduler: Scheduler,
    stages: int,
    cost: Callable[[int], Any],
    until: int,
    arrivals: Mapping[int, tuple[int, int]] | None = None,
) -> list[Box]:
    """Let the engine's scheduler plan for a pipeline on a virtual clock.

    Args:
        cost: of a plan on each stage, from its tokens.
        arrivals: time -> number and prompt length of a request.
    """
    pipeline, now = Pipeline(stages), Fraction(0)
    flights: deque[tuple[Fraction, StepPlan]] = deque()
    waiting = sorted((arrivals or {}).items())
    while now < until:
        while waiting and waiting[0][0] <= now:
            add(scheduler, *waiting.pop(0)[1])
        for plan in all_plans(scheduler, len(flights)):
            rows = rows_of(plan)
            price = Fraction(cost(sum(tokens for _, tokens in rows)))
            flights.append((pipeline.send(now, price, plan.step, rows), plan))
        if not flights:
            break
        now, plan = flights.popleft()
        commit(scheduler, plan)
    return pipeline.boxes


def longest_gap(boxes: Sequence[Box], stages: int, sequence: int, start: int) -> Fraction:
    """The longest time between two tokens of a sequence, from `start` on."""
    last = [box for box in boxes if box.stage == stages - 1 and box.end >= start]
    ends = [box.end for box in last if dict(box.rows).get(sequence) == 1]
    return max(after - before for before, after in pairwise(ends))


def first_token(boxes: Sequence[Box], stages: int, sequence: int) -> Fraction:
    """When the last chunk of a sequence's prompt leaves the last stage."""
    last = [box for box in boxes if box.stage == stages - 1]
    return max(box.end for box in last if dict(box.rows).get(sequence, 0) > 1)


@contextmanager
def all_in_one_plan() -> Iterator[None]:
    """As if the scheduler did not deal sequences out: every plan takes all that decode."""
    right = scheduler_file.most_decoding
    scheduler_file.most_decoding = lambda num_running, config: num_running
    try:
        yield
    finally:
        scheduler_file.most_decoding = right


# Models on stages and ranks --------------------------------------------------------------------


def open_stages(model: str, stages: int, **options: Any) -> LLM:
    """An engine of so many stages, which are threads, on the processor and in float32, so that
    tokens can be compared."""
    more = {"pipeline_parallel_size": stages, "distributed_executor_backend": "threads"}
    return LLM(model, dtype="float32", device="cpu", **{**more, **options})


def sent(llm: LLM) -> list[tuple[int, int]]:
    """Tensors and bytes that have crossed each boundary between stages so far."""
    places = llm.engine.runner.places  # type: ignore[attr-defined]
    ends = [each.traffic["send"] for each in places if each.after is not None]
    return [(each.calls, each.num_bytes) for each in ends]


def sent_per_token(llm: LLM, prompt: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Tensors and bytes across each boundary for a token that is written behind the prompt: two
    texts that differ only in their length are written, and the difference counts."""
    counted = [sent(llm)]
    for tokens in (1, 1 + count):
        write(llm, prompt, tokens)
        counted.append(sent(llm))
    found = []
    for first, second, third in zip(*counted, strict=True):  # at one boundary
        calls, num_bytes = (c - 2 * b + a for a, b, c in zip(first, second, third, strict=True))
        found.append((calls // count, num_bytes // count))
    return found


def mixture(ranks: int = 1, whole_experts: bool = False) -> LLM:
    """A small mixture of 8 experts, 2 per token, with the same random weights every time."""
    shapes = {
        "model_type": "mixtral", "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    more: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32, "device": "cpu"}
    if ranks > 1:
        more |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "threads"}
        more |= {"enable_expert_parallel": whole_experts}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shapes), encoding="utf-8")
        return LLM(folder, tokenizer="tiny", load_format="dummy", dtype="float32", **more)


def summed(llm: LLM) -> tuple[int, int]:
    """Sums and their bytes, of rank 0 so far."""
    traffic = llm.engine.runner.places[0].traffic["sum"]  # type: ignore[attr-defined]
    return traffic.calls, traffic.num_bytes


# Cuts ------------------------------------------------------------------------------------------


def head_in_layers(config: ModelConfig) -> Fraction:
    """What reading the output matrix costs, where a layer costs 1."""
    layers, head = layer_costs(config)
    return Fraction(head) / Fraction(layers[-1])


def equal_counts(num_layers: int, stages: int) -> list[int]:
    """As many layers for each stage, and one more for the first ones where that is not possible."""
    return [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]


def by_cost(config: ModelConfig, stages: int) -> list[int]:
    """Layers of each stage as the engine cuts them."""
    return [len(held) for held in cut_layers(*layer_costs(config), stages)]


def stage_costs(counts: Sequence[int], head: Any) -> list[Any]:
    """Each stage's cost in layers; the last one has the output matrix, too."""
    return [*counts[:-1], counts[-1] + head]


# Predictions -----------------------------------------------------------------------------------


def devices(gpu: Hardware, link: str, layout: Layout, weight_size: float | None = None) -> Devices:
    """Devices whose steps are recorded graphs."""
    weights = None if weight_size is None else matrices_in(weight_size)
    return Devices(gpu, LINKS[link], layout, is_recorded=True, weights=weights)


def decode(config: ModelConfig, on: Devices, batch: int, context: int = CONTEXT) -> ParallelTime:
    """The engine's prediction of a token for each of `batch` sequences, in bfloat16."""
    return decode_time(config, on, batch=batch, context=context, dtype="bfloat16")


def read_prompt(config: ModelConfig, on: Devices, chunks: int) -> ParallelTime:
    """The engine's prediction of a prompt of `PROMPT` tokens, in chunks, in bfloat16."""
    return prefill_time(config, on, num_tokens=PROMPT, num_chunks=chunks, dtype="bfloat16")


def room(config: ModelConfig, on: Devices) -> int:
    """Tokens that the caches of all devices hold together, in bfloat16."""
    layout, memory = on.layout, on.hardware.memory_bytes
    plan = device_memory(config, memory, layout, weights=on.weights, dtype="bfloat16")
    return plan.num_tokens * (layout.tensor if layout.own_attention else 1)


def holds(config: ModelConfig, on: Devices, tokens: int) -> bool:
    """Whether the devices' memory holds the model and caches of so many tokens, all together."""
    return room(config, on) >= tokens


def weights_per_device(config: ModelConfig, on: Devices) -> float:
    """Gigabytes (10^9) of weights on the device with the most."""
    layout, memory = on.layout, on.hardware.memory_bytes
    plan = device_memory(config, memory, layout, weights=on.weights, dtype="bfloat16")
    return plan.weight_bytes / 1e9


# Experts ---------------------------------------------------------------------------------------


def choices(tokens: int, experts: int, per_token: int, seed: int = 0) -> Tensor:
    """Experts of each token, all equally likely and all of a token different: [tokens, k]."""
    dice = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=dice).topk(per_token).indices


def routed(tokens: int, moe: MoEConfig, seed: int = 0) -> Tensor:
    """Experts that the engine's router chooses at random scores, by groups if there are some."""
    dice = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, moe.num_experts, generator=dice)
    how = moe.num_experts_per_token, moe.num_groups, moe.topk_groups, moe.group_score
    return ops.moe_route(scores, None, *how, moe.normalize)[1]


def ranks_reached(ids: Tensor, experts: int, ranks: int) -> Fraction:
    """On how many ranks a token's experts are, the mean of all tokens."""
    reached = [len(set(row)) for row in (ids // (experts // ranks)).tolist()]
    return Fraction(sum(reached), len(reached))


def rows_of_ranks(ids: Tensor, experts: int, ranks: int) -> list[int]:
    """Rows that each rank computes, of the choices [tokens, k]."""
    counted = Counter((ids // (experts // ranks)).flatten().tolist())
    return [counted[rank] for rank in range(ranks)]


def balance(rows: Sequence[int]) -> Fraction:
    """Mean over largest."""
    return Fraction(sum(rows), len(rows) * max(rows))
