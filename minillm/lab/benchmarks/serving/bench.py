"""One benchmark of a server: the plan, its runs, and their figures as JSON data."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.client import Client
from minillm.lab.benchmarks.serving.prompts import Writer
from minillm.lab.benchmarks.serving.reply import Reply, row
from minillm.lab.benchmarks.serving.runner import POLLED, Load, Progress, offer
from minillm.lab.benchmarks.serving.summary import Evaluation, summarise
from minillm.lab.benchmarks.serving.target import Target
from minillm.lab.benchmarks.serving.workload import Arrivals, Conversation, Workload, fit

MARGIN = 64  # tokens that a chat template may add
SAY_SECONDS = 0.5
SEEDS = 1_000_003  # runs of a seed


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        arrivals: the process of arrivals; its rate is replaced in a sweep. None: closed loop.
        loads: rates (open loop) or concurrencies (closed loop) of a sweep.
        count: conversations of a run, warm-up included.
        seconds: if given, a run at rate r has r * seconds conversations instead.
        concurrency: open loop only: at most this many at once.
    """

    workload: Workload
    arrivals: Arrivals | None
    loads: tuple[float, ...]
    count: int
    seconds: float | None = None
    concurrency: int | None = None
    repeats: int = 1
    seed: int = 0
    evaluation: Evaluation = field(default_factory=lambda: Evaluation({}))

    def size(self, load: float) -> int:
        """Conversations of one run."""
        if self.seconds is None:
            return self.count
        return max(1, math.ceil(load * self.seconds)) + self.evaluation.warmup

    def load(self, load: float, repeat: int, count: int, polled: float = POLLED) -> Load:
        """The times of one run. A seed's arrivals are the same ones at each rate, stretched."""
        if self.arrivals is None:
            return Load(None, int(load), polled)
        rng = np.random.default_rng([self.seed + repeat, 0])
        arrivals = replace(self.arrivals, rate=load)
        return Load([float(at) for at in arrivals.times(count, rng)], self.concurrency, polled)

    def describe(self) -> str:
        """Arrivals or closed loop, in words."""
        if self.arrivals is None:
            return "closed loop"
        limit = f", at most {self.concurrency} at once" if self.concurrency else ""
        return f"open loop, {self.arrivals.describe()}{limit}"


@dataclass
class Bench:
    """Runs of a plan on one server."""

    plan: Plan
    target: Target
    client: Client
    writer: Writer
    say: Callable[[str], None]
    live: bool = False
    polled: float = POLLED
    runs: list[dict[str, Any]] = field(default_factory=list)
    shortened: int = 0

    def conversations(self, count: int, repeat: int) -> list[Conversation]:
        """The conversations of one run, shortened to the model's context."""
        plan = self.plan
        drawn = plan.workload.draw(count, plan.seed + repeat)
        if self.target.longest is None:
            return drawn
        margin = MARGIN if self.writer.fields.chat or not self.writer.as_ids else 0
        room = self.target.longest - margin
        if room < 2:
            raise ConfigError(
                f"The server's context has {self.target.longest} tokens; this benchmark needs at "
                f"least {margin + 2}."
            )
        fitted, changed = fit(drawn, room)
        self.shortened += changed
        return fitted

    async def run(self, load: float, repeat: int, shown: str) -> dict[str, Any]:
        """One run: its figures and a row per request."""
        count = self.plan.size(load)
        conversations = self.conversations(count, repeat)
        # Each run has own prompts; otherwise the prefix cache would hold those of the last run.
        seed = self.plan.seed * SEEDS + len(self.runs)
        vocabulary = replace(self.writer.vocabulary, seed=seed)
        send = sender(self.client, replace(self.writer, vocabulary=vocabulary), conversations)
        load_plan = self.plan.load(load, repeat, count, self.polled)
        progress = Progress(sum(len(turns) for turns in conversations))
        teller = asyncio.create_task(self.tell(progress, shown))
        try:
            start, replies = await offer(conversations, load_plan, send, progress)
        finally:
            teller.cancel()
        found = {
            "load": load if math.isfinite(load) else None,
            "repeat": repeat,
            "seed": self.plan.seed + repeat,
            "summary": summarise(replies, start, self.plan.evaluation),
            "rows": [row(reply, start) for reply in replies],
        }
        self.runs.append(found)
        return found

    async def tell(self, progress: Progress, shown: str) -> None:
        """Report progress: repeatedly on a terminal, once in a log."""
        self.say(shown)
        while self.live:
            await asyncio.sleep(SAY_SECONDS)
            bad = sum(reply.error is not None for reply in progress.done)
            lost = f", {bad} failed or rejected" if bad else ""
            self.say(
                f"{shown}: {progress.sent} of {progress.total} requests sent, "
                f"{len(progress.done)} done{lost}"
            )


def sender(client: Client, writer: Writer, conversations: Sequence[Conversation]) -> Any:
    """The function that sends a turn. Bodies of first turns are written before the run starts."""
    bodies = [writer.body(each, 0, []) for each in conversations]

    async def send(reply: Reply, conversation: Conversation, replies: list[str]) -> None:
        first = reply.turn == 0
        body = bodies[reply.index] if first else writer.body(conversation, reply.turn, replies)
        await client.send(reply, writer.path, body)

    return send


def name_of(load: float, closed: bool) -> str:
    """A load in words."""
    if closed:
        return f"concurrency {load:g}"
    return "all at once" if math.isinf(load) else f"{load:g}/s"
