"""Four attention variants with equal training, for the comparison of chapter 04.

MHA, GQA, MQA and MLA have equal numbers of parameters (within 2 %), the same rows of text in the
same order, the same number of steps, and three seeds each. Parameters saved in projections are
added to the MLP, as in Shazeer (2019, section 4) for MQA. GQA has four query heads per KV head. MLA
has DeepSeek-V2's proportions: a rotated part of half a head and a latent of 3.5 heads (4 in
DeepSeek-V2), so that it caches as many values as GQA's two keys and two values.

Each variant has the norms of its published form: Qwen3's on queries and keys, V2-Lite's on the
latent. As a control for this difference, MHA without norms is trained from the first seed.
"""

import json
import multiprocessing
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from minillm.config import MLAConfig, ModelConfig, RopeConfig
from minillm.errors import ConfigError
from minillm.lab.training import corpus
from minillm.lab.training.data import TokenStreams
from minillm.lab.training.evaluate import bits_per_byte
from minillm.lab.training.export import export, load_trained
from minillm.lab.training.launch import TOKENS, prepare_tokens
from minillm.lab.training.prompts import held_out_texts
from minillm.lab.training.recipes import VOCAB_SIZE, Phase, Recipe
from minillm.lab.training.trainer import CHECKPOINT, RunOptions, Trainer, checkpoint_progress
from minillm.models.checkpoint import ASSETS
from minillm.models.decoder import Decoder
from minillm.plan.cost import kv_bytes_per_token
from minillm.plan.machine import cpu_name
from minillm.text.tokenizer import Tokenizer

SEEDS = (0, 1, 2)
STEPS = 1000
WINDOW = 256  # tokens of a training row, and context of the evaluation
WIDTH, LAYERS, HEADS, HEAD_DIM = 256, 4, 8, 32
MLA = MLAConfig(kv_lora_rank=112, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


def _variant(kv_heads: int, mlp: int, mla: MLAConfig | None = None) -> ModelConfig:
    """Qwen3's architecture, or with `mla` DeepSeek-V2's without experts."""
    return ModelConfig(
        family="deepseek_v2" if mla else "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else HEAD_DIM,
        intermediate_size=mlp,
        max_position_embeddings=WINDOW,
        rope=RopeConfig(interleaved=bool(mla)),
        tie_word_embeddings=True,
        qk_norm=mla is None,
        mla=mla,
    )


VARIANTS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "mha": _variant(HEADS, mlp=256),
        "gqa": _variant(2, mlp=384),
        "mqa": _variant(1, mlp=408),
        "mla": _variant(HEADS, mlp=264, mla=MLA),
    }
)

CONTROLS: Mapping[str, ModelConfig] = MappingProxyType(
    {"mha-plain": replace(VARIANTS["mha"], family="llama", qk_norm=False)}
)
RUNS = (
    *((name, seed) for seed in SEEDS for name in VARIANTS),
    *((name, SEEDS[0]) for name in CONTROLS),
)


def variant_recipe(name: str, seed: int, steps: int = STEPS) -> Recipe:
    """The recipe of one run; the seed determines the initial weights and the order of the text."""
    return Recipe(
        name=f"{name}-{seed}",
        config={**VARIANTS, **CONTROLS}[name],
        phases=(Phase(steps, stdlib_rows=10, windows=(WINDOW,)),),
        decay_steps=steps // 2,
        batch_tokens=4096,
        matrix_lr=1e-2,
        embedding_lr=5e-3,
        warmup_steps=min(40, steps),
        # `Trainer.step_rows` derives the order of rows from the seed.
        seed=1000 * seed,
    )


def train_run(recipe: Recipe, folder: Path, compiled: bool = True) -> None:
    """Train one run in its subfolder of `folder`, from its last checkpoint if there is one, and
    evaluate it."""
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    torch.set_num_threads(1)
    tokens = load_file(folder / TOKENS)
    streams = TokenStreams(tokens["stdlib"].numpy(), tokens["packages"].numpy())
    options = RunOptions(folder / recipe.name, compile=compiled, progress=False)
    options.folder.mkdir(exist_ok=True)
    trainer = Trainer(recipe, streams, options)
    trainer.resume()
    rows = tokens["held_out"]
    with suppress(KeyboardInterrupt):  # Ctrl-C reaches every process; the parent reports it
        trainer.run(torch.cat((rows[:, : WINDOW + 1], rows[:, WINDOW:])))
        judge(recipe, options.folder)


def judge(recipe: Recipe, folder: Path) -> dict[str, dict[str, float]]:
    """Bits per byte of both held-out texts under a finished run, measured once and then cached.

    Weights are bf16, as exported, with float32 arithmetic; the context is 128 to 256 tokens.
    """
    path = folder / "score.json"
    if path.exists():
        return json.loads(path.read_text())
    model = load_trained(folder / CHECKPOINT, recipe.config)
    with torch.no_grad():  # not model.bfloat16(), which would also round the angles of RoPE
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    manifest, tokenizer = corpus.load_manifest(), Tokenizer.from_folder(ASSETS / "tiny")
    scores = {}
    for name, stdlib in (("stdlib", True), ("jinja2", False)):
        texts = held_out_texts(manifest, stdlib=stdlib)
        found = bits_per_byte(model, tokenizer, texts, WINDOW)
        scores[name] = {
            "bits_per_byte": found.bits_per_byte,
            "bytes": found.num_bytes,
            "tokens": found.num_tokens,
        }
    path.write_text(json.dumps(scores))
    return scores


def run_log(folder: Path) -> list[dict[str, float]]:
    """The log of a run: step, loss and held-out loss in nats per token."""
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_variants(folder: Path, workers: int, compiled: bool = True) -> None:
    """Train all unfinished runs, `workers` at a time, each on one thread.

    Independent runs use two cores better than two processes of one run.
    """
    prepare_tokens(folder)
    recipes = [variant_recipe(name, seed) for name, seed in RUNS]
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool,
        tqdm(total=sum(recipe.steps for recipe in recipes), unit="step") as bar,
    ):
        waiting = {pool.submit(train_run, recipe, folder, compiled) for recipe in recipes}
        while waiting:
            finished, waiting = wait(waiting, timeout=5)
            for future in finished:
                future.result()
            logs = [run_log(folder / recipe.name) for recipe in recipes]
            bar.n = sum(int(log[-1]["step"]) for log in logs if log)
            bar.refresh()


def finished(recipe: Recipe, folder: Path) -> bool:
    """Whether the run in `folder` has all its steps."""
    path = folder / CHECKPOINT
    return path.exists() and checkpoint_progress(path, recipe.name)[0] == recipe.steps


def run_record(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """The record of one finished run for the chapter."""
    recipe = variant_recipe(name, seed)
    scores = judge(recipe, folder)
    _, seconds = checkpoint_progress(folder / CHECKPOINT, recipe.name)
    config = recipe.config
    return {
        "variant": name,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in Decoder(config).parameters()),
        "kv_bytes_per_token": kv_bytes_per_token(config, "bfloat16"),
        "bits_per_byte": {text: round(s["bits_per_byte"], 5) for text, s in scores.items()},
        "curve": [
            {key: round(value, 4) for key, value in point.items()} for point in run_log(folder)
        ],
        "minutes": round(seconds / 60),
    }


def publish(folder: Path, target: Path) -> int:
    """Write results.json of all finished runs, and each variant's weights from the first seed, into
    `target`; returns the number of runs.

    Raises:
        ConfigError: no run has finished; nothing is written.
    """
    runs, texts = [], {}
    for name, seed in RUNS:
        recipe = variant_recipe(name, seed)
        run = folder / recipe.name
        if not finished(recipe, run):
            continue
        runs.append(run_record(name, seed, run))
        texts = {
            text: {"bytes": score["bytes"], "tokens": score["tokens"]}
            for text, score in judge(recipe, run).items()
        }
        if seed == SEEDS[0] and name in VARIANTS:
            model = load_trained(run / CHECKPOINT, recipe.config)
            export(model, target / name)
    if not runs:  # keep the results of an earlier training
        raise ConfigError(f"No run in {folder} has all its steps; train first.")
    record = {
        "steps": STEPS,
        "tokens_per_run": STEPS * variant_recipe("mha", 0).batch_tokens,
        "window": WINDOW,
        "machine": cpu_name(),
        "torch": version("torch"),
        "held_out": texts,
        "runs": [run for run in runs if run["variant"] in VARIANTS],
        "controls": [run for run in runs if run["variant"] in CONTROLS],
    }
    target.mkdir(parents=True, exist_ok=True)
    (target / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    return len(runs)
