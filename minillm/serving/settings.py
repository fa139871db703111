"""Options of the HTTP server."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed package; "0" in a checkout that is not installed."""
    try:
        return version("minillm-course")
    except PackageNotFoundError:
        return "0"


VERSION = installed_version()


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
    trust_request_chat_template: bool = False
