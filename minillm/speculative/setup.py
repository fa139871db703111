"""Builds the parts of speculative decoding from `speculative_config`: the scheduler's limits, the
executor's proposer and acceptance rule, and the description of the draft model."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from minillm.api.arguments import EngineArgs
from minillm.api.speculative_config import HEAD_METHODS, SpeculativeConfig, check_vocabulary
from minillm.config import ModelConfig
from minillm.errors import ConfigError, MinillmError, ModelNotFoundError
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import ModelSource, open_model
from minillm.models.decoder import Decoder
from minillm.models.packing import copied_weight_bytes
from minillm.sampling.ratio import Ratio
from minillm.sampling.rules import Rule
from minillm.sampling.synthetic import Synthetic
from minillm.sampling.typical import Typical
from minillm.scheduling.adaptive_drafts import AdaptiveDrafts
from minillm.scheduling.drafts import Drafts
from minillm.speculative.features import Features
from minillm.speculative.heads import HeadsSource, heads_tree, open_heads
from minillm.speculative.mtp import mtp_source
from minillm.speculative.ngram import NGrams
from minillm.speculative.proposer import Proposer
from minillm.speculative.suffix import Suffixes
from minillm.text.tokenizer import Tokenizer

MODEL_PRICE = 4.0  # plain steps; expected loss of the first trial of draft models and heads


@dataclass(frozen=True)
class DraftSource:
    """A draft model before its weights are read, checked against the target.

    Attributes:
        context: positions below this can have drafts.
    """

    source: ModelSource
    context: int

    @property
    def config(self) -> ModelConfig:
        """Configuration of the draft model."""
        return self.source.config

    def planned(self, copied: torch.dtype | None = None) -> dict[str, Any]:
        """Its arguments of `memory_plan`; `copied`: the dtype of weights that are held twice."""
        num_bytes = copied_weight_bytes(self.config, copied) if copied else 0
        return {"draft": self.config, "copied_draft_bytes": num_bytes}


def speculation_of(args: EngineArgs) -> SpeculativeConfig | None:
    """The validated `speculative_config`."""
    given = args.speculative_config
    return given if given is None else SpeculativeConfig.of(given)


def open_draft(
    args: EngineArgs, target: ModelSource, tokenizer: Tokenizer | None
) -> DraftSource | HeadsSource | None:
    """The draft model or the draft heads of these arguments, if there are any.

    Raises:
        ConfigError: they cannot be opened, or do not match the target or the arguments.
    """
    config = speculation_of(args)
    if config is not None and config.method in HEAD_METHODS:
        check_heads_can_run(args)
        return open_source(config, target)
    if config is None or config.model is None:
        return None
    name = f"speculative_config's model {config.model!r}"
    try:
        source = open_model(config.model)
    except MinillmError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from error
    sizes = source.config.vocab_size, target.config.vocab_size
    check_vocabulary(config.model, sizes[0], target.name, sizes[1])
    if tokenizer is not None and not has_tokens_of(source, tokenizer):
        raise ConfigError(
            f"{name} has a tokenizer with other tokens than that of {target.name}; choose a draft "
            "model with the same tokenizer."
        )
    return DraftSource(source, draft_context(args, config, source, target))


def open_source(config: SpeculativeConfig, target: ModelSource) -> HeadsSource:
    """The draft heads or the layer of these settings; errors as of `open_heads`."""
    if config.method != "mtp":
        return open_heads(config, target)
    source = mtp_source(target)
    tree, values = heads_tree(config, {}, "the layer", source.most)
    return replace(source, tree=tree, values=values)


def check_heads_can_run(args: EngineArgs) -> None:
    """ConfigError if an engine with these arguments cannot have draft heads."""
    if args.num_ranks > 1:
        raise ConfigError(
            f"draft heads run in one process and this engine has {args.num_ranks} ranks; leave out "
            "the parallel sizes, or choose another method in speculative_config."
        )
    if args.load_format == "dummy":
        raise ConfigError(
            "random weights have no trained heads; leave out load_format, or choose another method "
            "in speculative_config."
        )


def draft_context(
    args: EngineArgs, config: SpeculativeConfig, source: ModelSource, target: ModelSource
) -> int:
    """Context length for drafting: the configured one, or the smaller of both models'."""
    own, longest = source.config.longest_context, args.max_model_len
    if longest is None:
        longest = target.config.longest_context
    if config.max_model_len is None:
        return min(own, longest)
    most, whose = min((own, "the draft model's own"), (longest, "the target's"))
    if config.max_model_len > most:
        raise ConfigError(
            f"speculative_config's max_model_len is {config.max_model_len}; it must be at most "
            f"{most}, {whose} context."
        )
    return config.max_model_len


def has_tokens_of(source: ModelSource, tokenizer: Tokenizer) -> bool:
    """Whether a model's tokenizer has the same tokens as this one; True if it has none."""
    if source.folder is None:
        return True
    try:
        return Tokenizer.from_folder(source.folder).same_tokens(tokenizer)
    except ModelNotFoundError:
        return True


def build_drafts(
    config: SpeculativeConfig, draft: DraftSource | HeadsSource | None = None
) -> Drafts:
    """The policy for the number of drafts per row."""
    limits = config.disable_by_batch_size, None if draft is None else draft.context
    most, values = config.most, tuple[float, ...]()
    if isinstance(draft, HeadsSource):
        most = min(most, draft.most) if draft.tree is None else len(draft.tree)
        values = draft.values
    if not config.adapts:
        return Drafts(most, *limits)
    return AdaptiveDrafts(most, *limits, values, price=MODEL_PRICE if draft is not None else 0.0)


def build_heads(
    config: SpeculativeConfig,
    source: HeadsSource,
    model: Decoder,
    features: Features,
    packs: bool,
    kv: KVCache,
    max_num_tokens: int,
) -> Proposer:
    """The proposer that runs draft heads or an EAGLE layer, in the dtype of the target, whose KV
    cache is `kv`.

    Raises:
        ConfigError: the heads cannot be loaded.
    """
    try:
        heads = source.load(model.dtype, model.device, packs)
    except MinillmError as error:
        name = f"model {config.model!r}" if config.model else f"method {config.method!r}"
        raise ConfigError(f"speculative_config's {name} cannot be loaded: {error}") from error
    return source.proposer(heads, model, features, kv, max_num_tokens, config.coupled)


def build_proposer(config: SpeculativeConfig) -> Proposer:
    """The proposer of a method without a model."""
    if config.method == "ngram":
        return NGrams(config.prompt_lookup_min or 1, config.prompt_lookup_max or 1)
    if config.method == "suffix":
        return Suffixes(
            config.suffix_decoding_min_token_prob or 0.0,
            config.suffix_decoding_max_tree_depth or 1,
            config.suffix_decoding_max_cached_requests or 0,
        )
    return config.method


def build_rule(config: SpeculativeConfig) -> Rule | None:
    """The acceptance rule; None compares drafts with samples, which does not change the tokens."""
    if config.synthetic_acceptance_rates is not None:
        return Synthetic(config.synthetic_acceptance_rates)
    if config.rejection_sample_method == "typical":
        return Typical(config.posterior_threshold or 0.0, config.posterior_alpha or 0.0)
    return Ratio() if config.rejection_sample_method == "standard" else None
