"""``python -m minillm.lab.training``: train the embedded models again, step by step."""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from minillm.errors import ConfigError, MinillmError
from minillm.lab.training import corpus
from minillm.lab.training.recipes import RECIPES, recipe
from minillm.plan.machine import cpu_count, cpu_name

ASSETS = Path(__file__).parents[2] / "assets"
EXAMPLES = """examples:
  python -m minillm.lab.training verify      check all files of the corpus against the manifest
  python -m minillm.lab.training tiny        train for an hour or two on a few cores; after Ctrl-C
                                             the same command continues
  python -m minillm.lab.training tiny --device cuda
  python -m minillm.lab.training tiny-draft  distil the draft model from the embedded tiny
  python -m minillm.lab.training variants    train the twelve runs of chapter 04, one per core
  python -m minillm.lab.training card        measure both and write assets/MODEL_CARD.md
  python -m minillm.lab.training calibration write assets/calibration.txt.gz, for quantisation
  python -m minillm.lab.training manifest    select a new corpus from the installed packages
  python -m minillm.lab.training tokenizer   train a new vocabulary (then train the models again)
"""


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.lab.training",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [candidate.name for candidate in RECIPES]
    tasks = [*names, "variants", "card", "calibration", "manifest", "tokenizer", "verify"]
    parser.add_argument("task", choices=tasks, metavar="TASK", help=", ".join(tasks))
    parser.add_argument("--out", type=Path, help="folder of the run (default: work/training/TASK)")
    parser.add_argument(
        "--export", type=Path, help="folder of the result (default: assets, or notebooks/variants)"
    )
    parser.add_argument(
        "--workers", type=positive, help="training processes (default: one per core)"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, one process")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return parser


def train(arguments: argparse.Namespace) -> str:
    """Train one recipe, from its last checkpoint if there is one, and export the result."""
    from minillm.lab.training.export import export, load_trained
    from minillm.lab.training.launch import train as launch
    from minillm.lab.training.trainer import RunOptions, checkpoint_progress

    chosen = recipe(arguments.task)
    folder = arguments.out or Path("work", "training", chosen.name)
    target = arguments.export or ASSETS / chosen.name
    tokenizer = Tokenizer.from_file(str(ASSETS / "tiny" / "tokenizer.json"))
    cores = 1 if arguments.device != "cpu" else cpu_count()
    workers = arguments.workers or max(n for n in (1, 2, 4) if n <= cores)
    options = RunOptions(folder, arguments.device, compile=not arguments.no_compile)
    launch(chosen, options, tokenizer, workers)
    checkpoint = folder / "checkpoint.safetensors"
    export(load_trained(checkpoint, chosen.config), tokenizer, target)
    steps, seconds = checkpoint_progress(checkpoint, chosen.name)
    machine = cpu_name() if arguments.device == "cpu" else arguments.device
    record = {
        "steps": steps,
        "tokens": steps * chosen.batch_tokens,
        "minutes": round(seconds / 60),
        "machine": f"{workers} x {machine}, torch {version('torch')}",
    }
    (target / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return f"The trained model is in {target}."


def train_variants(arguments: argparse.Namespace) -> str:
    """Train the variants of chapter 04, and publish them in the folder of the chapters."""
    from minillm.lab.training import variants

    if arguments.device != "cpu":
        raise ConfigError("The variants are trained on CPU cores, one run on each; omit --device.")
    folder = arguments.out or Path("work", "training", "variants")
    target = arguments.export or Path("notebooks", "variants")
    workers = arguments.workers or cpu_count()
    variants.train_variants(folder, workers, compiled=not arguments.no_compile)
    return f"{variants.publish(folder, target)} runs are in {target}."


def learn_tokenizer(arguments: argparse.Namespace) -> str:
    """Train the vocabulary on the training split."""
    from minillm.lab.training.tokenizer import sample_texts, save_tokenizer, train_tokenizer

    target = arguments.export or ASSETS / "tiny"
    tokenizer = train_tokenizer(sample_texts(corpus.load_manifest()))
    save_tokenizer(tokenizer, target, recipe("tiny").config.max_position_embeddings)
    return f"The tokenizer is in {target}."


def run(arguments: argparse.Namespace) -> str:
    """Run one task, and return a message about its result."""
    if arguments.task == "manifest":
        manifest = corpus.build_manifest()
        corpus.save_manifest(manifest)
        return f"{corpus.MANIFEST.name} lists {len(manifest.files)} files."
    if arguments.task == "verify":
        manifest = corpus.load_manifest()
        size = corpus.verify(manifest)
        return f"All {len(manifest.files)} files of the corpus match the manifest: {size:,} bytes."
    if arguments.task == "calibration":
        from minillm.lab.training.calibration import write_calibration_text

        return write_calibration_text(corpus.load_manifest(), ASSETS / "calibration.txt.gz")
    if arguments.task == "tokenizer":
        return learn_tokenizer(arguments)
    if arguments.task == "variants":
        return train_variants(arguments)
    if arguments.task == "card":
        from minillm.lab.training.model_card import write_model_card

        return f"Wrote {write_model_card(ASSETS)}."
    return train(arguments)


def main() -> int:
    """Entry point; reports errors of the library as one line."""
    try:
        sys.stdout.write(run(parser().parse_args()) + "\n")
    except MinillmError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Stopped; the same command continues from the last checkpoint.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
