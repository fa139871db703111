"""GET /metrics: Prometheus metrics under vLLM's names.

Gauges and the engine's counters are read when Prometheus scrapes. The server counts only what the
engine does not know: how requests ended, their times, and the gaps between delivered tokens.

    requests of the API     RequestObserver.tokens, .end  --> histograms, counters of ends
    records of the steps    Trace.listeners               --> tokens per step
    AsyncLLMEngine.state()  at a scrape                   --> gauges, counters

A request with several prompts counts as one request per prompt, a prompt with n=3 as three ends.
Latencies of whole requests are of requests whose completions ended with "stop" or "length"; queue
time and time to first token are of all requests whose client got a token, as in vLLM. The others
are in `requests_without_first_token`, which vLLM lacks: without it a server would seem fast whose
clients give up before their first token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.api.outputs import RequestOutput
from minillm.api.sampling_params import SamplingParams
from minillm.errors import EngineDeadError, MinillmError
from minillm.sampling.logprobs import NOT_FINITE
from minillm.scheduling.record import StepRecord
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.engine_state import EngineState
from minillm.serving.gate import Gate
from minillm.serving.request_stream import RequestStream

LABELS = ("model_name", "engine")
ENDS = ("stop", "length", "abort", "error")
REASONS = ("batch_slots", "tokens", "blocks", "next_step")  # that a sequence waits for
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
WHOLE = frozenset({"stop", "length"})  # ends of requests that were served to their end
# vLLM's buckets, in seconds or in numbers.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
           240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# Histograms: buckets and description. Token counts have buckets up to the context length.
HISTOGRAMS: Mapping[str, tuple[Sequence[float] | None, str]] = {
    "time_to_first_token_seconds": (TTFT, "Arrival to first token."),
    "inter_token_latency_seconds": (
        TOKEN_GAP, "Time per token after the first, as delivered to streams; for other "
        "requests their mean time per token, once per token."),
    "request_time_per_output_token_seconds": (
        TOKEN_GAP, "Mean time per token after the first, per request."),
    "e2e_request_latency_seconds": (LATENCY, "Arrival to end."),
    "request_queue_time_seconds": (LATENCY, "Arrival to first step."),
    "request_inference_time_seconds": (LATENCY, "First step to end."),
    "request_prefill_time_seconds": (LATENCY, "First step to first token."),
    "request_decode_time_seconds": (LATENCY, "First token to end."),
    "request_prompt_tokens": (None, "Prompt tokens per request."),
    "request_generation_tokens": (None, "New tokens per completion."),
    "request_max_num_generation_tokens": (None, "Tokens of a request's longest completion."),
    "request_params_n": (COMPLETIONS, "Parameter n of requests."),
    "request_params_max_tokens": (None, "Parameter max_tokens of requests that set it."),
    "request_num_preemptions": (PREEMPTIONS, "Preemptions per request."),
    "request_prefill_kv_computed_tokens": (
        None, "Prompt tokens per request that were not in the prefix cache."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens computed per step."),
}  # fmt: skip


def token_bounds(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`, as vLLM's buckets of token counts."""
    bounds = [digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= longest)


class Histogram:
    """Counts of observations by bucket, and their sum. `bounds` are the buckets' upper bounds,
    which belong to the bucket; the last bucket has no bound.

    prometheus-client's takes one observation at a time, under a lock; here an event of a stream
    observes the gaps of all its tokens at once. One thread observes; any thread may read.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket and the observations up to it."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Metrics(Collector):
    """All metrics of one application, in a registry of its own.

    The methods that observe run in the event loop of the application, except `_step`.
    """

    def __init__(self, engine: AsyncLLMEngine, gate: Gate, model_name: str):
        self.engine, self.gate = engine, gate
        self.labels = [model_name, "0"]
        longest = token_bounds(engine.max_model_len)
        self.histograms = {
            name: Histogram(longest if bounds is None else bounds)
            for name, (bounds, _) in HISTOGRAMS.items()
        }
        self.ends: Counter[str] = Counter()  # completions by finish reason
        self.tokenless: Counter[str] = Counter()  # requests without a first token, by their end
        self.num_corrupted = 0
        self.responses: Counter[tuple[str, str, str]] = Counter()  # handler, method, status
        self._latest: dict[tuple[str, str | None], float] = {}  # counters at the latest scrape
        self._step_tokens = self.histograms["iteration_tokens_total"]
        engine.trace.listeners.append(self._step)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    async def page(self) -> Response:
        """GET /metrics: Prometheus' text format 0.0.4. prometheus-client would send OpenMetrics to
        a Prometheus 2 that prefers it with "vllm_" in place of "vllm:"."""
        text = generate_latest(self.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    def _step(self, record: StepRecord) -> None:
        """Count a step. Runs in the step thread."""
        self._step_tokens.observe(record.num_prefill_tokens + record.num_decode_tokens)

    # ---- one scrape ----------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        state = self.engine.state()
        yield from self._gauges(state)
        yield from self._counters(state)
        yield from self._responses()
        for name, (_, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            histogram = self.histograms[name]
            family.add_metric(self.labels, histogram.buckets(), histogram.total)
            yield family

    def _gauges(self, state: EngineState) -> Iterator[Metric]:
        waiting = dict.fromkeys(REASONS, 0)
        if state.waiting_reason in waiting:
            waiting[state.waiting_reason] = state.num_waiting
        rows: Sequence[tuple[Any, ...]] = (
            ("num_requests_running", "Sequences in the running batch.", state.num_running),
            ("num_requests_waiting", "Sequences and requests that wait.", state.num_waiting),
            ("kv_cache_usage_perc", "KV cache blocks in use, 0 to 1.", state.kv_cache_usage),
            ("num_requests_waiting_by_reason",
             "Waiting sequences, by what the first of them lacks.", waiting, "reason"),
        )  # fmt: skip
        for row in rows:
            yield self._family(GaugeMetricFamily, *row)
        info = cache_config(self.engine)
        text, labels = "Settings of the KV cache.", ("engine", *info)
        family = GaugeMetricFamily("vllm:cache_config_info", text, labels=labels)
        family.add_metric(["0", *info.values()], 1)
        yield family

    def _counters(self, state: EngineState) -> Iterator[Metric]:
        now, cached = state.counters, self.engine.trace.settings.prefix_cache is not None
        places = {str(place): count for place, count in enumerate(now.num_accepted_at)}
        tokenless = {reason: self.tokenless[reason] for reason in ("abort", "error")}
        drafts: Sequence[tuple[Any, ...]] = (
            ("spec_decode_num_drafts", "Rows with drafts.", now.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", now.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted drafted tokens.",
             now.num_accepted_tokens),
            ("spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by position.",
             places, "position"),
        )  # fmt: skip
        rows: Sequence[tuple[Any, ...]] = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
             now.num_prompt_tokens if cached else 0),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.",
             now.num_cached_tokens),
            ("num_preemptions", "Preemptions of sequences.",
             now.num_preemptions_recompute + now.num_preemptions_swap),
            ("prompt_tokens", "Prompt tokens of admitted requests.", now.num_prompt_tokens),
            ("prompt_tokens_cached", "Of these, tokens from the prefix cache.",
             now.num_cached_tokens),
            ("generation_tokens", "New tokens.", state.num_generated),
            *(drafts if self.engine.args.speculative_config is not None else ()),
            ("request_success", "Completions by how they ended.",
             {reason: self.ends[reason] for reason in ENDS}, "finished_reason"),
            ("requests_without_first_token",
             "Requests that ended before a token was delivered; time_to_first_token_seconds lacks "
             "them.", tokenless, "finished_reason"),
            ("corrupted_requests", "Completions that ended because logits were not finite.",
             self.num_corrupted),
        )  # fmt: skip
        for row in rows:
            yield self._family(CounterMetricFamily, *row)

    def _family(
        self, kind: Any, name: str, text: str, values: float | Mapping[str, float], label: str = ""
    ) -> Metric:
        """A family with one value, or with values by one more label.

        A counter never decreases: Prometheus would take a decrease for a restart. The engine's can,
        by tokens that a step of the same moment takes back.
        """
        family: Metric = kind(f"vllm:{name}", text, labels=(*LABELS, *filter(None, [label])))
        for more, value in values.items() if isinstance(values, Mapping) else [(None, values)]:
            if kind is CounterMetricFamily:
                value = max(value, self._latest.get((name, more), 0))
                self._latest[name, more] = value
            family.add_metric([*self.labels, *filter(None, [more])], value)  # type: ignore[attr-defined]
        return family

    def _responses(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused with 503.",
            labels=("model_name", "reason"),
        )  # fmt: skip
        for reason, count in self.gate.refused.items():
            refused.add_metric([self.labels[0], reason], count)
        yield refused
        responses = CounterMetricFamily(
            "http_requests", "Responses of the API; a stream counts when it begins.",
            labels=("handler", "method", "status"),
        )  # fmt: skip
        for place, count in self.responses.copy().items():
            responses.add_metric(place, count)
        yield responses


class RequestObserver:
    """Observes one request of the API: its tokens as they are delivered, and its end."""

    __slots__ = ("_gaps", "_last", "_metrics", "_num_tokens", "_params")

    def __init__(self, metrics: Metrics, params: SamplingParams):
        self._metrics, self._params = metrics, params
        self._gaps = metrics.histograms["inter_token_latency_seconds"]
        self._last: dict[int, float] = {}  # by choice: when the latest tokens were delivered
        self._num_tokens: dict[int, int] = {}  # by choice, of streams only

    def tokens(self, choice: int, count: int) -> None:
        """`count` new tokens of a choice are delivered to a stream now. The first delivery has no
        gap; several later tokens share the time since the one before."""
        now = perf_counter()
        if choice not in self._last:
            self._num_tokens[choice] = count
        elif count:
            self._num_tokens[choice] += count
            self._gaps.observe((now - self._last[choice]) / count, count)
        self._last[choice] = now

    def end(
        self, streams: Sequence[RequestStream], outputs: Sequence[RequestOutput | None]
    ) -> None:
        """The request has ended; `outputs` has the latest output of each stream."""
        for index, (stream, output) in enumerate(zip(streams, outputs, strict=True)):
            if stream.error is not None:
                if not is_failure(stream.error):
                    continue
                self._first(output, "error")
                self._metrics.ends["error"] += self._params.n
            elif output is not None:
                self._end(index, output)
            elif stream.begun:
                self._first(output, "abort")
                self._metrics.ends["abort"] += self._params.n

    def _first(self, output: RequestOutput | None, reason: str) -> None:
        """Observe the first token, or count a request that ended by `reason` without one."""
        times = None if output is None else output.metrics
        if times is None or times.ttft is None:
            self._metrics.tokenless[reason] += 1
            return
        self._observe(
            time_to_first_token_seconds=times.ttft,
            request_queue_time_seconds=times.queue_time,
            request_prefill_time_seconds=times.ttft - times.queue_time,
        )

    def _end(self, index: int, output: RequestOutput) -> None:
        metrics, times = self._metrics, output.metrics
        reasons = [completion.finish_reason or "abort" for completion in output.outputs]
        metrics.ends.update(reasons)
        metrics.num_corrupted += sum(each.error == NOT_FINITE.message for each in output.outputs)
        first, numbers = index * self._params.n, []
        for place, completion in enumerate(output.outputs, first):
            streamed = self._num_tokens.get(place)
            numbers.append(len(completion.token_ids) if streamed is None else streamed)
            if streamed is None and times.tpot is not None and len(completion.token_ids) > 1:
                self._gaps.observe(times.tpot, len(completion.token_ids) - 1)
        self._first(output, reasons[0])
        if times.ttft is None or not WHOLE.issuperset(reasons):
            return
        num_prompt = len(output.prompt_token_ids)
        self._observe(
            request_time_per_output_token_seconds=times.tpot,
            e2e_request_latency_seconds=times.e2e,
            request_inference_time_seconds=times.e2e - times.queue_time,
            request_decode_time_seconds=times.e2e - times.ttft,
            request_prompt_tokens=num_prompt,
            request_max_num_generation_tokens=max(numbers),
            request_params_n=self._params.n,
            request_params_max_tokens=self._params.max_tokens,
            request_num_preemptions=times.num_preemptions,
            request_prefill_kv_computed_tokens=num_prompt - times.num_cached_tokens,
        )
        for number in numbers:
            self._observe(request_generation_tokens=number)

    def _observe(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._metrics.histograms[name].observe(value)


def is_failure(error: Exception) -> bool:
    """Whether a stream's error is the server's; a request that is invalid was never begun."""
    return isinstance(error, EngineDeadError) or not isinstance(error, MinillmError)


def cache_config(engine: AsyncLLMEngine) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`."""
    settings, args = engine.trace.settings, engine.args
    found: dict[str, Any] = {
        "block_size": settings.block_size,
        "num_gpu_blocks": settings.num_blocks,
        "num_cpu_blocks": settings.num_host_blocks,
        "cache_dtype": settings.kv_dtype,
        "bytes_per_token": settings.kv_bytes_per_token,
        "enable_prefix_caching": settings.prefix_cache is not None,
        "prefix_cache": settings.prefix_cache,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
    }
    return {name: str(value) for name, value in found.items()}


class ResponseCounter:
    """ASGI middleware: counts responses by route, method and status."""

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, str, str]]):
        self.app, self.counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if not begun and message["type"] == "http.response.start":
                begun = True
                self._count(scope, message["status"])
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except Exception:
            if not begun:
                self._count(scope, 500)
            raise

    def _count(self, scope: Scope, status: int) -> None:
        # Only known values: a client must not be able to make new time series.
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.counts[handler, method, str(status)] += 1
