"""Windows of a run: the steady window, and the time in which load was offered."""

from collections.abc import Sequence

from minillm.lab.benchmarks.serving.measures import succeeded
from minillm.lab.benchmarks.serving.reply import Reply

Window = tuple[float, float]  # start and end, on the clock of the replies


def concurrency(replies: Sequence[Reply]) -> list[tuple[float, int]]:
    """Requests in flight, as steps: from each time on, this many."""
    changes = sorted(
        [(reply.sent, 1) for reply in replies] + [(reply.end, -1) for reply in replies]
    )
    steps: list[tuple[float, int]] = []
    level = 0
    for at, change in changes:
        level += change
        if steps and steps[-1][0] == at:
            steps.pop()
        steps.append((at, level))
    return steps


def steady_window(replies: Sequence[Reply], ratio: float) -> tuple[Window, int]:
    """The longest interval in which at least `ratio` of the peak concurrency is in flight, and the
    peak. Without replies it is empty."""
    steps = concurrency(replies)
    peak = max((level for _, level in steps), default=0)
    best, start = (0.0, 0.0), None
    for at, level in steps:
        enough = peak > 0 and level >= ratio * peak
        if enough and start is None:
            start = at
        elif not enough and start is not None:
            best = max(best, (start, at), key=lambda one: one[1] - one[0])
            start = None
    return best, peak


def offered_window(replies: Sequence[Reply]) -> Window:
    """From the first to the last time at which a request was due."""
    due = [reply.intended for reply in replies]
    return (min(due, default=0.0), max(due, default=0.0))


def tokens_within(replies: Sequence[Reply], window: Window) -> float:
    """Output tokens that arrived within a window. Every frame of a request has the same share of
    its tokens, because frames may hold several tokens."""
    start, end = window
    total = 0.0
    for reply in replies:
        if succeeded(reply):
            inside = sum(start <= at < end for at in reply.frames)
            total += reply.tokens * inside / len(reply.frames)
    return total


def prompts_within(replies: Sequence[Reply], window: Window) -> int:
    """Prompt tokens of requests whose first frame arrived within a window."""
    start, end = window
    return sum(
        reply.prompt_tokens or 0
        for reply in replies
        if succeeded(reply) and start <= reply.frames[0] < end
    )
