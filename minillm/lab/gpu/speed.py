"""Stages "decode", "nano" and "profile": the speed of the engine, with dummy weights."""

import gzip
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.api.arguments import EngineArgs
from minillm.execution.setup import runner_of
from minillm.lab.benchmarks.decode_steps import DecodeSteps
from minillm.lab.gpu.worker import Case, Context
from minillm.lab.roofline import step_cost
from minillm.models.presets import preset

STEPS, EAGER_STEPS, REPLAYS, PROFILED = 64, 8, 20, 5
# Rows and context of a decode step, the most important first; then in blocks of 64.
SIZES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "qwen3-0.6b": ((1, 512), (64, 512), (8, 512), (256, 512), (1, 4096), (4, 512)),
    "llama-3.1-8b": ((1, 512), (64, 512), (8, 512)),
}
PROFILES: Mapping[str, tuple[int, ...]] = {"qwen3-0.6b": (1, 256), "llama-3.1-8b": (1,)}
BLOCKS = (16, 64)
# nano-vllm's benchmark: requests, and the most tokens of a prompt and of an output.
NANO_REQUESTS, NANO_MOST, NANO_VOCAB = 256, 1024, 10_000
NANO: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "16384 tokens per step": {"max_num_batched_tokens": 16_384},
    "blocks of 64": {"block_size": 64},
}


def cases(context: Context) -> list[Case]:
    """Of "decode MODEL", "profile MODEL" or "nano"."""
    what, _, model = context.task.partition(" ")
    if what == "nano":
        return [Case(name, partial(nano, context, more), 45) for name, more in NANO.items()]
    opened: dict[int, DecodeSteps] = {}
    if what == "profile":
        return [
            Case(f"{rows} rows", partial(profiled, context, opened, model, rows), 35)
            for rows in PROFILES[model]
        ]
    return [
        Case(f"{rows} x {length}, blocks of {block}",
             partial(steps, context, opened, model, rows, length, block), 60)
        for block in BLOCKS for rows, length in SIZES[model]
    ]  # fmt: skip


# ---- decode steps ----------------------------------------------------------------------------


def engine(context: Context, opened: dict[int, DecodeSteps], model: str, block: int) -> DecodeSteps:
    """The engine with blocks of this size; the one with other blocks is closed."""
    if block not in opened:
        for other in list(opened):
            opened.pop(other).close()
        opened[block] = DecodeSteps(EngineArgs(
            f"preset:{model}", load_format="dummy", dtype="bfloat16", device=context.device,
            block_size=block, max_model_len=4352, max_num_seqs=256, async_scheduling=True,
            enable_prefix_caching=False, num_gpu_blocks_override=4096 if context.dry else None,
        ))  # fmt: skip
    return opened[block]


def steps(
    context: Context, opened: dict[int, DecodeSteps], model: str, rows: int, length: int, block: int
) -> dict[str, Any]:
    """Milliseconds of a step with graphs and overlap, of the replay alone, and of an eager step."""
    timed, dry = engine(context, opened, model, block), context.dry
    length = min(length, 80) if dry else length
    runner = runner_of(timed.engine.runner)
    seconds = median(timed.run(rows, length, 2 if dry else STEPS))
    if dry:
        return {}
    figures = {"ms": seconds * 1e3, "tok/s": rows / seconds}
    cost = step_cost(preset(model), [1] * rows, [length] * rows, dtype="bfloat16")
    figures["GB/s"] = cost.total_bytes / seconds / 1e9
    graphs, runner.graphs = runner.graphs, None
    try:
        figures["ms eager"] = median(timed.run(rows, length, EAGER_STEPS)) * 1e3
    finally:
        runner.graphs = graphs
    if graphs is not None and graphs.sizes:
        figures["ms replay"] = replay(graphs, rows)
        figures["graphs MB"] = graphs.num_bytes / 1e6
    return {"figures": figures, "bytes": cost.total_bytes}


def replay(graphs: Any, rows: int) -> float:
    """Milliseconds of a graph of at least so many rows, on the inputs of the last step."""
    run = graphs._replay[next(size for size in graphs.sizes if size >= rows)]
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(REPLAYS):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / REPLAYS


# ---- nano-vllm's workload --------------------------------------------------------------------


def nano_requests() -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of nano-vllm's bench.py, with its seed."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, NANO_VOCAB) for _ in range(draw.randint(100, NANO_MOST))]
        for _ in range(NANO_REQUESTS)
    ]
    return prompts, [draw.randint(100, NANO_MOST) for _ in range(NANO_REQUESTS)]


def nano(context: Context, more: Mapping[str, Any]) -> dict[str, Any]:
    """Output tokens per second, after 16 short requests that compile and load what is left."""
    prompts, lengths = nano_requests()
    if context.dry:
        prompts, lengths = [prompt[:40] for prompt in prompts[:4]], [3] * 4
        more = {**more, "num_gpu_blocks_override": 512}
    arguments = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096} | dict(more)
    with LLM("preset:qwen3-0.6b", device=context.device, async_scheduling=True, **arguments) as llm:

        def run(prompts: list[list[int]], lengths: list[int]) -> float:
            params = [
                SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
                for length in lengths
            ]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        run([[1 + i] * 20 for i in range(16)], [8] * 16)
        before = llm.trace[-1].step
        seconds, count = run(prompts, lengths), llm.trace[-1].step - before
    figures = {"tok/s": sum(lengths) / seconds, "s": seconds, "steps": count}
    return {} if context.dry else {"figures": figures}


# ---- profile ---------------------------------------------------------------------------------


def profiled(
    context: Context, opened: dict[int, DecodeSteps], model: str, rows: int
) -> dict[str, Any]:
    """Kernels of a few decode steps by time, the gaps between them, and a trace file."""
    timed = engine(context, opened, model, BLOCKS[0])
    if context.dry:
        timed.run(rows, 40, 2)
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)
    timed.run(rows, 512, PROFILED)  # warm
    timed.run(rows, 512, PROFILED, around=profile)
    name = f"trace-{model}-{rows}"
    path = context.out / f"{name}.json"
    profile.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    path.unlink()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    # A step that was launched ahead is in it, too; every step draws once.
    draws = sum(name.startswith("_draw") for *_, name in spans)
    return kernel_table(sorted(spans), draws or PROFILED)


def kernel_table(spans: list[tuple[float, float, str]], count: int) -> dict[str, Any]:
    """From the start, end and name of each kernel, in microseconds: per step the number, the busy
    time and the gaps; and the kernels that take most."""
    total: dict[str, list[float]] = defaultdict(list)
    gaps, end = 0.0, spans[0][0] if spans else 0.0
    for start, stop, name in spans:
        total[name].append(stop - start)
        gaps, end = gaps + max(start - end, 0.0), max(end, stop)
    busy = sum(map(sum, total.values()))
    largest = sorted(total.items(), key=lambda each: -sum(each[1]))[:20]
    kernels = [
        {"kernel": name[:80], "calls": len(times) / count, "us": sum(times) / len(times),
         "share": sum(times) / busy}
        for name, times in largest
    ]  # fmt: skip
    figures = {"kernels per step": len(spans) / count, "us busy": busy / count,
               "us gaps": gaps / count}  # fmt: skip
    return {"figures": figures, "kernels": kernels}
