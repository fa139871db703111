"""`minillm bench decode|prefill|offline`: the comparison that the arguments ask for."""

import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.commands.bench import engines_of, finish, model_for, progress

if TYPE_CHECKING:
    from minillm.config import ModelConfig
    from minillm.lab.benchmarks.compare import Work

OFFLINE = (64, 1024, 512)  # at most: sequences at once, prompt tokens, output tokens


def run(args: Namespace, terminal: Terminal) -> int:
    """Check the arguments, run the comparison, print the table and write JSON."""
    from minillm.lab.benchmarks.processor import limited

    isa = isa_of(args.isa, args.device)
    with limited(isa):  # torch is imported in this block
        work = replace(work_of(args, terminal), isa=isa)
        from minillm.lab.benchmarks.compare import measure
        from minillm.lab.benchmarks.compare_table import show

        with progress(terminal) as say:
            result = measure(work, say)
    return finish(result, args, terminal, show)


def isa_of(name: str | None, device: str) -> str | None:
    """The instruction set to which --isa, or else the variable of the C functions, limits all
    engines."""
    from minillm.lab.benchmarks.processor import FLAGS, ISA, check_isa, processor_class

    if name is None:
        given = os.environ.get(ISA)
        return given if given in FLAGS else None
    check_isa(name, processor_class())
    if device != "cpu":
        raise ConfigError(f"--isa is for a CPU; leave it out with --device {device}.")
    return name


def work_of(args: Namespace, terminal: Terminal) -> "Work":
    """The comparison that the arguments ask for, after checking them."""
    from minillm.lab.benchmarks.beside import check_count
    from minillm.lab.commands.plan import find_config

    check_count(args.beside or 0)
    kv_cache_dtype = args.kv_cache_dtype or "auto"
    engines = engines_of(args.vs, args.device, args.quantization, kv_cache_dtype)
    name, config, layers = args.model, find_config(args.model), getattr(args, "layers", None)
    cases = cases_of(args, config)
    model = model_for(name, args.dtype, terminal, layers, as_folder=len(engines) > 1)
    if layers is not None:
        name, config = f"{name}, {layers} layers", find_config(model)
    from minillm.lab.benchmarks.checkpoint import gguf_of
    from minillm.lab.benchmarks.compare import Work
    from minillm.lab.commands.quantised_weights import weights_of

    return Work(
        what=args.what,
        name=name,
        model=model,
        config=config,
        cases=cases,
        repeats=args.repeats,
        engines=engines,
        threads=args.threads,
        dtype=args.dtype,
        device=args.device,
        requests=getattr(args, "requests", 0),
        extra=0 if args.quick else args.repeats,
        fresh=not args.quick,
        beside=args.beside or 0,
        quantization=args.quantization,
        weights=weights_of(model, args.quantization, args.dtype, args.device == "cpu"),
        kv_cache_dtype=kv_cache_dtype,
        gguf=str(gguf_of(Path(model), args.dtype)) if "llamacpp" in engines else "",
    )


def cases_of(args: Namespace, config: "ModelConfig") -> tuple[Any, ...]:
    """Every batch at every context; for "offline" one case with the maximum lengths."""
    from minillm.lab.benchmarks.contest import Case

    longest = config.longest_context
    if args.what == "offline":
        max_num_seqs, prompt, new_tokens = OFFLINE
        batch = min(max_num_seqs, args.requests)
        return (Case(batch, min(prompt, longest // 2), min(new_tokens, longest // 4)),)
    new_tokens = 1 if args.what == "prefill" else args.new_tokens
    for context in args.context:
        if context + new_tokens > longest:
            raise ConfigError(
                f"--context is {context}; with {new_tokens} new tokens it exceeds the "
                f"{longest} positions of this model."
            )
    return tuple(
        Case(batch, context, new_tokens) for context in args.context for batch in args.batch
    )
