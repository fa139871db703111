"""Chapter 07: what every slot of the KV memory is for in each step, and why a request is refused.

`serve` drives any allocator in the order of the engine's scheduler: first come, first served, and
the last request to come is preempted first. The pictures are in `ch07_pictures`.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.lab.simulation import Simulation
from minillm.models.forward_pass import Chunk
from minillm.ops.batch import Batch
from minillm_exercises.chapters.common import chosen, rounds
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.errors import ExerciseError

CAP = 2048
REASONS = ("no hole", "over-reserved", "full")

# How long requests are: uniform, or log-normal with this mean and deviation of the logarithm.
DISTS: Mapping[str, tuple[float, float] | None] = MappingProxyType(
    {"uniform": None, "mixed": (6.2, 0.8), "mostly short": (5.6, 0.9)}
)


class Work(NamedTuple):
    """A request: it brings `prompt` tokens and holds `total` slots when it ends."""

    name: int
    prompt: int
    total: int


class Memory(Protocol):
    """What `serve` asks of an allocator; `held` has the slots that each request may write."""

    held: dict[int, int]

    @property
    def free(self) -> int:
        """Slots that no request holds."""
        ...

    def wants(self, work: Work, tokens: int) -> int:
        """Slots that the request needs before its first `tokens` can be computed."""
        ...

    def begin(self, work: Work, tokens: int) -> bool:
        """Give the request the slots that it wants, if that is possible."""
        ...

    def grow(self, name: int, length: int) -> bool:
        """Make the slots of the first `length` tokens writable, if that is possible."""
        ...

    def end(self, name: int) -> None:
        """Take all slots of the request back."""
        ...


# Slots wanted, free, reserved but never used, and needed in the end: the name of the reason.
Why = Callable[[int, int, int, int], str]


class Moment(NamedTuple):
    """One step: slots by their use, and why the next request of the queue was refused, if so."""

    used: int  # written
    later: int  # will be written by the request that holds them
    never: int  # held, and given back unwritten
    free: int
    running: int
    waiting: int
    refused: str | None
    preempted: int  # lost all their slots in this step, and begin again later


@dataclass(eq=False)
class _Run:
    work: Work
    computed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens known: the prompt, or one more than was ever computed."""
        return max(self.work.prompt, self.computed + 1)


class Server:
    """The queue in front of a memory, and the order in which it is served."""

    def __init__(self, memory: Memory, works: Sequence[Work], why: Why):
        self.memory, self.why = memory, why
        self.waiting, self.running = deque(map(_Run, works)), list[_Run]()

    def step(self) -> Moment:
        """One step: running requests grow, waiting ones are admitted, finished ones leave."""
        behind, refused = len(self.waiting), None
        grown = self.grow()
        preempted = len(self.waiting) - behind
        if len(grown) == len(self.running) and not preempted:
            refused = self.admit(grown)
        for run in grown:
            run.computed = run.tokens
        moment = self.moment(refused, preempted)
        for run in [run for run in grown if run.computed == run.work.total]:
            self.running.remove(run)
            self.memory.end(run.work.name)
        return moment

    def grow(self) -> list[_Run]:
        """A slot for each running request in order; the last to come are preempted for them."""
        grown: list[_Run] = []
        for run in list(self.running):
            while run in self.running:
                if self.memory.grow(run.work.name, run.tokens):
                    grown.append(run)
                    break
                if self.running[-1] is run:
                    break  # no request came later: this one keeps its slots and waits a step
                victim = self.running.pop()
                self.memory.end(victim.work.name)
                self.waiting.appendleft(victim)
        return grown

    def admit(self, grown: list[_Run]) -> str | None:
        """Admit waiting requests in order; returns why the next one is refused."""
        while self.waiting:
            run = self.waiting[0]
            if not self.memory.begin(run.work, run.tokens):
                wanted = self.memory.wants(run.work, run.tokens)
                never = self.moment(None, 0).never
                return self.why(wanted, self.memory.free, never, run.work.total)
            self.waiting.popleft()
            self.running.append(run)
            grown.append(run)
        return None

    def moment(self, refused: str | None, preempted: int) -> Moment:
        """The use of all slots at this moment."""
        used = later = never = 0
        for run in self.running:
            held = self.memory.held[run.work.name]
            kept = min(held, run.work.total)
            used += run.computed
            later += kept - run.computed
            never += held - kept
        counts = len(self.running), len(self.waiting)
        return Moment(used, later, never, self.memory.free, *counts, refused, preempted)


def serve(memory: Memory, works: Sequence[Work], why: Why) -> list[Moment]:
    """All requests come at once; each step writes one slot of every running request, or the whole
    prompt of one that begins. `why(wanted, free, never, needed)` names the reason of a refusal.

    Raises:
        ExerciseError: no request runs, and the next one does not fit either.
    """
    server, moments = Server(memory, works, why), list[Moment]()
    while server.waiting or server.running:
        moments.append(server.step())
        if not moments[-1].running:
            raise ExerciseError("No request runs, and the next one does not fit into the memory.")
    return moments


def average(moments: Sequence[Moment], field: str) -> str:
    """The mean of a count over the steps in which a request waited, or over all steps if none ever
    did, to one decimal."""
    busy = [moment for moment in moments if moment.waiting] or moments
    counts = [getattr(moment, field) for moment in busy]
    return f"{sum(counts) / len(counts):.1f}"


def refusals(moments: Sequence[Moment]) -> dict[str, int]:
    """Steps in which the next request of the queue was refused, by reason."""
    return dict(Counter(moment.refused for moment in moments if moment.refused))


def table_rows(runs: Mapping[str, Mapping[str, Sequence[Moment]]]) -> list[list[str]]:
    """A line per distribution and memory: how many ran at once, refusals by reason, preemptions."""
    rows = []
    for dist, found in runs.items():
        for name, moments in found.items():
            seen = refusals(moments)
            reasons = [f"{seen.get(reason, 0):,}" for reason in REASONS]
            lost = f"{sum(moment.preempted for moment in moments):,}"
            rows.append([dist, name, average(moments, "running"), *reasons, lost])
    return rows


def lengths(dist: str, count: int, seed: int = 0) -> list[int]:
    """Slots that requests need in the end: 100 to CAP ("uniform"), or log-normally distributed.

    Raises:
        ExerciseError: a distribution that is not of `DISTS`.
    """
    draw, shape = random.Random(seed), chosen("dist", dist, DISTS)
    if shape is None:
        return [draw.randint(100, CAP) for _ in range(count)]
    return [min(CAP, max(4, round(draw.lognormvariate(*shape)))) for _ in range(count)]


def requests(dist: str, count: int, seed: int = 0) -> list[Work]:
    """Requests of which a quarter is prompt."""
    return [Work(i, total // 4, total) for i, total in enumerate(lengths(dist, count, seed))]


def come_and_go(memory: Memory, why: Why, arrivals: int, runs: int = 1, seed: int = 0) -> list[str]:
    """Refusals where a request comes every 2.2 ticks, stays for 5 to 60, holds 100 to CAP slots
    from its first tick on, and does not ask again. The memory is empty after each of the runs."""
    found: list[str] = []
    for run in range(runs):
        draw, leaving = random.Random(seed + run), deque[tuple[float, int]]()
        for name in range(arrivals):
            now = 2.2 * name
            for gone in [entry for entry in leaving if entry[0] <= now]:
                leaving.remove(gone)
                memory.end(gone[1])
            work = Work(name, 1, draw.randint(100, CAP))
            if memory.begin(work, 1):
                leaving.append((now + draw.randint(5, 60), name))
            else:
                found.append(why(memory.wants(work, 1), memory.free, 0, work.total))
        for _, name in leaving:
            memory.end(name)
    return found


@contextmanager
def batches(llm: LLM) -> Iterator[list[Batch]]:
    """The batch of each forward pass of `llm` inside the block."""
    seen: list[Batch] = []
    hook = llm.engine.forward_pass.model.register_forward_pre_hook(
        lambda model, args: seen.append(args[0])
    )
    try:
        yield seen
    finally:
        hook.remove()


def tables_of(batch: Batch, size: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The block table and the number of positions of each row, which are named A, B, C ..."""
    counts = dict(zip("ABCDEFGH", batch.seq_lens.tolist(), strict=False))
    rows = zip(counts.items(), batch.block_tables.tolist(), strict=True)
    return {name: table[: -(-count // size)] for (name, count), table in rows}, counts


def rows_of(batches: Sequence[Batch]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Table, positions and slots of each row of each batch."""
    for batch in batches:
        starts = batch.query_start.tolist()
        for row, table in enumerate(batch.block_tables.tolist()):
            mine = slice(starts[row], starts[row + 1])
            yield table, batch.positions[mine].tolist(), batch.slot_mapping[mine].tolist()


def decode_times(sizes: Sequence[int], sequences: int, length: int, steps: int) -> list[float]:
    """Milliseconds of the fastest decode step of the tiny model for each block size; the engines
    take turns, so that other programs disturb all of them alike."""
    engines = [_filled(size, sequences, length, length + steps) for size in sizes]
    for _ in range(steps - 1):
        for llm in engines:
            llm.engine.step()
    decodes = [[r for r in llm.trace if not r.num_prefill_tokens] for llm in engines]
    for llm in engines:
        llm.close()
    return [1e3 * min(r.computed - r.planned for r in records) for records in decodes]


def _filled(size: int, sequences: int, length: int, longest: int) -> LLM:
    """An engine whose sequences have computed their prompts."""
    llm = LLM("tiny", device="cpu", dtype="float32", block_size=size, max_model_len=longest,
              enable_prefix_caching=False, max_num_batched_tokens=sequences * length,
              num_gpu_blocks_override=sequences * -(-longest // size))  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=longest - length, ignore_eos=True)
    for n in range(rounds(sequences)):
        llm.engine.add(llm.engine.make_request(f"{n}", None, [n + 1] * rounds(length), params))
    llm.engine.step()
    return llm


def holders(simulation: Simulation) -> list[dict[int, list[int]]]:
    """After each step of a simulation with one request: for each block in use, the completions
    (1, 2, ...) whose tables have it."""
    steps: list[dict[int, list[int]]] = []
    while simulation.has_work:
        simulation.step()
        held: dict[int, list[int]] = {}
        for name, sequence in sorted(simulation.scheduler.sequences.items()):
            for block in sequence.table.blocks:
                held.setdefault(block, []).append(name + 1)
        steps += [held] if held else []
    return steps


def confirmed(llm: LLM, output: RequestOutput) -> list[bool]:
    """Whether each completion has the logprob that a pass over one unbroken range gives it."""
    by_hand, prompt = llm.engine.forward_pass, list(output.prompt_token_ids)
    verdicts = []
    for completion in output.outputs:
        ids = prompt + list(completion.token_ids)
        hidden, _ = by_hand.run([Chunk(0, 0, ids)], by_hand.allocate(1, len(ids)))
        rows = by_hand.logits(hidden[len(prompt) - 1 : -1]).float().log_softmax(-1).cpu()
        expected = sum(float(rows[at, token]) for at, token in enumerate(completion.token_ids))
        reported = completion.cumulative_logprob
        verdicts.append(reported is not None and abs(expected - reported) < 1e-2)
    return verdicts
