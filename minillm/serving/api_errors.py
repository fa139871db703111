"""Errors of the HTTP API: the status and the body of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from minillm.errors import EngineDeadError, InvalidRequestError, MinillmError
from minillm.serving.protocol import ChatRequest, CompletionRequest

FIELDS = frozenset({*CompletionRequest.model_fields, *ChatRequest.model_fields})
TOO_LONG = "maximum context length"  # as in the engine's message, for which clients look


@dataclass
class ApiError(Exception):
    """An error that a client gets: `{"error": {"message", "type", "param", "code"}}`."""

    status: int
    message: str
    kind: str = "BadRequestError"
    param: str | None = None
    code: str | int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, object]:
        """The body of the reply, and the data of an error in a stream."""
        code = self.status if self.code is None else self.code
        described = {"message": self.message, "type": self.kind, "param": self.param, "code": code}
        return {"error": described}


def overloaded(message: str, seconds: int) -> ApiError:
    """The server refuses a request that may succeed after `seconds`."""
    return ApiError(
        503, message, "ServiceUnavailableError", headers={"Retry-After": str(max(seconds, 1))}
    )


def api_error(error: BaseException) -> ApiError:
    """The reply to an exception. A client's mistake is a 400, because clients repeat a request
    after a 500. The text of an unexpected error stays in the log, because it may name files."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"The engine has stopped. {error}", "ServiceUnavailableError")
    if isinstance(error, MinillmError):
        too_long = TOO_LONG in str(error) and isinstance(error, InvalidRequestError)
        return ApiError(
            400,
            str(error),
            param="prompt" if too_long else parameter(str(error)),
            code="context_length_exceeded" if too_long else None,
        )
    return ApiError(
        500,
        f"The server failed ({type(error).__name__}); its log has the details.",
        "InternalServerError",
    )


def parameter(message: str) -> str | None:
    """The field that a message begins with, if any: "temperature is -1; it must be ..."."""
    word = message.partition(" ")[0].rstrip(":")
    return word if word in FIELDS else None
