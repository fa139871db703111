"""The HTTP API: OpenAI's routes and vLLM's additions, over an `AsyncLLMEngine`."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from minillm.errors import InvalidRequestError, MinillmError
from minillm.serving import playground_page
from minillm.serving.api_errors import ApiError, on_error, sent_id
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.event_stream import ClientGone, EventStream, unless_gone
from minillm.serving.gate import Gate
from minillm.serving.generation import Generation
from minillm.serving.guard import Guard
from minillm.serving.metrics import Metrics, RequestObserver, ResponseCounter
from minillm.serving.openapi import SCHEMAS, document
from minillm.serving.params import Job, Limits, chat_job, completion_job, conversation, listed
from minillm.serving.protocol import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    T,
    TokenizeRequest,
    parse,
)
from minillm.serving.replies import Header
from minillm.serving.request_trace import RequestTrace
from minillm.serving.settings import VERSION, Settings
from minillm.text.tokenizer import LONG_TEXT

R = TypeVar("R")

LARGE_BODY = 2**16  # bytes; parsing fewer takes less than a millisecond
IGNORED_HEADER = "x-minillm-ignored"
UNPRINTABLE = re.compile(r"[^!-+\--~]")  # characters that a header's value may not have, and commas


@dataclass
class Server:
    """What the routes share: the engine, the options and the gate."""

    engine: AsyncLLMEngine
    settings: Settings
    gate: Gate = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        running = self.engine.state().max_num_seqs
        self.engine.limit_outputs(self.settings.max_event_rate)
        self.gate = Gate(running + self.settings.max_waiting)
        self.metrics = Metrics(self.engine, self.gate, self.settings.names[0])
        self.request_trace = RequestTrace(self.engine, self.settings.request_trace)
        self.numbers = count()  # of requests
        self.defaults = self.engine.sampling_defaults
        self.tokenizer = self.engine.tokenizer
        if self.tokenizer is not None and self.settings.chat_template is not None:
            self.tokenizer = self.tokenizer.with_chat_template(self.settings.chat_template)
        longest = 1 if self.tokenizer is None else self.tokenizer.longest_token
        context = self.engine.max_model_len
        self.limits = Limits(context, context * longest)

    def check_model(self, name: str | None) -> str:
        """The name for the reply; a name that is not served is a 404."""
        names = self.settings.names
        if name is None or name in names:
            return name or names[0]
        raise ApiError(
            404,
            f"The model `{name[:80]}` does not exist; this server has `{names[0]}`.",
            "NotFoundError",
            param="model",
            code="model_not_found",
        )

    # ---- generation ----------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read(CompletionRequest, request)
        header = self._header("cmpl", self.check_model(body.model), body, request)
        prompts = listed(body.prompt)
        large = len(prompts) > 1 or max(map(len, prompts[0].values())) > LONG_TEXT
        arguments = body, self.defaults, self.limits, self.tokenizer
        making = partial(in_thread_if, large, completion_job, *arguments)
        return await self._generate(request, body, header, len(prompts) * (body.n or 1), making)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read(ChatRequest, request)
        header = self._header("chatcmpl", self.check_model(body.model), body, request)
        trusts = self.settings.trust_request_chat_template
        arguments = body, self.defaults, self.limits, trusts, self.tokenizer
        # The model's template may take long; it runs in a sandbox without a time limit.
        making = partial(asyncio.to_thread, chat_job, *arguments)
        return await self._generate(request, body, header, body.n or 1, making)

    def _header(self, kind: str, model: str, body: GenerationRequest, request: Request) -> Header:
        given = body.request_id or request.headers.get("x-request-id", "")[:256]
        top = (body.top_logprobs or 0) if isinstance(body, ChatRequest) else 0
        return Header(
            id=f"{kind}-{given or uuid4().hex}", created=int(time.time()), model=model,
            chat=isinstance(body, ChatRequest), as_ids=bool(body.return_tokens_as_token_ids),
            with_ids=bool(body.return_token_ids), num_top=top, tokenizer=self.tokenizer,
            acceptance=self.engine.acceptance,
        )  # fmt: skip

    async def _generate(
        self,
        request: Request,
        body: GenerationRequest,
        header: Header,
        count: int,
        making: Callable[[], Awaitable[Job]],
    ) -> Response:
        headers = headers_of(body, body.request_id or header.id) | sent_id(request)
        self.gate.enter(count)  # before its prompts are rendered and tokenised
        try:
            job = await making()
        except BaseException:
            self.gate.leave(count)
            raise
        observer = RequestObserver(self.metrics, job.params)
        generation = self._start(header, job, body.priority or 0)
        generation.when_tokens = observer.tokens

        def closed() -> None:
            generation.when_closed = lambda: None  # `close` may be called twice
            self.gate.leave(count)
            observer.end(generation.streams, generation.outputs)
            self.request_trace.ended(generation.outputs)

        generation.when_closed = closed
        try:
            if body.stream:
                events = await unless_gone(request, generation.start(body.stream_options))
                return EventStream(*events, headers, generation.close)
            reply = await unless_gone(request, generation.reply())
        except BaseException:
            await generation.close()
            raise
        return JSONResponse(reply, headers=headers | generation.headers())

    def _start(self, header: Header, job: Job, priority: int) -> Generation:
        several = len(job.prompts) > 1
        key = f"{header.id}~{next(self.numbers)}"  # a client's id may be in use
        streams = [
            self.engine.generate(prompt, job.params, f"{key}-{i}" if several else key, priority)
            for i, prompt in enumerate(job.prompts)
        ]
        return Generation(header, job, streams, self.tokenizer)

    # ---- tokens --------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await read(TokenizeRequest, request)
        self.check_model(body.model)
        reply = await asyncio.to_thread(self._tokenized, body)
        return JSONResponse(reply, headers=headers_of(body))

    def _tokenized(self, body: TokenizeRequest) -> dict[str, Any]:
        tokenizer = self._needed_tokenizer()
        special = body.add_special_tokens
        if body.messages is not None:
            made = conversation(body, tokenizer, self.settings.trust_request_chat_template)
            ids = made.ids(bool(special))
        else:
            ids = tokenizer.encode(body.prompt or "", special is not False)
        texts = [tokenizer.piece(token_id) for token_id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.engine.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read(DetokenizeRequest, request)
        self.check_model(body.model)
        tokenizer, ids = self._needed_tokenizer(), body.tokens
        wrong = next((each for each in ids if not 0 <= each < self.engine.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"tokens contains {str(wrong)[:20]}; this model has ids from 0 to "
                f"{self.engine.vocab_size - 1}."
            )
        text = await asyncio.to_thread(tokenizer.decode, ids, False)
        return JSONResponse({"prompt": text}, headers=headers_of(body))

    async def tokenizer_info(self) -> dict[str, Any]:
        """GET /tokenizer_info: special tokens, for clients that tokenise by themselves."""
        tokenizer = self._needed_tokenizer()
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "eos_token": None,
            **tokenizer.special_tokens,
            "model_max_length": self.engine.max_model_len,
        }

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InvalidRequestError("This model has no tokenizer; send token ids as the prompt.")
        return self.tokenizer

    # ---- state ---------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self._card(name) for name in self.settings.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """GET /v1/models/{name}."""
        return self._card(self.check_model(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "minillm",
            "root": self.settings.names[0],
            "parent": None,
            "max_model_len": self.engine.max_model_len,
            "chat": self.tokenizer is not None and self.tokenizer.has_chat_template,
        }

    async def health(self) -> Response:
        """GET /health: 200 if steps run, or nothing waits for one."""
        await self.engine.check_health()
        if self.gate.draining:
            raise ApiError(503, "The server is shutting down.", "ServiceUnavailableError")
        for _ in range(2):
            if self.engine.seconds_since_progress() < self.settings.health_timeout:
                return Response(status_code=200)
            await asyncio.sleep(0.05)  # a request has just ended a long idle time
        raise ApiError(
            503,
            f"No step has completed for {self.engine.seconds_since_progress():.0f} s although "
            f"{self.engine.num_unfinished} requests are unfinished.",
            "ServiceUnavailableError",
        )

    async def load(self) -> dict[str, Any]:
        """GET /load: unfinished requests, and the use of the KV cache."""
        state = self.engine.state()
        return {
            "server_load": self.gate.num_open,
            "running": state.num_running,
            "waiting": state.num_waiting,
            "kv_cache_usage": round(state.kv_cache_usage, 4),
        }


async def read(kind: type[T], request: Request) -> T:
    """The body of a request. A large one is parsed in a thread, so that streams go on."""
    body = await request.body()
    return await in_thread_if(len(body) > LARGE_BODY, parse, kind, body)


async def in_thread_if(large: bool, function: Callable[..., R], *arguments: Any) -> R:
    """The result of `function`, which would block all streams if its input is large. For a small
    one the thread would take longer."""
    return await asyncio.to_thread(function, *arguments) if large else function(*arguments)


def headers_of(body: ApiRequest, request_id: str | None = None) -> dict[str, str]:
    """Headers of a reply: the id of a generation, and the names of unknown fields, if any."""
    made = {} if request_id is None else {"x-request-id": printable(request_id)}
    names = ", ".join(printable(name[:80]) for name in body.ignored[:10])
    return made | ({IGNORED_HEADER: names} if body.ignored else {})


def printable(text: str) -> str:
    """The text with only those characters that a header may have."""
    return UNPRINTABLE.sub("?", text)


def schema(kind: type[ApiRequest]) -> dict[str, Any]:
    """The body's schema for the OpenAPI document."""
    body = kind.model_json_schema(ref_template=SCHEMAS + "{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def build_app(engine: AsyncLLMEngine, settings: Settings) -> FastAPI:
    """The application. The caller shuts the engine down after the server has stopped."""
    server = Server(engine, settings)
    app = FastAPI(
        title="minillm", version=VERSION, docs_url=None, redoc_url=None,
        description="OpenAI-compatible API of minillm.",
    )  # fmt: skip
    app.state.server = server
    # What has no entry but Exception is raised again by Starlette after the reply.
    for kind in (Exception, HTTPException, ApiError, ClientGone, ClientDisconnect, MinillmError):
        app.add_exception_handler(kind, on_error)  # type: ignore[arg-type]
    posts: Mapping[str, tuple[Any, type[ApiRequest]]] = {
        "/v1/completions": (server.completions, CompletionRequest),
        "/v1/chat/completions": (server.chat, ChatRequest),
        "/tokenize": (server.tokenize, TokenizeRequest),
        "/detokenize": (server.detokenize, DetokenizeRequest),
    }
    for path, (handler, body) in posts.items():
        app.post(path, response_model=None, openapi_extra=schema(body))(handler)

    async def version() -> dict[str, str]:
        """GET /version."""
        return {"version": VERSION}

    gets: Mapping[str, Any] = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.model,
        "/health": server.health,
        "/ping": server.health,
        "/version": version,
        "/load": server.load,
        "/tokenizer_info": server.tokenizer_info,
        "/metrics": server.metrics.page,
        "/debug/requests/{request_id:path}": server.request_trace.request,
        "/debug/trace": server.request_trace.steps,
    }
    for path, handler in gets.items():
        app.get(path, response_model=None)(handler)
    page = HTMLResponse(playground_page.page(), headers=dict(playground_page.headers()))

    async def playground() -> Response:
        """GET /: the playground."""
        return page

    app.get("/", response_model=None, include_in_schema=False)(playground)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, api_keys=settings.api_keys)
    app.add_middleware(ResponseCounter, counts=server.metrics.responses)
    app.add_middleware(CORSMiddleware, **settings.cors())  # outermost: a preflight has no key
    return app
