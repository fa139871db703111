"""``minillm plan -tp``: memory and predicted speed of a model on several GPUs."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from minillm.cli.terminal import Terminal, amount, digits, plural, seconds, size
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.commands.place import Place
from minillm.lab.links import LINKS, all_reduce, find_link
from minillm.lab.parallel_cost import BATCHES, Devices, ParallelTime, Prediction, predict
from minillm.lab.parallel_layout import Layout, check_layout, device_memory
from minillm.plan.cost import MemoryPlan
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes

SIZES = (1, 2, 4, 8)  # numbers of GPUs (or stages) shown beside the requested one
SHOWN_LINKS = ("nvlink", "pcie")
CONTEXT = 1024  # tokens of every sequence, and of the prompt
NO_ROOM = "-"


def add_options(parser: ArgumentParser) -> None:
    """Declare the options for several GPUs."""
    add = parser.add_argument_group("several GPUs").add_argument
    add("-tp", "--tensor-parallel-size", metavar="N", type=int,
        help="tensor parallelism: GPUs that split every layer")  # fmt: skip
    add("-pp", "--pipeline-parallel-size", metavar="P", type=int,
        help="pipeline parallelism: number of stages")  # fmt: skip
    add("-ep", "--enable-expert-parallel", action="store_true",
        help="expert parallelism: whole experts on each GPU")  # fmt: skip
    add("--link", metavar="NAME",
        help=f"interconnect: {', '.join(LINKS)} ({' and '.join(SHOWN_LINKS)})")  # fmt: skip


def check(args: Namespace) -> bool:
    """Whether -tp or -pp is given; rejects options that are missing or do not go with them."""
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    if sizes == (None, None):
        if args.link is not None or args.enable_expert_parallel:
            raise ConfigError("--link and -ep need -tp or -pp; add one of these.")
        return False
    args.links = SHOWN_LINKS if args.link is None else (find_link(args.link).name,)
    tensor, pipeline = (1 if each is None else each for each in sizes)
    args.layout = Layout(tensor, pipeline)
    if args.hardware is None:
        raise ConfigError("-tp and -pp need the rates of a GPU; add one, such as --hardware h100.")
    if args.speculative_config is not None:
        raise ConfigError(
            "-tp and -pp predict plain decoding only; leave out --speculative-config."
        )
    return True


def layouts(config: ModelConfig, asked: Layout) -> list[Layout]:
    """The requested layout and the possible ones with 1, 2, 4 and 8 GPUs (or stages)."""
    vary_stages = asked.tensor == 1 and asked.pipeline > 1
    own = asked.pipeline if vary_stages else asked.tensor
    predictions = []
    for number in sorted({*SIZES, own}):
        each = replace(asked, pipeline=number) if vary_stages else replace(asked, tensor=number)
        try:
            check_layout(config, each)
        except ConfigError:
            if number == own:
                raise
            continue
        predictions.append(each)
    return predictions


def run(
    args: Namespace,
    config: ModelConfig,
    place: Place,
    weights: WeightSizes | None,
    terminal: Terminal,
) -> int:
    """Print the predictions; the exit code is 0 also if the model does not fit."""
    asked = replace(args.layout, expert_parallel=args.enable_expert_parallel)
    context = min(CONTEXT, args.max_model_len or config.longest_context)
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")
    settings = {name: getattr(args, name) for name in names}
    types = {"dtype": args.dtype, "kv_dtype": args.kv_cache_dtype or args.dtype}
    found: list[Prediction] = []
    for layout in layouts(config, asked):
        memory = device_memory(
            config, place.memory_bytes, layout, weights=weights, **types, **settings
        )
        for name in args.links if layout.devices > 1 else args.links[:1]:
            devices = Devices(place.known, LINKS[name], layout, weights=weights)
            found.append(predict(config, devices, context=context, memory=memory, **types))
    if args.json:
        terminal.line(json.dumps(as_json(args.model, found)))
    else:
        show(args.model, config, asked, found, terminal)
    return 0


def as_json(model: str, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The predictions as JSON data: bytes, seconds, fractions."""
    return {
        "model": model,
        "hardware": asdict(predictions[0].devices.hardware),
        "context": predictions[0].context,
        "links": {layout.devices.link.name: asdict(layout.devices.link) for layout in predictions},
        "parallel": [
            {
                "layout": asdict(prediction.devices.layout),
                "devices": prediction.devices.layout.devices,
                "link": link_name(prediction),
                "fits": prediction.holds(1),
                "memory": asdict(prediction.memory),
                "cached_tokens": prediction.cache_tokens,
                "decode": {
                    str(batch): {"fits": prediction.holds(batch)} | timed(time)
                    for batch, time in prediction.decode.items()
                },
                "prefill": {"fits": prediction.holds(1)} | timed(prediction.prefill),
            }
            for prediction in predictions
        ],
    }


def timed(time: ParallelTime) -> dict[str, Any]:
    """A predicted step time as JSON data."""
    names = ("seconds", "tokens_per_second", "communication", "utilisation", "num_groups")
    return {name: getattr(time, name) for name in names} | {
        "stages": [
            asdict(stage.device)
            | {"communication_seconds": stage.communication, "seconds": stage.seconds}
            for stage in time.stages
        ],
    }


def link_name(prediction: Prediction) -> str | None:
    """The name of the link; None for one device."""
    return prediction.devices.link.name if prediction.devices.layout.devices > 1 else None


def show(
    model: str,
    config: ModelConfig,
    asked: Layout,
    predictions: Sequence[Prediction],
    terminal: Terminal,
) -> None:
    """Print the predictions as text."""
    mine = [prediction for prediction in predictions if prediction.devices.layout == asked]
    hardware, memory, weights = mine[0].devices.hardware, mine[0].memory, mine[0].devices.weights
    terminal.heading(f"{model} on {asked.devices} x {hardware.name}: predictions")
    rows = [
        ("memory", f"{size(memory.memory_bytes)} on each GPU, "
         f"{memory.settings.gpu_memory_utilization:.0%} of it usable"),
        ("weights", f"{size(memory.weight_bytes)} on each GPU, in "
         f"{memory.settings.dtype if weights is None else weights.name}"),
        ("KV cache", cache_line(memory)),
    ]  # fmt: skip
    if asked.tensor > 1:
        rows.append(("all-reduce", sums_line(config, mine)))
    terminal.rows(rows)
    if memory.num_tokens and not memory.fits:
        terminal.paragraph(
            f"One sequence of {memory.settings.max_model_len:,} tokens does not fit; "
            f"--max-model-len {memory.num_tokens} does."
        )
    terminal.line()
    show_table(predictions, terminal)
    terminal.paragraph(explanation(mine[0]))
    if any(not prediction.holds(batch) for prediction in predictions for batch in BATCHES):
        terminal.paragraph(f'"{NO_ROOM}": that many sequences do not fit.')


def explanation(prediction: Prediction) -> str:
    """What the columns mean, and which rates the predictions use."""
    hardware, dtype = prediction.devices.hardware, prediction.memory.settings.dtype
    context = plural(prediction.context, "token")
    launches = sum(stage.device.overhead_seconds for stage in prediction.decode[1].stages)
    return (
        "Columns: tokens that fit into the KV cache; decode tokens per second at batch 1 and batch "
        f"64, with a context of {context}, and in brackets the fraction of the time spent on "
        f"communication; time to prefill {context}. Predictions from counts, datasheet rates of "
        f"{amount(hardware.bandwidth, 'B/s')} and {amount(hardware.rate(dtype), 'FLOP/s')} "
        f"({dtype}) and published latencies of links; nothing was measured here. Kernel launches "
        f"take {seconds(launches)} of a decode step; CUDA graphs remove them."
    )


def cache_line(memory: MemoryPlan) -> str:
    """Memory left for the KV cache on each GPU, in bytes and tokens."""
    each = f"{size(memory.kv_bytes_per_token)} in {memory.settings.kv_dtype}"
    if memory.kv_cache_bytes <= 0:
        return f"does not fit: no memory is left; a token takes {each}"
    left = size(memory.kv_cache_bytes)
    return f"{left} on each GPU, for {memory.num_tokens:,} tokens of {each}"


def sums_line(config: ModelConfig, predictions: Sequence[Prediction]) -> str:
    """Number, size and duration of the all-reduces of a decode step of one layout on each link."""
    num_bytes = config.hidden_size * dtype_bytes(predictions[0].memory.settings.dtype)
    times = []
    for prediction in predictions:
        how = all_reduce(prediction.devices.link, prediction.devices.layout.tensor, num_bytes)
        times.append(f"{seconds(how.seconds)} on {prediction.devices.link.name} ({how.algorithm})")
    count = 2 * config.num_layers + 1
    return f"{count} in a step; at batch 1, {size(num_bytes)} each: {', '.join(times)}"


def show_table(predictions: Sequence[Prediction], terminal: Terminal) -> None:
    """Print a row for each layout and link; the share of communication is in brackets."""
    header = ("GPUs", "link", "weights", "KV tokens", "batch 1", "batch 64", "prefill")
    rows = []
    for prediction in predictions:
        layout, link = prediction.devices.layout, link_name(prediction)
        speeds = [
            f"{digits(time.tokens_per_second)}{f' ({time.communication:.0%})' if link else ''}"
            if prediction.holds(batch) else NO_ROOM
            for batch, time in prediction.decode.items()
        ]  # fmt: skip
        rows.append((
            f"{layout.tensor} x {layout.pipeline}" if layout.pipeline > 1 else f"{layout.tensor}",
            link or NO_ROOM,
            size(prediction.memory.weight_bytes),
            f"{prediction.cache_tokens:,}" if prediction.holds(1) else "does not fit",
            *speeds,
            seconds(prediction.prefill.seconds) if prediction.holds(1) else NO_ROOM,
        ))  # fmt: skip
    terminal.table(header, rows)
