"""`python -m minillm.lab.gpu`: everything that a GPU should be asked, within some minutes."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm.errors import ConfigError
from minillm.lab.gpu import stages as plan
from minillm.lab.gpu import summary
from minillm.lab.gpu.pack import ROOT, pack
from minillm.lab.gpu.parent import Parent, Record, Results, read
from minillm.lab.gpu.stages import Stage

SECONDS = 540.0
EXAMPLES = """\
examples:
  python -m minillm.lab.gpu                                everything, within 9 minutes
  python -m minillm.lab.gpu --only smoke,memcheck          are the kernels right?
  python -m minillm.lab.gpu --only kernels                 how close do they come to the limits?
  python -m minillm.lab.gpu --seconds 240 --again gpu-results/results.jsonl --changed sampling
  python -m minillm.lab.gpu --dry-run                      on a CPU: compile everything, run nothing

exit codes: 0 nothing was wrong, 1 something was, 2 nothing could be run, 130 or 143 stopped.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m minillm.lab.gpu", epilog=EXAMPLES, allow_abbrev=False,
        description="Check and measure kernels and engine on an NVIDIA GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--out", type=Path, default=Path("gpu-results"), metavar="FOLDER", help="for all files")
    add("--seconds", type=float, default=SECONDS, metavar="N", help=f"in all ({SECONDS:.0f})")
    add("--only", default="", metavar="STAGE,...", help="these stages (see --list)")
    told = "an earlier results.jsonl: what did not pass, and its figures beside the new ones"
    add("--again", type=Path, metavar="FILE", help=told)
    add("--changed", default="", metavar="FAMILY,...", help="with --again: these families whole")
    add("--list", action="store_true", help="stages, tasks and seconds, and stop")
    add("--pack", type=Path, metavar="FOLDER", help="copy what a run needs there, and stop")
    add("--dry-run", action="store_true", help="on a CPU: compile for sm_90, run nothing")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(arguments)
    try:
        if args.pack is not None:
            size = pack(args.pack)
            sys.stdout.write(f"{size / 2**20:.1f} MiB are in {args.pack}\n")
            return 0
        stages, only, before = asked(args)
        if args.list:
            for stage in stages:
                tasks = ", ".join(stage.tasks)
                sys.stdout.write(f"{stage.name:<9} {stage.cap:5.0f} s  {tasks}\n")
            return 0
        stages, why = plan.lacking(stages)
        results = Results(args.out)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    run = Run(args, stages, only, before, results)
    if why:
        results.add("facts", "packages", case="", status="error", error=why)
        run.say(why)
    return run.go()


def asked(
    args: argparse.Namespace,
) -> tuple[tuple[Stage, ...], dict[tuple[str, str], list[str]], list[Record]]:
    """The stages, the cases of those tasks that are not run whole, and the earlier records."""
    if not 30 <= args.seconds <= 86_400:
        raise ConfigError(f"--seconds is {args.seconds:g}; it must be from 30 to 86400.")
    stages = plan.chosen([name for name in args.only.split(",") if name])
    only: dict[tuple[str, str], list[str]] = {}
    before = read(args.again) if args.again is not None else []
    changed = [name for name in args.changed.split(",") if name]
    if args.again is not None:
        stages, only = plan.again(stages, before, changed)
    elif changed:
        raise ConfigError("--changed needs --again FILE, the results that the changes are against.")
    stages = plan.within(stages, args.seconds)
    return plan.dry(stages) if args.dry_run else stages, only, before


class Run:
    """One run: stages in their order, a summary after each."""

    def __init__(
        self,
        args: argparse.Namespace,
        stages: Sequence[Stage],
        only: Mapping[tuple[str, str], list[str]],
        before: Sequence[Record],
        results: Results,
    ):
        self.args, self.stages, self.only, self.before = args, stages, only, before
        self.results, self.seconds, self.signal = results, dict[str, float](), 0
        self.parent = Parent(results, self.command, self.say)

    def command(self, stage: Stage, task: str, start: int, seconds: float) -> list[str]:
        """The worker's."""
        job = {
            "stage": stage.name, "module": stage.module, "task": task, "start": start,
            "seconds": seconds, "dry": self.args.dry_run, "out": str(self.args.out),
            "only": self.only.get((stage.name, task)),
        }  # fmt: skip
        return [sys.executable, "-m", "minillm.lab.gpu.worker", json.dumps(job)]

    def say(self, text: str) -> None:
        """A line of progress."""
        sys.stderr.write(f"[{time.monotonic() - self.results.began:4.0f} s] {text}\n")
        sys.stderr.flush()

    def go(self) -> int:
        """All stages; the exit code."""
        import threading

        paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        os.environ["PATH"] += f"{os.pathsep}/usr/local/cuda/bin"  # of compute-sanitizer
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        end, beside = time.monotonic(), []  # a stage also has the time that earlier ones left
        for stage in self.stages:
            if self.parent.stopped.is_set():
                break
            self.say(f"{stage.name}: at most {stage.cap:.0f} s")
            if stage.beside:
                beside.append(threading.Thread(target=self.parent.run, args=(stage,)))
                beside[-1].start()
                continue
            began, end = time.monotonic(), end + stage.cap
            self.parent.run(stage, end + stage.grace)
            self.seconds[stage.name] = round(time.monotonic() - began, 1)
            self.write()
            if stage.name == "facts" and not self.signal and not self._can_go_on():
                self.parent.stop()
                return 2
        self.parent.stopped.set()
        for thread in beside:
            thread.join()
        data = self.write()
        sys.stdout.write(summary.printed(data))
        if self.results.lost:
            sys.stdout.write(f"A file could not be written: {self.results.lost}\n")
        return 128 + self.signal if self.signal else int(bool(data["wrong"] or self.results.lost))

    def _can_go_on(self) -> bool:
        for record in self.results.records:
            if record.get("case") == "machine" and record["status"] == "passed":
                return True
        told = [str(each.get("error")) for each in self.results.records if each.get("error")]
        sys.stderr.write(f"Nothing can be run here: {(told or ['no answer'])[0]}\n")
        return False

    def _stop(self, number: int, frame: object) -> None:
        self.signal = number
        self.parent.stop()

    def write(self) -> dict[str, Any]:
        """Replace the summaries."""
        data = summary.summary(self.results.records, self.before, self.seconds)
        self.results.replace("summary.json", summary.as_json(data))
        self.results.replace("summary.md", summary.markdown(data))
        return data


if __name__ == "__main__":
    raise SystemExit(main())
