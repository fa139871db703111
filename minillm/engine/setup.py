"""Choices made once when an engine starts: device, dtype, tokenizer, memory plan."""

import gc
import logging
from dataclasses import replace
from functools import partial
from math import ceil

import torch

from minillm.api.arguments import EngineArgs
from minillm.cache.manager import BlockManager
from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.execution.executor import Capacity, Executor
from minillm.execution.graphs import has_graphs
from minillm.execution.setup import build_executor, packs, records
from minillm.models.all_layers import sizes_fit
from minillm.models.checkpoint import ModelSource
from minillm.models.deterministic import PASS_ROWS
from minillm.models.forward_pass import ForwardPass
from minillm.models.loader import DTYPES, load_model
from minillm.models.packing import copied_weight_bytes
from minillm.models.quantize import quantize_weights, quantize_while_reading
from minillm.models.weight_sizes import Layout, planned_sizes
from minillm.ops import backend_of, cpu, has_int8_kernels
from minillm.parallel.split import largest_part
from minillm.plan import machine
from minillm.plan.cost import MemoryPlan, PlanSettings, memory_plan
from minillm.plan.parameters import parameter_count
from minillm.plan.weight_sizes import WeightSizes
from minillm.scheduling.config import scheduler_config
from minillm.scheduling.data_parallel import DataParallelScheduler, schedulers_of
from minillm.scheduling.scheduler import Scheduler
from minillm.speculative.heads import HeadsSource
from minillm.speculative.setup import DraftSource, build_drafts, speculation_of
from minillm.structured.grammars import Grammars
from minillm.text.tokenizer import Tokenizer
from minillm.trace.recorder import TraceSettings

logger = logging.getLogger(__name__)

GPU_BLOCK_SIZE = 16
LARGE_GPU, LARGE_GPU_TOKENS = 40 * 10**9, 8192  # from so many bytes on, tokens per step
CPU_BLOCK_SIZE = 32
CPU_CACHE_SHARE = 0.25  # of the memory left for the cache; the rest stays for other programs


def choose_device(device: str) -> torch.device:
    """The device of an engine; "auto" is the GPU if there is one, else the CPU."""
    has_gpu = torch.get_device_module("cuda").is_available()
    if device == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; it must be 'auto', 'cpu' or 'cuda:N'.") from error
    if chosen.type == "cuda" and not has_gpu:
        raise ConfigError(f"device is {device!r}, but torch sees no CUDA GPU; use device='cpu'.")
    return chosen


def with_defaults_of(args: EngineArgs, device: torch.device) -> EngineArgs:
    """The arguments with the device's token budget: a large GPU is idle with few tokens per step,
    and each step with prompts costs the host as much as several of decodes."""
    if device.type != "cuda" or args.max_num_batched_tokens is not None:
        return args
    large = torch.get_device_module(device).mem_get_info(device)[1] >= LARGE_GPU
    return replace(args, max_num_batched_tokens=LARGE_GPU_TOKENS) if large else args


def choose_dtype(dtype: str, config: ModelConfig, device: torch.device, eager: bool = False) -> str:
    """The dtype of an engine; "auto" is the checkpoint's on a GPU and the fastest on a CPU."""
    if dtype != "auto":
        return dtype
    if device.type != "cpu":
        return config.dtype
    fast = machine.cpu_has_bf16() or (not eager and is_fast_in_c(config))
    return "bfloat16" if fast else "float32"


def is_fast_in_c(config: ModelConfig) -> bool:
    """Whether all matrices and the attention of a model are computed in C in bf16. Without bf16
    instructions this reads half the bytes of float32, but torch's own bf16 is slow."""
    return cpu.panels_are_fast(torch.bfloat16) and sizes_fit(config)


def end_tokens(source: ModelSource, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-sequence ids, the tokenizer's first; ids without a logit are dropped."""
    own = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ids = tuple(dict.fromkeys((*own, *source.eos_token_ids)))
    width = source.config.vocab_size
    for token_id in ids:
        if token_id >= width:
            logger.warning(
                "The end-of-sequence id %d is ignored: the model has ids up to %d.",
                token_id,
                width - 1,
            )
    return tuple(token_id for token_id in ids if token_id < width)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device, with those that torch keeps of an engine before."""
    if device.type == "cpu":
        return machine.available_memory_bytes()
    gc.collect()  # an engine has cycles
    torch.get_device_module(device).empty_cache()
    return torch.get_device_module(device).mem_get_info(device)[0]


def plan_memory(
    args: EngineArgs,
    source: ModelSource,
    dtype: str,
    device: torch.device,
    draft: DraftSource | HeadsSource | None = None,
) -> tuple[int, MemoryPlan]:
    """The context length and the memory plan.

    Raises:
        ConfigError: `max_model_len` is longer than the model's, or one sequence does not fit.
    """
    config, longest = source.config, source.config.longest_context
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}; {config.family} with this config.json has "
            f"positions for {longest} tokens."
        )
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    experts = args.data_parallel_size, args.num_redundant_experts
    # All ranks share the host memory.
    free = free_memory(device) // (args.num_ranks if device.type == "cpu" else 1)
    limits = scheduler_config(args)
    speculation, copies = speculation_of(args), packs(args, device)
    # Our kernels have routers in float32.
    wide = has_graphs(device) * parameter_count(config).router * (4 - DTYPES[dtype].itemsize)
    weights, draft_weights = sizes_of_weights(args, source, DTYPES[dtype], device, draft)
    planned = partial(
        memory_plan,
        largest_part(config, *sizes, args.enable_expert_parallel, *experts),
        free,
        dtype=dtype,
        kv_dtype=kv_dtype_of(args, device, config, draft),
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        padding=PASS_ROWS if args.deterministic else 0,  # a batch is padded to whole tiles
        block_size=args.block_size or (CPU_BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE),
        gpu_memory_utilization=args.gpu_memory_utilization,
        copied_weight_bytes=copied_weight_bytes(config, DTYPES[dtype]) if copies else wide,
        cuda_graphs=records(args, device),
        num_drafts=0 if speculation is None else speculation.most,
        weights=weights,
        draft_weights=draft_weights,
        cache_of=partial(cache_bytes, args, device),
        **(draft.planned(DTYPES[dtype] if copies else None) if draft else {}),
    )
    plan = planned(max_model_len=args.max_model_len or longest)
    if not plan.fits:
        if args.max_model_len is not None or plan.num_tokens < 2:
            raise ConfigError(why_it_does_not_fit(args, plan))
        logger.warning("max_model_len is reduced to %d, limited by memory.", plan.num_tokens)
        plan = planned(max_model_len=plan.num_tokens)
    check_swap_space(args, plan, device)
    return plan.settings.max_model_len, plan


def kv_dtype_of(
    args: EngineArgs,
    device: torch.device,
    config: ModelConfig,
    draft: DraftSource | HeadsSource | None,
) -> str | None:
    """The dtype of both models' KV caches; None is that of the weights.

    Raises:
        UnsupportedFeatureError: the device or one of the models does not support it.
    """
    if args.kv_cache_dtype == "auto":
        return None
    cache_spec(config, args.kv_cache_dtype)
    for model in (config, draft.config if draft else config):
        if device.type != "cpu" and not has_int8_kernels(device, model.head_dim):
            raise UnsupportedFeatureError(
                f"kv_cache_dtype='int8' on {device} needs Triton kernels, which are for GPUs from "
                "compute capability 8.0 on and heads of at most 256 dimensions, a multiple of 8; "
                f"here: {backend_of(device).why}, and heads have {model.head_dim}; leave it out."
            )
    try:
        if draft is not None:
            cache_spec(draft.config, args.kv_cache_dtype)
    except UnsupportedFeatureError as error:
        raise UnsupportedFeatureError(
            f"The KV cache of the draft model is of the target's kind: {error}"
        ) from None
    return args.kv_cache_dtype


def sizes_of_weights(
    args: EngineArgs,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    draft: DraftSource | HeadsSource | None,
) -> tuple[WeightSizes | None, WeightSizes | None]:
    """The sizes of quantised weights, of the model and of its draft model."""
    layout, dummy = Layout(dtype, device, packs(args, device)), args.load_format == "dummy"
    weights = planned_sizes(source, layout, args.quantization, dummy)
    small = None if draft is None else draft.source
    return weights, None if small is None else planned_sizes(small, layout, dummy=dummy)


def why_it_does_not_fit(args: EngineArgs, plan: MemoryPlan) -> str:
    """The message of the error: bytes needed, bytes available, and what to change."""
    settings, model = plan.settings, str(args.model)
    if plan.draft_weight_bytes:
        model += " with its draft model"
    usable = plan.memory_bytes - plan.reserve_bytes
    left = usable - plan.weight_bytes - plan.activation_bytes
    rest = (
        f"{plan.weight_bytes:,} bytes of weights, {plan.activation_bytes:,} of activations for "
        f"{settings.max_num_batched_tokens:,} tokens in one step"
    )
    budget = f"only {usable:,} may be used ({settings.gpu_memory_utilization:g} of what is free)"
    needed = ceil(settings.max_model_len / settings.block_size)
    block = plan.block_bytes
    given = args.num_gpu_blocks_override or args.kv_cache_memory_bytes
    if given is None or left < needed * block:
        return (
            f"{model} needs {rest} and {needed * block:,} of KV cache for one sequence of "
            f"{settings.max_model_len:,}, and {budget}; try {' or '.join(plan.hints)}."
        )
    name, least, most = "kv_cache_memory_bytes", needed * block, left
    if args.num_gpu_blocks_override is not None:
        name, least, most = "num_gpu_blocks_override", needed, left // block
    if given > most:
        return (
            f"{name} is {given:,}; it must be at most {most:,}, because {model} also needs "
            f"{rest}, and {budget}."
        )
    return (
        f"{name} is {given:,}; it must be at least {least:,} for one sequence of max_model_len="
        f"{settings.max_model_len} tokens, so raise it or lower max_model_len."
    )


def check_swap_space(args: EngineArgs, plan: MemoryPlan, device: torch.device) -> None:
    """ConfigError if `swap_space` exceeds the free host memory. Its pages are allocated at first
    use, where a shortage would end the process."""
    free = machine.available_memory_bytes()
    if device.type == "cpu":  # model and KV cache are in host memory, too
        free -= plan.weight_bytes + plan.activation_bytes + plan.kv_cache_bytes
    if args.swap_space * 2**30 > max(free, 0):
        raise ConfigError(
            f"swap_space is {args.swap_space}; it must be at most {max(free, 0) / 2**30:.1f} "
            "GiB, the host memory that is free beside model and KV cache."
        )


def cache_bytes(
    args: EngineArgs, device: torch.device, left: int, block: int, settings: PlanSettings
) -> int:
    """Bytes of the KV cache: the size given in `args`; else all memory left on a GPU, and on a CPU
    a share of it, but at most `max_num_seqs` sequences of `max_model_len` tokens."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override * block
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    if device.type != "cpu":
        return left
    longest = ceil(settings.max_model_len / settings.block_size) * block
    return min(left, max(int(CPU_CACHE_SHARE * left), longest), settings.max_num_seqs * longest)


def open_executor(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | HeadsSource | None = None,
    grammars: Grammars | None = None,
) -> tuple[Executor, ForwardPass | None]:
    """The executor of step plans, and the `ForwardPass` if the model is in this process."""
    if args.num_ranks > 1:
        from minillm.parallel.launch import open_ranks

        small = draft if isinstance(draft, DraftSource) else None  # heads are refused before
        return open_ranks(args, source, plan, device, small), None
    dtype, limit = DTYPES[plan.settings.dtype], plan.settings.max_model_len
    prepare = partial(quantize_while_reading, how=args.quantization) if args.quantization else None
    model = load_model(source, dtype, device, limit, args.load_format, args.seed, shard=prepare)
    if args.quantization:
        quantize_weights(model, args.quantization)
    runner = build_executor(args, model, plan, limit, draft)
    runner.sampler.edits.grammars = grammars
    return runner, ForwardPass(model)


def build_scheduler(
    args: EngineArgs, capacity: Capacity, draft: DraftSource | HeadsSource | None = None
) -> Scheduler | DataParallelScheduler:
    """The scheduler over an executor's blocks; with data parallelism one for each rank."""
    copies = [one_scheduler(args, capacity, draft) for _ in range(args.data_parallel_size)]
    return DataParallelScheduler(copies) if len(copies) > 1 else copies[0]


def one_scheduler(
    args: EngineArgs, capacity: Capacity, draft: DraftSource | HeadsSource | None
) -> Scheduler:
    """The scheduler of one data-parallel rank."""
    prefix_cache = None if args.enable_prefix_caching is False else args.prefix_cache or "hash"
    blocks = BlockManager(
        capacity.num_blocks, capacity.block_size, prefix_cache, capacity.num_host_blocks
    )
    speculation = speculation_of(args)
    drafts = None if speculation is None else build_drafts(speculation, draft)
    return Scheduler(scheduler_config(args), blocks, drafts=drafts)


def trace_settings(
    name: str,
    memory: MemoryPlan,
    device: torch.device,
    scheduler: Scheduler | DataParallelScheduler,
) -> TraceSettings:
    """The model, device, scheduler and cache settings of an engine, for its trace."""
    config, blocks, copies = scheduler.config, scheduler.blocks, len(schedulers_of(scheduler))
    return TraceSettings(
        model=name,
        dtype=memory.settings.dtype,
        kv_dtype=memory.settings.kv_dtype,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        device=str(device),
        policy=config.policy,
        admission=config.admission,
        preemption=config.preemption_mode,
        prefix_cache=blocks.prefix_cache,
        block_size=blocks.block_size,
        num_blocks=copies * blocks.pool.num_blocks,
        num_host_blocks=copies * blocks.host.num_blocks,
        max_num_seqs=copies * config.max_num_seqs,
        max_num_batched_tokens=copies * config.max_num_batched_tokens,
    )
