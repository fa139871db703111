"""Predict memory use and upper bounds of speed without loading the model."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from minillm.api.speculative_config import SpeculativeConfig, check_vocabulary
from minillm.cli.engine_import import import_engine
from minillm.cli.options import json_object
from minillm.cli.terminal import Terminal, amount, digits, plural, seconds, size
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.commands import plan_parallel, plan_speculation
from minillm.lab.commands.place import Place, find_place
from minillm.lab.commands.quantised_weights import check_quantization, weights_of
from minillm.models.presets import preset
from minillm.plan.cost import (
    MemoryPlan,
    StepCost,
    StepTime,
    memory_plan,
    step_cost,
    step_time,
)
from minillm.plan.hardware import DATASHEET, Hardware
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes

USAGE = "MODEL [options]"
EXAMPLES = """\
examples:
  minillm plan preset:llama-3.1-70b --hardware h100 -tp 4
  minillm plan preset:qwen3-8b --memory 24GiB --quantization int4
  minillm plan PATH_TO_A_HF_FOLDER --max-num-seqs 16 --load
  minillm plan preset:qwen3-8b --hardware h200 --speculate preset:qwen3-0.6b
"""
PROMPT = 1024  # prompt length and context length of the predicted times


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("model", metavar="MODEL",
                        help="embedded name, folder, hub id or preset:NAME")  # fmt: skip
    parser.add_argument("--hardware", "--gpu", metavar="NAME", help=", ".join(DATASHEET))
    parser.add_argument("--memory", metavar="SIZE",
                        help="memory, such as 24GiB or 24GB (free memory of this "
                             "machine)")  # fmt: skip
    parser.add_argument("--dtype", metavar="NAME", help="dtype of the weights (the checkpoint's)")
    parser.add_argument("--quantization", metavar="NAME",
                        help="quantise 16-bit weights while loading: int8 or int4")  # fmt: skip
    parser.add_argument("--kv-cache-dtype", metavar="NAME",
                        help="dtype of the KV cache (--dtype)")  # fmt: skip
    parser.add_argument("--max-model-len", metavar="N", type=int,
                        help="longest context, in tokens (the model's)")  # fmt: skip
    parser.add_argument("--max-num-seqs", metavar="N", type=int, default=256,
                        help="maximum number of running sequences (256)")  # fmt: skip
    parser.add_argument("--max-num-batched-tokens", metavar="N", type=int, default=2048,
                        help="maximum number of tokens in one step (2048)")  # fmt: skip
    parser.add_argument("--gpu-memory-utilization", metavar="X", type=float, default=0.9,
                        help="fraction of the memory to use, also on a CPU (0.9)")  # fmt: skip
    parser.add_argument("--speculative-config", metavar="JSON", type=json_object,
                        help="include the draft model and the logits of drafts")  # fmt: skip
    parser.add_argument("--load", action="store_true",
                        help="load the model here, and compare planned and allocated "
                             "memory")  # fmt: skip
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object (bytes, seconds, FLOP)")  # fmt: skip
    plan_speculation.add_options(parser)
    plan_parallel.add_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Print the plan, and return the exit code, which is 0 also if the model does not fit."""
    plan_speculation.check(args)
    is_parallel = plan_parallel.check(args)
    config = find_config(args.model)
    if args.max_model_len is not None:
        check_length(args.max_model_len, config)
    for dtype in filter(None, (args.dtype, args.kv_cache_dtype)):
        dtype_bytes(dtype)
    check_quantization(args.quantization)
    if args.load and (args.hardware or args.memory or args.kv_cache_dtype):
        raise ConfigError(
            "--load runs on this machine; leave out --hardware, --memory and --kv-cache-dtype."
        )
    speculation, draft = None, None
    if args.speculative_config is not None:
        speculation = SpeculativeConfig.of(args.speculative_config)
        draft = find_draft(speculation, args.model, config)
    place = find_place(args, terminal)
    dtype = args.dtype or best_dtype(config, place)
    weights = weights_of(args.model, args.quantization, dtype, place.is_cpu)
    if is_parallel and place.hardware is not None:
        device = place.hardware, place.memory_bytes
        return plan_parallel.run(args, config, *device, weights, terminal)
    plan = memory_plan(
        config,
        place.memory_bytes,
        dtype=dtype,
        kv_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=args.gpu_memory_utilization,
        draft=draft,
        num_drafts=0 if speculation is None else speculation.most,
        weights=weights,
        draft_weights=None
        if speculation is None or speculation.model is None
        else weights_of(speculation.model, None, dtype, place.is_cpu),
    )
    loaded = load(args, terminal) if args.load else None
    if args.speculate is not None:
        if weights is not None:
            raise ConfigError(
                f"--speculate predicts with 16-bit weights, and those of {args.model} are "
                "quantised; give the 16-bit model, without --quantization."
            )
        return speculate(args, config, plan, place, terminal)
    if args.json:
        terminal.line(json.dumps(as_json(args.model, config, plan, place, weights, loaded)))
    else:
        show(args.model, config, plan, place, weights, terminal)
        if loaded is not None:
            show_loaded(*loaded, terminal)
    return 0


def speculate(
    args: Namespace, config: ModelConfig, plan: MemoryPlan, place: Place, terminal: Terminal
) -> int:
    """Print the predicted speed-up of speculative decoding."""
    name = args.speculate
    draft = None if name == plan_speculation.NGRAM else find_config(name)
    context = min(PROMPT, plan.settings.max_model_len)
    found, acceptance, is_measured = plan_speculation.predict_for(
        args, config, draft, plan.settings.dtype, context, place.hardware, place.is_cpu, terminal
    )
    if args.json:
        result = {"acceptance": acceptance, "speculation": plan_speculation.as_json(found)}
        terminal.line(json.dumps(result))
    else:
        assumed = args.acceptance is None
        plan_speculation.show(name, found, acceptance, assumed, is_measured, terminal)
    return 0


def load(args: Namespace, terminal: Terminal) -> tuple[MemoryPlan, dict[str, int]]:
    """Load the engine on this machine; returns its plan and the bytes it allocated."""
    with terminal.progress("Loading"):
        llm = import_engine()(
            args.model,
            dtype=args.dtype or "auto",
            quantization=args.quantization,
            load_format="dummy" if args.model.startswith("preset:") else "auto",
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            gpu_memory_utilization=args.gpu_memory_utilization,
            speculative_config=args.speculative_config,
        )
    with llm:
        return llm.plan(), llm.engine.allocated()


def find_config(model: str) -> ModelConfig:
    """The configuration of a model; that of a preset needs no import of torch."""
    if model.startswith("preset:"):
        return preset(model.removeprefix("preset:"))
    from minillm.models.checkpoint import open_model

    return open_model(model).config


def find_draft(
    speculation: SpeculativeConfig, target: str, config: ModelConfig
) -> ModelConfig | None:
    """The configuration of the draft model, or None."""
    if speculation.model is None:
        return None
    draft = find_config(speculation.model)
    check_vocabulary(speculation.model, draft.vocab_size, target, config.vocab_size)
    return draft


def check_length(length: int, config: ModelConfig) -> None:
    """Reject a context that the engine would reject."""
    if length > config.longest_context:
        raise ConfigError(
            f"--max-model-len is {length}; this model has positions for "
            f"{config.longest_context} tokens."
        )


def best_dtype(config: ModelConfig, place: Place) -> str:
    """The dtype the engine would choose: the checkpoint's, but on this CPU the fastest one."""
    if not place.is_cpu:
        return config.dtype
    import torch

    from minillm.engine.setup import choose_dtype

    return choose_dtype("auto", config, torch.device("cpu"))


def predictions(
    config: ModelConfig, plan: MemoryPlan, hardware: Hardware, weights: WeightSizes | None
) -> list[tuple[str, int, StepCost, StepTime]]:
    """(name, tokens, cost, time) of a decode step and of the prefill of a prompt."""
    length = min(PROMPT, plan.settings.max_model_len)
    settings = plan.settings
    dtypes = partial(step_cost, config, dtype=settings.dtype, kv_dtype=settings.kv_dtype)
    cost_of = partial(dtypes, weights=weights)
    costs = {"decode": cost_of([1], [length]), "prefill": cost_of([length], [length])}
    return [
        (what, cost.num_tokens, cost, step_time(cost, hardware)) for what, cost in costs.items()
    ]


def as_json(
    model: str,
    config: ModelConfig,
    plan: MemoryPlan,
    place: Place,
    weights: WeightSizes | None,
    loaded: tuple[MemoryPlan, dict[str, int]] | None = None,
) -> dict[str, Any]:
    """The plan as JSON data: bytes, seconds, operations."""
    speed = [] if place.hardware is None else predictions(config, plan, place.hardware, weights)
    return {
        "model": model,
        "hardware": place.hardware and asdict(place.hardware),
        "fits": plan.fits,
        "plan": asdict(plan),
        "weights": weights and asdict(weights),
        "predictions": {
            what: asdict(cost) | asdict(time) | {"seconds": time.seconds, "bound": time.bound}
            for what, _, cost, time in speed
        },
        **({} if loaded is None else {"loaded": asdict(loaded[0]), "allocated": loaded[1]}),
    }


def show(
    model: str,
    config: ModelConfig,
    plan: MemoryPlan,
    place: Place,
    weights: WeightSizes | None,
    terminal: Terminal,
) -> None:
    """Print the plan as text."""
    settings = plan.settings
    terminal.heading(f"{model} on {place.what}")
    terminal.rows(
        [
            ("memory", f"{size(plan.memory_bytes)} = {amount(plan.memory_bytes, 'B')}"),
            ("reserve", f"{size(plan.reserve_bytes)}  ("
             f"{1 - settings.gpu_memory_utilization:.0%}) for the runtime and workspaces"),
            ("weights", f"{size(plan.weight_bytes - plan.draft_weight_bytes)}  in "
             f"{settings.dtype if weights is None else weights.name}"),
            *draft_rows(plan),
            ("activations", f"{size(plan.activation_bytes)}  for "
             f"{settings.max_num_batched_tokens:,} tokens in one step"),
            ("KV cache", cache_line(plan)),
        ]
    )  # fmt: skip
    terminal.line()
    if plan.fits:
        show_combinations(plan, terminal)
    else:
        terminal.paragraph(
            f"It does not fit: {size(plan.shortfall_bytes)} of memory are missing for one sequence "
            f"of {settings.max_model_len:,} tokens."
        )
        terminal.line("  It fits with any one of:")
        for hint in plan.hints:
            terminal.line(f"    {as_option(hint)}")
    if place.hardware is not None:
        terminal.line()
        show_speed(config, plan, place.hardware, weights, terminal)


def show_loaded(plan: MemoryPlan, allocated: Mapping[str, int], terminal: Terminal) -> None:
    """Print planned and allocated bytes side by side; on a CPU most memory stays free."""
    draft_cache = plan.kv_cache_bytes * plan.draft_block_bytes // plan.block_bytes
    planned = {
        "weights": plan.weight_bytes - plan.draft_weight_bytes,
        "kv_cache": plan.kv_cache_bytes - draft_cache,
        "draft_weights": plan.draft_weight_bytes,
        "draft_kv_cache": draft_cache,
        "activations": plan.activation_bytes,
    }
    rows = [
        (name.replace("_", " "), size(planned[name]), size(num_bytes),
         f"{round(num_bytes / planned[name] - 1, 3) + 0.0:+.1%}")
        for name, num_bytes in allocated.items() if name in planned
    ]  # fmt: skip
    terminal.line()
    terminal.table(("loaded here", "planned", "allocated", "difference"), rows)
    settings = plan.settings
    text = (
        f"The KV cache has {plan.num_tokens // settings.block_size:,} blocks of "
        f"{settings.block_size} tokens, for sequences of up to {settings.max_model_len:,}."
    )
    if "activations" not in allocated:
        text += (
            " On a CPU the cache takes a quarter of the remaining memory, or what --max-num-seqs "
            "sequences can fill if that is less; the memory of activations is not measured."
        )
    terminal.paragraph(text)


def draft_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """The row of the draft model's memory, if there is one."""
    if not plan.draft_weight_bytes:
        return []
    per_token = size(plan.draft_block_bytes // plan.settings.block_size)
    text = f"{size(plan.draft_weight_bytes)}  of weights, and {per_token} of each cached token"
    return [("draft model", text)]


def cache_line(plan: MemoryPlan) -> str:
    """Memory left for the KV cache, in bytes and tokens."""
    per_token = f"{size(plan.kv_bytes_per_token)} in {plan.settings.kv_dtype}"
    if plan.kv_cache_bytes <= 0:
        return f"no memory left; a token takes {per_token}"
    return f"{size(plan.kv_cache_bytes)}  for {plan.num_tokens:,} tokens of {per_token}"


def show_combinations(plan: MemoryPlan, terminal: Terminal) -> None:
    """Print the number of sequences that fit at each context length."""
    rows = [(f"{fit.context:,}", f"{fit.batch:,}") for fit in plan.combinations]
    terminal.table(("context", "sequences that fit"), rows)
    most = plan.settings.max_num_seqs
    if any(fit.batch > most for fit in plan.combinations):
        terminal.paragraph(f"At most {most:,} of them run at once (--max-num-seqs).")


def show_speed(
    config: ModelConfig,
    plan: MemoryPlan,
    hardware: Hardware,
    weights: WeightSizes | None,
    terminal: Terminal,
) -> None:
    """Print the upper bounds of speed and the resource that limits each."""
    source = "measured" if hardware.source.startswith("measured") else "datasheet"
    dtype, unit = plan.settings.dtype, "FLOP/s"
    if weights and weights.products and hardware.rate(weights.products) > hardware.rate(dtype):
        dtype, unit = weights.products, "OP/s"
    terminal.paragraph(
        f"Upper bounds{'' if plan.fits else ', if it did fit'}, at {source} rates of "
        f"{amount(hardware.bandwidth, 'B/s')} and {amount(hardware.rate(dtype), unit)} "
        f"({dtype}):"
    )
    rows = []
    for what, tokens, cost, time in predictions(config, plan, hardware, weights):
        length = min(PROMPT, plan.settings.max_model_len)
        if what == "decode":
            value = f"{digits(1 / time.seconds)} tokens/s, {seconds(time.seconds)} per token"
            value += f" (batch 1, context {length:,})"
        else:
            value = f"{seconds(time.seconds)} for {plural(tokens, 'token')}"
        rows.append((what, f"{value}; {why(cost, time)}"))
    terminal.rows(rows)


def why(cost: StepCost, time: StepTime) -> str:
    """The limiting resource, and how much of it the step uses."""
    reasons = {
        "memory": f"it reads {amount(cost.total_bytes, 'B')}",
        "compute": f"it computes {amount(cost.flops, 'FLOP')}",
        "overhead": f"it starts {cost.num_operations:,} operations",
    }
    return f"bound by {time.bound}: {reasons[time.bound]}"


def as_option(hint: str) -> str:
    """Rewrite a hint as options: ``max_model_len=4096`` becomes ``--max-model-len 4096``."""
    hint = re.sub(r"(\d) (\wiB) of memory", r"--memory \1\2", hint).replace(" and ", " ")
    hint = re.sub(r"^([\d.]*)--memory ", r"--memory \1", hint)
    return re.sub(r'(\w+)="?([\w.]+)"?', lambda m: f"--{m[1].replace('_', '-')} {m[2]}", hint)
