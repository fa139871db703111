"""Three questions at the end of a chapter; the answers are in `exercises/quiz/NN.toml`."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import exercises_root
from minillm_exercises.wording import wrapped

LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Question:
    """One question: its options by letter, the letter of the answer, and why."""

    text: str
    options: tuple[str, ...]
    answer: str
    why: str

    def asked(self, number: int) -> str:
        """The question and its options as text."""
        lines = [f"  {letter})  {option}" for letter, option in self.by_letter().items()]
        asked = [
            wrapped(f"{number}. {self.text}", "   "),
            *(wrapped(line, " " * 6) for line in lines),
        ]
        return "\n".join(asked)

    def by_letter(self) -> dict[str, str]:
        """The options by their letters."""
        return dict(zip(LETTERS, self.options))  # noqa: B905

    def answered(self, number: int, choice: str) -> str:
        """The sentence about the answer `choice`, right or wrong.

        Raises:
            ExerciseError: the choice is none of the options.
        """
        letters = LETTERS[: len(self.options)]
        if choice not in letters or len(choice) != 1:
            raise ExerciseError(
                f"Question {number} was answered {choice!r}; choose one of {', '.join(letters)}."
            )
        verdict = "right" if choice == self.answer else f"{choice} is wrong, {self.answer} is right"
        return f"{number}. {verdict}. {self.why}"


def chapter_number(name: str) -> str:
    """A chapter's number as its files have it, "01b", from the ways people write it: "1B"."""
    return re.sub(r"^(?=\d(?!\d))", "0", name.strip().lower())


def load_quiz(chapter: str, root: Path | None = None) -> tuple[Question, ...]:
    """The questions of a chapter ("03").

    Raises:
        ExerciseError: the chapter has no quiz, or its file is damaged.
    """
    path = (root or exercises_root()) / "quiz" / f"{chapter_number(chapter)}.toml"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
        questions = tuple(
            Question(q["text"], tuple(q["options"]), q["answer"], q["why"]) for q in entries
        )
    except FileNotFoundError:
        have = ", ".join(sorted(p.stem for p in path.parent.glob("*.toml"))) or "none"
        raise ExerciseError(
            f"Chapter {chapter!r} has no quiz; these chapters have one: {have}."
        ) from None
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ExerciseError(f"{path.name} of the quiz is damaged: {error}.") from None
    for number, question in enumerate(questions, 1):
        if question.answer not in LETTERS[: len(question.options)] or len(question.answer) != 1:
            raise ExerciseError(f"{path.name}: the answer of question {number} is not an option.")
    return questions


def quiz_text(chapter: str, answers: str = "", root: Path | None = None) -> str:
    """The questions of a chapter, or, with `answers` such as "b a c", what each is worth.

    A dash leaves a question out: "- a -" answers the second only.

    Raises:
        ExerciseError: no such quiz, too many answers, or a letter that is no option.
    """
    chapter = chapter_number(chapter)
    questions = load_quiz(chapter, root)
    if answers.strip():
        return judged(questions, answers, f'quiz("{chapter}", "a b c")')[0]
    asked = "\n".join(q.asked(n) for n, q in enumerate(questions, 1))
    return f'{asked}\nAnswer with quiz("{chapter}", "a b c"); a dash leaves one out.'


def judged(questions: Sequence[Question], answers: str, example: str) -> tuple[str, bool]:
    """What each answer is worth, and whether all are right; `example` shows how to write them.

    Raises:
        ExerciseError: too many answers, or a letter that is no option.
    """
    chosen = answers.lower().replace(",", " ").split()
    if len(chosen) > len(questions):
        raise ExerciseError(
            f"There are {len(questions)} questions and {len(chosen)} answers; write one letter "
            f"each with spaces between, for instance {example}."
        )
    pairs = list(zip(questions, chosen))  # noqa: B905 (fewer answers are allowed)
    lines = [q.answered(n, c) for n, (q, c) in enumerate(pairs, 1) if c != "-"]
    right = sum(q.answer == c for q, c in pairs)
    lines.append(f"{right} of {len(questions)} right.")
    return "\n".join(lines), right == len(questions)
