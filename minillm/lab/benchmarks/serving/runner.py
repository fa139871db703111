"""Sends the planned requests: open loop by the clock, or closed loop by concurrency.

In an open loop every request is sent when it is due, however many are unanswered, and its latency
counts from that time. A limit of concurrency may be added; the wait for it counts as latency, too.
In a closed loop a request is due when one of the places becomes free.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from minillm.lab.benchmarks.serving.reply import Reply
from minillm.lab.benchmarks.serving.workload import Conversation

# The event loop's timers are rounded up to milliseconds; the last part of a wait is polled.
POLLED = 0.0015  # seconds
# Sends the turn of a conversation, given the replies so far, and fills in a `Reply`.
Send = Callable[[Reply, Conversation, list[str]], Awaitable[None]]


@dataclass
class Progress:
    """Counts of a run, for display while it runs."""

    total: int
    sent: int = 0
    done: list[Reply] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """How the conversations are offered.

    Attributes:
        times: when each conversation starts, in seconds; None for a closed loop.
        concurrency: conversations at once; None for no limit.
        polled: seconds before a due time from which on the clock is polled.
    """

    times: Sequence[float] | None
    concurrency: int | None = None
    polled: float = POLLED


async def offer(
    conversations: Sequence[Conversation], load: Load, send: Send, progress: Progress
) -> tuple[float, list[Reply]]:
    """Send all conversations; returns the start time and the replies, in the order of their
    conversations and turns."""
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.TaskGroup() as group:
            if load.times is None:
                waiting = iter(enumerate(conversations))
                for _ in range(min(load.concurrency or 1, len(conversations))):
                    group.create_task(work_off(waiting, send, progress))
            else:
                await open_loop(group, start, conversations, load, send, progress)
    except BaseExceptionGroup as several:  # the first error, as without a group
        raise several.exceptions[0] from several
    return start, sorted(progress.done, key=lambda reply: (reply.index, reply.turn))


async def open_loop(
    group: asyncio.TaskGroup,
    start: float,
    conversations: Sequence[Conversation],
    load: Load,
    send: Send,
    progress: Progress,
) -> None:
    """Start each conversation when it is due."""
    limit: AbstractAsyncContextManager[None] = nullcontext()
    if load.concurrency is not None:
        limit = asyncio.Semaphore(load.concurrency)
    for index, (due, conversation) in enumerate(zip(load.times or (), conversations, strict=True)):
        await until(start + due, load.polled)
        group.create_task(converse(index, conversation, start + due, limit, send, progress))


async def until(due: float, polled: float) -> None:
    """Wait for a time on the clock of the event loop, more precisely than its timers."""
    clock = asyncio.get_running_loop().time
    if (left := due - clock()) > polled:
        await asyncio.sleep(left - polled)
    while clock() < due:
        await asyncio.sleep(0 if polled else due - clock())


async def work_off(waiting: "enumerate[Conversation]", send: Send, progress: Progress) -> None:
    """One place of a closed loop: one conversation after the other."""
    for index, conversation in waiting:
        due = asyncio.get_running_loop().time()
        await converse(index, conversation, due, nullcontext(), send, progress)


async def converse(
    index: int,
    conversation: Conversation,
    due: float,
    limit: AbstractAsyncContextManager[None],
    send: Send,
    progress: Progress,
) -> None:
    """Send the turns of a conversation. Turns after a failure are not sent."""
    texts: list[str] = []
    async with limit:
        for turn, planned in enumerate(conversation):
            if planned.think:
                due += planned.think
                await until(due, 0.0)
            reply = Reply(index, turn, due)
            progress.sent += 1
            await send(reply, conversation, texts)
            progress.done.append(reply)
            if reply.error is not None:
                return
            texts.append(reply.text)
            due = reply.end
