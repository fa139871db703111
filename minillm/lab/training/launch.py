"""Start a run: prepare the tokens once, then one training process per CPU core."""

import hashlib
import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from minillm.errors import ConfigError
from minillm.lab.training import corpus
from minillm.lab.training.data import TokenStreams, encode_corpus, held_out_rows
from minillm.lab.training.generate import own_text
from minillm.lab.training.recipes import Recipe
from minillm.lab.training.trainer import RunOptions, Trainer
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model

TOKENS, OWN_TEXT = "tokens.safetensors", "own-text.safetensors"


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
    # Autocast gives a norm bf16 rows and float32 weights; torch remarks on it once per graph.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
        )
    tokens = load_file(options.folder / TOKENS)
    streams = TokenStreams(tokens["stdlib"].numpy(), tokens["packages"].numpy())
    teacher = None
    if recipe.teacher:
        own = teacher_text(recipe, streams.stdlib, options.folder, rank, world)
        streams = TokenStreams(streams.stdlib, own)
        teacher = load_model(open_model(recipe.teacher), torch.float32, options.device)
        teacher.requires_grad_(False)
    trainer = Trainer(recipe, streams, options, rank, world, teacher)
    trainer.resume()
    if world == 1:
        trainer.run(tokens["held_out"])
    else:
        with suppress(KeyboardInterrupt):  # Ctrl-C reaches every process; the parent speaks
            trainer.run(tokens["held_out"])
        dist.destroy_process_group()


def teacher_text(
    recipe: Recipe, stream: np.ndarray, folder: Path, rank: int, world: int
) -> np.ndarray:
    """What the teacher writes, each process generating its share; kept in `folder`."""
    path = folder / OWN_TEXT
    if not path.exists():
        model = load_model(open_model(recipe.teacher or ""), torch.bfloat16)
        mine = own_text(model, stream, range(rank, recipe.own_batches, world))
        parts = [torch.from_numpy(mine.astype(np.int32))] * world
        if world > 1:
            parts = [torch.empty_like(parts[0]) for _ in range(world)]
            dist.all_gather(parts, torch.from_numpy(mine.astype(np.int32)))
        if rank == 0:
            tokens = torch.stack(parts, dim=1).flatten()  # batches in the order of their numbers
            save_file({"tokens": tokens.to(torch.uint16)}, path)
        if world > 1:
            dist.barrier()
    return load_file(path)["tokens"].numpy()


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
