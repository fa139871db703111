"""The errors that minillm raises for its users, each also a builtin exception type.

A message is one sentence that says what was given, what is allowed, and what to do.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Literal, NamedTuple

Owner = Literal["request", "model", "server"]
"""Who has to change something after an error: the client, the model's publisher, the operator."""


class Failure(NamedTuple):
    """Why a completion failed, and whose error it is."""

    message: str
    owner: Owner


class MinillmError(Exception):
    """Base class: ``except MinillmError`` catches every error that minillm raises on purpose."""


class ConfigError(MinillmError, ValueError):
    """A configuration value (engine argument, config.json field) is out of its domain."""


class UnknownArgumentError(MinillmError, TypeError):
    """An argument name that does not exist; the message suggests the nearest one."""


class UnsupportedFeatureError(MinillmError, ValueError):
    """A known option that this version does not support."""


class ModelNotFoundError(MinillmError, FileNotFoundError):
    """The model folder, a file in it, or the hub id cannot be found."""


class CheckpointError(MinillmError, ValueError):
    """A weight file is damaged, or its tensors do not fit the configuration."""


class TraceFileError(MinillmError, ValueError):
    """A trace file is damaged, or is no trace file."""


class InvalidRequestError(MinillmError, ValueError):
    """A prompt or a sampling parameter that cannot be served."""


class NodeError(MinillmError, RuntimeError):
    """Another machine cannot be reached, is not trusted, or does not match this one."""


class EngineDeadError(MinillmError, RuntimeError):
    """The engine was closed, or stopped by an earlier error."""


class ForeignCode:
    """Context of calls into a library: what they raise becomes a `kind`, "`what`: its reason."

    A panic of a library in Rust is no Exception: it would pass every handler and end a thread.
    Ctrl-C, SystemExit and the errors of minillm are not changed.
    """

    __slots__ = ("_kind", "_what", "_why")

    def __init__(
        self, kind: type[MinillmError], what: str, why: Callable[[BaseException], str] | None = None
    ) -> None:
        self._kind, self._what, self._why = kind, what, why or reason

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(
            error, (KeyboardInterrupt, SystemExit, MinillmError)
        ):
            raise self._kind(f"{self._what}: {self._why(error)}.") from error


def owner_of(error: BaseException) -> Owner:
    """Whose error an exception is."""
    if isinstance(error, EngineDeadError | NodeError):
        return "server"
    known = isinstance(error, MinillmError) and not isinstance(error, CheckpointError)
    return "request" if known else "model"


def reason(error: BaseException) -> str:
    """The message of a library's error in one line, without its number and path."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(text.split())[:200].rstrip(".")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` with the nearest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def in_one_line(error: BaseException) -> str:
    """An error's type and the first 300 characters of its message, in one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_it_stopped(error: Exception) -> str:
    """The message of every further call to an engine that this error stopped."""
    known = isinstance(error, EngineDeadError)  # its message is complete
    return str(error) if known else f"The engine stopped: {in_one_line(error)}"
