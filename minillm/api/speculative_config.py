"""`speculative_config`: the proposer of drafts, their number, and the acceptance rule."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from minillm.api.sampling_params import shown
from minillm.errors import ConfigError, UnknownArgumentError, did_you_mean

METHODS = ("ngram", "draft_model")
REJECTION_METHODS = ("strict", "standard", "synthetic")
MAX_DRAFTS = 15  # decode attention takes up to 16 query positions per row
AUTO = "auto"
AUTO_MOST = 8  # maximum drafts per row with "auto"


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding; names and meanings are vLLM's where it has them.

    Attributes:
        num_speculative_tokens: maximum drafts per sequence and step (k); "auto" chooses the fastest
            number in each step, 0 if plain decoding is faster.
        method: "ngram" looks up the latest tokens earlier in the sequence, "draft_model" runs a
            small model (`model`), and an object with a method ``propose``
            (`speculative/proposer.py`) is a custom proposer. Optional if `model` is given.
        model: name, hub id or folder of the draft model, which must have the target's vocabulary.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that "ngram" looks up; the
            longest is tried first.
        disable_by_batch_size: no drafts if more sequences than this are running.
        max_model_len: context length of the draft model, if shorter than its own.
        rejection_sample_method: "strict" (the default; vLLM's is "standard") accepts a draft if it
            equals the token that plain decoding samples, so no token changes. "standard" accepts
            with probability min(1, p / q): it keeps the distribution and accepts more drafts of a
            draft model, but the tokens depend on the number of drafts and on preemptions.
            "synthetic" accepts with `synthetic_acceptance_rates`, whatever the drafts are, to
            measure speed with dummy weights.
        synthetic_acceptance_rates: for each of the k drafts, the probability that it is accepted
            given that all drafts before it are.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    num_speculative_tokens: int | str
    method: Any = None
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    disable_by_batch_size: int | None = None
    max_model_len: int | None = None
    rejection_sample_method: str = "strict"
    synthetic_acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        self._check_method()
        if self.num_speculative_tokens != AUTO:
            self._check_count("num_speculative_tokens", 1, MAX_DRAFTS, " or 'auto'")
        for name in ("disable_by_batch_size", "max_model_len"):
            self._check_count(name, 1, 2**31)
        if self.method == "ngram":
            self._set_lookup()
        elif self.prompt_lookup_max is not None or self.prompt_lookup_min is not None:
            raise ConfigError(
                "prompt_lookup_max and prompt_lookup_min belong to method 'ngram'; leave them out "
                f"of a speculative_config with method {self.name!r}."
            )
        if self.rejection_sample_method not in REJECTION_METHODS:
            raise ConfigError(
                f"rejection_sample_method is {shown(self.rejection_sample_method)}; it must "
                f"be one of {', '.join(REJECTION_METHODS)}."
            )
        self._check_rates()

    @classmethod
    def of(cls, given: object) -> "SpeculativeConfig":
        """The config for a mapping of names to values."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"speculative_config is {shown(given)}; it must be a dictionary such as "
                "{'method': 'ngram', 'num_speculative_tokens': 4}."
            )
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise UnknownArgumentError(
                    f"speculative_config has no key {shown(name)}; it has "
                    f"{', '.join(map(repr, known))}."
                    f"{did_you_mean(str(name), known)}"
                )
        if "num_speculative_tokens" not in given:
            raise ConfigError(
                "speculative_config has no 'num_speculative_tokens'; set it to a number of drafts "
                "per step such as 4, or to 'auto'."
            )
        return cls(**given)

    @property
    def name(self) -> str:
        """The method, or the class name of a custom proposer."""
        return self.method if isinstance(self.method, str) else type(self.method).__name__

    @property
    def most(self) -> int:
        """Maximum drafts per sequence and step."""
        return AUTO_MOST if self.adapts else int(self.num_speculative_tokens)

    @property
    def adapts(self) -> bool:
        """Whether the number of drafts is chosen in each step ("auto")."""
        return self.num_speculative_tokens == AUTO

    def _check_method(self) -> None:
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(
                f"speculative_config's model is {shown(self.model)}; it must be a name, a hub id "
                "or a folder."
            )
        if self.method is None:
            if self.model is None:
                raise ConfigError(
                    "speculative_config has neither 'method' nor 'model'; set method to 'ngram', "
                    "or model to a draft model."
                )
            object.__setattr__(self, "method", "draft_model")
        elif isinstance(self.method, str):
            if self.method not in METHODS:
                raise ConfigError(
                    f"speculative_config's method is {shown(self.method)}; it must be one of "
                    f"{', '.join(METHODS)}, or an object with a method 'propose'."
                    f"{did_you_mean(self.method, METHODS)}"
                )
        elif not callable(getattr(self.method, "propose", None)):
            raise ConfigError(
                f"speculative_config's method is a {type(self.method).__name__}; it must be one of "
                f"{', '.join(METHODS)}, or an object with a method 'propose'."
            )
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config has method {self.name!r} and model {shown(self.model)}; "
                "'draft_model' needs a model, and no other method takes one."
            )
        if self.max_model_len is not None and self.method != "draft_model":
            raise ConfigError(
                "speculative_config's 'max_model_len' is the context of a draft model; leave it "
                f"out with method {self.name!r}."
            )

    def _check_count(self, name: str, least: int, most: int, other: str = "") -> None:
        value = getattr(self, name)
        if value is None:
            return
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise ConfigError(
                f"speculative_config's {name!r} is {shown(value)}; it must be a whole number "
                f"from {least} to {most}{other}."
            )
        object.__setattr__(self, name, int(value))

    def _set_lookup(self) -> None:
        """Set the n-gram lengths; if only one is given, the other is the same, as in vLLM."""
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            self._check_count(name, 1, 64)
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None and shortest is None:
            longest, shortest = 4, 2
        longest, shortest = longest or shortest, shortest or longest
        if longest is None or shortest is None or shortest > longest:
            raise ConfigError(
                f"speculative_config's prompt_lookup_min is {shortest} and prompt_lookup_max is "
                f"{longest}; prompt_lookup_min must not be above prompt_lookup_max."
            )
        object.__setattr__(self, "prompt_lookup_max", longest)
        object.__setattr__(self, "prompt_lookup_min", shortest)

    def _check_rates(self) -> None:
        rates = self.synthetic_acceptance_rates
        if (self.rejection_sample_method == "synthetic") != (rates is not None):
            raise ConfigError(
                "synthetic_acceptance_rates and rejection_sample_method='synthetic' belong "
                "together; give both or neither."
            )
        if rates is None:
            return
        numbers = isinstance(rates, list | tuple) and all(
            isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates
        )
        if not numbers or len(rates) != self.most:
            raise ConfigError(
                f"synthetic_acceptance_rates is {shown(rates)}; it must be {self.most} numbers "
                "from 0 to 1, one for each of num_speculative_tokens."
            )
        object.__setattr__(self, "synthetic_acceptance_rates", tuple(map(float, rates)))


def check_vocabulary(model: str, size: int, target: str, target_size: int) -> None:
    """Raise ConfigError if the vocabulary of a draft model is not as large as the target's."""
    if size != target_size:
        raise ConfigError(
            f"speculative_config's model {model!r} has a vocabulary of {size:,} tokens and "
            f"{target} one of {target_size:,}; choose a draft model with the same vocabulary."
        )
