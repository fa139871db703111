"""GET /debug/requests/{id} and GET /debug/trace: why a request waited, with the numbers.

Both read the engine's trace of the latest steps and are for the operator of a server: they name
other requests, and say what the prefix cache holds. They answer only with `--enable-request-trace`.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from minillm.api.outputs import PrefixReport, RequestOutput
from minillm.scheduling.record import Blocked, StepRecord
from minillm.serving.api_errors import ApiError
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.trace.file import trace_lines
from minillm.trace.recorder import Trace
from minillm.trace.replay import PREEMPTED, RUNNING, SWAPPED, WAITING, Replay, SequenceState

LAST = 200  # steps of /debug/trace
MOST = 100_000
KEPT_REPORTS = 1000  # prefix reports of finished requests
KINDS: Mapping[str, str] = {
    WAITING: "waiting",
    PREEMPTED: "preempted",
    SWAPPED: "swapped",
    RUNNING: "waiting",
}
RUNS = frozenset({"waiting", "preempted", "swapped", "decode"})  # equal ones in a row are one event
OFF = "This server keeps no request trace; start it with --enable-request-trace."


@dataclass
class Event:
    """What happened to one completion in `steps` steps, of which `step` is the first.

    Attributes:
        time: seconds from the request's arrival to the start of the first step.
        tokens: computed tokens of a prefill, new tokens of a decode, lost tokens of a preemption,
            all new tokens of the completion at its end.
        reason: why it waited or ended; for a run of steps, of the last one.
    """

    step: int
    time: float
    kind: str
    tokens: int = 0
    reason: str | None = None
    completion: int = 0
    steps: int = 1

    def joins(self, other: "Event") -> bool:
        """Whether `other`, the completion's next event, continues this one."""
        same = self.kind == other.kind and self.kind in RUNS
        return same and lack(self.reason) == lack(other.reason)


def lack(reason: str | None) -> str | None:
    """A reason without its numbers, which may change from step to step."""
    return reason and reason.partition(": needs")[0]


@dataclass
class RequestHistory:
    """The events of one request, found in a trace."""

    request_id: str
    state: SequenceState  # of its first completion
    events: list[Event] = field(default_factory=list)
    num_open: int = 1  # unfinished completions
    latest: dict[int, Event] = field(default_factory=dict)  # by completion

    @classmethod
    def find(cls, trace: Trace, request_id: str) -> "RequestHistory | None":
        """The history of the latest request with this id, or None."""
        before, records = trace.snapshot()
        known = {state.seq_id: state.request_id for state in before.sequences.values()}
        own = [state for state in before.sequences.values() if state.request_id == request_id]
        first = 0
        for place, record in enumerate(records):
            known |= {one.seq_id: one.request_id for one in record.added}
            known |= {one.seq_id: known.get(one.parent_id, "?") for one in record.forked}
            arrivals = [one for one in record.added if one.request_id == request_id]
            if arrivals:
                first, own = place, [SequenceState(arrivals[-1].seq_id, arrivals[-1])]
        if not own:
            return None
        own.sort(key=lambda state: state.index)
        made = cls(request_id, own[0], num_open=len(own))
        replay = Replay(own)
        for record in records[first:]:
            if not replay.sequences:
                break
            made._follow(replay, record, known)
        return made

    @property
    def arrival(self) -> float:
        """When the request arrived, on the engine's clock."""
        return self.state.added.arrival if self.state.added else 0.0

    def _follow(self, replay: Replay, record: StepRecord, known: dict[int, str]) -> None:
        """Add the events of one step."""
        for one in record.preempted:
            if one.seq_id in replay.sequences:
                kind = "swapped" if one.mode == "swap" else "preempted"
                reason = f"its blocks went to {known.get(one.for_seq_id, '?')}"
                state = replay.sequences[one.seq_id]
                self._add(state, record, kind, one.num_tokens, reason)
        lost = {one.seq_id for one in record.preempted}
        step = replay.apply(only(record, replay.sequences.keys()))
        self.num_open = len(replay.sequences)
        ran = {done.state.seq_id for done in step.rows}
        for done in step.rows:
            if done.state.is_decode(done.row):
                self._add(done.state, record, "decode", done.num_new)
            else:
                again = f"{done.num_recomputed} of its tokens were computed before a preemption"
                self._add(
                    done.state, record, "prefill", done.row.num_tokens,
                    again if done.num_recomputed else None,
                )  # fmt: skip
        for state in replay.sequences.values():
            if state.seq_id not in ran | lost and state not in step.forked:
                self._add(state, record, KINDS[state.where], 0, why(state, record))
        for state in step.ended:
            self._add(state, record, "finished", state.num_tokens, state.end)
            self.latest[state.index].time = (state.ended or 0.0) - self.arrival

    def _add(
        self, state: SequenceState, record: StepRecord, kind: str, tokens: int,
        reason: str | None = None,
    ) -> None:  # fmt: skip
        time = record.started - self.arrival
        event = Event(record.step, time, kind, tokens, reason, state.index)
        latest = self.latest.get(state.index)
        if latest is not None and latest.joins(event):
            latest.steps += 1
            latest.tokens += tokens
            latest.reason = reason
        else:
            self.latest[state.index] = event
            self.events.append(event)

    def body(self, prefix: PrefixReport | None) -> dict[str, Any]:
        """The reply to GET /debug/requests/{id}."""
        state, scheduled = self.state, self.state.scheduled
        if not self.num_open:
            now = "finished"
        else:
            now = "running" if state.where == RUNNING else "waiting"
        waited = perf_counter() if scheduled is None and self.num_open else scheduled
        return {
            "id": self.request_id,
            "state": now,
            "events": [rounded(event) for event in self.events],
            "queue_time": round((waited or state.ended or self.arrival) - self.arrival, 6),
            "cached_tokens": state.num_cached if scheduled is not None else None,
            "prefix": asdict(prefix) if prefix is not None else None,
        }


def rounded(event: Event) -> dict[str, Any]:
    """An event as JSON, its time in microseconds."""
    return asdict(replace(event, time=round(event.time, 6)))


def only(record: StepRecord, own: Iterable[int]) -> StepRecord:
    """The record of a step with the events of these sequences only, and of their new forks."""
    ids = set(own)
    forked = [one for one in record.forked if one.parent_id in ids]
    ids |= {one.seq_id for one in forked}
    return msgspec.structs.replace(
        record,
        added=[],
        forked=forked,
        admitted=[seq_id for seq_id in record.admitted if seq_id in ids],
        void=[seq_id for seq_id in record.void if seq_id in ids],
        rows=[one for one in record.rows if one.seq_id in ids],
        preempted=[one for one in record.preempted if one.seq_id in ids],
        drafted=[one for one in record.drafted if one.seq_id in ids],
        ended=[one for one in record.ended if one.seq_id in ids],
    )


def why(state: SequenceState, record: StepRecord) -> str:
    """Why a sequence has no row in a step."""
    if state.where == RUNNING:
        found = next((stall for stall in record.stalled if stall.seq_id == state.seq_id), None)
        return f"running, but {found}" if found else "the tokens of its last step were not known"
    head: Blocked | None = record.blocked
    if head is None:
        return "it arrived while the step was planned"
    if head.seq_id == state.seq_id:
        return str(head)
    return f"behind {head.request_id}, which has {head}"


def names_of(request_id: str) -> tuple[str, str, str]:
    """The names of a request of the server: the engine's id, the id in its reply (with the number
    of the prompt if there are several), and the client's id."""
    public = re.sub(r"~\d+(?=(-\d+)?$)", "", request_id)
    return request_id, public, re.sub(r"^(chat)?cmpl-", "", public)


class RequestTrace:
    """The routes, and the prefix reports of finished requests."""

    def __init__(self, engine: AsyncLLMEngine, enabled: bool):
        self.engine, self.enabled = engine, enabled
        self._reports: OrderedDict[str, PrefixReport] = OrderedDict()

    def ended(self, outputs: Iterable[RequestOutput | None]) -> None:
        """Keep the prefix reports of requests that have ended, by their latest outputs."""
        for output in outputs if self.enabled else ():
            if output is not None and (report := output.metrics.prefix) is not None:
                self._reports[output.request_id] = replace(report)  # computes its counts now
                self._reports.move_to_end(output.request_id)
        while len(self._reports) > KEPT_REPORTS:
            self._reports.popitem(last=False)

    def _check(self) -> None:
        if not self.enabled:
            raise ApiError(404, OFF, "NotFoundError")

    async def request(self, request_id: str) -> Response:
        """GET /debug/requests/{id}: what happened to a request in each step, and why."""
        self._check()
        request_id = await asyncio.to_thread(self._latest, request_id)
        history = await asyncio.to_thread(RequestHistory.find, self.engine.trace, request_id)
        report = self.engine.prefix_report(request_id) or self._reports.get(request_id)
        if history is not None:
            return JSONResponse(await asyncio.to_thread(history.body, report))
        if (waiting := self.engine.waiting_outside(request_id)) is not None:
            event = Event(0, 0.0, "waiting", 0, waiting[1])
            body = {"id": request_id, "state": "waiting", "events": [rounded(event)],
                    "queue_time": round(waiting[0], 6), "cached_tokens": None,
                    "prefix": None}  # fmt: skip
            return JSONResponse(body)
        raise ApiError(
            404,
            f"The trace of the latest {len(self.engine.trace):,} steps has no request "
            f"{request_id[:80]!r}; replies name it, and prompt 0 of several is ID-0.",
            "NotFoundError",
        )

    def _latest(self, name: str) -> str:
        """The engine's id of the latest request of this name, which a client may have given."""
        before, records = self.engine.trace.snapshot()
        known = [one.added for one in before.sequences.values() if one.added is not None]
        known += [one for record in records for one in record.added]
        ids = [(one.arrival, one.request_id) for one in known] + self.engine.unfinished()
        return max((each for each in ids if name in names_of(each[1])), default=(0.0, name))[1]

    async def steps(self, request: Request) -> Response:
        """GET /debug/trace?last=N: the latest steps in the format of trace files."""
        self._check()
        given = request.query_params.get("last", str(LAST))
        if not (given.isascii() and given.isdigit() and 0 < int(given[:9]) <= MOST):
            raise ApiError(400, f"last is {given[:20]!r}; it must be from 1 to {MOST:,}.")
        trace, last = self.engine.trace, int(given)
        lines = await asyncio.to_thread(lambda: list(trace_lines(trace, last)))
        body = (line + b"\n" for line in lines)
        return StreamingResponse(body, media_type="application/jsonl")
