"""What an engine tells about itself: its memory, and what a trace of it is a trace of."""

import torch

from minillm.runner import Runner
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import TraceSettings


def allocated(runner: Runner, device: torch.device) -> dict[str, int]:
    """Bytes that were really allocated, under the names of the memory plan's parts, and for graphs.

    "activations" is the peak of a GPU's allocator beyond the rest; a CPU's does not tell.
    """
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    sizes = {
        "weights": sum(tensor.nbytes for tensor in tensors),
        "kv_cache": runner.kv.num_bytes,
        "swap_space": runner.host.num_bytes if runner.host else 0,
    }
    if device.type != "cpu":
        peak = torch.get_device_module(device).max_memory_allocated(device)
        sizes["activations"] = peak - sizes["weights"] - sizes["kv_cache"]
    if runner.graphs is not None:
        sizes["cuda_graphs"] = runner.graphs.num_bytes
    return sizes


def trace_settings(
    name: str, dtype: str, device: torch.device, scheduler: Scheduler
) -> TraceSettings:
    """What engine is recorded."""
    config, blocks = scheduler.config, scheduler.blocks
    return TraceSettings(
        model=name,
        dtype=dtype,
        device=str(device),
        policy=config.policy,
        admission=config.admission,
        preemption=config.preemption_mode,
        prefix_cache=blocks.prefix_cache,
        block_size=blocks.block_size,
        num_blocks=blocks.pool.num_blocks,
        num_host_blocks=blocks.host.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
