"""Checks before a request is read: its API key, and the size of its body."""

from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minillm.serving.api_errors import ApiError

MAX_BODY = 8 * 2**20  # bytes
OPEN_PATHS = frozenset({"/health", "/"})  # without a key: for load balancers, and a static page


class Guard:
    """ASGI middleware: every path but `OPEN_PATHS` needs a key if the server has keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()):
        self.app = app
        self._digests = [sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reply 401 or 413."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._refusal(scope, headers)
        if error is not None:
            reply = JSONResponse(error.body, error.status, headers=dict(error.headers))
            await reply(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY:
                raise too_large()
            return message

        await self.app(scope, limited, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if self._digests and scope["path"] not in OPEN_PATHS and not self._knows(headers):
            return ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                "AuthenticationError",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and len(length) < 19 and int(length) <= MAX_BODY:
            return None
        return too_large()

    def _knows(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = sha256(key.strip().encode("latin-1")).digest()
        # Every key is compared, and each comparison takes the same time.
        matches = [compare_digest(given, digest) for digest in self._digests]
        return any(matches) and kind.lower() == "bearer"


def too_large() -> ApiError:
    """The reply to a body above the limit."""
    return ApiError(413, f"The body is larger than {MAX_BODY:,} bytes; send fewer prompts.")
