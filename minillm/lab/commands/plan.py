"""Predict memory use and upper bounds of speed without loading the model."""

import json
import re
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from minillm.api.arguments import QUANTIZATIONS, check_kv_cache_dtype
from minillm.api.speculative_config import HEAD_METHODS, SpeculativeConfig, check_vocabulary
from minillm.cli.options import json_object
from minillm.cli.terminal import Terminal, amount, digits, plural, seconds, size
from minillm.config import DTYPE_BYTES, ModelConfig
from minillm.errors import ConfigError
from minillm.lab.commands import plan_parallel
from minillm.lab.commands.place import Place, find_place
from minillm.lab.commands.quantised_weights import weights_of
from minillm.lab.hardware import DATASHEET, Hardware
from minillm.lab.roofline import StepCost, StepTime, step_cost, step_time
from minillm.models.presets import preset
from minillm.plan.cost import MemoryPlan, memory_plan
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes

USAGE = "MODEL [options]"
EXAMPLES = """\
examples:
  minillm plan preset:llama-3.1-70b --hardware h100 -tp 4
  minillm plan preset:qwen3-8b --memory 24GiB --quantization int4
  minillm plan PATH_TO_A_HF_FOLDER --max-num-seqs 16
"""
PROMPT = 1024  # prompt length and context length of the predicted times
SETTINGS = ("dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
            "gpu_memory_utilization")  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A plan of a model at a place; `weights` are the sizes of quantised ones."""

    model: str
    config: ModelConfig
    place: Place
    weights: WeightSizes | None
    plan: MemoryPlan

    @property
    def length(self) -> int:
        """Prompt length and context length of the predicted times."""
        return min(PROMPT, self.plan.settings.max_model_len)


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="embedded name, folder, hub id or preset:NAME")
    add("--hardware", "--gpu", metavar="NAME", help=", ".join(DATASHEET))
    add("--memory", metavar="SIZE",
        help="memory, such as 24GiB or 24GB (free memory of this machine)")  # fmt: skip
    add("--dtype", metavar="NAME", help="dtype of the weights (the checkpoint's)")
    add("--quantization", metavar="NAME", choices=QUANTIZATIONS,
        help="quantise 16-bit weights while loading: int8 or int4")  # fmt: skip
    add("--kv-cache-dtype", metavar="NAME", help="dtype of the KV cache, or int8 (--dtype)")
    add("--max-model-len", metavar="N", type=int,
        help="longest context, in tokens (the model's)")  # fmt: skip
    add("--max-num-seqs", metavar="N", type=int, default=256,
        help="maximum number of running sequences (256)")  # fmt: skip
    add("--max-num-batched-tokens", metavar="N", type=int, default=2048,
        help="maximum number of tokens in one step (2048)")  # fmt: skip
    add("--gpu-memory-utilization", metavar="X", type=float, default=0.9,
        help="fraction of the memory to use, also on a CPU (0.9)")  # fmt: skip
    add("--speculative-config", metavar="JSON", type=json_object,
        help="include the draft model and the logits of drafts")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object (bytes, seconds, FLOP)")
    plan_parallel.add_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Print the plan, and return the exit code, which is 0 also if the model does not fit."""
    is_parallel = plan_parallel.check(args)
    config = find_config(args.model)
    if args.max_model_len is not None and args.max_model_len > config.longest_context:
        raise ConfigError(
            f"--max-model-len is {args.max_model_len}; this model has positions for "
            f"{config.longest_context} tokens."
        )
    if args.dtype:
        dtype_bytes(args.dtype)
    if args.kv_cache_dtype:
        check_kv_cache_dtype(args.kv_cache_dtype, (*DTYPE_BYTES, "int8"))
    drafts = drafts_of(args, config)
    place = find_place(args, terminal)
    args.dtype = args.dtype or best_dtype(config, place)
    weights = weights_of(args.model, args.quantization, args.dtype, place.is_cpu)
    if is_parallel:
        return plan_parallel.run(args, config, place, weights, terminal)
    if drafts.get("draft") is not None:
        drafts["draft_weights"] = weights_of(
            args.speculative_config["model"], None, args.dtype, place.is_cpu
        )
    plan = memory_plan(config, place.memory_bytes, weights=weights, **settings_of(args), **drafts)
    answer = Found(args.model, config, place, weights, plan)
    if args.json:
        terminal.line(json.dumps(as_json(answer)))
    else:
        show(answer, terminal)
    return 0


def settings_of(args: Namespace) -> dict[str, Any]:
    """The options that are arguments of `memory_plan`."""
    return {name: getattr(args, name) for name in SETTINGS} | {"kv_dtype": args.kv_cache_dtype}


def find_config(model: str) -> ModelConfig:
    """The configuration of a model; that of a preset needs no import of torch."""
    if model.startswith("preset:"):
        return preset(model.removeprefix("preset:"))
    from minillm.models.checkpoint import open_model

    return open_model(model).config


def drafts_of(args: Namespace, config: ModelConfig) -> dict[str, Any]:
    """The arguments of `memory_plan` for a draft model or heads, and the drafts; {} without."""
    if args.speculative_config is None:
        return {}
    speculation, draft = SpeculativeConfig.of(args.speculative_config), None
    if speculation.method in HEAD_METHODS:
        from minillm.models.checkpoint import open_model
        from minillm.speculative.setup import open_source

        heads = open_source(speculation, open_model(args.model)).planned()
        return {**heads, "num_drafts": speculation.most}
    if speculation.model is not None:
        draft = find_config(speculation.model)
        check_vocabulary(speculation.model, draft.vocab_size, args.model, config.vocab_size)
    return {"draft": draft, "num_drafts": speculation.most}


def best_dtype(config: ModelConfig, place: Place) -> str:
    """The dtype the engine would choose: the checkpoint's, but on this CPU the fastest one."""
    if not place.is_cpu:
        return config.dtype
    import torch

    from minillm.engine.setup import choose_dtype

    return choose_dtype("auto", config, torch.device("cpu"))


def predictions(answer: Found, hardware: Hardware) -> dict[str, tuple[StepCost, StepTime]]:
    """The cost and the time of a decode step and of the prefill of a prompt."""
    settings, length = answer.plan.settings, answer.length
    cost_of = partial(
        step_cost,
        answer.config,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        weights=answer.weights,
    )
    costs = {"decode": cost_of([1], [length]), "prefill": cost_of([length], [length])}
    return {what: (cost, step_time(cost, hardware)) for what, cost in costs.items()}


def as_json(answer: Found) -> dict[str, Any]:
    """The plan as JSON data: bytes, seconds, operations."""
    hardware = answer.place.hardware
    speed = {} if hardware is None else predictions(answer, hardware)
    return {
        "model": answer.model,
        "hardware": hardware and asdict(hardware),
        "fits": answer.plan.fits,
        "plan": asdict(answer.plan),
        "weights": answer.weights and asdict(answer.weights),
        "predictions": {
            what: asdict(cost) | asdict(time) | {"seconds": time.seconds, "bound": time.bound}
            for what, (cost, time) in speed.items()
        },
    }


def show(answer: Found, terminal: Terminal) -> None:
    """Print the plan as text."""
    plan, settings = answer.plan, answer.plan.settings
    terminal.heading(f"{answer.model} on {answer.place.what}")
    drafter = "draft heads" if settings.head_weights else "draft model"  # or an EAGLE layer
    rows = [
        ("memory", f"{size(plan.memory_bytes)} = {amount(plan.memory_bytes, 'B')}"),
        ("reserve", f"{size(plan.reserve_bytes)}  ("
         f"{1 - settings.gpu_memory_utilization:.0%}) for the runtime and workspaces"),
        ("weights", f"{size(plan.weight_bytes - plan.draft_weight_bytes)}  in "
         f"{settings.dtype if answer.weights is None else answer.weights.name}"),
        (drafter, f"{size(plan.draft_weight_bytes)}  of weights, and "
         f"{size(plan.draft_block_bytes // settings.block_size)} of each cached token"),
        ("activations", f"{size(plan.activation_bytes)}  for "
         f"{settings.max_num_batched_tokens:,} tokens in one step"),
        ("KV cache", cache_line(plan)),
    ]  # fmt: skip
    terminal.rows([row for row in rows if row[0] != drafter or plan.draft_weight_bytes])
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
    if answer.place.hardware is not None:
        terminal.line()
        show_speed(answer, answer.place.hardware, terminal)


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


def show_speed(answer: Found, hardware: Hardware, terminal: Terminal) -> None:
    """Print the upper bounds of speed and the resource that limits each."""
    source = "measured" if hardware.source.startswith("measured") else "datasheet"
    dtype, unit, weights = answer.plan.settings.dtype, "FLOP/s", answer.weights
    if weights and weights.products and hardware.rate(weights.products) > hardware.rate(dtype):
        dtype, unit = weights.products, "OP/s"
    terminal.paragraph(
        f"Upper bounds{'' if answer.plan.fits else ', if it did fit'}, at {source} rates of "
        f"{amount(hardware.bandwidth, 'B/s')} and {amount(hardware.rate(dtype), unit)} "
        f"({dtype}):"
    )
    rows = []
    for what, (cost, time) in predictions(answer, hardware).items():
        value = f"{seconds(time.seconds)} for {plural(cost.num_tokens, 'token')}"
        if what == "decode":
            value = f"{digits(1 / time.seconds)} tokens/s, {seconds(time.seconds)} per token"
            value += f" (batch 1, context {answer.length:,})"
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
