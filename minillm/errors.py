"""Every error a user of minillm can cause, each also the Python type people already catch.

A message is one sentence that says what was given, what is allowed, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MinillmError(Exception):
    """Base class: ``except MinillmError`` catches everything the library raises on purpose."""


class ConfigError(MinillmError, ValueError):
    """A configuration value (engine argument, config.json field) is out of its domain."""


class UnknownArgumentError(MinillmError, TypeError):
    """An argument name that does not exist; the message proposes the nearest one."""


class UnsupportedFeatureError(MinillmError, ValueError):
    """A known option whose feature this version does not have."""


class ModelNotFoundError(MinillmError, FileNotFoundError):
    """The model folder, a file of it, or the hub id cannot be found."""


class CheckpointError(MinillmError, ValueError):
    """A weight file is damaged, or its tensors do not fit the configuration."""


class TraceFileError(MinillmError, ValueError):
    """A file that should hold a trace does not, or is damaged."""


class InvalidRequestError(MinillmError, ValueError):
    """A prompt or a sampling parameter that cannot be served."""


class NodeError(MinillmError, RuntimeError):
    """Another machine cannot be reached, is not trusted, or does not match this one."""


class EngineDeadError(MinillmError, RuntimeError):
    """The engine was closed, or stopped by an earlier error."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def in_one_line(error: BaseException) -> str:
    """An error's type and the beginning of what it says."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_it_stopped(error: Exception) -> str:
    """What an engine that met this error answers from then on."""
    known = isinstance(error, EngineDeadError)  # which says what has ended
    return str(error) if known else f"The engine stopped: {in_one_line(error)}"
