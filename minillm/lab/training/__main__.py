"""``python -m minillm.lab.training``: train the embedded models again, step by step."""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

from minillm.errors import MinillmError
from minillm.lab.commands.bench_options import within
from minillm.lab.training import corpus
from minillm.lab.training.recipes import RECIPES
from minillm.models.checkpoint import ASSETS
from minillm.plan.machine import cpu_count, cpu_name

EXAMPLES = """examples:
  python -m minillm.lab.training verify      check all files of the corpus against the manifest
  python -m minillm.lab.training tiny        train for an hour or two on a few cores; after Ctrl-C
                                             the same command continues
  python -m minillm.lab.training tiny --device cuda
  python -m minillm.lab.training tiny-draft  distil the draft model from the embedded tiny
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.lab.training",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tasks = [*RECIPES, "verify"]
    add = parser.add_argument
    add("task", choices=tasks, metavar="TASK", help=", ".join(tasks))
    add("--out", type=Path, help="folder of the run (default: work/training/TASK)")
    add("--export", type=Path, help="folder of the result (default: assets)")
    add("--workers", type=within(int, 1), help="training processes (default: one per core)")
    add("--device", default="cpu", help="cpu (default) or cuda, one process")
    add("--no-compile", action="store_true", help="do not use torch.compile")
    return parser


def train(arguments: argparse.Namespace) -> str:
    """Train one recipe, from its last checkpoint if there is one, and export the result."""
    from minillm.lab.training.export import export, load_trained
    from minillm.lab.training.launch import train as launch
    from minillm.lab.training.trainer import CHECKPOINT, RunOptions, checkpoint_progress

    chosen = RECIPES[arguments.task]
    folder = arguments.out or Path("work", "training", chosen.name)
    target = arguments.export or ASSETS / chosen.name
    cores = 1 if arguments.device != "cpu" else cpu_count()
    workers = arguments.workers or max(n for n in (1, 2, 4) if n <= cores)
    launch(chosen, RunOptions(folder, arguments.device, not arguments.no_compile), workers)
    checkpoint = folder / CHECKPOINT
    export(load_trained(checkpoint, chosen.config), target)
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


def run(arguments: argparse.Namespace) -> str:
    """Run one task, and return a message about its result."""
    if arguments.task == "verify":
        manifest = corpus.load_manifest()
        size = corpus.verify(manifest)
        return f"All {len(manifest.files)} files of the corpus match the manifest: {size:,} bytes."
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
