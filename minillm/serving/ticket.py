"""A request on its way between the stream that reads it and the thread that steps the engine."""

import asyncio
from collections.abc import Iterable
from time import perf_counter

from minillm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from minillm.api.sampling_params import RequestOutputKind, SamplingParams
from minillm.engine.live_request import LiveRequest
from minillm.scheduling.request import Request

Key = tuple[int, int]  # priority, arrival
Result = RequestOutput | Exception


class Ticket:
    """One request between its stream and the step thread.

    The stream sets `wanted` while its consumer waits, and the thread clears it when it answers.
    `receive` runs in the event loop; `live` and `seen` belong to the step thread.
    """

    __slots__ = (
        "arrival",
        "ended",
        "key",
        "kind",
        "live",
        "loop",
        "num_completions",
        "prompt",
        "request",
        "request_id",
        "result",
        "seen",
        "waiter",
        "wanted",
    )

    def __init__(self, request_id: str, key: Key, params: SamplingParams, prompt: str | None):
        self.request_id, self.key = request_id, key
        self.num_completions, self.kind, self.prompt = params.n, params.output_kind, prompt
        self.arrival = perf_counter()
        self.loop = asyncio.get_running_loop()
        self.request: Request | None = None  # None while a long text is tokenised
        self.live: LiveRequest | None = None  # None while it waits outside the engine
        self.seen = 0  # `live.num_updates` at the latest output
        self.wanted = True
        self.waiter: asyncio.Future[None] | None = None
        self.result: Result | None = None  # the one that the consumer has not taken
        self.ended = False  # the last result came, or the consumer has left

    def receive(self, result: Result) -> None:
        """The newest output, or the error that ends the stream. Runs in the event loop."""
        if self.ended:
            return
        if isinstance(result, Exception):
            self.ended = True
        else:
            self.ended = result.finished
            if self.kind is RequestOutputKind.DELTA and isinstance(self.result, RequestOutput):
                result = joined(self.result, result)  # the consumer was woken, and has not looked
        self.result = result
        self.wake()

    def output(self, live: LiveRequest) -> RequestOutput:
        """The next one. Runs in the step thread."""
        return live.output(self.kind is RequestOutputKind.DELTA)

    def wake(self) -> None:
        """Let the consumer look. Runs in the event loop."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def never_begun(self) -> RequestOutput:
        """The output of a request that was aborted before the engine had it."""
        request, waited = self.request, perf_counter() - self.arrival
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids) if request else [],
            outputs=[
                CompletionOutput(index, "", [], finish_reason="abort")
                for index in range(self.num_completions)
            ],
            finished=True,
            metrics=RequestMetrics(queue_time=waited, e2e=waited),
        )


def ticket_key(ticket: Ticket) -> Key:
    """Smaller keys go first."""
    return ticket.key


def deliver(results: Iterable[tuple[Ticket, Result]]) -> None:
    """What one step has for one event loop, which runs this."""
    for ticket, result in results:
        ticket.receive(result)
