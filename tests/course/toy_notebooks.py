"""Small notebooks for the tests, built as execute.py would leave them."""

import json
from pathlib import Path
from typing import Any

from notebook_chapter import NOTEBOOKS, chapters

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
FACT_TAGS = ("facts", "nbval-check-output")


def markdown(source: str, *tags: str) -> dict[str, Any]:
    """A cell of prose."""
    return {"cell_type": "markdown", "metadata": {"tags": [*tags]}, "source": source}


def code(source: str, *tags: str, says: str = "", outputs: tuple = ()) -> dict[str, Any]:
    """A cell of code whose committed output is what it `says`, then `outputs`."""
    printed = [{"output_type": "stream", "name": "stdout", "text": says}] if says else []
    metadata = {"tags": [*tags]} if tags else {}
    made = {"cell_type": "code", "metadata": metadata, "source": source}
    return {**made, "outputs": [*printed, *outputs]}


def fact(name: str, value: object) -> dict[str, Any]:
    """A fact cell that needs no import, with the committed output that is right."""
    return code(f"print('{name}: {value}')", *FACT_TAGS, says=f"{name}: {value}\n")


def notebook(*cells: dict[str, Any], number: str = "90", **about: object) -> dict[str, Any]:
    """A notebook of these cells, run once from top to bottom."""
    count = 0
    for index, cell in enumerate(cells):
        cell.setdefault("id", f"c{index}")
        if cell["cell_type"] == "code":
            count += 1
            cell.setdefault("execution_count", count)
    known = {"chapter": number, "question": "Why?", "minutes": 30, "needs": [], **about}
    return {
        "cells": json.loads(json.dumps(cells)),
        "metadata": {
            "kernelspec": dict(KERNELSPEC),
            "language_info": {"name": "python"},
            "minillm": known,
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write(folder: Path, stem: str, *cells: dict[str, Any], **about: object) -> Path:
    """Write a notebook into `folder`."""
    path = folder / f"{stem}.ipynb"
    chapters.write_notebook(path, notebook(*cells, number=stem.partition("_")[0], **about))
    return path


def copy_machinery(folder: Path) -> None:
    """Put what pytest needs to run the notebooks of `folder` beside them."""
    for name in ("conftest.py", "chapters.py", "forked.py"):
        (folder / name).write_text((NOTEBOOKS / name).read_text("utf-8"), "utf-8")
