"""Bodies of requests to the HTTP API: OpenAI's fields and vLLM's additions.

Each field here is checked for its type only. `SamplingParams` checks ranges, in the same way as for
`LLM`. A field with the value null counts as absent, because several clients send all fields.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import from_json

from minillm.api.sampling_params import MAX_LOGIT_BIAS, shown
from minillm.errors import InvalidRequestError, UnsupportedFeatureError, did_you_mean

MAX_PROMPTS = 64  # of one request
MAX_SEQUENCES = 16  # n: completions of one prompt
MAX_NAMES = 10  # unknown fields and errors that a reply lists
MAX_SHOWN = 80  # characters of a client's value in a reply
MAX_FIELDS = 256  # of a body
MAX_VALUES = 2**19  # commas, colons and opening brackets of a body
MARKS = (b",", b":", b"[", b"{")
CHUNK = 2**18  # bytes that are searched at a time
MAX_TOKENS = 2**18  # of POST /detokenize
MAX_CHARACTERS = 2**20  # of POST /tokenize

# Fields that would change the output if they were supported. All others are ignored, and listed in
# a response header. A constraint that is silently ignored is worse than an error.
STRUCTURED = "give it in structured_outputs, such as {'regex': '[0-9]+'}, or use response_format"
FUNCTIONS = "it is the old form of tools and tool_choice; use those"
BEAMS = "beam search is not supported; use n with a temperature above 0"
UNSUPPORTED = "it is not supported; leave it out"
CHATS = "it is for /v1/chat/completions and messages; leave it out"
VARIABLE = "it is not a field; if the chat template reads it, give it in chat_template_kwargs"
REASONS: Mapping[str, str] = {
    STRUCTURED: "json_schema regex ebnf grammar",
    CHATS: "tools tool_choice parallel_tool_calls chat_template chat_template_kwargs "
           "reasoning_effort",
    FUNCTIONS: "functions function_call",
    BEAMS: "use_beam_search length_penalty early_stopping",
    VARIABLE: "enable_thinking thinking reasoning",
    UNSUPPORTED: "structural_tag logits_processors documents thinking_token_budget verbosity "
                 "prompt_embeds modalities audio prediction web_search_options",
    "text cannot be inserted before a suffix; leave it out": "suffix",
    "it is not supported; use n": "best_of",
}  # fmt: skip
CONSTRAINTS: Mapping[str, str] = {
    name: reason for reason, names in REASONS.items() for name in names.split()
}
HARMLESS: Mapping[str, Sequence[Any]] = {
    "tool_choice": ("none", "auto"), "best_of": (1,), "early_stopping": (False,),
    "length_penalty": (1, 1.0), "parallel_tool_calls": (True, False), "modalities": (["text"],),
    "verbosity": ("medium",), "chat_template_kwargs": ({},),
}  # fmt: skip

T = TypeVar("T", bound="ApiRequest")


def checked_prompt(value: Any) -> Any:
    """A prompt of one of its four types. pydantic would make an error for each wrong entry and each
    of the types, which takes minutes for a body of 8 MiB."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        if len(value) > MAX_PROMPTS and kinds != {int}:
            raise ValueError(
                f"prompt has {len(value)} entries; it must have from 1 to {MAX_PROMPTS}"
            )
        inner = {kind for item in value if isinstance(item, list) for kind in set(map(type, item))}
        if kinds in (set(), {int}, {str}) or (kinds == {list} and inner <= {int}):
            return value
    elif isinstance(value, str):
        return value
    raise ValueError(
        "prompt must be a text, a list of texts, a list of token ids, or lists of them"
    )


Prompts = str | list[str] | list[int] | list[list[int]]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ApiRequest(BaseModel):
    """The base of all bodies: strict types, finite numbers, and unknown fields kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="Name of the model; null means the one served.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if len(data) > MAX_FIELDS:
                raise ValueError(
                    f"The body has {len(data)} fields; at most {MAX_FIELDS} may be sent"
                )
            bias = data.get("logit_bias")
            if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
                raise ValueError(
                    f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed"
                )
            return {name: value for name, value in data.items() if value is not None}
        return data

    @property
    def ignored(self) -> list[str]:
        """Names of given fields without effect."""
        return sorted(self.model_extra or {})

    def refuse_constraints(self) -> None:
        """Raise UnsupportedFeatureError for a given field that should constrain the output."""
        for name, value in (self.model_extra or {}).items():
            known = STRUCTURED if name.startswith("guided_") else CONSTRAINTS.get(name)
            nothing = value in (False, []) and known is not VARIABLE
            if known and not nothing and value not in HARMLESS.get(name, ()):
                raise UnsupportedFeatureError(f"{name[:MAX_SHOWN]}: {known}.")


class StreamOptions(BaseModel):
    """What a stream reports besides the text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(ApiRequest):
    """Fields of completions and chat completions."""

    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's additions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: dict[str, Any] | None = None
    bad_words: Texts | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream; set stream to true, or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs is not available in a stream; leave one of them out")
        self.constraint()
        return self

    def constraint(self) -> dict[str, Any] | None:
        """The fields of structured_outputs: the given ones, or those of response_format."""
        given, format = self.structured_outputs, self.response_format or {}
        kind = format.get("type", "text")
        if kind == "text":
            return given
        if given is not None:
            raise ValueError("structured_outputs and response_format are given; leave one out")
        if kind == "json_object":
            return {"json_object": True}
        if kind != "json_schema":
            raise ValueError(
                f"response_format of type {shown(kind)}: it must be text, json_object or "
                "json_schema"
            )
        inner = format.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise ValueError("response_format has no object json_schema.schema; give the schema")
        return {"json": inner["schema"]}


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[Prompts, PlainValidator(checked_prompt, json_schema_input_type=Prompts)]
    echo: bool | None = None
    logprobs: int | None = None


class TemplateFields(ApiRequest):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, description="With --trust-request-chat-template.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="A variable of the template.")
    tools: Messages | None = Field(None, description="Functions that the model may call.")


class ChatRequest(GenerationRequest, TemplateFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (also if absent), required, or a function."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set logprobs to true")
        if self.echo:
            raise ValueError("echo is for /v1/completions; leave it out")
        return self


class TokenizeRequest(TemplateFields):
    """The body of POST /tokenize: a prompt, or messages."""

    prompt: str | None = Field(None, max_length=MAX_CHARACTERS)
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (given := self.model_fields_set & CONSTRAINTS.keys()):
            raise ValueError(f"{min(given)}: {CHATS}")
        return self


class DetokenizeRequest(ApiRequest):
    """The body of POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True)]


def parse(kind: type[T], body: bytes) -> T:
    """The request in a body.

    Raises:
        InvalidRequestError: the body is not JSON, or a field has the wrong type; the message has at
            most `MAX_NAMES` errors, and at most `MAX_SHOWN` characters of each value.
        UnsupportedFeatureError: a field that should constrain the output and is not supported.
    """
    if has_too_many_values(body):
        raise InvalidRequestError(
            f"The body has more than {MAX_VALUES:,} JSON values; send fewer token ids or messages "
            "per request."
        )
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(
            f"The body is a JSON {type(data).__name__}; it must be an object."
        )
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise InvalidRequestError(explained(error, kind, data)) from None
    request.refuse_constraints()
    return request


def has_too_many_values(body: bytes) -> bool:
    """Whether a body has more than `MAX_VALUES` commas, colons and opening brackets outside of
    strings. The JSON parser makes all objects in one call, while no other thread can run."""
    if sum(map(body.count, MARKS)) <= MAX_VALUES:
        return False
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that quotes only enclose strings
    number = num_quotes = 0
    for begin in range(0, len(body), CHUNK):
        pieces = body[begin : begin + CHUNK].split(b'"')
        outside = b"".join(pieces[num_quotes % 2 :: 2])
        number += sum(map(outside.count, MARKS))
        num_quotes += len(pieces) - 1
        if number > MAX_VALUES:
            return True
    return False


def explained(error: ValidationError, kind: type[BaseModel], data: dict[str, Any]) -> str:
    """The errors of a body in one sentence per field."""
    fields: dict[str, tuple[str, str]] = {}
    missing: list[str] = []
    for fault in error.errors(include_url=False, include_context=False):
        name, entry = str(fault["loc"][0]) if fault["loc"] else "", entry_of(data, fault["loc"])
        if fault["type"] == "missing":
            missing.append(name)
        # Of a field with several types, the error of the type that was meant is inside the value.
        elif len(entry) > len(fields.get(name, ("", ""))[0]) or name not in fields:
            fields[name] = entry, sentence(entry, fault["msg"], fault["input"])
    texts = [f"{name} is missing" for name in missing] + [text for _, text in fields.values()]
    if missing:
        unknown = [str(name)[:MAX_SHOWN] for name in data if name not in kind.model_fields]
        texts[0] += did_you_mean(missing[0], unknown).replace(" Did you mean", ", did you mean")
    return "; ".join(texts[:MAX_NAMES]).rstrip(".?") + "."


def entry_of(data: Any, path: Sequence[int | str]) -> str:
    """The name of the wrong entry, such as ``logit_bias['5']``. Other parts of pydantic's path name
    a type."""
    name = ""
    for part in path:
        if (isinstance(data, list) and isinstance(part, int)) or (
            isinstance(data, dict) and part in data
        ):
            data = data[part]  # type: ignore[index]
            name = f"{name}[{part!r:.{MAX_SHOWN}}]" if name else str(part)
    return name


def sentence(name: str, message: str, given: object) -> str:
    """One of pydantic's errors in words, with the value that was given."""
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    shown = repr(given)[:MAX_SHOWN] if isinstance(given, str | int | float | bool) else ""
    shown = "null" if given is None else shown
    what = f"{name} is {shown}" if shown else f"{name} is a {type(given).__name__}"
    return f"{what}: {message[:1].lower()}{message[1:]}"
