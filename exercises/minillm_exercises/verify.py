"""Test the graders: `verify` reports every wrong verdict and what to repair.

A broken grader may go on to say "pass" unnoticed. So each grader runs on submissions with a known
outcome: the starter, two correct solutions, wrong ones, mechanical mutants, functions that return
nothing, and objects that claim to be equal to everything.
"""

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import Grader
from minillm_exercises.guard import inspect_source
from minillm_exercises.limits import DEFAULT
from minillm_exercises.manifest import Exercise, find, load_manifest
from minillm_exercises.mutants import Mutant
from minillm_exercises.mutation import mechanical_mutants
from minillm_exercises.results import Verdict

SEEDS = (0, 1)
LEAST_MUTANTS = 3
MOST_CHANGED_LINES = 5
KILLED = 0.85
IMPATIENT = replace(DEFAULT, cpu=1.0)
Function = ast.FunctionDef | ast.AsyncFunctionDef
BASES = ("int", "float", "str", "list", "tuple", "dict", "object")
# A class that agrees with everything: every comparison holds, and every other operation, of Python
# or of torch, gives the object itself.
AGREEABLE = """
class Agreeable({base}):
    def _itself(self, *args, **kwargs):
        return self

    def _yes(self, *args, **kwargs):
        return True

    def _no(self, *args, **kwargs):
        return False

    def __hash__(self):
        return 0

    def __iter__(self):
        return iter((self,))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return agreeable

    __eq__ = __le__ = __ge__ = __bool__ = __contains__ = _yes
    __ne__ = __lt__ = __gt__ = _no
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _itself
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _itself
    __neg__ = __pos__ = __abs__ = __round__ = __getitem__ = __call__ = _itself


agreeable = Agreeable()
"""


@dataclass(frozen=True)
class Problem:
    """A fault of an exercise; `message` is a sentence that says how to repair it."""

    exercise_id: str
    message: str

    def __str__(self) -> str:
        return f"{self.exercise_id}: {self.message}"


def verify(
    manifest: dict[str, Exercise] | None = None,
    ids: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
    thorough: bool = True,
) -> list[Problem]:
    """Everything wrong with the exercises called `ids` (all, if None) of `manifest`.

    Args:
        progress: is called with one line about each exercise when it is done.
        thorough: run each known-wrong solution twice and to its end, to see that it is recognised
            and none of its results depends on chance; try mechanical mutants of the solution, two
            seeds, and objects that agree with everything of every kind. Without, there is one of
            each, and only the first known-wrong solutions have to fail.

    Raises:
        ExerciseError: an id that is not in the manifest, or a manifest that cannot be read.
    """
    manifest = load_manifest() if manifest is None else manifest
    exercises = [find(key, manifest) for key in (manifest if ids is None else ids)]
    problems: list[Problem] = []
    for exercise in exercises:
        found, summary = _verify(exercise, thorough)
        problems += found
        if progress is not None:
            progress(f"{exercise.id}: {summary}, {len(found)} to repair")
    return problems


def _verify(exercise: Exercise, thorough: bool) -> tuple[list[Problem], str]:
    messages = list(_texts(exercise))
    try:
        trial = _Trial(exercise, Grader(exercise), thorough)
        messages += trial.messages()
        summary = trial.summary
    except ExerciseError as error:
        messages.append(str(error))
        summary = "not graded"
    return [Problem(exercise.id, message) for message in messages], summary


def _texts(exercise: Exercise) -> Iterator[str]:
    """What is wrong with the files a learner reads."""
    readme = exercise.folder / "README.md"
    if not readme.is_file() or exercise.id not in readme.read_text(encoding="utf-8"):
        yield f"{readme.name} is missing or does not speak of {exercise.id}: write the task there."
    if not exercise.starter.is_file():
        yield f"the starter {exercise.starter.name} is missing."
        return
    try:
        tree = ast.parse(exercise.starter.read_text(encoding="utf-8"))
    except SyntaxError as error:
        yield f"the starter is no Python: {error}."
        return
    for name, node in _definitions(tree):
        if name.split(".")[0] not in {known.split(".")[0] for known in exercise.names}:
            continue
        if not ast.get_docstring(node):
            yield f"{name} in the starter has no docstring: say what it takes and returns."
        if isinstance(node, Function) and (untyped := _untyped(node)):
            yield f"{name} in the starter has no type for {', '.join(untyped)}."
    if "torch" in _imported(tree) and "torch" not in exercise.needs:
        yield 'the starter imports torch: add needs = ["torch"] to exercises.toml.'


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions and classes of a module, and the public methods: ``Cache.append``."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Function) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def _untyped(function: Function) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    return missing if function.returns is not None else [*missing, "the result"]


def _imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


class _Trial:
    """Tries one exercise's grader on submissions whose outcome is known."""

    def __init__(self, exercise: Exercise, grader: Grader, thorough: bool) -> None:
        self._exercise, self._grader, self._thorough = exercise, grader, thorough
        self.summary = "no solution"

    def messages(self) -> Iterator[str]:
        """The faults of the exercise."""
        if not sum(check.points for check in self._grader.checks) > 0:
            yield "the checks give no points."
        if self._exercise.starter.is_file():
            yield from self._starter()
            yield from self._fooled(self._exercise.starter.read_text(encoding="utf-8"))
        solution = self._exercise.answers / "solution.py"
        yield from self._correct(solution)
        yield from self._correct(self._exercise.answers / "alternate.py")
        if solution.is_file() and not inspect_source(solution.read_bytes(), self._exercise):
            yield from self._known_wrong(solution)
            if self._thorough:
                yield from self._mechanical(solution)

    def _starter(self) -> Iterator[str]:
        verdict = self._grader.grade(self._exercise.starter, diagnose=False)
        todo = f"TODO {self._exercise.id}"
        if verdict.status != "todo":
            yield (
                f"the starter's verdict is {_said(verdict)}: each function to be written must "
                f'raise NotImplementedError("{todo}: ...") and nothing else may fail.'
            )
        for check in verdict.checks:
            if check.status == "pass":
                yield f"the starter passes {check.name}: that check asks for nothing."
            elif verdict.status == "todo" and not check.message.startswith(todo):
                yield f"{check.name} fails on the starter without its TODO: {check.message}"

    def _fooled(self, starter: str) -> Iterator[str]:
        """Nothing may pass an empty file, and the starter with functions that return None or an
        object equal to everything."""
        bases = (*BASES, *(("torch.Tensor",) if "torch" in self._exercise.needs else ()))
        tried = {
            "on an empty file: it does not call the submission": "",
            "when every function returns None: compare a value that the submission returned": (
                returning_none(starter)
            ),
        } | {
            f"when every function returns an object of a kind of {base} that agrees with "
            f"everything: pass a result through number(...) or accept(...) before the check "
            f"computes with it": returning_agreeable(starter, base)
            for base in (bases if self._thorough else bases[-1:])
        }
        known = set()
        for why, source in tried.items():
            for name in self._passed(source):
                if name not in known:
                    yield f"{name} passes {why}."
                known.add(name)

    def _passed(self, source: str) -> Iterator[str]:
        """The checks that `source` passes; what ends the process hides those behind it, which are
        then run in another."""
        waiting = [check.name for check in self._grader.checks]
        while waiting:
            verdict = self._grader.run(source, checks=waiting)
            yield from (check.name for check in verdict.checks if check.status == "pass")
            if verdict.status not in ("crashed", "timeout"):
                return
            ran = [at for at, c in enumerate(verdict.checks, 1) if c.status != "not run"]
            waiting = waiting[max(ran, default=1) :]

    def _correct(self, path: Path) -> Iterator[str]:
        """A solution must pass, for each seed."""
        if not path.is_file():
            yield f"{path.name} is missing in {self._exercise.answers.name}."
            return
        if finding := inspect_source(path.read_bytes(), self._exercise):
            why = finding.message.splitlines()[0]
            yield (
                f"{path.name} is refused: {why} Allow it in exercises.toml (imports, banned, "
                f"names), or write {path.name} without it."
            )
            return
        for seed in SEEDS if self._thorough else SEEDS[:1]:
            verdict = self._grader.run(path.read_text(encoding="utf-8"), seed=seed)
            if verdict.status != "pass":
                yield (
                    f"{path.name} does not pass with seed {seed}: {_said(verdict)}. Repair it, or "
                    f"the check that asks for more than the README."
                )

    def _known_wrong(self, solution: Path) -> Iterator[str]:
        mutants = self._grader.mutants
        if len(mutants) < LEAST_MUTANTS:
            yield f"there are {len(mutants)} mutants; write at least {LEAST_MUTANTS}."
        names: dict[str, str] = {}
        verdicts = self._verdicts(mutants)
        right = solution.read_text(encoding="utf-8")
        for mutant in mutants:
            if mutant.teaches in names:
                yield (
                    f"mutants {names[mutant.teaches]} and {mutant.name} teach the same sentence: "
                    f"say what is wrong in each."
                )
            names[mutant.teaches] = mutant.name
            if (lines := changed_lines(right, mutant.source)) > MOST_CHANGED_LINES:
                yield (
                    f"mutant {mutant.name} differs from the solution in {lines} lines; at most "
                    f"{MOST_CHANGED_LINES}, so that it is one mistake."
                )
            yield from self._wrong(mutant, verdicts)

    def _verdicts(self, mutants: Iterable[Mutant]) -> dict[str, Verdict]:
        """The verdict on each mutant that may be handed in, in a hurry up to its first failure. The
        grader compares every mutant with all others: it need not run those once more for each of
        their checks."""
        verdicts: dict[str, Verdict] = {}
        for mutant in mutants:
            if not self._thorough and len(verdicts) == LEAST_MUTANTS:
                break
            if not inspect_source(mutant.source.encode(), self._exercise):
                verdict = self._grader.run(mutant.source, stop=not self._thorough)
                verdicts[mutant.name] = verdict
                if self._thorough:
                    self._grader.remember(mutant, verdict)
        return verdicts

    def _wrong(self, mutant: Mutant, verdicts: dict[str, Verdict]) -> Iterator[str]:
        """A mutant may be handed in, passes something, fails something, and is recognised."""
        if finding := inspect_source(mutant.source.encode(), self._exercise):
            why = finding.message.splitlines()[0]
            yield f"mutant {mutant.name} is refused, so no learner can make this mistake: {why}"
            return
        if mutant.name not in verdicts:
            return
        verdict = verdicts[mutant.name]
        if self._thorough:
            self._grader.forget(mutant)  # a second run of itself must do the same
            verdict = self._grader.diagnose(verdict)
        if verdict.status == "pass":
            yield (
                f"mutant {mutant.name} passes every check: add a case that notices "
                f"({mutant.teaches})"
            )
        elif verdict.status != "fail":
            yield (
                f"mutant {mutant.name} should fail a check, but its verdict is {_said(verdict)}. "
                f"Make it run to the end."
            )
        elif not self._thorough:
            return
        elif not verdict.earned:
            yield f"mutant {mutant.name} fails every check: add a check that its mistake passes."
        elif verdict.mutant != mutant.name:
            twins = [twin.name for twin in self._grader.twins(mutant)]
            yield (
                f"mutants {mutant.name} and {', '.join(twins)} look the same to every check: add "
                f"a case that tells them apart, observe more (expect(..., observed=...)), or "
                f"remove one."
                if twins
                else f"mutant {mutant.name} is not recognised by its own behaviour ("
                f"{_said(verdict)}): do its results depend on chance?"
            )

    def _mechanical(self, solution: Path) -> Iterator[str]:
        mutants = mechanical_mutants(solution.read_text(encoding="utf-8"))
        excused = self._exercise.survivors
        alive = [m.id for m in mutants if self._passes(m.source, m.id in excused)]
        for name in excused:
            if name not in alive:
                yield (
                    f"survivors names {name!r}, which is no surviving mutant (any more): remove "
                    f"it from exercises.toml."
                )
        unexcused = [name for name in alive if name not in excused]
        counted = len(mutants) - (len(alive) - len(unexcused))
        killed = len(mutants) - len(alive)
        self.summary = f"{killed} of {counted} mechanical mutants noticed"
        if killed < KILLED * counted:
            yield (
                f"the checks notice {killed} of {counted} mechanical mutants of the solution, "
                f"fewer than {KILLED:.0%}. Add cases for, or name in survivors with the reason "
                f"why nothing changes: {'; '.join(unexcused)}."
            )

    def _passes(self, source: str, excused: bool) -> bool:
        """Whether a mechanical mutant passes. One that seems to loop is noticed, so that it need
        not loop for long; an excused one has the time of a solution, for slow machines."""
        limits = DEFAULT if excused else IMPATIENT
        return self._grader.run(source, stop=True, limits=limits).status == "pass"


def _said(verdict: Verdict) -> str:
    """A verdict in one line, for a problem's message."""
    checks = sorted(verdict.checks, key=lambda check: check.status == "not run")
    wrong = [f"{c.name}: {c.message}" for c in checks if c.message]
    return " ".join(f"{verdict.status} ({verdict.message or '; '.join(wrong[:2])})".split())


def returning_none(starter: str) -> str:
    """The starter with every function that is to be written returning None."""
    return _returning(starter, "None")


def returning_agreeable(starter: str, base: str) -> str:
    """The starter with every function that is to be written returning an object which is of a
    class derived from `base` and agrees with everything."""
    imported = "\nimport torch\n" if base.startswith("torch.") else ""
    return _returning(starter, "agreeable") + imported + AGREEABLE.format(base=base)


def _returning(starter: str, value: str) -> str:
    tree = ast.parse(starter)
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(isinstance(n, ast.Raise) for n in ast.walk(node)):
            returned = "None" if node.name == "__init__" else value
            node.body = [ast.Return(ast.parse(returned, mode="eval").body)]
    return ast.unparse(ast.fix_missing_locations(tree))


def changed_lines(one: str, other: str) -> int:
    """In how many lines two sources differ, formatting, comments and docstrings aside."""
    first, second = (_code(source).splitlines() for source in (one, other))
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    blocks = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
    return sum(max(i2 - i1, j2 - j1) for i1, i2, j1, j2 in blocks)


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
