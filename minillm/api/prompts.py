"""Normalises the arguments of `generate`: prompts, sampling parameters and priorities as lists."""

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, NotRequired, TypedDict

from minillm.api.sampling_params import SamplingParams, check_int, shown
from minillm.config import ModelConfig
from minillm.errors import InvalidRequestError, UnknownArgumentError, UnsupportedFeatureError

Prompt = str | Sequence[int] | Mapping[str, Any]


class TextPrompt(TypedDict):
    """A prompt dict with a text (vLLM's name)."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt dict with token ids (vLLM's name)."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


# Arguments of vLLM and transformers that are not supported, and what to do instead.
LEFT_OUT: Mapping[str, str] = {
    "lora_request": "adapters are not supported; merge the adapter into the weights",
    "tokenization_kwargs": "give the token ids as {'prompt_token_ids': [...]}",
    "prompt_token_ids": "give {'prompt_token_ids': [...]} as the prompt",
    "trace_headers": "tracing by OpenTelemetry is not supported; leave it out",
    "data_parallel_rank": "the scheduler chooses the rank; leave it out",
    "documents": "documents are not supported; put their text into a message",
    "return_tensors": "the result is a list of ids; give it to torch.tensor",
    "return_dict": "the result is a text or a list of ids; leave it out",
}


def refuse_left_out(function: str, given: Mapping[str, Any]) -> None:
    """Refuse other arguments than those of minillm; None and False count as absent."""
    for name, value in given.items():
        if name not in LEFT_OUT:
            raise UnknownArgumentError(f"{function} has no argument {shown(name)}.")
        if value is not None and value is not False:
            raise UnsupportedFeatureError(f"{name} of {function}: {LEFT_OUT[name]}.")


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is a {type(prompts).__name__}; it must be a string, a list of token ids, "
            "a dict, or a list of these."
        )
    single = bool(prompts) and all(isinstance(item, Integral) for item in prompts)
    return [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]


def list_params(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(item, SamplingParams) for item in each):
        raise InvalidRequestError(
            f"sampling_params is a {type(params).__name__}; it must be a SamplingParams or "
            "a list of them."
        )
    if len(each) != count:
        raise InvalidRequestError(
            f"There are {len(each)} sampling_params for {count} prompts; give one for all or "
            "one per prompt."
        )
    return each


def one_prompt(prompt: Prompt) -> Prompt:
    """The single prompt of a request; more than one is an error."""
    if isinstance(prompt, str | Mapping) or not token_list(prompt):
        return prompt  # an empty prompt is refused later
    listed = list_prompts(prompt)
    if len(listed) != 1:
        raise InvalidRequestError(
            f"generate takes one prompt, not {len(listed)}; call it once for each."
        )
    return listed[0]


def one_params(params: SamplingParams) -> SamplingParams:
    """The sampling parameters of a single request, checked."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"sampling_params is a {type(params).__name__}; it must be a SamplingParams."
        )
    return params


def one_priority(priority: int, policy: str) -> int:
    """The priority of a single request, checked; policies other than "priority" allow only 0."""
    if priority != 0 and policy != "priority":
        raise InvalidRequestError(
            f"priority={shown(priority)} has no effect with scheduling_policy={policy!r}; make the "
            "engine with scheduling_policy='priority'."
        )
    return check_int("priority", priority, -(2**31), 2**31 - 1)


def list_priorities(priority: Sequence[int] | None, count: int, policy: str) -> list[int]:
    """One priority for each of `count` prompts."""
    if priority is None:
        return [0] * count
    if policy != "priority":
        raise InvalidRequestError(
            f"priority has no effect with scheduling_policy={policy!r}; make the LLM with "
            "scheduling_policy='priority'."
        )
    if isinstance(priority, str) or not isinstance(priority, Sequence) or len(priority) != count:
        raise InvalidRequestError(
            f"priority is {shown(priority)}; it must be a list with one integer per prompt "
            f"({count})."
        )
    return [check_int("priority", number, -(2**31), 2**31 - 1) for number in priority]


def split_prompt(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str]:
    """The text, token ids and cache salt of a prompt; given ids take precedence over the text."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if isinstance(prompt, Mapping):
        if not prompt or prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
            raise InvalidRequestError(
                "A prompt dict has 'prompt' or 'prompt_token_ids', and optionally 'cache_salt', "
                f"not {shown(sorted(map(str, prompt)))}."
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not isinstance(text, str | None):
            raise InvalidRequestError(f"'prompt' is a {type(text).__name__}; it must be a string.")
        salt = prompt.get("cache_salt", "")
        if not isinstance(salt, str):
            raise InvalidRequestError(
                f"'cache_salt' is a {type(salt).__name__}; it must be a string."
            )
        return text, None if ids is None else token_list(ids), salt
    return None, token_list(prompt), ""


def token_list(ids: object) -> Sequence[int]:
    """A list of token ids; the engine checks the ids later."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InvalidRequestError(
            f"A prompt is a {type(ids).__name__}; it must be a string, a list of token ids or "
            "a dict."
        )
    return ids


def check_prompt(
    ids: Collection[int], config: ModelConfig, max_model_len: int, room: int = 1
) -> None:
    """Check that a prompt is not empty, leaves `room` for new tokens, and has valid ids."""
    width = config.vocab_size
    if not ids:
        raise InvalidRequestError(
            "The prompt is empty; it needs some text or at least one token id."
        )
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise InvalidRequestError(f"The prompt contains {token_id!r}; token ids are integers.")
        if not 0 <= token_id < width:
            raise InvalidRequestError(
                f"The prompt contains token id {token_id}; this model has ids from 0 to "
                f"{width - 1}."
            )
    if len(ids) + room > max_model_len:
        longer = max_model_len < config.longest_context
        raise InvalidRequestError(
            f"The prompt has {len(ids)} tokens; the maximum context length is "
            f"{max_model_len}{' and must leave room for one new token' * room}, "
            f"so shorten the prompt{' or raise max_model_len' * longer}."
        )
