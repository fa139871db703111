"""The engine: requests in, tokens and text out, many at once.

add -> waiting -> [ schedule -> run -> commit -> text ] -> finished
                         one step, for all who run
"""

import random
from collections.abc import Iterator, Sequence
from numbers import Integral
from time import perf_counter

import torch

from minillm.cache.blocks import AccountingError
from minillm.engine_args import EngineArgs
from minillm.engine_setup import (
    build_core,
    choose_device,
    choose_dtype,
    end_tokens,
    limit_threads,
    open_tokenizer,
    plan_memory,
)
from minillm.errors import EngineDeadError, InvalidRequestError
from minillm.flight import StepResult
from minillm.forward_pass import ForwardPass
from minillm.graphs import capture_for
from minillm.live_request import LiveRequest
from minillm.models.checkpoint import open_model
from minillm.models.loader import DTYPES, load_model
from minillm.outputs import FinishReason
from minillm.runner import Runner, in_one_line
from minillm.sampling_params import SamplingParams, validate_against_model
from minillm.scheduling.limits import check_fits
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Request, Status
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.trace.recorder import Trace, TraceSettings


class Engine:
    """A loaded model that serves requests. Raises what `open_model` and `load_model` raise."""

    def __init__(self, args: EngineArgs):
        limit_threads()
        self.args = args
        self.source = open_model(args.model)
        self.device = choose_device(args.device)
        self.dtype = choose_dtype(args.dtype, self.source.config, self.device)
        self.tokenizer = open_tokenizer(args, self.source)
        self.max_model_len, self.memory = plan_memory(
            args, self.source.config, self.dtype, self.device
        )
        self.eos_token_ids = end_tokens(self.source, self.tokenizer)
        self._seeds = random.Random(args.seed)
        self._live: dict[str, LiveRequest] = {}
        self._dead = ""
        model = load_model(
            self.source,
            DTYPES[self.dtype],
            self.device,
            self.max_model_len,
            args.load_format,
            args.seed,
        )
        self._forward_pass: ForwardPass | None = ForwardPass(model)
        self._runner: Runner | None = None
        self.scheduler, self._runner = build_core(args, model, self.memory, self.max_model_len)
        capture = capture_for(self.device, args.enforce_eager)
        if capture is not None:
            self._runner.use_graphs(capture)
        self.trace = Trace(self._trace_settings())

    @property
    def runner(self) -> Runner:
        """What carries out plans; an error once the engine is closed."""
        if self._runner is None or self._dead:
            raise EngineDeadError(self._dead or "This engine is closed; make a new one.")
        return self._runner

    @property
    def forward_pass(self) -> ForwardPass:
        """The model without the scheduler; an error once the engine is closed."""
        if self._forward_pass is None:
            raise EngineDeadError("This engine is closed; make a new one.")
        return self._forward_pass

    def allocated(self) -> dict[str, int]:
        """Bytes that were really allocated, under the names of the memory plan's parts.

        "activations" is the peak of a GPU's allocator beyond the rest; a CPU's does not tell.
        """
        runner = self.runner
        tensors = [*runner.model.parameters(), *runner.model.buffers()]
        sizes = {
            "weights": sum(tensor.nbytes for tensor in tensors),
            "kv_cache": runner.kv.num_bytes,
            "swap_space": runner.host.num_bytes if runner.host else 0,
        }
        if self.device.type != "cpu":
            peak = torch.get_device_module(self.device).max_memory_allocated(self.device)
            sizes["activations"] = peak - sizes["weights"] - sizes["kv_cache"]
        if runner.graphs is not None:
            sizes["cuda_graphs"] = runner.graphs.num_bytes
        return sizes

    def _trace_settings(self) -> TraceSettings:
        config, blocks = self.scheduler.config, self.scheduler.blocks
        return TraceSettings(
            model=self.source.name,
            dtype=self.dtype,
            device=str(self.device),
            policy=config.policy,
            admission=config.admission,
            preemption=config.preemption_mode,
            prefix_cache=blocks.prefix_cache,
            block_size=blocks.block_size,
            num_blocks=blocks.pool.num_blocks,
            num_host_blocks=blocks.host.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    def close(self) -> None:
        """End all requests and give the memory back. Closing twice is fine."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._runner = self._forward_pass = None

    # ---- requests ------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Check a request, tokenising its text if it has no ids.

        Raises InvalidRequestError, which says what cannot be served and why.
        """
        if prompt_token_ids is None:
            # Refused even where the tokenizer would put its start token: that one can be given.
            prompt_token_ids = self.encode(prompt) if prompt else ()
        self.check_prompt(prompt_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)!r} needs a tokenizer, which {self.source.name} does not "
                "have; use stop_token_ids."
            )
        bad_words = tuple(self._bad_words(params))
        validate_against_model(params, self.source.config.vocab_size, bad_words)
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
            bad_words_ids=bad_words,
        )
        check_fits(request, self.scheduler.config, self.scheduler.blocks)
        return request

    def make_scoring_request(self, request_id: str, ids: Sequence[int]) -> Request:
        """A request that only computes its prompt, for the log-probability of each token."""
        self.check_prompt(ids)
        params = SamplingParams(prompt_logprobs=0)
        request = Request(request_id, tuple(map(int, ids)), params, max_tokens=0)
        check_fits(request, self.scheduler.config, self.scheduler.blocks)
        return request

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's own first token."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.source.name} has no tokenizer.json, so a text cannot be used; "
                "give token ids as {'prompt_token_ids': [...]}."
            )
        return self.tokenizer.encode(text)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """A prompt has a token, leaves room for one, and only uses ids that the model has."""
        width = self.source.config.vocab_size
        if not ids:
            raise InvalidRequestError(
                "The prompt is empty; it needs some text or at least one token id."
            )
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise InvalidRequestError(
                    f"The prompt contains {token_id!r}; token ids are integers."
                )
            if not 0 <= token_id < width:
                raise InvalidRequestError(
                    f"The prompt contains token id {token_id}; this model has ids from 0 to "
                    f"{width - 1}."
                )
        if len(ids) >= self.max_model_len:
            longer = self.max_model_len < self.source.config.longest_context
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens; the maximum context length is "
                f"{self.max_model_len} and must leave room for one new token, "
                f"so shorten the prompt{' or raise max_model_len' * longer}."
            )

    def _bad_words(self, params: SamplingParams) -> Iterator[tuple[int, ...]]:
        """Each bad word as it is tokenised at the start of a text and after a space, as in vLLM."""
        for word in params.bad_words:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    f"bad_words={list(params.bad_words)!r} needs a tokenizer, which "
                    f"{self.source.name} does not have."
                )
            stripped = word.lstrip()
            variants = {
                tuple(self.tokenizer.encode(variant, add_special_tokens=False))
                for variant in (stripped, " " + stripped)
            }
            yield from sorted(variants - {()})

    # ---- running -------------------------------------------------------------------------

    def add(self, request: Request) -> LiveRequest:
        """Put a request in line; `step` advances it.

        Raises:
            InvalidRequestError: its id is in use.
        """
        self.runner  # noqa: B018  (a closed engine says so)
        try:
            first = self.scheduler.add(request)
            live = LiveRequest(request, first, self.eos_token_ids, self.tokenizer)
            self._live[request.request_id] = live
        except InvalidRequestError:  # the id belongs to another
            raise
        except BaseException:
            try:
                self.abort(request.request_id)
            except AccountingError:  # Ctrl-C in the middle of the scheduler's books
                self._abandon("abort")
            raise
        return live

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is. Unknown or finished is fine."""
        now = perf_counter()
        self.scheduler.abort(request_id, "abort", now)
        live = self._live.pop(request_id, None)
        if live is not None:
            live.end("abort", now)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._live)

    def step(self) -> list[LiveRequest]:
        """Advance the requests that the scheduler chooses; returns those that were in the step.

        What goes wrong in one request ends that one with ``finish_reason="error"``.

        Raises:
            EngineDeadError: something else went wrong. All requests have ended, and the engine
                answers every further call with this error.
        """
        runner = self.runner
        if not self._live:
            return []
        started = perf_counter()
        try:
            plan = self.scheduler.schedule()
            record = self.scheduler.record
            record.started, record.planned = started, perf_counter()
            self.trace.append(record)
            if not plan.rows:
                raise AccountingError(f"Nothing can run, but {len(self._live)} requests wait.")
            for seq_id in record.admitted:
                owner = self.scheduler.sequences[seq_id].request.request_id
                self._live[owner].schedule(record.planned)
            result = runner.execute(plan)
            record.graph_rows, record.why_eager = result.graph_rows, result.why_eager
            record.computed = perf_counter()
            touched = self._commit(plan, result, record.computed)
            record.delivered = perf_counter()
            return touched
        except Exception as error:
            self._dead = f"The engine stopped: {in_one_line(error)}"
            self._abandon("error", self._dead)
            raise EngineDeadError(self._dead) from error
        except BaseException:  # Ctrl-C, at any point of the step
            self._abandon("abort")
            raise

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[LiveRequest]:
        """Tell the scheduler and the requests what came out of a step; `now` is its time for all,
        so that metrics and trace agree."""
        scheduler = self.scheduler
        owners = [(row, scheduler.in_flight[row.seq_id]) for row in plan.rows]
        for row, sequence in owners:
            if len(result.errors.get(row.seq_id, ())) == max(row.num_samples, 1):
                # Before the commit, which would offer what it computed to others.
                scheduler.blocks.forget(sequence.table)
                scheduler.finish(row.seq_id, "error")
        for fork in scheduler.commit(plan, result.token_ids):
            self._live[fork.request.request_id].sequences[fork.index] = fork
        touched = {}
        for row, sequence in owners:
            live = self._live.get(sequence.request.request_id)
            if live is not None and live.request is sequence.request:  # not aborted meanwhile
                touched[live.request.request_id] = live
                self._deliver(row, sequence, live, result, now)
        for request_id, live in touched.items():
            if live.finished:
                del self._live[request_id]
        return list(touched.values())

    def _deliver(
        self,
        row: Row,
        sequence: ScheduledSequence,
        live: LiveRequest,
        result: StepResult,
        now: float,
    ) -> None:
        """Hand one row's results to its request, and end what they complete."""
        prompt = result.prompt_logprobs.get(row.seq_id)
        if prompt is not None and not live.add_prompt_logprobs(*prompt, now):
            self.scheduler.abort(live.request.request_id, "error")
            return
        errors = result.errors.get(row.seq_id, {})
        if not row.num_samples:
            if errors:
                for index in range(sequence.index, sequence.index + sequence.num_seats):
                    live.end_completion(index, "error", now, errors[0])
            elif sequence.status is Status.FINISHED:  # it was to be computed only
                live.end("length", now)
            return
        logprobs = result.logprobs.get(row.seq_id, [None] * row.num_samples)
        for each, token in enumerate(result.token_ids[row.seq_id]):
            index = sequence.index + each
            if token is None:
                live.end_completion(index, "error", now, errors[each])
            elif reason := live.append(index, token, logprobs[each], now):
                self.scheduler.finish(live.sequences[index].seq_id, reason)

    def _abandon(self, reason: FinishReason, error: str | None = None) -> None:
        """End everything. The scheduler may have been interrupted anywhere, so it is replaced,
        and with it what it knew of cached prefixes."""
        now = perf_counter()
        for live in self._live.values():
            live.end(reason, now, error)
        self._live = {}
        scheduler = self.scheduler
        scheduler.log.end_all(scheduler.sequences.values(), reason, scheduler.in_flight, now)
        self.trace.append(scheduler.record)
        if self._runner is not None:
            self.scheduler = scheduler.restarted()
            self._runner.reset()
