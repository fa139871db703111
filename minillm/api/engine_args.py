"""The arguments of an engine, which are the constructor arguments of `LLM`, with their checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minillm.api.eplb_config import EplbConfig
from minillm.api.sampling_params import refuse_unknown_arguments, shown
from minillm.api.speculative_config import SpeculativeConfig
from minillm.config import DTYPE_BYTES
from minillm.errors import ConfigError, UnsupportedFeatureError

# Known options that are not implemented, each with the only value that is accepted.
NOT_BUILT_YET: Mapping[str, Any] = MappingProxyType(
    {
        "quantization": None,
        "kv_cache_dtype": "auto",
    }
)
DTYPE_ALIASES: Mapping[str, str] = MappingProxyType({"half": "float16", "float": "float32"})
DTYPES = ("auto", *DTYPE_BYTES)
LOAD_FORMATS = ("auto", "dummy")
COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "block_size",
)
PREFIX_CACHES = ("hash", "radix")
EXECUTOR_BACKENDS = ("mp", "threads", "external", "ray")
REMOTE_BACKENDS = ("external", "ray")  # ranks are started outside this process
PREEMPTION_MODES = ("recompute", "swap")
FLAGS = (
    "enable_chunked_prefill",
    "enforce_eager",
    "enable_expert_parallel",
    "enable_eplb",
    "deterministic",
    "disable_log_stats",
)
MAX_SWAP_SPACE = 2**20  # GiB


def is_whole(value: object) -> bool:
    """Whether `value` is a Python or numpy integer; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@refuse_unknown_arguments
@dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine; names and meanings are vLLM's.

    `dtype` "auto" is the checkpoint's on a GPU, bfloat16 on a CPU with bf16 instructions, else
    float32. `gpu_memory_utilization` is the share of the device's free memory for weights,
    activations and KV cache together. It applies to a CPU, too, where the KV cache takes at most a
    quarter of what is left after weights and activations. `kv_cache_memory_bytes`, or
    `num_gpu_blocks_override` in blocks of `block_size` tokens, sets the size of the KV cache
    directly. `max_model_len` None is the model's own length, reduced if the KV cache is smaller.

    A step has at most `max_num_seqs` sequences (256, or fewer for a small token budget) and
    `max_num_batched_tokens` tokens (2048), of which at most `long_prefill_token_threshold` are of
    one prompt. `admission_policy` admits a request when its prompt fits into the free blocks
    ("watermark"), or only when its maximum length does ("reserve_max"). When blocks run out, the
    most recently admitted request is preempted: its KV is swapped out to `swap_space` GiB of host
    memory, or recomputed if there is no swap space (`preemption_mode`).

    `scheduling_policy` is the order in which waiting requests are scheduled:

    - "fcfs": first come, first served.
    - "priority": lowest `priority=` of `generate` first, without aging.
    - "shortest_prefill_first": short prompts first; 16 tokens cost one place in the queue.
    - "longest_prefix_match": cached prompts first; 16 cached tokens gain one place in the queue.

    `async_scheduling` plans and launches a step while the previous one runs, so that a GPU does not
    wait for the host. One extra token is computed for each finished request and discarded. The
    default None enables it on a GPU and disables it on a CPU, where model and scheduler share the
    cores.

    `deterministic` makes logprobs bitwise identical for any batch, any chunks of the prompt, with a
    cached prefix and after preemption, on one machine with one torch version and one number of
    threads. For a dense model on a CPU with the C functions they are also identical for any number
    of threads, and for a `tensor_parallel_size` of 1, 2, 4 and 8 if 8 divides the inputs of the o
    and down projections; other models log a warning and need the same `tensor_parallel_size`. It
    is slower (``python -m minillm.lab.benchmarks.deterministic`` measures how much).

    On a GPU, the decode steps of a batch size are captured as a CUDA graph at the first use;
    `enforce_eager` runs every step eagerly, on a CPU with plain torch.
    `speculative_config` enables speculative decoding (`SpeculativeConfig`), for example
    ``{"method": "ngram", "num_speculative_tokens": 4}``; by default it changes no token.

    `tensor_parallel_size` ranks each hold a share of every layer's heads and MLP units.
    `pipeline_parallel_size` stages each hold some of the layers, with as many steps in flight.
    `data_parallel_size` ranks each hold a copy of the model, with their own requests, blocks and
    limits, and run their steps together. `enable_expert_parallel` places whole experts on the ranks
    instead of a share or a copy of each. `enable_eplb` rebalances them every few thousand steps by
    how often each was chosen (`EplbConfig`), for example
    ``{"step_interval": 3000, "num_redundant_experts": 2}``; it changes no token.
    `distributed_executor_backend` runs ranks as processes ("mp", the default), as threads of this
    process ("threads", for tests and experiments), or on other machines, started by `minillm node`
    or torchrun ("external") or by Ray ("ray"). Ranks on other machines connect to `master_addr`, an
    address of this machine, and `master_port`; port 0 lets the system choose one.
    An `AsyncLLMEngine` logs its statistics every ten seconds (level INFO, logger
    "minillm.serving.stat_logger") unless `disable_log_stats`.

    Raises:
        ConfigError: a value out of its range.
        UnknownArgumentError: a name that does not exist.
        UnsupportedFeatureError: a known option that this version does not support.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    load_format: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool | None = None
    prefix_cache: str | None = None
    enable_chunked_prefill: bool = True
    swap_space: float = 0
    preemption_mode: str | None = None
    scheduling_policy: str = "fcfs"
    admission_policy: str = "watermark"
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: EplbConfig | Mapping[str, Any] | None = None
    distributed_executor_backend: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    deterministic: bool = False
    seed: int = 0
    disable_log_stats: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(
                f"model is {shown(self.model)}; it must be a name, a hub id or a folder."
            )
        for name, only in NOT_BUILT_YET.items():
            value = getattr(self, name)
            if value is not None and value != only:
                raise UnsupportedFeatureError(
                    f"{name}={shown(value)} is not built yet; leave {name} out in this version."
                )
        if self.tokenizer is not None and not isinstance(self.tokenizer, str | Path):
            raise ConfigError(
                f"tokenizer is {shown(self.tokenizer)}; it must be a folder or a name."
            )
        # Accept a torch.dtype, which prints as torch.float16, and a torch.device.
        object.__setattr__(self, "device", str(self.device))
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        self._check_choice("dtype", DTYPES)
        self._check_choice("load_format", LOAD_FORMATS)
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise ConfigError(
                f"device is {shown(self.device)}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'."
            )
        for name in COUNTS:
            if getattr(self, name) is not None:
                # The shortest sequence is one prompt token and one new token.
                self._check_count(name, least=2 if name == "max_model_len" else 1)
        self._check_count("long_prefill_token_threshold", least=0)
        if self.speculative_config is not None:
            config = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", config)
        for name in ("scheduling_policy", "admission_policy"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be a name.")
        self._check_share()
        self._check_cache()
        self._check_ranks()
        seed = 0 if self.seed is None else self.seed
        if not is_whole(seed) or not 0 <= seed < 2**63:
            raise ConfigError(
                f"seed is {shown(seed)}; it must be an integer from 0 to {2**63 - 1}."
            )
        object.__setattr__(self, "seed", int(seed))
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be a bool.")
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(
                f"async_scheduling is {shown(self.async_scheduling)}; it must be a bool or None."
            )

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(
                f"{name} is {shown(getattr(self, name))}; it must be one of {', '.join(allowed)}."
            )

    def _check_count(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if not (is_whole(value) and least <= value < 2**63):
            raise ConfigError(
                f"{name} is {shown(value)}; it must be a whole number of at least {least}."
            )
        object.__setattr__(self, name, int(value))

    def _check_share(self) -> None:
        share = self.gpu_memory_utilization
        number = isinstance(share, Real) and not isinstance(share, bool)
        if not (number and 1e-9 <= share <= 1):  # also refuses NaN
            raise ConfigError(
                f"gpu_memory_utilization is {shown(share)}; it must be above 0 and at most 1."
            )
        object.__setattr__(self, "gpu_memory_utilization", float(share))

    @property
    def num_ranks(self) -> int:
        """Ranks that run the model, as processes or threads."""
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        return prod(sizes)

    @property
    def eplb(self) -> EplbConfig | None:
        """The settings of expert load balancing; None if it is disabled."""
        return EplbConfig.of(self.eplb_config or {}) if self.enable_eplb else None

    @property
    def num_redundant_experts(self) -> int:
        """Slots for copies of experts, over all ranks together."""
        return self.eplb.num_redundant_experts if self.eplb else 0

    @property
    def step_interval(self) -> int:
        """Steps between two placements of experts; 0 if load balancing is disabled."""
        return self.eplb.step_interval if self.eplb else 0

    def _check_ranks(self) -> None:
        self._check_count("tensor_parallel_size")
        self._check_count("pipeline_parallel_size")
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()
        self._check_count("data_parallel_size")
        shared = self.tensor_parallel_size, self.data_parallel_size
        if self.enable_expert_parallel and max(shared) == 1:
            raise ConfigError(
                "enable_expert_parallel needs ranks, but tensor_parallel_size and "
                "data_parallel_size are 1; set one of them to 2 or more, or leave it out."
            )
        if self.data_parallel_size > 1:
            self._check_data_parallel()
        self._check_eplb()
        if self.distributed_executor_backend is not None:
            self._check_choice("distributed_executor_backend", EXECUTOR_BACKENDS)
        if self.distributed_executor_backend in REMOTE_BACKENDS and self.num_ranks == 1:
            raise ConfigError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} needs ranks; "
                "set tensor_parallel_size or another size to 2 or more."
            )
        self._check_count("master_port", least=0)
        if not isinstance(self.master_addr, str) or not self.master_addr:
            raise ConfigError(
                f"master_addr is {shown(self.master_addr)}; it must be an address or host name of "
                "this machine."
            )
        if self.master_port > 65535:
            raise ConfigError(f"master_port is {self.master_port}; it must be from 0 to 65535.")

    def _check_data_parallel(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                raise UnsupportedFeatureError(
                    f"data_parallel_size is {self.data_parallel_size} and {name} is "
                    f"{getattr(self, name)}; this version does not support both, so set one of "
                    "them to 1."
                )
        if self.deterministic and self.enable_expert_parallel:
            raise UnsupportedFeatureError(
                f"deterministic and enable_expert_parallel cannot be used together with "
                f"data_parallel_size={self.data_parallel_size}, because an expert computes the "
                "tokens of all ranks in one batch; leave out deterministic or "
                "enable_expert_parallel."
            )

    def _check_eplb(self) -> None:
        if self.eplb_config is not None:
            object.__setattr__(self, "eplb_config", EplbConfig.of(self.eplb_config))
            if not self.enable_eplb:
                raise ConfigError(
                    "eplb_config has no effect without enable_eplb; set enable_eplb=True, or leave "
                    "eplb_config out."
                )
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError(
                "enable_eplb needs expert parallelism; set enable_expert_parallel=True, too, or "
                "leave enable_eplb out."
            )
        if self.enable_eplb and self.deterministic:
            raise UnsupportedFeatureError(
                "enable_eplb cannot be used with deterministic, because moving an expert to "
                "another rank changes the order of additions; leave one of them out."
            )

    def _check_pipeline(self) -> None:
        if self.speculative_config is not None:
            raise UnsupportedFeatureError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} and speculative_config "
                "is set; drafting needs tokens that are still in the pipeline, so leave one of "
                "them out."
            )

    def _check_cache(self) -> None:
        """Check the KV cache's size, prefix caching, and the preemption mode."""
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both set the size of the KV "
                "cache; give one of them."
            )
        if not isinstance(self.enable_prefix_caching, bool | None):
            raise ConfigError(
                f"enable_prefix_caching is {shown(self.enable_prefix_caching)}; it must be a bool."
            )
        if self.prefix_cache is not None:
            if self.prefix_cache not in PREFIX_CACHES:
                raise ConfigError(
                    f"prefix_cache is {shown(self.prefix_cache)}; it must be one of "
                    f"{', '.join(PREFIX_CACHES)}, and enable_prefix_caching=False turns it off."
                )
            if self.enable_prefix_caching is False:
                raise ConfigError(
                    f"prefix_cache={self.prefix_cache!r} needs prefix caching, which "
                    "enable_prefix_caching=False turns off; leave one of them out."
                )
        if self.scheduling_policy == "longest_prefix_match" and self.enable_prefix_caching is False:
            raise ConfigError(
                "scheduling_policy='longest_prefix_match' needs prefix caching, which "
                "enable_prefix_caching=False turns off; leave one of them out."
            )
        swap, number = self.swap_space, isinstance(self.swap_space, Real)
        if isinstance(swap, bool) or not number or not 0 <= swap <= MAX_SWAP_SPACE:
            raise ConfigError(
                f"swap_space is {shown(swap)}; it must be a number of GiB from 0 to "
                f"{MAX_SWAP_SPACE:,}."
            )
        object.__setattr__(self, "swap_space", int(swap) if is_whole(swap) else float(swap))
        if self.preemption_mode is not None:
            self._check_choice("preemption_mode", PREEMPTION_MODES)
            if self.preemption_mode == "swap" and not swap:
                raise ConfigError(
                    "preemption_mode='swap' needs host memory; set swap_space to some GiB."
                )
            if self.preemption_mode == "recompute" and swap:
                raise ConfigError(
                    f"swap_space={swap} is not used by preemption_mode='recompute'; leave one of "
                    "them out."
                )
