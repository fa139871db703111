"""`minillm bench speculation`: the variants and workloads that are measured."""

from argparse import Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.benchmarks.speculation import PLAIN, RandomDrafts, SpeculationWork, measure
from minillm.lab.benchmarks.speculation_table import show
from minillm.lab.commands.bench import finish, progress
from minillm.lab.commands.plan import find_config

DRAFT_OF: Mapping[str, str] = {"tiny": "tiny-draft"}
HEADS_OF: Mapping[str, Mapping[str, str]] = {
    "tiny": {"medusa": "tiny-medusa", "eagle": "tiny-eagle"}
}
WORKLOADS = ("held-out", "sampled", "copy")
NUM_DRAFTS, NUM_NODES = 4, 16  # of a chain, of a tree


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the benchmark, print the table, write JSON."""
    work = work_of(args)
    with progress(terminal) as say:
        result = measure(work, say)
    return finish(result, args, terminal, show)


def work_of(args: Namespace) -> SpeculationWork:
    """The benchmark that the arguments ask for, after checking them."""
    name = args.model if "model" in args.given else "tiny"
    draft = args.draft or DRAFT_OF.get(name)
    config = find_config(name)
    if name.startswith("preset:"):
        raise ConfigError(
            f"{name} has random weights, so its acceptance rate means nothing; give a checkpoint."
        )
    return SpeculationWork(
        model=name,
        variants=real_variants(draft, config.vocab_size, HEADS_OF.get(name, {})),
        workloads=WORKLOADS,
        batches=args.batch,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        threads=args.threads,
        dtype=args.dtype,
    )


def real_variants(
    draft: str | None, vocab_size: int, heads: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Mapping[str, Any] | None]:
    """Plain decoding, n-grams, suffixes, a draft model, draft heads and an EAGLE layer (each as a
    chain and as a tree), and random drafts (the worst case).

    Repeats have the same prompts, so suffixes of earlier outputs are a variant of its own."""
    variants: dict[str, Mapping[str, Any] | None] = {PLAIN: None}
    for number in (NUM_DRAFTS, "auto"):
        variants[f"ngram {number}"] = {"method": "ngram", "num_speculative_tokens": number}
        suffix = {"method": "suffix", "num_speculative_tokens": number}
        variants[f"suffix {number}"] = suffix | {"suffix_decoding_max_cached_requests": 0}
        if draft is not None:
            variants[f"{draft} {number}"] = {"model": draft, "num_speculative_tokens": number}
        for method, name in heads.items():
            own = {"method": method, "model": name, "num_speculative_tokens": number}
            variants[f"{name} {number}"] = own
            nodes = number if number == "auto" else NUM_NODES
            tree = {"tree": "auto", "num_speculative_tokens": nodes}
            variants[f"{name}, tree {nodes}"] = own | tree
    variants["suffix auto, seen before"] = {"method": "suffix", "num_speculative_tokens": "auto"}
    wrong = RandomDrafts(vocab_size)
    variants["random auto"] = {"method": wrong, "num_speculative_tokens": "auto"}
    return variants
