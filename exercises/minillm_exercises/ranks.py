"""For exercises about ranks: they take turns in one thread, and every meeting is on record.

The function of each rank is run until it brings something to a meeting whose answer is not known
yet. When all have brought their part, the answer is, and all are run again from the start. So a
function that is asked twice must do the same twice, and nothing can hang: where some ranks wait and
others have returned, that is said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm_exercises.checking import CheckFailedError, accept

Meet = Callable[[Any], Any]  # a rank brings its part and gets the answer
MOST = 64  # meetings; more are a loop that does not end


class _WaitError(BaseException):
    """A rank waits for the others: no Exception, so that a solution does not catch it."""


@dataclass(frozen=True)
class Together:
    """What each rank returned, and for each meeting the parts, in rank order."""

    results: list[Any]
    meetings: list[list[Any]]


def together(
    size: int, call: Callable[[int, Meet], Any], answer: Callable[[list[Any]], Any], what: str
) -> Together:
    """Run `call(rank, meet)` for each rank; `answer` makes of the parts of a meeting what every
    rank gets, and is called anew for each of them. `what` names the meeting for the learner.

    Raises:
        CheckFailedError: some ranks meet more often than others, or without end.
    """
    meetings: list[list[Any]] = []
    while True:
        returned: dict[int, Any] = {}
        brought: dict[int, Any] = {}
        for rank in range(size):
            meet, parts = _replay(meetings, answer, what)
            try:
                returned[rank] = call(rank, meet)
            except _WaitError:
                brought[rank] = parts[0]
        if not brought:
            return Together([returned[rank] for rank in range(size)], meetings)
        if returned:
            raise CheckFailedError(
                f"Rank {min(brought)} waits in {what} number {len(meetings) + 1}, and rank "
                f"{min(returned)} has returned without it: all ranks make the same calls."
            )
        if len(meetings) == MOST:
            raise CheckFailedError(f"After {MOST} calls of {what} the ranks are not done.")
        meetings.append([brought[rank] for rank in range(size)])


def _replay(
    meetings: list[list[Any]], answer: Callable[[list[Any]], Any], what: str
) -> tuple[Meet, list[Any]]:
    """What a rank calls in this round, and where its part is found if it had to wait."""
    known, parts = iter(meetings), list[Any]()

    def meet(part: Any) -> Any:
        done = next(known, None)
        if done is None:
            parts.append(accept(part, f"What a rank brings to {what}"))
            raise _WaitError
        return answer(done)

    return meet, parts
