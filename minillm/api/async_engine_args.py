"""The arguments of an `AsyncLLMEngine`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from minillm.api.engine_args import EngineArgs
from minillm.api.sampling_params import refuse_unknown_arguments
from minillm.api.vllm_arguments import without_meaningless

T = TypeVar("T", bound=type)


def accept_meaningless_arguments(cls: T) -> T:
    """Class decorator over a dataclass: vLLM's arguments without effect here only warn."""
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
    """Arguments of an `AsyncLLMEngine`: those of `EngineArgs` and `max_num_requests`.

    The scheduler has at most `max_num_requests` unfinished requests, so its work per step is
    bounded. Further requests wait outside in arrival order (with scheduling_policy="priority", in
    priority order).

    Raises the errors of `EngineArgs`.
    """

    max_num_requests: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("max_num_requests")
