"""Prompts and sampling parameters of a request to the HTTP API."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from minillm.api.sampling_params import RequestOutputKind, SamplingParams, shown
from minillm.errors import InvalidRequestError
from minillm.serving.api_errors import TOO_LONG, ApiError
from minillm.serving.protocol import (
    MAX_CHARACTERS,
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from minillm.serving.reply_parser import ReplyParser
from minillm.serving.tool_calls import calls_of, constrained, parser_of, thoughts_of
from minillm.text.chat_prompt import ChatPrompt, chat_prompt
from minillm.text.chat_template import ChatTemplate
from minillm.text.tokenizer import Tokenizer

# Fields that SamplingParams has under the same name and with the same meaning.
SAME = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationRequest.model_fields
    and field.name not in ("max_tokens", "logit_bias", "structured_outputs")
)


@dataclass(frozen=True)
class Job:
    """What the engine computes for one request: each prompt with the same parameters.

    Attributes:
        prompts: prompts of `AsyncLLMEngine.generate`.
        hides_completion: echo with max_tokens 0; one token is computed and left out.
        shows_prompt: whether the reply has `prompt_logprobs`.
        parser: makes what divides a chat's reply into thoughts, content and tool calls, or None.
    """

    prompts: list[dict[str, Any]]
    params: SamplingParams
    echo: bool = False
    hides_completion: bool = False
    shows_prompt: bool = False
    parser: Callable[[], ReplyParser | None] = lambda: None


@dataclass(frozen=True)
class Limits:
    """Lengths above which a prompt is refused before it is tokenised or checked.

    Attributes:
        context: tokens of a prompt and its completion together.
        characters: characters that `context` tokens may have.
    """

    context: int
    characters: int

    def check(self, prompts: Sequence[Mapping[str, Any]], keep: int | None) -> None:
        """Raise ApiError for a prompt that is far too long. With `keep` (truncate_prompt_tokens) a
        text may be longer than the context, but all of it is tokenised, because its last tokens may
        depend on its beginning; so the texts of a request have at most `MAX_CHARACTERS`."""
        texts = [len(prompt["prompt"]) for prompt in prompts if "prompt" in prompt]
        if keep is not None:
            most = max(MAX_CHARACTERS, self.characters)
            if sum(texts) > most:
                raise InvalidRequestError(
                    f"truncate_prompt_tokens is for texts of at most {most:,} characters per "
                    f"request, and the prompt has {sum(texts):,}; send the end of the text only."
                )
            return
        ids = [len(each["prompt_token_ids"]) for each in prompts if "prompt_token_ids" in each]
        for lengths, what, most in (
            (texts, "characters", self.characters),
            (ids, "token ids", self.context),
        ):
            if max(lengths, default=0) > most:
                raise ApiError(
                    400,
                    f"The prompt has {max(lengths):,} {what}, and this model's {TOO_LONG} of "
                    f"{self.context} tokens has at most {most:,}; shorten it.",
                    param="prompt",
                    code="context_length_exceeded",
                )


def completion_job(
    request: CompletionRequest,
    defaults: Mapping[str, Any],
    limits: Limits,
    tokenizer: Tokenizer | None,
) -> Job:
    """The job of POST /v1/completions. `defaults` are the model's sampling parameters."""
    echo = bool(request.echo)
    if echo and request.stream and request.logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs is not available in a stream; leave out stream, echo or logprobs."
        )
    given = sampling_fields(request)
    hidden = request.max_tokens == 0
    if hidden and not echo:
        raise InvalidRequestError("max_tokens is 0; it must be at least 1 unless echo is true.")
    if request.max_tokens is not None:
        given["max_tokens"] = max(request.max_tokens, 1)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if echo:
            given.setdefault("prompt_logprobs", request.logprobs)
    given_prompts = listed(request.prompt)
    limits.check(given_prompts, request.truncate_prompt_tokens)
    prompts = [complete(prompt, request, tokenizer) for prompt in given_prompts]
    shows = request.prompt_logprobs is not None
    return Job(prompts, params_of(given, defaults, request), echo, hidden, shows)


def chat_job(
    request: ChatRequest,
    defaults: Mapping[str, Any],
    limits: Limits,
    trusts_template: bool,
    tokenizer: Tokenizer | None,
) -> Job:
    """The job of POST /v1/chat/completions: the conversation as one prompt.

    Raises:
        InvalidRequestError: the model has no chat template, or the messages do not fit it.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "This model has no tokenizer and no chat template; use /v1/completions with token ids."
        )
    given = sampling_fields(request)
    limit = request.max_completion_tokens or request.max_tokens
    if 0 in (request.max_completion_tokens, request.max_tokens):
        raise InvalidRequestError("max_tokens is 0; it must be at least 1.")
    given["max_tokens"] = limit or defaults.get("max_tokens")  # None: up to the context length
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    template = template_of(request, tokenizer, trusts_template)
    calls = calls_of(request, template)
    chat = conversation(request, tokenizer, trusts_template)
    thoughts = thoughts_of(request, template, chat.text)
    given["structured_outputs"] = constrained(given, thoughts, calls)
    limits.check([{"prompt": chat.text}], request.truncate_prompt_tokens)
    ids = chat.ids(bool(request.add_special_tokens))
    prompt = complete({"prompt": chat.text, "prompt_token_ids": ids}, request, tokenizer)
    shows = request.prompt_logprobs is not None
    params = params_of(given, defaults, request)
    return Job([prompt], params, shows_prompt=shows, parser=partial(parser_of, thoughts, calls))


def conversation(
    request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, trusts_template: bool = False
) -> ChatPrompt:
    """The conversation in the model's format, or in the client's if the server trusts it."""
    template_of(request, tokenizer, trusts_template)  # refuses what cannot be
    told = not isinstance(request, ChatRequest) or request.tool_choice != "none"
    effort = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort else {}
    try:
        return chat_prompt(
            tokenizer,
            request.messages or [],
            request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            chat_template=request.chat_template,
            chat_template_kwargs=effort | (request.chat_template_kwargs or {}),
            tools=request.tools if told else None,
        )
    except InvalidRequestError as error:  # without the folder of the model
        raise InvalidRequestError(str(error).replace(tokenizer.origin, "this model")) from None


def template_of(
    request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, trusts_template: bool
) -> ChatTemplate:
    """The model's chat template, or the client's if the server trusts it."""
    if request.chat_template is None:
        if tokenizer.has_chat_template:
            return tokenizer.template
        raise InvalidRequestError(
            "This model has no chat template (it is a base model); use /v1/completions, or start "
            "the server with --chat-template FILE."
        )
    if not trusts_template:
        raise InvalidRequestError(
            "chat_template is a program with no limit of time, and this server does not take it "
            "from requests; leave it out, or start the server with --trust-request-chat-template."
        )
    return ChatTemplate(request.chat_template, tokenizer.origin, tokenizer.special_tokens)


def listed(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """The prompts of a completion request, each as a text or token ids.

    Raises:
        InvalidRequestError: there is no prompt, or there are more than `MAX_PROMPTS`.
    """
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if prompt and isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    if not 0 < len(prompt) <= MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt has {len(prompt)} entries; it must have from 1 to {MAX_PROMPTS}."
        )
    key = "prompt" if isinstance(prompt[0], str) else "prompt_token_ids"
    return [{key: text} for text in prompt]


def complete(
    prompt: dict[str, Any], request: GenerationRequest, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """A prompt with its cache salt, shortened only if the client asks for it."""
    keep, plain = request.truncate_prompt_tokens, request.add_special_tokens is False
    if "prompt_token_ids" not in prompt and (keep is not None or plain) and prompt["prompt"]:
        if tokenizer is None:
            raise InvalidRequestError("This model has no tokenizer; give the prompt as token ids.")
        prompt = prompt | {"prompt_token_ids": tokenizer.encode(prompt["prompt"], not plain)}
    if keep is not None and len(prompt.get("prompt_token_ids", ())) > keep:
        ids = prompt["prompt_token_ids"][-keep:]
        prompt = {"prompt_token_ids": ids}
        if tokenizer is not None:
            prompt["prompt"] = tokenizer.decode(ids, skip_special_tokens=False)
    return prompt | ({"cache_salt": request.cache_salt} if request.cache_salt else {})


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """The given fields of `SamplingParams`."""
    given = {name: getattr(request, name) for name in SAME}
    given = {name: value for name, value in given.items() if value is not None}
    if (constraint := request.constraint()) is not None:
        given["structured_outputs"] = constraint
    if request.logit_bias is not None:
        given["logit_bias"] = {whole(key): value for key, value in request.logit_bias.items()}
    return given


def whole(key: str) -> int:
    """A token id of `logit_bias`, whose keys are strings in JSON."""
    if key.isascii() and key.isdigit() and len(key) < 12:
        return int(key)
    raise InvalidRequestError(f"logit_bias has the key {shown(key)}; keys are token ids.")


def params_of(
    given: Mapping[str, Any], defaults: Mapping[str, Any], request: GenerationRequest
) -> SamplingParams:
    """Sampling parameters: given fields, else the model's recommended values, else vLLM's."""
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{**defaults, **given, "output_kind": kind})
