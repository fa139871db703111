"""Errors of the HTTP API: the status and the body of each."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from minillm.errors import EngineDeadError, MinillmError, Owner, owner_of
from minillm.serving.event_stream import ClientGone
from minillm.serving.protocol import ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)

# Clients and proxies send a request again after a 5xx, and a 500 alerts who runs the server.
STATUS: Mapping[Owner, tuple[int, str]] = {
    "request": (400, "BadRequestError"),
    "model": (500, "InternalServerError"),
    "server": (503, "ServiceUnavailableError"),
}
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


def owned(message: str, owner: Owner) -> ApiError:
    """An error with the status of its owner."""
    too_long = owner == "request" and TOO_LONG in message
    return ApiError(
        STATUS[owner][0],
        message,
        STATUS[owner][1],
        param="prompt" if too_long else parameter(message),
        code="context_length_exceeded" if too_long else None,
    )


def overloaded(message: str, seconds: int) -> ApiError:
    """The server refuses a request that may succeed after `seconds`."""
    return ApiError(
        503, message, "ServiceUnavailableError", headers={"Retry-After": str(max(seconds, 1))}
    )


def api_error(error: BaseException) -> ApiError:
    """The reply to an exception. The text of an unexpected error stays in the log, because it may
    name files."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return owned(f"The engine has stopped. {error}", "server")
    if isinstance(error, MinillmError):
        return owned(str(error), owner_of(error))
    return ApiError(
        500,
        f"The server failed ({type(error).__name__}); its log has the details.",
        "InternalServerError",
    )


def parameter(message: str) -> str | None:
    """The field that a message begins with, if any: "stop[0] is null: ..."."""
    word = re.split(r"\W", message, maxsplit=1)[0]
    return word if word in FIELDS else None


async def on_error(request: Request, error: Exception) -> Response:
    """FastAPI's handler of all exceptions."""
    if isinstance(error, ClientGone | ClientDisconnect):
        return Response(status_code=499)  # nginx's number; the client does not see it
    if isinstance(error, HTTPException):  # no such route, or no such method
        kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
        text = f"{request.method} {request.url.path[:80]}: {error.detail}."
        error = ApiError(error.status_code, text, kind, headers=error.headers or {})
    made = api_error(error)
    if made.status == 500:
        logger.error("A request failed: %s", error, exc_info=error)
    return JSONResponse(made.body, made.status, headers={**sent_id(request), **made.headers})


def sent_id(request: Request) -> dict[str, str]:
    """The header by which a client or a proxy finds the reply to its request."""
    given = request.headers.get("x-request-id")
    return {} if given is None else {"x-request-id": given}
