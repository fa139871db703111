"""The arguments of an engine, which are the constructor arguments of `LLM`, with their checks."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from minillm.api.checks import CheckedArguments, checked, choice, flag, number, whole
from minillm.api.sampling_params import refuse_unknown_arguments, shown
from minillm.api.speculative_config import SpeculativeConfig
from minillm.config import DTYPE_BYTES
from minillm.errors import ConfigError, UnsupportedFeatureError, did_you_mean

QUANTIZATIONS = ("int8", "int4")  # of a 16-bit checkpoint while it is loaded
KV_CACHE_DTYPES = ("auto", "int8")
DTYPE_ALIASES: Mapping[str, str] = {"half": "float16", "float": "float32"}
REMOTE_BACKENDS = ("external", "ray")  # ranks are started outside this process
# vLLM's arguments without effect here: the accepted values, and the reason why others are not.
FLAG = (True, False), "it may be True or False"
IGNORED: Mapping[str, tuple[tuple[Any, ...], str]] = {  # each gives a warning
    "use_v2_block_manager": FLAG,
    "disable_log_requests": FLAG,
    "enable_log_requests": FLAG,
    "trust_remote_code": ((False,), "minillm never runs code of a checkpoint"),
}
ONLY_DEFAULT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tokenizer_mode": (("auto",), "there is one tokenizer, that of tokenizer.json"),
    "skip_tokenizer_init": ((False,), "a model's tokenizer is always loaded, if it has one"),
    "revision": ((None,), "give the folder of that revision as model"),
    "download_dir": ((None,), "set the environment variable HF_HUB_CACHE instead"),
}

T = TypeVar("T", bound=type)


def check_kv_cache_dtype(name: object, known: tuple[str, ...] = KV_CACHE_DTYPES) -> None:
    """UnsupportedFeatureError unless it is a known dtype of the KV cache."""
    if name in known:
        return
    why = f"it must be one of {', '.join(known)}"
    if str(name).startswith("fp8"):
        why = (
            "int8 takes the same memory with a tenth of its error (KL divergence 0.0009 against "
            "0.0087 on SmolLM2-135M), so use int8"
        )
    elif "int4" in str(name):
        why = (
            "with values in 4 bits the KL divergence on SmolLM2-135M is 0.012, and with keys in 4 "
            "bits 0.13, where int8 has 0.0009, so use int8"
        )
    raise UnsupportedFeatureError(
        f"kv_cache_dtype={shown(name)} is not supported; {why}.{did_you_mean(str(name), known)}"
    )


def without_meaningless(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop vLLM's arguments that have no effect here; an ignored argument gives a warning.

    Raises:
        UnsupportedFeatureError: a value other than those accepted.
    """
    for name, (accepted, reason) in {**ONLY_DEFAULT, **IGNORED}.items():
        if name in arguments:
            value = arguments.pop(name)
            if value not in accepted:
                raise UnsupportedFeatureError(f"{name}={shown(value)} is not supported: {reason}.")
            if name in IGNORED:
                warnings.warn(f"{name} has no meaning in minillm and is ignored.", stacklevel=3)
    return arguments


CACHE_POLICIES = ("longest_prefix_match",)  # those with `reads_cache`


@dataclass(frozen=True)
class EplbConfig(CheckedArguments):
    """Expert-parallel load balancing (EPLB); names, meanings and defaults are vLLM's.

    Attributes:
        window_size: number of latest steps over which expert load is measured. Each rank keeps 4
            bytes per step, expert and layer.
        step_interval: steps between two placements.
        num_redundant_experts: slots for copies of popular experts, over all ranks of a stage; the
            number of slots in all must be a multiple of the ranks.

    Raises:
        ConfigError: a value out of its range.
    """

    _argument = "eplb_config"
    _example = "{'step_interval': 3000, 'num_redundant_experts': 2}"

    window_size: int = whole(1000, 1, 2**31 - 1)
    step_interval: int = whole(3000, 1, 2**31 - 1)
    num_redundant_experts: int = whole(0, 0, 2**31 - 1)


@refuse_unknown_arguments
@dataclass(frozen=True)
class EngineArgs(CheckedArguments):
    """Arguments of an engine; names and meanings are vLLM's.

    `dtype` "auto" is the checkpoint's on a GPU, bfloat16 on a CPU with bf16 instructions, else
    float32. `gpu_memory_utilization` is the share of the device's free memory for weights,
    activations and KV cache together. It applies to a CPU, too, where the KV cache takes at most a
    quarter of what is left after weights and activations. `kv_cache_memory_bytes`, or
    `num_gpu_blocks_override` in blocks of `block_size` tokens, sets the size of the KV cache
    directly. `max_model_len` None is the model's own length, reduced if the KV cache is smaller.
    `kv_cache_dtype` "int8" stores keys and values in 8 bits, with a scale for each token and head;
    "auto" stores them in `dtype`.

    A step has at most `max_num_seqs` sequences (256, or fewer for a small token budget) and
    `max_num_batched_tokens` tokens (2048; 8192 on a GPU of 40 GB), of which at most
    `long_prefill_token_threshold` are of one prompt. `admission_policy` admits a request when its
    prompt fits into the free blocks ("watermark"), or only when its maximum length does
    ("reserve_max"). When blocks run out, the most recently admitted request is preempted: its KV is
    swapped out to `swap_space` GiB of host memory, or recomputed if there is no swap space
    (`preemption_mode`).

    `scheduling_policy` is the order in which waiting requests are scheduled:

    - "fcfs": first come, first served.
    - "priority": lowest `priority=` of `generate` first, without aging.
    - "shortest_prefill_first": short prompts first; 16 tokens cost one place in the queue.
    - "longest_prefix_match": cached prompts first; 16 cached tokens gain one place in the queue.

    `async_scheduling` plans and launches a step while the previous one runs, which hides host
    overhead; one extra token per finished request is computed and discarded. The default None
    enables it on a GPU, but not on a CPU, where model and scheduler share the cores.

    `deterministic` makes logprobs bitwise identical for any batch, any chunks of the prompt, with a
    cached prefix and after preemption, on one machine with one torch version and one number of
    threads. For a dense model on a CPU with the C functions they are also identical for any number
    of threads, and for a `tensor_parallel_size` of 1, 2, 4 and 8 if 8 divides the inputs of the o
    and down projections; other models log a warning and need the same `tensor_parallel_size`. It
    is slower.

    On a GPU, the decode steps of several batch sizes are captured as CUDA graphs when the engine
    starts; `enforce_eager` runs every step eagerly, on a CPU with plain torch.
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
    process ("threads", for tests and experiments), or on other machines, started by torchrun
    ("external") or by Ray ("ray"). Ranks of Ray connect to `master_addr`, an address of this
    machine, and `master_port`; port 0 lets the system choose one.
    An `AsyncLLMEngine` logs its statistics every ten seconds (INFO, "minillm.serving.stat_logger")
    unless `disable_log_stats`.

    Raises:
        ConfigError: a value out of its range.
        UnknownArgumentError: a name that does not exist.
        UnsupportedFeatureError: a known option that this version does not support.
    """

    model: str | Path = checked(
        MISSING, str | Path, "a name, a hub id or a folder", lambda m: m != ""
    )
    tokenizer: str | Path | None = checked(None, str | Path, "a folder or a name")
    dtype: str = choice("auto", "auto", *DTYPE_BYTES)
    device: str = checked(
        "auto",
        str,
        "'auto', 'cpu', 'cuda' or 'cuda:N'",
        lambda device: device in ("auto", "cpu") or device.startswith("cuda"),
    )
    quantization: str | None = None
    load_format: str = choice("auto", "auto", "dummy")
    max_model_len: int | None = whole(None, least=2)  # at least one prompt and one new token
    gpu_memory_utilization: float = number(0.9, 1e-9, 1, "above 0 and at most 1")
    kv_cache_memory_bytes: int | None = whole(None)
    num_gpu_blocks_override: int | None = whole(None)
    block_size: int | None = whole(None)
    kv_cache_dtype: str = "auto"
    max_num_seqs: int | None = whole(None)
    max_num_batched_tokens: int | None = whole(None)
    long_prefill_token_threshold: int = whole(0, least=0)
    enable_prefix_caching: bool | None = flag(None)
    prefix_cache: str | None = choice(
        None, "hash", "radix", note=", and enable_prefix_caching=False turns it off"
    )
    enable_chunked_prefill: bool = flag(True)
    swap_space: float = number(0, 0, 2**20, "a number of GiB from 0 to 1,048,576")
    preemption_mode: str | None = choice(None, "recompute", "swap")
    scheduling_policy: str = checked("fcfs", str, "a name")  # the scheduler knows the names
    admission_policy: str = checked("watermark", str, "a name")
    enforce_eager: bool = flag(False)
    async_scheduling: bool | None = flag(None)
    tensor_parallel_size: int = whole(1)
    pipeline_parallel_size: int = whole(1)
    data_parallel_size: int = whole(1)
    enable_expert_parallel: bool = flag(False)
    enable_eplb: bool = flag(False)
    eplb_config: EplbConfig | Mapping[str, Any] | None = None
    distributed_executor_backend: str | None = choice(None, "mp", "threads", *REMOTE_BACKENDS)
    master_addr: str = checked("127.0.0.1", str, "an address or host name of this machine", bool)
    master_port: int = whole(0, 0, 65535)
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    deterministic: bool = flag(False)
    seed: int = whole(0, 0, 2**63 - 1)
    disable_log_stats: bool = flag(False)

    def __post_init__(self) -> None:
        # Accept a torch.dtype, which prints as torch.float16, and a torch.device.
        dtype = str(self.dtype).removeprefix("torch.")
        self._set("dtype", DTYPE_ALIASES.get(dtype, dtype))
        self._set("device", str(self.device))
        self._set("seed", 0 if self.seed is None else self.seed)
        if self.kv_cache_dtype == "int8_per_token_head":  # vLLM's name
            self._set("kv_cache_dtype", "int8")
        super().__post_init__()
        if self.speculative_config is not None:
            self._set("speculative_config", SpeculativeConfig.of(self.speculative_config))
        if self.eplb_config is not None:
            self._set("eplb_config", EplbConfig.of(self.eplb_config))
        self._check_cache()
        self._check_ranks()
        self._check_supported()

    @property
    def num_ranks(self) -> int:
        """Ranks that run the model, as processes or threads."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

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

    def _check_cache(self) -> None:
        """Check the combination of KV cache size, prefix caching and preemption mode."""
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both set the size of the KV "
                "cache; give one of them."
            )
        by_prefix = self.scheduling_policy in CACHE_POLICIES
        if self.enable_prefix_caching is False and (self.prefix_cache is not None or by_prefix):
            name = "scheduling_policy" if self.prefix_cache is None else "prefix_cache"
            raise ConfigError(
                f"{name}={getattr(self, name)!r} needs prefix caching, which "
                "enable_prefix_caching=False turns off; leave one of them out."
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError(
                "preemption_mode='swap' needs host memory; set swap_space to some GiB."
            )
        if self.preemption_mode == "recompute" and self.swap_space:
            raise ConfigError(
                f"swap_space={self.swap_space} is not used by preemption_mode='recompute'; leave "
                "one of them out."
            )

    def _check_ranks(self) -> None:
        """Check that options of ranks come with the ranks they need."""
        if self.enable_expert_parallel and self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel needs ranks, but tensor_parallel_size and "
                "data_parallel_size are 1; set one of them to 2 or more, or leave it out."
            )
        if self.eplb_config is not None and not self.enable_eplb:
            raise ConfigError(
                "eplb_config has no effect without enable_eplb; set enable_eplb=True, or leave "
                "eplb_config out."
            )
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError(
                "enable_eplb needs expert parallelism; set enable_expert_parallel=True, too, or "
                "leave enable_eplb out."
            )
        if self.distributed_executor_backend in REMOTE_BACKENDS and self.num_ranks == 1:
            raise ConfigError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} needs ranks; "
                "set tensor_parallel_size or another size to 2 or more."
            )

    def _check_supported(self) -> None:
        """Refuse options and combinations that this version does not support."""
        if self.quantization not in (None, *QUANTIZATIONS):
            raise UnsupportedFeatureError(
                f"quantization={shown(self.quantization)} is not one of "
                f"{', '.join(QUANTIZATIONS)}; a checkpoint that is already quantised needs no "
                "quantization, because its config.json names the format."
            )
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.kv_cache_dtype == "int8" and (self.block_size or 4) % 4:
            raise ConfigError(
                f"block_size is {self.block_size}; with kv_cache_dtype='int8' it must be a "
                "multiple of 4."
            )
        if self.pipeline_parallel_size > 1 and self.speculative_config is not None:
            raise UnsupportedFeatureError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size} and speculative_config "
                "is set; drafting needs tokens that are still in the pipeline, so leave one of "
                "them out."
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.data_parallel_size > 1 and getattr(self, name) > 1:
                raise UnsupportedFeatureError(
                    f"data_parallel_size is {self.data_parallel_size} and {name} is "
                    f"{getattr(self, name)}; this version does not support both, so set one of "
                    "them to 1."
                )
        if self.data_parallel_size > 1 and self.deterministic and self.enable_expert_parallel:
            raise UnsupportedFeatureError(
                f"deterministic and enable_expert_parallel cannot be used together with "
                f"data_parallel_size={self.data_parallel_size}, because an expert computes the "
                "tokens of all ranks in one batch; leave out deterministic or "
                "enable_expert_parallel."
            )
        if self.enable_eplb and self.deterministic:
            raise UnsupportedFeatureError(
                "enable_eplb cannot be used with deterministic, because moving an expert to "
                "another rank changes the order of additions; leave one of them out."
            )


def accept_meaningless_arguments(cls: T) -> T:
    """Class decorator over a dataclass: vLLM's arguments without effect here only warn."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def lenient_init(self: object, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **without_meaningless(kwargs))

    cls.__init__ = lenient_init  # type: ignore[misc]
    return cls


@accept_meaningless_arguments
@refuse_unknown_arguments
@dataclass(frozen=True)
class AsyncEngineArgs(EngineArgs):
    """Arguments of an `AsyncLLMEngine`: those of `EngineArgs` and `max_num_requests`.

    The scheduler has at most `max_num_requests` unfinished requests, so its work per step is
    bounded. Further requests wait outside in arrival order (with scheduling_policy="priority", in
    priority order).

    Raises the errors of `EngineArgs`.
    """

    max_num_requests: int = whole(1024)
