"""What an asynchronous engine is asked to be: an engine's arguments, and how much it takes in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from minillm.api.engine_args import EngineArgs
from minillm.api.sampling_params import refuse_unknown_arguments
from minillm.api.vllm_arguments import without_meaningless

T = TypeVar("T", bound=type)


def accept_meaningless_arguments(cls: T) -> T:
    """Class decorator over a dataclass: vLLM's arguments without a meaning here only warn."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def lenient_init(self: object, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **without_meaningless(kwargs))

    cls.__init__ = lenient_init  # type: ignore[misc]
    return cls


@accept_meaningless_arguments
@refuse_unknown_arguments
@dataclass(frozen=True)
class AsyncEngineArgs(EngineArgs):
    """Arguments of an `AsyncLLMEngine`: those of `EngineArgs`, and how many requests it holds.

    The engine holds at most `max_num_requests` unfinished requests. More wait outside in the order
    of their arrival (with scheduling_policy="priority", of their priority), so that a flood of
    requests costs the scheduler nothing.

    Raises: as `EngineArgs`.
    """

    max_num_requests: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("max_num_requests")
