"""minillm: an LLM inference engine small enough to read, and the course that measures it.

Importing this package is cheap: a name loads its module, and torch, when it is first used.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.api.arguments import AsyncEngineArgs, EngineArgs
    from minillm.api.outputs import CompletionOutput, Logprob, RequestOutput, ScoreOutput
    from minillm.api.prompts import TextPrompt, TokensPrompt
    from minillm.api.sampling_params import RequestOutputKind, SamplingParams
    from minillm.api.structured_outputs import StructuredOutputsParams
    from minillm.errors import (
        CheckpointError,
        ConfigError,
        EngineDeadError,
        InvalidRequestError,
        MinillmError,
        ModelNotFoundError,
        UnknownArgumentError,
        UnsupportedFeatureError,
    )
    from minillm.llm import LLM
    from minillm.serving.async_engine import AsyncLLMEngine

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineArgs",
    "EngineDeadError",
    "InvalidRequestError",
    "Logprob",
    "MinillmError",
    "ModelNotFoundError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnknownArgumentError",
    "UnsupportedFeatureError",
]
_HOMES = (
    "api.arguments",
    "api.sampling_params",
    "api.structured_outputs",
    "api.outputs",
    "api.prompts",
    "errors",
)
_WITH_TORCH: Mapping[str, str] = {"LLM": "llm", "AsyncLLMEngine": "serving.async_engine"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in (_WITH_TORCH[name],) if name in _WITH_TORCH else _HOMES:
            module = import_module(f"minillm.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
