"""The commands and their options, each with examples; what is mistyped gets the nearest name."""

import re
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from minillm.errors import did_you_mean

PROG = "python -m minillm_exercises"
LEARN: Mapping[str, str] = MappingProxyType({
    "list": "the board: what there is, what is done, what comes next",
    "start": "get an exercise's file to work on", "run": "grade your file",
    "watch": "grade your file each time it is saved",
    "hint": "the next hint: the idea, then where to look, then the steps",
    "solution": "the reference solution, once you have passed",
    "reset": "begin again from the starter; your file is kept in work/.history",
    "quiz": "the three questions of a chapter",
    "engine": "run the engine made of the exercises you have passed, in work/engine",
    "report": "grade everything begun and write JSON or JUnit XML",
    "doctor": "check this machine: packages, torch, Triton, Jupyter, folders",
})  # fmt: skip
TEACH: Mapping[str, str] = MappingProxyType({
    "verify": "prove that the graders tell right from wrong",
    "grade": "grade a folder of submissions with your own seed and hidden checks",
    "room": "write a page that shows how far everybody is, from their reports",
    "release": "write a copy of the exercises without their solutions",
})  # fmt: skip
COMMANDS: Mapping[str, str] = MappingProxyType({**LEARN, **TEACH})
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "list": "list",
        "start": "start e03.1\nstart e03.1 --new      a newer starter, beside your file",
        "run": "run                     the exercise you worked on last\nrun e03.1 -v\n"
        "run e03.1 --file try.py\nrun --all\nrun e03.1 --json",
        "watch": "watch\nwatch e03.1",
        "hint": "hint e03.1\nhint e03.1 -n 2",
        "solution": "solution e03.1\nsolution e03.1 --alternate\nsolution e03.1 --give-up\n"
        "solution e03.1 --save",
        "reset": "reset e03.1\nreset e03.1 --yes",
        "quiz": "quiz 03\nquiz 03 b a c          a dash leaves a question out",
        "engine": "engine\nengine 'def add(a, b):'",
        "report": "report\nreport --json report.json --junit report.xml\nreport --json -",
        "doctor": "doctor",
        "verify": "verify\nverify e03.1 e03.2",
        "grade": "grade submissions --out grades.csv\n"
        "grade submissions --seed 20 --hidden secret/checks --out grades.csv --json grades.json",
        "room": "room reports\nroom reports --out room.html",
        "release": "release --out learners/exercises",
    }
)


class Parser(ArgumentParser):
    """An argument parser whose mistakes are one sentence with the nearest right name."""

    def __init__(self, **options: Any):
        options.setdefault("formatter_class", RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over here, where the command's own options are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [o for action in self._actions for o in action.option_strings]
            near = did_you_mean(name, known).rstrip("?").replace("'", "")
            self.error(f"{self.prog} does not take {name!r}." + (f"{near}?" if near else ""))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print one sentence and leave with exit code 2."""
        bad = re.match(r"argument COMMAND: invalid choice: '(.*?)'", message)
        if bad:
            near = did_you_mean(bad[1], COMMANDS)
            message = f"there is no command {bad[1]!r}; there are {', '.join(COMMANDS)}.{near}"
        message = message if message.endswith((".", "?")) else message + "."
        self.exit(2, f"error: {message}\nTry '{self.prog} --help'.\n")


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog=PROG, usage=f"{PROG} COMMAND ...", description=_overview())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=SUPPRESS)
    for name, says in COMMANDS.items():
        lines = "\n".join(f"  {PROG} {line}" for line in EXAMPLES[name].splitlines())
        sub = commands.add_parser(
            name, prog=f"{PROG} {name}", description=says, epilog=f"examples:\n{lines}"
        )
        for names, settings in _ARGUMENTS.get(name, ()):
            sub.add_argument(*names, **settings)
    return parser


def _overview() -> str:
    """The commands in two groups: argparse's own list has one."""
    groups = (("to learn", LEARN), ("to teach", TEACH))
    lines = [
        f"{title}:\n" + "\n".join(f"  {n:<9} {t}" for n, t in g.items()) for title, g in groups
    ]
    intro = "Exercises that grade themselves. Begin with `list`, then `start e00.1`."
    return "\n\n".join([intro, *lines, "COMMAND --help shows its options and examples."])


Argument = tuple[tuple[str, ...], Mapping[str, Any]]  # names and settings of `add_argument`


def _argument(*names: str, **settings: Any) -> Argument:
    return names, settings


def _flag(*names: str, says: str) -> Argument:
    return names, {"action": "store_true", "help": says}


_ONE = _argument("id", metavar="ID", help="an exercise, for instance e03.1")
_LAST = _argument("id", metavar="ID", nargs="?", help="default: the one you worked on last")
_SEED = _argument("--seed", metavar="S", type=int, default=0,
                  help="other random inputs than the public ones (0)")  # fmt: skip
_ARGUMENTS: Mapping[str, tuple[Argument, ...]] = MappingProxyType({
    "start": (_ONE, _flag("--new", says="write the newest starter beside your file")),
    "run": (
        _LAST,
        _flag("--all", says="every exercise you have begun"),
        _argument("--file", metavar="PATH", type=Path,
                  help="grade another file; nothing is remembered"),
        _flag("-v", "--verbose", says="every failure, everything printed, times"),
        _flag("--json", says="the verdict as JSON"),
    ),
    "watch": (_LAST,),
    "hint": (_ONE, _argument("-n", "--number", metavar="N", type=int,
                             help="all hints up to this one")),
    "solution": (
        _ONE,
        _flag("--give-up", says="show it before you have passed"),
        _flag("--alternate", says="a different correct solution"),
        _flag("--save", says="also write it beside your file"),
    ),
    "reset": (_ONE, _flag("--yes", says="do not ask")),
    "quiz": (
        _argument("chapter", metavar="NN", help="a chapter, for instance 03"),
        _argument("answers", metavar="LETTER", nargs="*", help="your answers in order"),
    ),
    "engine": (_argument("prompts", metavar="PROMPT", nargs="*", help="default: three of ours"),),
    "report": (
        _argument("--json", metavar="FILE", help="write JSON; - writes it to the screen"),
        _argument("--junit", metavar="FILE", help="write JUnit XML"),
        _SEED,
    ),
    "verify": (_argument("ids", metavar="ID", nargs="*", help="default: all"),),
    "grade": (
        _argument("folder", metavar="DIR", type=Path, help="one subfolder per student"),
        _argument("--hidden", metavar="PATH", type=Path,
                  help="a folder with your own test_eNN_M.py files"),
        _argument("--out", metavar="FILE", type=Path, help="write CSV (default: the screen)"),
        _argument("--json", metavar="FILE", type=Path, help="write every verdict as JSON"),
        _argument("--only", metavar="ID", nargs="+", help="these exercises only"),
        _SEED,
    ),
    "room": (
        _argument("folder", metavar="DIR", type=Path, help="with files of `report --json`"),
        _argument("--out", metavar="FILE", type=Path, default=Path("room.html"),
                  help="the page (room.html)"),
    ),
    "release": (_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder"),),
})  # fmt: skip
