"""What is decided once, when an engine starts: device, dtype, tokenizer, memory."""

import logging
from dataclasses import replace

import torch

from minillm import machine
from minillm.config import ModelConfig
from minillm.cost import MemoryPlan, memory_plan
from minillm.engine_args import NOT_BUILT_YET, EngineArgs
from minillm.errors import ConfigError, ModelNotFoundError
from minillm.models.checkpoint import ModelSource, find_folder
from minillm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def choose_device(device: str) -> torch.device:
    """The device of an engine; "auto" is a GPU if there is one."""
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


def limit_threads() -> None:
    """Never more torch threads than processors: torch does not see a container's CPU quota, and
    threads without a processor make every product wait for the next time slice."""
    torch.set_num_threads(min(torch.get_num_threads(), machine.cpu_count()))


def choose_dtype(dtype: str, config: ModelConfig, device: torch.device) -> str:
    """The dtype of an engine: "auto" takes the checkpoint's on a GPU, on a CPU the fastest."""
    if dtype != "auto":
        return dtype
    if device.type != "cpu":
        return config.dtype
    return "bfloat16" if machine.cpu_has_bf16() else "float32"


def open_tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer | None:
    """The tokenizer of the model, or the one that was asked for; None with a warning if absent."""
    if args.tokenizer is not None:
        return Tokenizer.from_folder(find_folder(str(args.tokenizer)))
    if source.folder is None:
        return None
    try:
        return Tokenizer.from_folder(source.folder)
    except ModelNotFoundError as error:
        logger.warning("%s", error)
        return None


def end_tokens(source: ModelSource, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a sequence, the tokenizer's own first. An id without a logit never comes."""
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
    """Bytes that are free on the device."""
    if device.type == "cpu":
        return machine.available_memory_bytes()
    return torch.get_device_module(device).mem_get_info(device)[0]


def plan_memory(
    args: EngineArgs, config: ModelConfig, dtype: str, device: torch.device
) -> tuple[int, MemoryPlan]:
    """The context length and the memory plan; ConfigError when a sequence cannot fit."""
    longest = config.longest_context
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {args.max_model_len}; {config.family} with this config.json has "
            f"positions for {longest} tokens."
        )
    plan = memory_plan(
        config,
        free_memory(device),
        dtype=dtype,
        max_model_len=args.max_model_len or longest,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=1,
        block_size=1,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    if args.kv_cache_memory_bytes is not None:
        plan = with_cache_of(plan, args.kv_cache_memory_bytes)
    if plan.fits:
        return plan.settings.max_model_len, plan
    if args.max_model_len is not None or plan.num_tokens < 2:
        # The plan knows of options that this version's engine does not have yet.
        hints = [h for h in plan.hints if h.split("=")[0] not in NOT_BUILT_YET]
        raise ConfigError(
            f"{args.model} needs {plan.weight_bytes:,} bytes of weights and "
            f"{plan.settings.max_model_len} x {plan.kv_bytes_per_token:,} of KV cache, which is "
            f"{plan.shortfall_bytes:,} more than may be used; try {' or '.join(hints)}."
        )
    logger.warning("max_model_len is %d, which is what memory allows.", plan.num_tokens)
    return plan.num_tokens, plan


def with_cache_of(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The same plan with a KV cache of a given size, which must hold a sequence and fit."""
    needed = plan.settings.max_model_len * plan.kv_bytes_per_token
    usable = plan.memory_bytes - plan.reserve_bytes
    excess = plan.weight_bytes + plan.activation_bytes + num_bytes - usable
    fits = excess <= 0
    return replace(
        plan,
        kv_cache_bytes=num_bytes,
        num_tokens=num_bytes // plan.kv_bytes_per_token if fits else 0,
        shortfall_bytes=max(0, needed - num_bytes, excess),
        hints=(f"kv_cache_memory_bytes={needed}",) if fits else plan.hints,
    )
