"""The list of exercises: `exercises.toml` as frozen dataclasses, checked when it is read."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.errors import did_you_mean
from minillm_exercises.errors import ExerciseError
from minillm_exercises.mutants import Mutant, load_mutants


@dataclass(frozen=True)
class Exercise:
    """One exercise and where its files are.

    `names` must be defined by a solution ("append", "Cache", "Cache.append"); `imports` are the
    modules it may import; `banned` are names it may not use although their module is allowed, as
    "torch.cumsum" or, for methods of anything, "cumsum"; `needs` is what the machine must
    offer ("torch", "triton", "gpu"); `survivors` maps mechanical mutants ("line 12: + -> -")
    that change nothing a check could see to the reason.
    """

    id: str  # "e03.1"
    folder: Path  # exercises/e03_kv_cache
    title: str
    chapter: str  # "03", that of the id if the file names no other
    minutes: int
    difficulty: int  # 1 to 3
    names: tuple[str, ...]
    hints: tuple[str, str, str]  # concept, pointer, pseudo-code in words
    imports: tuple[str, ...] = ("math", "typing", "collections", "dataclasses")
    banned: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    project: bool = False  # takes longer than a chapter leaves time for
    survivors: dict[str, str] = field(default_factory=dict)

    @property
    def length(self) -> str:
        """``20 minutes``, or ``project, 90 minutes``."""
        return f"{'project, ' if self.project else ''}{self.minutes} minutes"

    @property
    def stem(self) -> str:
        """The file name without suffix: ``e03_1``."""
        return self.id.replace(".", "_")

    @property
    def starter(self) -> Path:
        """The file a learner begins with."""
        return self.folder / f"{self.stem}.py"

    @property
    def checks(self) -> Path:
        """The public checks."""
        return self.folder / f"test_{self.stem}.py"

    @property
    def answers(self) -> Path:
        """The folder of solution.py, alternate.py and mutants.toml; not in a learner's release."""
        return self.folder.parent / "_solutions" / self.stem

    @property
    def mutants(self) -> tuple[Mutant, ...]:
        """The known-wrong solutions, by name."""
        return load_mutants(self.answers)


def exercises_root() -> Path:
    """The folder of exercises.toml, next to this package in a checkout."""
    return Path(__file__).resolve().parent.parent


def load_manifest(root: Path | None = None) -> dict[str, Exercise]:
    """Every exercise by id, in the course's order.

    Raises:
        ExerciseError: the file is missing, or an entry is incomplete; the message names it.
    """
    root = exercises_root() if root is None else root
    try:
        entries = tomllib.loads((root / "exercises.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExerciseError(
            "exercises.toml is not beside the package: run from a checkout of the course, or "
            "unpack its bundle."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ExerciseError(f"exercises.toml is not valid TOML: {error}.") from None
    return {key: _exercise(key, value, root) for key, value in entries.items()}


def find(exercise_id: str, manifest: dict[str, Exercise]) -> Exercise:
    """The exercise called `exercise_id`, or an error that proposes the nearest."""
    if exercise_id not in manifest:
        raise ExerciseError(
            f"There is no exercise {exercise_id!r}; there are {', '.join(manifest)}."
            + did_you_mean(exercise_id, manifest)
        )
    return manifest[exercise_id]


def _exercise(key: str, entry: dict[str, Any], root: Path) -> Exercise:
    known = set(Exercise.__dataclass_fields__) - {"id"}
    required = {"folder", "title", "minutes", "difficulty", "names", "hints"}
    if unknown := entry.keys() - known:
        raise ExerciseError(f"exercises.toml, {key}: unknown key {sorted(unknown)[0]!r}.")
    if missing := required - entry.keys():
        raise ExerciseError(f"exercises.toml, {key}: {sorted(missing)[0]!r} is missing.")
    if len(entry["hints"]) != 3 or not all(entry["hints"]):
        raise ExerciseError(f"exercises.toml, {key}: three hints, from concept to pseudo-code.")
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    lists = {"chapter": key[1:3]} | lists
    return Exercise(id=key, folder=root / lists.pop("folder"), **lists)
