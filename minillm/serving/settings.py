"""Options of the HTTP server."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def installed_version() -> str:
    """The version of the installed package; "0" in a checkout that is not installed."""
    try:
        return version("minillm-course")
    except PackageNotFoundError:
        return "0"


VERSION = installed_version()
THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


@dataclass(frozen=True)
class Settings:
    """Options of the server.

    Attributes:
        names: names of the model; the first one is in replies.
        api_keys: keys of which a client must send one; none: all clients may send requests.
        max_waiting: sequences that may wait besides the running ones.
        health_timeout: seconds without a step, while requests wait, after which /health fails.
        shutdown_timeout: seconds that running requests have after SIGTERM.
        request_trace: whether GET /debug/requests/{id} and /debug/trace answer.
        max_event_rate: events per second over all streams. Above it an event has several tokens,
            which leaves the processor to the engine.
        chat_template: a template in place of the model's.
        allowed_origins: sites whose pages may read replies in a browser; "*" is all. None: pages
            that this machine serves. A server without a key answers every page that its user
            opens, so "*", vLLM's default, would let each web site use the model.
        allowed_methods, allowed_headers, allow_credentials: as in vLLM.
        trust_request_chat_template: whether a request may have a template of its own, which runs
            in a sandbox, but for as long as it likes.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    health_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    request_trace: bool = False
    max_event_rate: float = 1000.0
    chat_template: str | None = None
    allowed_origins: tuple[str, ...] | None = None
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    trust_request_chat_template: bool = False

    def cors(self) -> dict[str, Any]:
        """The arguments of Starlette's middleware for requests of other sites (CORS)."""
        return {
            "allow_origins": self.allowed_origins or (),
            "allow_origin_regex": THIS_MACHINE if self.allowed_origins is None else None,
            "allow_methods": self.allowed_methods,
            "allow_headers": self.allowed_headers,
            "allow_credentials": self.allow_credentials,
            "expose_headers": ("x-request-id", "x-minillm-ignored", "retry-after"),
        }
