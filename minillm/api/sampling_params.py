"""Sampling parameters of a request: a frozen, fully checked dataclass.

Names, defaults and meanings are vLLM's, so that scripts run on both. The type and the range of
every value are checked here; NaN and infinity are refused. A server passes on values from untrusted
clients, so every list and string has a maximum length.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import IntEnum
from numbers import Integral, Real
from typing import Any

from minillm.api.refusals import explain_frozen, refuse_unknown_arguments, shown
from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.errors import InvalidRequestError

GREEDY_BELOW = 1e-5  # lower temperatures are greedy, as in vLLM
MAX_STOP_STRINGS = 16
MAX_STRING_LENGTH = 256  # of one stop string or bad word, in characters
MAX_BAD_WORDS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
INT32_MAX = 2**31 - 1


class RequestOutputKind(IntEnum):
    """The content of a stream's outputs: all tokens so far (CUMULATIVE), the new tokens only
    (DELTA), or all tokens in one output at the end (FINAL_ONLY)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in [low, high]; numpy integers are accepted, booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be an integer.")
    if not low <= int(value) <= high:
        raise InvalidRequestError(
            f"{name} is {shown(value)}; it must be an integer from {low} to {high}."
        )
    return int(value)


def check_float(name: str, value: Any, low: float, high: float, above: bool = False) -> float:
    """`value` as a finite float in [low, high], or in (low, high] if `above`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a number.")
    # `not (...)` refuses NaN, for which every comparison is false.
    number: Any = value  # numbers.Real declares no comparison with a float
    if not (low < number <= high if above else low <= number <= high):
        bounds = f"above {low:g} and at most {high:.9g}" if above else f"from {low:g} to {high:.9g}"
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a number {bounds}.")
    return float(value)


def _int(default: int | None, low: int, high: int, optional: bool = False) -> Any:
    """A dataclass field holding an integer in [low, high], or None if `optional`."""
    limits = {"check": check_int, "limits": (low, high), "optional": optional}
    return field(default=default, metadata=limits)


def _float(default: float, low: float, high: float, above: bool = False) -> Any:
    """A dataclass field holding a finite number in [low, high], or in (low, high]."""
    return field(default=default, metadata={"check": check_float, "limits": (low, high, above)})


@refuse_unknown_arguments
@explain_frozen
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Each field lists its default and its range.

    Frozen, because a request must not change while it runs: where a vLLM script assigns
    ``params.max_tokens = 5``, write ``params = dataclasses.replace(params, max_tokens=5)``.

    Order of the logits processors, as in vLLM: `structured_outputs` and `allowed_token_ids`,
    `bad_words`, `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, then `top_k` and
    `top_p`. Reported logprobs are those of the raw logits, before any of these.

    Raises:
        InvalidRequestError: a value of the wrong type or outside its range.
        UnknownArgumentError: a name that does not exist.
    """

    n: int = _int(1, 1, 64)  # completions of one prompt
    temperature: float = _float(1.0, 0.0, 1e6)  # divides the logits; 0 is greedy
    top_k: int = _int(0, -1, INT32_MAX)  # the k most probable tokens (and ties); 0 or -1: all
    top_p: float = _float(1.0, 0.0, 1.0, above=True)  # fewest tokens of this mass (1904.09751)
    min_p: float = _float(0.0, 0.0, 1.0)  # threshold relative to the best token (2407.01082)
    presence_penalty: float = _float(0.0, -2.0, 2.0)  # subtracted from tokens in the output
    frequency_penalty: float = _float(0.0, -2.0, 2.0)  # the same, times their counts
    repetition_penalty: float = _float(1.0, 0.01, 100.0)  # prompt and output (CTRL, 1909.05858)
    max_tokens: int | None = _int(16, 1, INT32_MAX, True)  # None: up to the context length
    min_tokens: int = _int(0, 0, INT32_MAX)  # no end of sequence and no stop token before
    seed: int | None = _int(None, -(2**63), 2**63 - 1, True)  # None or -1: a new random one
    logprobs: int | None = _int(None, 0, 20, True)  # 0: the sampled token only
    prompt_logprobs: int | None = _int(None, 0, 20, True)
    stop: Sequence[str] = ()  # one string or several; the text ends before the first match
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None  # token id -> -100 .. 100, added to the logit
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # used by streams only
    structured_outputs: StructuredOutputsParams | Any = None  # or a mapping of its fields

    def __post_init__(self) -> None:
        for item in fields(self):
            self._check_number_or_flag(item)
        self._set("top_k", max(self.top_k, 0))
        self._set("seed", None if self.seed == -1 else self.seed)
        stop = _strings("stop", self.stop, MAX_STOP_STRINGS)
        bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        stop_ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._set("stop", stop)
        self._set("bad_words", bad_words)
        self._set("stop_token_ids", stop_ids)
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, INT32_MAX)
            if not allowed:
                raise InvalidRequestError("allowed_token_ids is empty; it needs at least one id.")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))
        self._set("output_kind", _output_kind(self.output_kind))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        self._check_combinations()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen (temperature 0) instead of sampling."""
        return self.temperature < GREEDY_BELOW

    def clone(self) -> "SamplingParams":
        """A copy. Parameters are frozen, so `dataclasses.replace` makes a changed one."""
        return replace(self)

    def _set(self, name: str, value: object) -> None:
        """Store the normalised form of an argument; used only by `__post_init__`."""
        object.__setattr__(self, name, value)

    def _check_number_or_flag(self, item: Field) -> None:
        value = getattr(self, item.name)
        if "check" in item.metadata:
            if value is not None or not item.metadata.get("optional"):
                self._set(
                    item.name, item.metadata["check"](item.name, value, *item.metadata["limits"])
                )
        elif isinstance(item.default, bool) and not isinstance(value, bool):
            raise InvalidRequestError(f"{item.name} is {shown(value)}; it must be True or False.")

    def _check_combinations(self) -> None:
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos is True and structured_outputs is given; nothing may follow a complete "
                "output, so leave one of them out."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, "
                f"which is {self.max_tokens}."
            )
        if self.greedy and self.n > 1:
            raise InvalidRequestError(
                f"n is {self.n} and temperature is {self.temperature:g}; greedy completions are "
                "identical, so set n to 1 or raise the temperature."
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop is {shown(self.stop)} and detokenize is False; stop strings need the text, "
                "so leave detokenize on or use stop_token_ids."
            )


def validate_against_model(
    params: SamplingParams, logit_width: int, bad_words_ids: Iterable[Sequence[int]] = ()
) -> None:
    """Check that the model has a logit for every token id in `params`.

    An id out of range would write into another request's row of the logits.

    Args:
        logit_width: rows of the output embedding, including those without a token.
        bad_words_ids: token ids of each of `params.bad_words`.

    Raises:
        InvalidRequestError: names the parameter and the first id out of range.
    """
    used: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": (token for word in bad_words_ids for token in word),
    }
    for name, ids in used.items():
        for token in ids:
            if not 0 <= token < logit_width:
                raise InvalidRequestError(
                    f"{name} contains token id {token}; this model has ids from 0 to "
                    f"{logit_width - 1}."
                )


def _output_kind(value: object) -> RequestOutputKind:
    """The `RequestOutputKind` for a member, or for its number as JSON has it."""
    if type(value) is int and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    if not isinstance(value, RequestOutputKind):
        names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
        raise InvalidRequestError(f"output_kind is {shown(value)}; it must be one of {names}.")
    return value


def _items(name: str, value: object, most: int) -> tuple[Any, ...]:
    """The items of a list or tuple, at most `most`; none for None."""
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a list.")
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {most} are allowed.")
    return tuple(value)


def _strings(name: str, value: object, most: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) and name == "stop" else _items(name, value, most)
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STRING_LENGTH:
            raise InvalidRequestError(
                f"{name} contains {shown(item)}; each entry must be a string of 1 to "
                f"{MAX_STRING_LENGTH} characters."
            )
    return items


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    items = _items(name, value, most)
    return tuple(check_int(f"a token id in {name}", item, 0, INT32_MAX) for item in items)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {shown(value)}; it must map token ids to numbers from -100 to 100."
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed."
        )
    return {
        check_int("a token id in logit_bias", token, 0, INT32_MAX): check_float(
            f"logit_bias of token {shown(token)}", bias, -100.0, 100.0
        )
        for token, bias in value.items()
    }
