"""The rooms and floors of minillm: imports point down, and counting needs no torch.

A room is a folder of `minillm/`, or a file beside them. A room imports rooms of lower floors only,
so there is no circle between rooms. The table is the design's (`minillm/DESIGN.md`). Reading the
syntax tree sees every import, also one inside a function or a rarely taken branch. What needs no
torch is imported in a process of its own.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        [
            "errors",
            "config",
            "api",
            "cache gguf",
            "plan text",
            "ops structured",
            "layers",
            "quantization",
            "models",
            "scheduling",
            "sampling",
            "speculative",
            "execution",
            "parallel",
            "trace",
            "engine",
            "llm serving",
            "minillm",  # minillm/__init__.py, which offers the public names
            "cli",
            "__main__ lab",
        ]
    )
    for room in rooms.split()
}
# Lines of Python of each part, blanks included. Limits only go down; a feature comes with its own.
LINES = {
    "minillm": 53_879, "minillm without minillm/lab": 35_917, "minillm/lab": 17_962,
    "kernels": 12_350, "notebooks": 2_198,
    "exercises/minillm_exercises": 17_870, "tests": 72_781,
}  # fmt: skip
DATA = frozenset({"assets"})  # the embedded models: files, no code
MAX_ROOMS = 25
TORCH_FREE_ROOMS = (
    "errors",
    "config",
    "api",
    "cache",
    "gguf",
    "plan",
    "text",
    "scheduling",
    "structured",
)
NEEDS_TORCH = ("torch", "triton", "minillm_kernels", "safetensors.torch")


class Import(NamedTuple):
    """One imported module: its dotted name and the line."""

    name: str
    line: int


def module_files(package: str = "minillm", folder: Path = ROOT) -> dict[str, Path]:
    """Dotted module name -> file, for every Python file of the package under `folder`."""
    files = {}
    for path in sorted((folder / package).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(module: str, source: str, is_package: bool, known: set[str]) -> list[Import]:
    """What `module` imports, with ``from package import submodule`` resolved to the submodule."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append(Import(full if full in known else base, node.lineno))
    return found


def package_imports(files: dict[str, Path]) -> dict[str, list[Import]]:
    """`imports` of every module of a package."""
    return {
        name: imports(name, path.read_text("utf-8"), path.name == "__init__.py", set(files))
        for name, path in files.items()
    }


def place(module: str) -> str:
    """The room of a module: minillm.ops.cpu -> ops; minillm itself -> minillm."""
    return module.split(".")[1] if "." in module else module


def upward_imports(graph: dict[str, list[Import]]) -> list[str]:
    """Every import that does not point to a lower floor, as ``module:line: why``."""
    wrong = []
    for module, found in graph.items():
        here = place(module)
        for name, line in found:
            there, where = place(name), f"{module}:{line} imports {name}"
            if name.split(".")[0] != "minillm" or there == here or there in DATA:
                continue
            if there == "lab":
                wrong.append(f"{where}: the engine never imports lab/")
            elif FLOORS.get(there, 0) >= FLOORS.get(here, len(FLOORS)):
                wrong.append(f"{where}: floor {FLOORS[here]} may not import floor {FLOORS[there]}")
    return wrong


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter in the repository root and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


GPU_ONLY = "minillm.ops.triton"
TORCH_FREE = [name for name in module_files() if place(name) in TORCH_FREE_ROOMS]


@cache
def graph_of_minillm() -> dict[str, list[Import]]:
    """Read when a test asks for it, because every process of a run imports this file."""
    return package_imports(module_files())


def test_every_module_has_a_floor() -> None:
    unknown = {place(module) for module in graph_of_minillm()} - set(FLOORS) - DATA
    assert not unknown, (
        f"no floor is known for {sorted(unknown)} of minillm/: put each into FLOORS in "
        "tests/test_floors.py (the lowest floor above all that it imports) and into "
        "minillm/README.md."
    )


def test_there_are_few_rooms() -> None:
    assert len({place(module) for module in graph_of_minillm()}) <= MAX_ROOMS


def test_imports_point_down() -> None:
    assert upward_imports(graph_of_minillm()) == []


def test_the_engine_loads_nothing_of_the_lab_and_minillm_no_triton() -> None:
    """`trace/recorder.py` imports a drawing by name, when it is asked for one. Triton exists on
    Linux only; None in sys.modules makes its import fail as it would there. One module is for GPUs
    alone, and no other may import it before a tensor is on one."""
    names = [
        name for name in graph_of_minillm() if not name.endswith("__main__") and name != GPU_ONLY
    ]
    engine = [name for name in names if place(name) != "lab"]
    loads, others = ("\n".join(f"import {name}" for name in each)
                     for each in (engine, ["minillm_kernels", *names]))  # fmt: skip
    look = "print([m for m in sys.modules if m.startswith('minillm.lab')])"
    code = f"import sys\nsys.modules['triton'] = None\n{loads}\n{look}\n{others}"
    assert run_python(code) == "[]"


def test_torch_is_not_loaded_by_rooms_that_count() -> None:
    loads = "\n".join(f"import {module}" for module in ["minillm", *TORCH_FREE])
    code = f"import sys\n{loads}\nprint([m for m in {NEEDS_TORCH} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_kernels_need_torch_and_triton_and_nothing_else() -> None:
    allowed = {"torch", "triton", "minillm_kernels", *sys.stdlib_module_names}
    graph = package_imports(module_files("minillm_kernels", ROOT / "kernels"))
    foreign = [
        f"{module}:{line} imports {name}"
        for module, found in graph.items()
        for name, line in found
        if name.split(".")[0] not in allowed
    ]
    assert foreign == []


# The checks above are worth what they catch: each is given a violation.


def planted(files: dict[str, str]) -> dict[str, list[Import]]:
    """The import graph of a made-up package."""
    return {
        name: imports(name, text, name == "minillm", set(files)) for name, text in files.items()
    }


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("minillm.config", "from minillm.ops import norm", "floor 1 may not import floor 5"),
        ("minillm.layers.mlp", "from minillm import execution", "floor 6 may not import floor 12"),
        ("minillm.layers.mlp", "from ..execution import runner", "floor 6 may not import floor 12"),
        ("minillm.text.stop", "def f():\n    import minillm.engine", "floor 4 may not import"),
        ("minillm.text.stop", "import minillm.plan.cost", "floor 4 may not import floor 4"),
        ("minillm.execution.runner", "import minillm", "floor 12 may not import floor 17"),
        ("minillm.execution.runner", "from minillm import LLM", "floor 12 may not import floor 17"),
        ("minillm.llm", "from minillm.lab.training import corpus", "never imports lab/"),
        ("minillm.cli.chat", "import minillm.lab.commands.info", "never imports lab/"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str, message: str) -> None:
    others = dict.fromkeys(("minillm", "minillm.execution", "minillm.execution.runner"), "")
    (found,) = upward_imports(planted({**others, module: source}))
    assert message in found
    assert found.startswith(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minillm.layers.mlp", "from minillm.layers import norm\nfrom minillm.ops import silu"),
        ("minillm.lab.commands.bench", "import minillm.lab.benchmarks.latency"),
        ("minillm.lab.training.loop", "from minillm.llm import LLM\nimport minillm.assets.x"),
        ("minillm.lab.training.loop", "from minillm import LLM"),
        ("minillm", "from minillm.llm import LLM"),
    ],
)
def test_a_downward_import_is_accepted(module: str, source: str) -> None:
    assert upward_imports(planted({module: source})) == []


@pytest.mark.parametrize("part", LINES)
def test_parts_do_not_grow(part: str) -> None:
    lines = 0
    for sign, folder in zip((1, -1), part.split(" without "), strict=False):
        files = (ROOT / folder).rglob("*.py")
        lines += sign * sum(file.read_bytes().count(b"\n") for file in files)
    assert lines <= LINES[part], f"{part} has {lines} lines: take some away before you add more."
