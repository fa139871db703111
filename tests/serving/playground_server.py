"""A server that answers the playground with scripted replies, and notes what it was asked."""

import json
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minillm.serving.playground_page import headers, page

# Text and logprob of a token, and its alternatives.
Token = tuple[str, float, dict[str, float]]
Frame = tuple[str, list[Token]]  # the text of a frame, and its tokens


def frames(*tokens: Token) -> list[Frame]:
    """One frame per token, with the token's string as its text."""
    return [(token[0], [token]) for token in tokens]


@dataclass
class Script:
    """What the server says, and what it has seen."""

    reply: list[Frame] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    gate: threading.Semaphore | None = None  # every frame waits for it
    late_headers: bool = False  # the response does not begin before the gate is open once
    refusal: tuple[int, Any, dict[str, str]] | None = None  # status, body, headers
    broken_after: int | None = None  # the connection ends after this number of frames
    error_frame: dict[str, Any] | None = None  # instead of the end
    queue_header: str | None = None
    key: str | None = None
    models: tuple[str, ...] = ("tiny",)
    chat: bool | None = None  # whether the model has a template; None as with other servers
    trace: dict[str, Any] | None = None
    load: dict[str, Any] | None = None
    speed: float | None = None  # tokens per second in /metrics, which None switches off
    seen: list[tuple[str, dict[str, Any] | None, str | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # X-Request-Id of all generations
    gone: threading.Event = field(default_factory=threading.Event)  # a client left a stream

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies of all requests to a path."""
        return [body or {} for seen, body, _ in self.seen if seen == path]


class Handler(BaseHTTPRequestHandler):
    """The routes that the playground uses."""

    script: Script

    def do_GET(self) -> None:
        """The page, and what it reads."""
        script = self.script
        script.seen.append((self.path, None, self.headers["Authorization"]))
        if self.path == "/":
            self.answer(200, page().encode(), {"Content-Type": "text/html", **headers()})
        elif not self.allowed():
            self.refuse(401, "Unauthorized")
        elif self.path == "/v1/models":
            entries = [{"id": name, "chat": script.chat} for name in script.models]
            self.json(200, {"object": "list", "data": entries})
        elif self.path == "/load" and script.load is not None:
            self.json(200, script.load)
        elif self.path == "/metrics" and script.speed is not None:
            number = script.speed * time.monotonic()
            lines = ["# TYPE vllm:generation_tokens_total counter",
                     'vllm:generation_tokens_total{model_name="a b} c"} ' + str(number),
                     'vllm:generation_tokens_created{model_name="tiny"} 1.7e9',
                     'vllm:prompt_tokens_total{model_name="tiny"} 5.0']  # fmt: skip
            self.answer(200, "\n".join(lines).encode(), {"Content-Type": "text/plain"})
        elif self.path.startswith("/debug/requests/") and script.trace is not None:
            self.json(200, script.trace)
        else:
            self.refuse(404, "Not Found")

    def do_POST(self) -> None:
        """Generations, and the tokenizer: a token is a letter."""
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.seen.append((self.path, body, self.headers["Authorization"]))
        if not self.allowed():
            self.refuse(401, "Unauthorized")
        elif self.path == "/tokenize":
            prompt = body.get("prompt") or "".join(m["content"] for m in body["messages"])
            self.json(200, {"tokens": [ord(letter) for letter in prompt]})
        elif self.path == "/detokenize":
            self.json(200, {"prompt": "".join(map(chr, body["tokens"]))})
        elif script.refusal is not None:
            status, refusal, more = script.refusal
            self.json(status, refusal, more)
        else:
            self.stream(chat="messages" in body)

    def stream(self, chat: bool) -> None:
        script = self.script
        script.names.append(self.headers["X-Request-Id"])
        if script.late_headers and not self.passed_gate():
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if script.queue_header is not None:
            self.send_header("x-minillm-queue-time-ms", script.queue_header)
        self.end_headers()
        for place, (text, tokens) in enumerate(script.reply):
            if place == script.broken_after or not self.passed_gate():
                return
            reason = "length" if place + 1 == len(script.reply) else None
            choice = {"index": 0, "finish_reason": reason}
            choice |= chat_part(text, tokens) if chat else completion_part(text, tokens)
            self.frame({"id": "cmpl-1", "choices": [choice]})
        if script.error_frame is not None:
            self.frame({"error": script.error_frame})
        elif script.usage is not None:
            self.frame({"id": "cmpl-1", "choices": [], "usage": script.usage})
        self.wfile.write(b": keep-alive\n\ndata: [DONE]\n\n")

    def frame(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def passed_gate(self) -> bool:
        """Wait for the gate; False if the client has left before it opened."""
        gate = self.script.gate
        while gate is not None and not gate.acquire(timeout=0.02):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                self.script.gone.set()
                return False
        return True

    def allowed(self) -> bool:
        key = self.script.key
        return key is None or self.headers["Authorization"] == f"Bearer {key}"

    def refuse(self, status: int, message: str) -> None:
        self.json(status, {"error": {"message": message, "code": status}})

    def json(self, status: int, content: Any, more: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.answer(status, body, {"Content-Type": "application/json", **(more or {})})

    def answer(self, status: int, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is the test's."""


def completion_part(text: str, tokens: list[Token]) -> dict[str, Any]:
    logprobs = {
        "tokens": [token[0] for token in tokens],
        "token_logprobs": [token[1] for token in tokens],
        "top_logprobs": [{token[0]: token[1], **token[2]} for token in tokens],
        "text_offset": [0] * len(tokens),
    }
    return {"text": text, "logprobs": logprobs}


def chat_part(text: str, tokens: list[Token]) -> dict[str, Any]:
    content = [
        {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode()),
            "top_logprobs": [{"token": other, "logprob": value} for other, value in others.items()],
        }
        for token, logprob, others in tokens
    ]
    return {"delta": {"content": text}, "logprobs": {"content": content}}


class PlaygroundServer(ThreadingHTTPServer):
    """The server on a free port of this machine; give `script` anew for every test."""

    daemon_threads = True

    def __init__(self) -> None:
        self.handler = type("ScriptedHandler", (Handler,), {"script": Script()})
        super().__init__(("127.0.0.1", 0), self.handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def follow(self, script: Script) -> None:
        """Answer by this script from now on."""
        self.handler.script = script

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: browsers close connections when they like."""
