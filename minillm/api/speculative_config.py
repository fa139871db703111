"""`speculative_config`: the proposer of drafts, their number, and the acceptance rule."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from typing import Any, Self

from minillm.api.checks import CheckedArguments, checked, choice, is_whole, whole
from minillm.api.sampling_params import shown
from minillm.api.tree_config import AUTO, AUTO_NODES, MOST_NODES, paths_of
from minillm.errors import ConfigError

TRAINED_METHODS = ("medusa", "eagle")  # for one target model, in files of their own
HEAD_METHODS = (*TRAINED_METHODS, "mtp")
METHODS = ("ngram", "suffix", "draft_model", *HEAD_METHODS)
REJECTION_METHODS = ("strict", "standard", "typical", "synthetic")
OF_OTHER_DISTRIBUTION = ("typical", "synthetic")
MAX_DRAFTS = 15  # decode attention takes up to 16 query positions per row
COUNTS = f"a whole number from 1 to {MAX_DRAFTS} (to {MOST_NODES} with a tree) or 'auto'"
# (method or rejection_sample_method, key of it only, its default)
OWN_KEYS = (
    ("ngram", "prompt_lookup_max", None),
    ("ngram", "prompt_lookup_min", None),
    ("suffix", "suffix_decoding_max_tree_depth", 24),
    ("suffix", "suffix_decoding_max_cached_requests", 10_000),
    ("suffix", "suffix_decoding_min_token_prob", 0.3),
    ("typical", "posterior_threshold", 0.09),
    ("typical", "posterior_alpha", 0.3),
)
AUTO_MOST = 8  # maximum drafts per row with "auto"


@dataclass(frozen=True)
class SpeculativeConfig(CheckedArguments):
    """Settings of speculative decoding; names and meanings are vLLM's where it has them.

    Attributes:
        num_speculative_tokens: maximum drafts per sequence and step (k); "auto" chooses the fastest
            number in each step, 0 if plain decoding is faster.
        method: "ngram" looks up the latest tokens earlier in the sequence, "suffix" also in earlier
            outputs, and drafts only what is probable (`speculative/suffix.py`); "draft_model" runs
            a small model (`model`), "medusa" heads and "eagle" a layer that were trained for the
            target (`speculative/medusa.py`, `eagle.py`), "mtp" the multi-token prediction layer of
            the target's own checkpoint (`mtp.py`), and an object with a method ``propose``
            (`speculative/proposer.py`) is a custom proposer. Optional if `model` is given.
        model: name, hub id or folder of the draft model, which must have the target's vocabulary;
            with "medusa" and "eagle", name or folder of the heads or the layer.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that "ngram" looks up; the
            longest is tried first.
        suffix_decoding_max_tree_depth: maximum tokens of a match of "suffix".
        suffix_decoding_max_cached_requests: number of earlier outputs that "suffix" keeps (at most
            65,536 tokens), the latest; 0 keeps none.
        suffix_decoding_min_token_prob: a draft of "suffix" ends where the estimated probability
            that all of it is accepted falls below this.
        disable_by_batch_size: no drafts if more sequences than this are running.
        max_model_len: context length of the draft model, if shorter than its own.
        rejection_sample_method: "strict" (the default; vLLM's is "standard") accepts a draft if it
            equals the token that plain decoding samples, so no token changes. "standard" accepts
            with probability min(1, p / q): it keeps the distribution and accepts more drafts of a
            draft model, but the tokens depend on the number of drafts and on preemptions. "typical"
            accepts what the target finds plausible, which changes the distribution of the text;
            every output says so (`sampling/typical.py`).
            "synthetic" accepts with `synthetic_acceptance_rates`, whatever the drafts are, to
            measure speed with dummy weights.
        tree: a token tree for "medusa", "eagle" or "mtp" (paths only): "auto" grows it from the
            accuracies stored with the heads, and drafts as much of it as is fastest. Or its paths,
            lists of ranks: [0, 1] is the second best token behind the best one. Then
            `num_speculative_tokens` is optional, by default "auto" or all paths.
        posterior_threshold, posterior_alpha: of "typical": a draft of probability p is accepted if
            p > min(threshold, alpha * exp(-entropy)).
        synthetic_acceptance_rates: for each of the k drafts, the probability that it is accepted
            given that all drafts before it are.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    _argument = "speculative_config"
    _example = "{'method': 'ngram', 'num_speculative_tokens': 4}"

    num_speculative_tokens: int | str = checked(
        MISSING,
        Integral | str,
        COUNTS,
        lambda k: k == AUTO or (is_whole(k) and 1 <= k <= MOST_NODES),
    )
    method: Any = checked(
        None,
        object,
        f"one of {', '.join(METHODS)}, or an object with a method 'propose'",
        lambda method: method in METHODS or callable(getattr(method, "propose", None)),
        METHODS,
    )
    model: str | None = checked(None, str, "a name, a hub id or a folder", bool)
    prompt_lookup_max: int | None = whole(None, 1, 64)
    prompt_lookup_min: int | None = whole(None, 1, 64)
    suffix_decoding_max_tree_depth: int | None = whole(None, 1, 1024)
    suffix_decoding_max_cached_requests: int | None = whole(None, 0, 2**31)
    suffix_decoding_min_token_prob: float | None = checked(
        None, Real, "a probability from 0 to 1", lambda p: 0 <= p <= 1
    )
    disable_by_batch_size: int | None = whole(None, 1, 2**31)
    max_model_len: int | None = whole(None, 1, 2**31)
    rejection_sample_method: str = choice("strict", *REJECTION_METHODS)
    posterior_threshold: float | None = checked(
        None, Real, "a probability from 0 to 1", lambda p: 0 <= p <= 1
    )
    posterior_alpha: float | None = checked(None, Real, "a number from 0", lambda a: a >= 0)
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    tree: Any = None

    @classmethod
    def of(cls, given: object) -> Self:
        """The settings for a mapping; with a tree, the number of drafts has a default."""
        if isinstance(given, Mapping) and (tree := given.get("tree")) is not None:
            every = len(tree) if isinstance(tree, list | tuple) else 0
            given = {"num_speculative_tokens": min(every, MOST_NODES) or AUTO} | dict(given)
        return super().of(given)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_method()
        self._check_tree()
        self._check_own_keys()
        self._set_lookup()
        self._check_rates()

    @property
    def name(self) -> str:
        """The method, or the class name of a custom proposer."""
        return self.method if isinstance(self.method, str) else type(self.method).__name__

    @property
    def most(self) -> int:
        """Maximum drafts per sequence and step."""
        if not self.adapts:
            return int(self.num_speculative_tokens)
        if self.tree is None:
            return AUTO_MOST
        return AUTO_NODES if self.tree == AUTO else len(self.tree)

    @property
    def adapts(self) -> bool:
        """Whether the number of drafts is chosen in each step ("auto")."""
        return self.num_speculative_tokens == AUTO

    @property
    def coupled(self) -> bool:
        """Whether drafts are sampled with the noise of the target."""
        return self.rejection_sample_method != "standard"

    @property
    def acceptance(self) -> str | None:
        """The acceptance rule, if it changes the distribution of the text."""
        method = self.rejection_sample_method
        return method if method in OF_OTHER_DISTRIBUTION else None

    def _check_method(self) -> None:
        if self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config has neither 'method' nor 'model'; set method to 'ngram', or "
                "model to a draft model."
            )
        if self.method is None:
            self._set("method", "draft_model")
        takers = ("draft_model", *TRAINED_METHODS)
        if (self.method in takers) != (self.model is not None):
            raise ConfigError(
                f"speculative_config has method {self.name!r} and model {shown(self.model)}; "
                f"{' and '.join(map(repr, takers))} need a model, and no other method takes one."
            )
        if self.max_model_len is not None and self.method != "draft_model":
            raise ConfigError(
                "speculative_config's 'max_model_len' is the context of a draft model; leave it "
                f"out with method {self.name!r}."
            )

    def _check_tree(self) -> None:
        """Check the tree, and that there is one if there are more drafts than a chain has."""
        if self.tree is None and not self.adapts and self.most > MAX_DRAFTS:
            raise ConfigError(
                f"speculative_config's 'num_speculative_tokens' is {self.most}; it must be "
                f"{COUNTS}."
            )
        if self.tree is None:
            return
        if self.method not in HEAD_METHODS or self.rejection_sample_method != "strict":
            raise ConfigError(
                f"speculative_config has a tree with method {self.name!r} and "
                f"rejection_sample_method {self.rejection_sample_method!r}; a tree belongs to "
                f"{', '.join(map(repr, HEAD_METHODS))}, and is verified 'strict'."
            )
        if self.method == "mtp" and AUTO in (self.tree, self.num_speculative_tokens):
            raise ConfigError(
                "speculative_config has a tree with 'auto' and method 'mtp', whose accuracy is not "
                "known; give paths, and no num_speculative_tokens or a number."
            )
        if self.tree != AUTO:
            self._set("tree", paths_of(self.tree))

    def _check_own_keys(self) -> None:
        """Set the defaults of the methods' own keys, and refuse those of other methods."""
        for method, key, default in OWN_KEYS:
            rule = method in REJECTION_METHODS
            value, mine = getattr(self, key), self.rejection_sample_method if rule else self.method
            if value is None and method == mine:
                self._set(key, default)
            elif value is not None and method != mine:
                kind = "rejection_sample_method" if rule else "method"
                raise ConfigError(
                    f"{key} belongs to {kind} {method!r}; leave it out of a speculative_config "
                    f"with {kind} {mine if rule else self.name!r}."
                )

    def _set_lookup(self) -> None:
        """Set the n-gram lengths; if only one is given, the other is the same, as in vLLM."""
        if self.method != "ngram":
            return
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        longest, shortest = longest or shortest or 4, shortest or longest or 2
        if shortest > longest:
            raise ConfigError(
                f"speculative_config's prompt_lookup_min is {shortest} and prompt_lookup_max is "
                f"{longest}; prompt_lookup_min must not be above prompt_lookup_max."
            )
        self._set("prompt_lookup_max", longest)
        self._set("prompt_lookup_min", shortest)

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
        self._set("synthetic_acceptance_rates", tuple(map(float, rates)))


def check_vocabulary(model: str, size: int, target: str, target_size: int) -> None:
    """Raise ConfigError if the vocabulary of a draft model is not as large as the target's."""
    if size != target_size:
        raise ConfigError(
            f"speculative_config's model {model!r} has a vocabulary of {size:,} tokens and "
            f"{target} one of {target_size:,}; choose a draft model with the same vocabulary."
        )
