"""Start a run: prepare the tokens once, then one training process per CPU core."""

import hashlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from minillm.errors import ConfigError
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.training import corpus
from minillm.training.data import TokenStreams, encode_corpus, held_out_rows
from minillm.training.recipes import Recipe
from minillm.training.trainer import RunOptions, Trainer

TOKENS = "tokens.safetensors"


def prepare_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    """Encode the corpus into `folder`, unless an earlier start of the same run did."""
    path = folder / TOKENS
    manifest = corpus.load_manifest()
    made_from = {"corpus": fingerprint(manifest, tokenizer)}
    if path.exists():
        with safe_open(path, "pt") as file:
            if file.metadata() == made_from:
                return
    folder.mkdir(parents=True, exist_ok=True)
    streams = encode_corpus(manifest, tokenizer)
    tensors = {
        "stdlib": torch.from_numpy(streams.stdlib),
        "packages": torch.from_numpy(streams.packages),
        "held_out": held_out_rows(manifest, tokenizer),
    }
    save_file(tensors, path, made_from)


def fingerprint(manifest: corpus.Manifest, tokenizer: Tokenizer) -> str:
    """Changes when the files of the corpus or the vocabulary do."""
    content = repr(manifest.files) + tokenizer.to_str()
    return hashlib.sha256(content.encode()).hexdigest()


def worker(rank: int, world: int, rendezvous: str, recipe: Recipe, options: RunOptions) -> None:
    """One process of a run."""
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
        )
    tokens = load_file(options.folder / TOKENS)
    streams = TokenStreams(tokens["stdlib"].numpy(), tokens["packages"].numpy())
    teacher = None
    if recipe.teacher:
        source = open_model(recipe.teacher)
        teacher = load_model(source, torch.float32, options.device).requires_grad_(False)
    trainer = Trainer(recipe, streams, options, rank, world, teacher)
    trainer.resume()
    trainer.run(tokens["held_out"])
    if world > 1:
        dist.destroy_process_group()


def train(recipe: Recipe, options: RunOptions, tokenizer: Tokenizer, workers: int) -> None:
    """Train `recipe`, continuing from a checkpoint in `options.folder` if there is one.

    The result does not depend on the number of `workers` beyond rounding; each must get equally
    many rows of every step.
    """
    windows = {window for phase in recipe.phases for window in phase.windows}
    if any(recipe.batch_tokens % (window * workers) for window in windows):
        rows = ", ".join(str(recipe.batch_tokens // window) for window in sorted(windows))
        raise ConfigError(
            f"{workers} workers cannot share the rows of a step ({rows}) equally; "
            "use --workers 1, 2 or 4."
        )
    prepare_tokens(options.folder, tokenizer)
    if workers == 1:
        worker(0, 1, "", recipe, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        mp.spawn(worker, (workers, rendezvous, recipe, options), nprocs=workers)
