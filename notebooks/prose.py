"""The numbers in a chapter's prose, each bound to where it comes from instead of typed.

    <span data-fact="NAME">?</span>     what fact("NAME", ...) printed in this chapter
    <span data-result="NAME">?</span>   what record("NAME", ...) measured on the reference machine
    <span data-given="NAME">?</span>    a constant of a code cell: NAME = 128, or LENGTHS[0]
    <span data-claim="A24">49,109</span>   a figure quoted from an article, listed in claims.toml

`execute.py` fills them in; the tests hold them to their sources and find the numbers that are
bound to nothing.
"""

import ast
import html
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chapters import NOTEBOOKS, Notebook, code_cells, facts, parsed
from minillm_exercises.plots import listed
from stale import pointed

SPAN = re.compile(r'<span data-(?P<kind>[\w-]+)="(?P<name>[^"]*)">(?P<text>.*?)</span>', re.DOTALL)
KINDS = ("fact", "result", "given", "claim")


@dataclass(frozen=True)
class Sources:
    """Everything a number in a chapter may be bound to, by kind and name, as it is written."""

    fact: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    claim: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        notebook: Notebook,
        results: Mapping[str, Any] | None = None,
        claims: Mapping[str, Any] | None = None,
    ) -> "Sources":
        """What `notebook` states, what its `results` JSON holds and what `claims` quotes."""
        values = (results or {}).get("values", {})
        return cls(
            facts(notebook),
            {name: entry["text"] for name, entry in values.items()},
            given(notebook),
            {name: tuple(entry["figures"]) for name, entry in (claims or {}).items()},
        )


def load_results(stem: str, folder: Path = NOTEBOOKS) -> dict[str, Any]:
    """What the reference machine measured for the chapter, {} before its first execution."""
    path = folder / "results" / f"{stem}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def load_claims(folder: Path = NOTEBOOKS) -> dict[str, Any]:
    """The figures that chapters quote from articles, by claim."""
    path = folder / "claims.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def given(notebook: Notebook) -> dict[str, str]:
    """The constants that code cells assign, as prose writes them: ``N = 2**10`` is "1,024".

    A sequence has its elements as NAME[0], NAME[1] ... NAME[-1]. A name that is assigned two
    different constants is no constant and is left out.
    """
    found: dict[str, set[str]] = {}
    for _, cell in code_cells(notebook):
        tree = parsed(cell)
        for target, value in _assignments(tree) if tree else ():
            constant = _constant(value)
            items = [(target, constant)]
            if isinstance(constant, tuple | list):
                items = [(f"{target}[{at}]", item) for at, item in enumerate(constant)]
                items += [(f"{target}[-1]", item) for item in constant[-1:]]
            for name, item in items:
                found.setdefault(name, set()).add(written(item))
    return {
        name: min(texts) for name, texts in found.items() if len(texts) == 1 and "" not in texts
    }


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            pairs = [(node.target, node.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for each, part in zip(target.elts, value.elts, strict=False):
                    if isinstance(each, ast.Name):
                        yield each.id, part


def _constant(node: ast.expr) -> Any:
    """The value of an expression of literals and operators only, else None."""
    try:
        return _value(node)
    except (TypeError, ValueError, ArithmeticError, KeyError):
        return None


def _value(node: ast.expr) -> Any:
    """Nothing of the notebook is called: what is not known here is a ValueError or a KeyError."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        operations = {
            ast.Add: lambda: left + right,
            ast.Sub: lambda: left - right,
            ast.Mult: lambda: left * right,
            ast.Div: lambda: left / right,
            ast.FloorDiv: lambda: left // right,
            ast.Pow: lambda: left**right if right < 64 else None,
        }
        return operations[type(node.op)]()
    raise ValueError(ast.dump(node))


def written(value: Any) -> str:
    """A constant as prose writes it: 8256 is "8,256", 1e9 is "1,000,000,000"; "" if no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def same_number(text: str, source: str) -> bool:
    """Whether `text` is `source` as a reader sees it: thousands commas are optional."""
    return text.strip() == source or text.strip().replace(",", "") == source.replace(",", "")


def fill(notebook: Notebook, sources: Sources) -> list[str]:
    """Write the facts', results' and constants' values into the spans of the prose, in place.

    Returns one sentence for each span that could not be filled.
    """
    problems = []
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "markdown":
            continue

        def replaced(match: re.Match[str], index: int = index) -> str:
            kind, name, text = match["kind"], match["name"], match["text"]
            if kind == "claim":
                return match[0]
            value = getattr(sources, kind, {}).get(name) if kind in KINDS else None
            if value is None:
                problems.append(f"cell {index}: {unknown(kind, name, sources)}")
                return match[0]
            shown = text if same_number(text, value) else value
            return f'<span data-{kind}="{name}">{shown}</span>'

        cell["source"] = SPAN.sub(replaced, pointed(cell["source"]))
    return problems


def renew_listings(notebook: Notebook) -> None:
    """Write the present source of what `listing` shows, in place. What a chapter imports is known
    here; a listing of something that it computes is left as it is."""
    shown: list[str] = []
    names: dict[str, Any] = {}
    for _, cell in code_cells(notebook):
        tree = parsed(cell)
        for statement in tree.body if tree else []:
            is_listing = ast.unparse(statement).startswith("listing(")
            if is_listing or isinstance(statement, ast.Import | ast.ImportFrom):
                # Every time, because an import of the chapter brings the real one.
                names["listing"] = lambda *parts: shown.append(listed(*parts))
                with suppress(NameError):
                    exec(compile(ast.Module([statement], []), "a cell", "exec"), names)
        while shown:
            text = shown.pop()
            for data in (output.get("data", {}) for output in cell["outputs"]):
                if data.get("text/markdown", "").partition("\n")[0] == text.partition("\n")[0]:
                    data["text/markdown"] = text


def unknown(kind: str, name: str, sources: Sources) -> str:
    """What to say of a span whose source does not exist."""
    if kind not in KINDS:
        return f"data-{kind} is no binding; they are {', '.join(f'data-{k}' for k in KINDS)}."
    where = {
        "fact": "no fact cell prints it with fact()",
        "result": "no cell record()s it, or the chapter was not executed since",
        "given": "no code cell assigns it one constant",
        "claim": "notebooks/claims.toml has no such entry",
    }[kind]
    known = sorted(getattr(sources, kind)) or ["none"]
    return f'data-{kind}="{name}": {where}. Known: {", ".join(known)}.'


# Numbers that may be typed -------------------------------------------------------------------

# What a model, a chip, a format or a program is called: a fixed phrase, or letters come first.
NAMED = re.compile(
    r"""
      \b(?:RTX|GTX|GeForce|Ryzen|EPYC|Core\si\d|Python|PyTorch|CUDA|Pascal|Table|Figure|Section)
      \s\d+(?:\.\d+)*(?:\s?(?:Ti|Super))?
    | \b(?:[Cc]hapters?|[Ee]xercises?)\s\d\d?(?:\.\d)?
      (?:(?:,\s?and|,|\sand|\sto|\sor|–|-)\s?\d\d?(?:\.\d)?)*
    | [(\[][^()\[\]]*\b(?:19|20)\d\d[a-z]?[)\]]              # (Kwon et al., 2023)
    | \bet\sal\.,?\s(?:19|20)\d\d
    | \b(?:4|8|16|32|64)-bit\b
    | \b0\d\b                                                # chapter 03
    | \b(?:2|10)\^\{?-?\d+\}?                                # 10^9, the definition of a unit
    | (?<![\w=<>*/+]) [A-Za-z][A-Za-z_]*(?:[-._:]?\w+)*      # smollm2-135m, bf16, e03.1
    """,
    re.VERBOSE,
)
NUMBERED_WORD = re.compile(r"[a-z]+[-.:_]\d[\d.]*")  # top-50 is a number with a word before it
MARKUP = re.compile(r"\]\([^)]*\)|<[^>]+>|https?://\S+|^\s*\d+\.\s", re.MULTILINE)
DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
FREE = 12


def loose_numbers(
    prose: str, code: str = "", bound: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """The typed numbers of a text, each with the sentence it stands in.

    Free are: bound spans, integers up to 12, names (H100, Llama-2-7B), chapters and exercises,
    years of citations, inline code that occurs in `code`, and the numbers in `bound`.
    """
    text = SPAN.sub(" ", prose)
    text = re.sub(r"`([^`]+)`", lambda m: " " if m[1] in code else f" {m[1]} ", text)
    text = MARKUP.sub(" ", text)
    text = NAMED.sub(lambda m: m[0] if NUMBERED_WORD.fullmatch(m[0]) else " ", html.unescape(text))
    for match in DIGITS.finditer(text):
        number = match[0].rstrip(".,")
        if number.isdigit() and (int(number) <= FREE or number in bound):
            continue
        yield number, _sentence(prose, number)


def _sentence(prose: str, number: str) -> str:
    """The sentence of `prose` that holds `number` outside its spans, without markup."""
    plain = SPAN.sub(lambda match: "\0" * len(match[0]), prose)
    at = max(0, plain.find(number))
    start = max(
        plain.rfind(". ", 0, at) + 2 if ". " in plain[:at] else 0, plain.rfind("\n\n", 0, at) + 1
    )
    ends = [end for end in (plain.find(". ", at), plain.find("\n\n", at)) if end >= 0]
    sentence = prose[start : min(ends) + 1 if ends else len(prose)]
    return " ".join(re.sub(r"<[^>]+>", "", sentence).split())[:160]
