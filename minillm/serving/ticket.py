"""The state of a request that its stream and the step thread share."""

import asyncio
from collections.abc import Iterable
from time import perf_counter

from minillm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from minillm.api.sampling_params import RequestOutputKind, SamplingParams
from minillm.engine.live_request import LiveRequest
from minillm.scheduling.request import Request

Key = tuple[int, int]  # priority, arrival: smaller keys are earlier in the queue
Result = RequestOutput | Exception


class Ticket:
    """One request, shared by its stream and the step thread.

    The stream sets `wanted` while its consumer awaits an output; the step thread clears it when it
    sends one. `receive` and `wake` run in the event loop; only the step thread uses `live` and
    `seen`.
    """

    __slots__ = (
        "arrival", "compiles", "ended", "key", "kind", "live", "loop", "num_completions", "prompt",
        "request", "request_id", "result", "seen", "waiter", "wanted",
    )  # fmt: skip

    def __init__(self, request_id: str, key: Key, params: SamplingParams, prompt: str | None):
        self.request_id, self.key = request_id, key
        self.num_completions, self.kind, self.prompt = params.n, params.output_kind, prompt
        self.arrival = perf_counter()
        self.loop = asyncio.get_running_loop()
        self.request: Request | None = None  # None while a long prompt is tokenised
        self.compiles = False  # until there is a request: its structured_outputs are compiled
        self.live: LiveRequest | None = None  # None while the request waits outside the engine
        self.seen = 0  # `live.num_updates` at the latest output
        self.wanted = True
        self.waiter: asyncio.Future[None] | None = None
        self.result: Result | None = None  # received, and not yet taken by the consumer
        self.ended = False  # the last result was received, or the consumer has left

    def receive(self, result: Result) -> None:
        """Take the newest output, or the error that ends the stream. Runs in the event loop."""
        if self.ended:
            return
        if isinstance(result, Exception):
            self.ended = True
        else:
            self.ended = result.finished
            if self.kind is RequestOutputKind.DELTA and isinstance(self.result, RequestOutput):
                result = joined(self.result, result)  # the consumer has not taken the previous one
        self.result = result
        self.wake()

    def output(self, live: LiveRequest) -> RequestOutput:
        """The next output. Runs in the step thread."""
        return live.output(self.kind is RequestOutputKind.DELTA)

    def wake(self) -> None:
        """Wake the consumer. Runs in the event loop."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def aborted_output(self) -> RequestOutput:
        """The output of a request that was aborted while it waited outside the engine."""
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


def deliver(results: Iterable[tuple[Ticket, Result]]) -> None:
    """Deliver the results of one step to their tickets. Runs in their event loop."""
    for ticket, result in results:
        ticket.receive(result)
