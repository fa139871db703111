"""The engine: requests in, tokens and text out, in continuous batches.

add -> waiting -> [ schedule -> run -> commit -> detokenize ] -> finished
                       one step, for all running requests

With `async_scheduling` step n + 1 is planned and launched before the tokens of step n are read:

    host      plan n + 1 | launch | wait for n | commit n, text | plan n + 2 | launch | ...
    device    ... step n ................... | step n + 1 .......................... | ...
"""

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter

from minillm.api.arguments import EngineArgs
from minillm.api.outputs import FinishReason
from minillm.api.prompts import check_prompt
from minillm.api.sampling_params import SamplingParams, validate_against_model
from minillm.cache.blocks import AccountingError
from minillm.engine.live_request import LiveRequest
from minillm.engine.setup import (
    build_scheduler,
    choose_device,
    choose_dtype,
    end_tokens,
    open_executor,
    plan_memory,
    trace_settings,
    with_defaults_of,
)
from minillm.errors import (
    EngineDeadError,
    Failure,
    InvalidRequestError,
    UnsupportedFeatureError,
    why_it_stopped,
)
from minillm.execution.executor import Executor, Step
from minillm.execution.flight import StepResult
from minillm.execution.setup import limit_threads, open_tokenizer
from minillm.models.checkpoint import open_model
from minillm.models.forward_pass import ForwardPass
from minillm.scheduling.admission import check_fits
from minillm.scheduling.data_parallel import end_all
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Request, Sequence, Status
from minillm.speculative.setup import open_draft, speculation_of
from minillm.structured.grammars import Grammars
from minillm.trace.recorder import Trace


class Engine:
    """A loaded model that serves requests."""

    def __init__(self, args: EngineArgs):
        limit_threads()
        source = self.source = open_model(args.model)
        self.device = choose_device(args.device)
        self.args = args = with_defaults_of(args, self.device)
        self.dtype = choose_dtype(args.dtype, self.source.config, self.device, args.enforce_eager)
        self.tokenizer = open_tokenizer(args, self.source)
        draft = open_draft(args, self.source, self.tokenizer)
        self.max_model_len, self.memory = plan_memory(args, source, self.dtype, self.device, draft)
        self.eos_token_ids = end_tokens(self.source, self.tokenizer)
        speculation = speculation_of(args)
        self.acceptance = None if speculation is None else speculation.acceptance
        self._seeds = random.Random(args.seed)
        self._live: dict[str, LiveRequest] = {}
        self._dead, self._stepping = "", False
        # Uncommitted steps: at most `depth` inside `step()`, at most `depth - 1` between calls.
        self._steps: list[Step] = []
        self._runner: Executor | None = None
        self.grammars = Grammars(self.tokenizer, self.source.config.vocab_size)
        parts = args, self.source, self.memory, self.device, draft, self.grammars
        self._runner, self._forward_pass = open_executor(*parts)
        self.scheduler = build_scheduler(args, self._runner.capacity(), draft)
        asked, self.depth = args.async_scheduling, max(args.pipeline_parallel_size, 2)
        pipelined = args.pipeline_parallel_size > 1
        self.overlaps = pipelined or (self.device.type != "cpu" if asked is None else asked)
        settings = trace_settings(self.source.name, self.memory, self.device, self.scheduler)
        self.trace = Trace(settings)

    @property
    def runner(self) -> Executor:
        """The executor of step plans; raises EngineDeadError once the engine is closed."""
        if self._runner is None or self._dead:
            raise EngineDeadError(self._dead or "This engine is closed; make a new one.")
        return self._runner

    def check_open(self) -> None:
        """Raise EngineDeadError once the engine is closed."""
        _ = self.runner

    @property
    def forward_pass(self) -> ForwardPass:
        """The model without the scheduler; raises EngineDeadError once the engine is closed."""
        if self._forward_pass is None:
            self.check_open()
            raise UnsupportedFeatureError(
                "forward_pass needs the whole model in one process; leave tensor_parallel_size out."
            )
        return self._forward_pass

    def allocated(self) -> dict[str, int]:
        """Allocated bytes of each part of the memory plan, by name."""
        return self.runner.stats()

    def close(self) -> None:
        """Abort all requests and free the memory. May be called twice."""
        with suppress(EngineDeadError):
            for request_id in list(self._live):
                self.abort(request_id)
        if self._runner is not None:
            self._runner.close()
        self._runner = self._forward_pass = None

    # ---- requests ------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Collection[int] | None,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Check a request, and tokenise its prompt if no token ids are given.

        Raises InvalidRequestError if the prompt or a parameter cannot be served.
        """
        if prompt_token_ids is None:
            # An empty text is invalid, even if the tokenizer would add a start token.
            prompt_token_ids = self.encode(prompt) if prompt else ()
        check_prompt(prompt_token_ids, self.source.config, self.max_model_len)
        words: list[tuple[int, ...]] = []
        if self.tokenizer is not None:
            words = [ids for word in params.bad_words for ids in self.tokenizer.spellings(word)]
        elif asked := [name for name in ("stop", "bad_words") if getattr(params, name)]:
            raise InvalidRequestError(
                f"{asked[0]}={list(getattr(params, asked[0]))!r} needs a tokenizer, which "
                f"{self.source.name} does not have; use stop_token_ids or logit_bias."
            )
        validate_against_model(params, self.source.config.vocab_size, words)
        room = self.max_model_len - len(prompt_token_ids)
        eos = () if params.ignore_eos else self.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(map(int, prompt_token_ids)),
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
            stop_ids=(*eos, *params.stop_token_ids),
            bad_words_ids=tuple(words),
        )
        check_fits(request, self.scheduler.config, self.scheduler.blocks)
        self.grammars.prepare(params, request.stop_ids)
        return request

    def make_scoring_request(self, request_id: str, ids: Collection[int]) -> Request:
        """A request that computes only its prompt, for the logprob of each prompt token."""
        check_prompt(ids, self.source.config, self.max_model_len, room=0)
        params = SamplingParams(prompt_logprobs=0)
        request = Request(request_id, tuple(map(int, ids)), params, max_tokens=0)
        check_fits(request, self.scheduler.config, self.scheduler.blocks)
        return request

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.source.name} has no tokenizer.json, so a text cannot be used; "
                "give token ids as {'prompt_token_ids': [...]}."
            )
        return self.tokenizer.encode(text)

    # ---- running -------------------------------------------------------------------------

    def add(self, request: Request) -> LiveRequest:
        """Add a request to the waiting queue; `step` advances it.

        Raises InvalidRequestError if the id is in use or the request can never fit.
        """
        self.check_open()
        try:
            first = self.scheduler.add(request)
            live = LiveRequest(request, first, self.eos_token_ids, self.tokenizer)
            live.acceptance = self.acceptance
            self._live[request.request_id] = live
        except InvalidRequestError:  # do not abort: the id may belong to another request
            raise
        except BaseException:
            try:
                self.abort(request.request_id)
            except AccountingError:  # Ctrl-C interrupted the scheduler
                self._abort_all("abort")
            raise
        return live

    def abort(self, request_id: str) -> None:
        """Abort a waiting or running request; unknown and finished ids are ignored."""
        now = perf_counter()
        self.scheduler.abort(request_id, "abort", now)
        live = self._live.pop(request_id, None)
        if live is not None:
            live.end("abort", now)
        if not self._stepping:
            with self._abort_all_on_error():
                self._complete_orphaned_steps()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def step(self) -> list[LiveRequest]:
        """Complete the oldest step; returns its unaborted requests. May launch later steps.

        An error in one request ends that request with ``finish_reason="error"``.

        Raises:
            EngineDeadError: any other error. All requests have ended, and every further call
                raises this error.
        """
        runner = self.runner
        if not self._live:
            return []
        with self._abort_all_on_error():
            if not self._steps:
                self._begin(self.scheduler.schedule)
            if self.overlaps:
                self._steps[0].launch(runner)
                while len(self._steps) < self.depth and self._begin(self.scheduler.schedule_ahead):
                    self._steps[-1].launch(runner)
            touched = self._complete()
            self._complete_orphaned_steps()
            return touched

    @contextmanager
    def _abort_all_on_error(self) -> Iterator[None]:
        """Context for code that runs steps: any exception ends all requests."""
        self._stepping = True
        try:
            yield
        except Exception as error:
            self._dead = why_it_stopped(error)
            self._abort_all("error", Failure(self._dead, "server"))
            raise EngineDeadError(self._dead) from error
        except BaseException:  # Ctrl-C, at any point of the step
            self._abort_all("abort")
            raise
        finally:
            self._stepping = False

    def _begin(self, schedule: Callable[[], StepPlan | None]) -> bool:
        """Schedule the next step; returns False if it must wait for a commit."""
        started = perf_counter()
        plan = schedule()
        if plan is None:
            return False
        record = self.scheduler.record
        record.started = started
        record.planned = perf_counter()
        if not self._steps:
            self.trace.append(record)  # a step scheduled ahead is recorded when it completes
        if not plan.rows:
            raise AccountingError(f"No row can be scheduled, but {len(self._live)} requests wait.")
        for seq_id in record.admitted:
            self._live[self.scheduler.sequences[seq_id].request.request_id].schedule(record.planned)
        self._steps.append(Step(plan, record))
        return True

    def _complete(self) -> list[LiveRequest]:
        """Launch the oldest step if needed, wait for it, and commit its results."""
        step, *others = self._steps
        record = step.record
        result = step.launch(self.runner).collect()
        record.graph_rows, record.why_eager = result.graph_rows, result.why_eager
        record.computed = perf_counter()
        record.ranks = result.ranks
        self.trace.append(record)
        self._steps = others
        touched = self._commit(step.plan, result, record.computed)
        record.delivered = perf_counter()
        return touched

    def _complete_orphaned_steps(self) -> None:
        """Complete the steps in flight when all their requests have ended."""
        while self._steps and not self._live:
            self._complete()

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[LiveRequest]:
        """Give the results of a step to the scheduler and the requests, all with the time `now`, so
        that metrics and trace agree."""
        scheduler = self.scheduler
        if result.suspect:
            scheduler.invalidate(plan, result.suspect)
        rows = [(row, scheduler.in_flight[row.seq_id]) for row in plan.rows]
        # A sequence that finished in the previous step may still have a row in this one.
        owners = [
            (row, one) for row, one in rows if one.status is not Status.FINISHED and not one.is_void
        ]
        for row, _ in owners if result.errors else ():
            if len(result.errors.get(row.seq_id, ())) == max(row.num_samples, 1):
                scheduler.finish(row.seq_id, "error", now)
        for fork in scheduler.commit(plan, result.token_ids, result.num_drafted):
            self._live[fork.request.request_id].sequences[fork.index] = fork
        touched = {}
        for row, sequence in owners:
            live = self._live.get(sequence.request.request_id)
            if live is not None and live.request is sequence.request:  # not aborted since
                touched[live.request.request_id] = live
                self._deliver(row, sequence, live, result, now)
        for request_id, live in touched.items():
            if live.finished:
                del self._live[request_id]
        return list(touched.values())

    def _deliver(
        self,
        row: Row,
        sequence: Sequence,
        live: LiveRequest,
        result: StepResult,
        now: float,
    ) -> None:
        """Give one row's results to its request, and finish completions that have ended."""
        prompt = result.prompt_logprobs.get(row.seq_id)
        if prompt is not None and not live.add_prompt_logprobs(*prompt, now):
            self.scheduler.abort(live.request.request_id, "error", now)
            return
        errors = result.errors.get(row.seq_id, {})
        if not row.num_samples:
            if errors:
                for index in range(sequence.index, sequence.index + sequence.num_seqs):
                    live.end_completion(index, "error", now, errors[0])
            elif sequence.status is Status.FINISHED:  # a scoring request
                live.end("length", now)
            return
        logprobs = result.logprobs.get(row.seq_id)
        tokens = result.token_ids[row.seq_id]
        for place, token in enumerate(tokens):  # of all forks, or a token and its accepted drafts
            index = sequence.index + (place if row.num_forks else 0)
            if token is None:
                live.end_completion(index, "error", now, errors[place])
            elif reason := live.append(index, token, logprobs[place] if logprobs else None, now):
                num_cut = 0 if row.num_forks else sum(t is not None for t in tokens[place + 1 :])
                self.scheduler.finish(live.sequences[index].seq_id, reason, now, num_cut)
                if not row.num_forks:  # accepted tokens after a stop are discarded
                    break

    def _abort_all(self, reason: FinishReason, error: Failure | None = None) -> None:
        """End all requests. A new scheduler with an empty prefix cache replaces the old one, which
        may be in an inconsistent state."""
        now = perf_counter()
        scheduler = self.scheduler
        for live in self._live.values():
            live.end(reason, now, error)
        for step in self._steps:
            self.trace.append(step.record)
        self._live, self._steps = {}, []
        end_all(scheduler, reason, now)
        self.trace.append(scheduler.record)
        if self._runner is not None:
            self.scheduler = scheduler.restarted()
            self._runner.reset()
