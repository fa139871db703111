"""The scheduler's configuration, validated when it is built."""

from dataclasses import dataclass
from numbers import Real

from minillm.api.engine_args import EngineArgs
from minillm.errors import ConfigError
from minillm.scheduling.policies import ADMISSIONS, POLICIES

PREEMPTION_MODES = ("recompute", "swap")
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies of a scheduler, named as in vLLM.

    Attributes:
        max_num_seqs: maximum number of running sequences, also of those without a row in a step.
        max_num_batched_tokens: maximum number of tokens per step (the token budget).
        long_prefill_token_threshold: maximum prefill tokens per sequence and step; 0 is no limit.
            With a limit, requests that arrive together may each compute parts of a common prefix,
            because blocks are shared only once a chunk completes them.
        enable_chunked_prefill: whether a prompt may be computed in several steps.
        policy: order of the requests, one of `POLICIES`.
        admission: blocks that a waiting sequence needs for admission, one of `ADMISSIONS`.
        watermark: share of the blocks that admission "watermark" keeps free.
        preemption_mode: "recompute", or "swap" to host memory.
        num_stages: pipeline stages, and so the maximum number of uncommitted plans.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    admission: str = "watermark"
    watermark: float = 0.01
    preemption_mode: str = "recompute"
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running sequence can decode "
                "in every step."
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}; it must be "
                "0 (no limit) or more."
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold splits prompts, which enable_chunked_prefill=False "
                "forbids; leave one of them out."
            )
        if not (isinstance(self.watermark, Real) and 0 <= self.watermark < 1):
            raise ConfigError(f"watermark is {self.watermark!r}; it must be from 0 to below 1.")
        for name, value, allowed in (  # as named in EngineArgs
            ("scheduling_policy", self.policy, tuple(POLICIES)),
            ("admission_policy", self.admission, tuple(ADMISSIONS)),
            ("preemption_mode", self.preemption_mode, PREEMPTION_MODES),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")


def scheduler_config(args: EngineArgs) -> SchedulerConfig:
    """The scheduler's part of the arguments; ConfigError if they contradict each other."""
    budget = args.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs or min(MAX_NUM_SEQS, budget),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        admission=args.admission_policy,
        preemption_mode="swap" if args.swap_space else "recompute",
        num_stages=args.pipeline_parallel_size,
    )
