"""The floors of minillm: imports point down or sideways, and counting needs no torch.

The table is the design's. Reading the syntax tree sees every import, also one inside a function or
a rarely taken branch; a subprocess then confirms what a real import does.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    **dict.fromkeys(["config", "sampling_params", "outputs", "errors", "hardware"], 0),
    **dict.fromkeys(["engine_args", "machine", "parameters", "cost", "decode_law", "presets"], 0),
    **dict.fromkeys(["attention_pairs", "cache_spec"], 0),
    **dict.fromkeys(["speculative_config", "eplb_config", "speculation_cost", "links"], 0),
    **dict.fromkeys(["prompts", "vllm_arguments", "async_engine_args", "expert_load"], 0),
    **dict.fromkeys(["ops", "linear_methods"], 1),
    **dict.fromkeys(["layers"], 2),
    **dict.fromkeys(["models", "quantization"], 3),
    **dict.fromkeys(["scheduling", "cache", "text"], 4),
    **dict.fromkeys(
        [
            "runner",
            "forward_pass",
            "sampler",
            "speculative",
            "graphs",
            "deterministic",
            "fixed_sums",
        ],
        5,
    ),
    **dict.fromkeys(["batches", "edits", "logprobs", "segments"], 5),
    **dict.fromkeys(["collect", "executor", "flight", "sequence_row", "wire"], 5),
    **dict.fromkeys(["engine", "engine_setup", "engine_report", "completion", "live_request"], 6),
    **dict.fromkeys(["scheduler_setup", "trace", "simulation", "parallel"], 6),
    **dict.fromkeys(["parallel_cost", "parallel_layout"], 6),  # need parallel/split.py, no torch
    **dict.fromkeys(["llm", "async_engine", "request_stream", "step_thread"], 7),
    **dict.fromkeys(["ticket", "stat_logger"], 7),
    **dict.fromkeys(["cli", "__main__", "serving"], 8),
    "": 9,  # minillm/__init__.py, which offers the names of every floor
}
BESIDE = frozenset({"training", "assets", "benchmarks"})
COMMANDS = frozenset({"cli", "__main__"})  # `minillm bench` runs benchmarks/
TORCH_FREE_FLOORS = (0, 4)
NEEDS_TORCH = ("torch", "triton", "minillm_kernels", "safetensors.torch")


class Import(NamedTuple):
    """One imported module: its dotted name, the line, and whether importing the file runs it."""

    name: str
    line: int
    at_import: bool


def module_files(package: str = "minillm", folder: Path = ROOT) -> dict[str, Path]:
    """Dotted module name -> file, for every Python file of the package under `folder`."""
    files = {}
    for path in sorted((folder / package).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def is_type_checking(node: ast.AST) -> bool:
    """Whether `node` is ``if TYPE_CHECKING:``, whose body never runs."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, with whether importing the module executes it."""
    for child in ast.iter_child_nodes(node):
        runs = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield child, at_import
        yield from statements(child, runs and not is_type_checking(child))


def imports(module: str, source: str, is_package: bool, known: set[str]) -> list[Import]:
    """What `module` imports, with ``from package import submodule`` resolved to the submodule."""
    found = []
    for node, at_import in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append(Import(full if full in known else base, node.lineno, at_import))
    return found


def package_imports(files: dict[str, Path]) -> dict[str, list[Import]]:
    """`imports` of every module of a package."""
    return {
        name: imports(name, path.read_text("utf-8"), path.name == "__init__.py", set(files))
        for name, path in files.items()
    }


def place(module: str) -> str:
    """The entry of the table that a module belongs to: minillm.ops.cpu -> ops; minillm -> ''."""
    return module.split(".")[1] if "." in module else ""


def upward_imports(graph: dict[str, list[Import]]) -> list[str]:
    """Every import that points up, or to a folder beside the floors, as ``module:line: why``."""
    wrong = []
    for module, found in graph.items():
        here = place(module)
        for name, line, _ in found:
            if name.split(".")[0] != "minillm" or place(name) == here:
                continue
            there, where = place(name), f"{module}:{line} imports {name}"
            if there in BESIDE:
                command = there == "benchmarks" and here in COMMANDS
                if here not in BESIDE and not command:
                    wrong.append(f"{where}: the engine never imports {there}/")
            elif here not in BESIDE and FLOORS.get(there, -1) > FLOORS.get(here, 9):
                wrong.append(f"{where}: floor {FLOORS[here]} may not import floor {FLOORS[there]}")
    return wrong


def torch_chains(graph: dict[str, list[Import]], start: str) -> list[str]:
    """Chains of imports, run when `start` is imported, that end in something that needs torch."""
    chains, todo, seen = [], [(start, start)], {start}
    while todo:
        module, chain = todo.pop()
        for name, _, at_import in graph[module]:
            if not at_import:
                continue
            if any(name == root or name.startswith(root + ".") for root in NEEDS_TORCH):
                chains.append(f"{chain} -> {name}")
            parts = name.split(".")  # importing a.b.c also runs a/__init__.py and a/b/__init__.py
            for parent in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if parent in graph and parent not in seen:
                    seen.add(parent)
                    todo.append((parent, f"{chain} -> {parent}"))
    return chains


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter in the repository root and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


GRAPH = package_imports(module_files())
TORCH_FREE = [name for name in GRAPH if FLOORS.get(place(name)) in TORCH_FREE_FLOORS]


def test_every_module_has_a_floor() -> None:
    unknown = {place(module) for module in GRAPH} - set(FLOORS) - BESIDE
    assert not unknown, (
        f"no floor is known for {sorted(unknown)} of minillm/: put each into FLOORS in "
        "tests/test_floors.py (the lowest floor whose modules it needs) and into minillm/README.md."
    )


def test_imports_point_down_or_sideways() -> None:
    assert upward_imports(GRAPH) == []


@pytest.mark.parametrize("module", ["minillm", *TORCH_FREE])
def test_floors_0_and_4_do_not_import_torch(module: str) -> None:
    assert torch_chains(GRAPH, module) == []


def test_torch_is_not_loaded_by_floors_0_and_4() -> None:
    loads = "\n".join(f"import {module}" for module in ["minillm", *TORCH_FREE])
    code = f"import sys\n{loads}\nprint([m for m in {NEEDS_TORCH} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_kernels_need_torch_and_triton_and_nothing_else() -> None:
    allowed = {"torch", "triton", "minillm_kernels", *sys.stdlib_module_names}
    graph = package_imports(module_files("minillm_kernels", ROOT / "kernels"))
    foreign = [
        f"{module}:{line} imports {name}"
        for module, found in graph.items()
        for name, line, _ in found
        if name.split(".")[0] not in allowed
    ]
    assert foreign == []


def test_minillm_imports_without_triton() -> None:
    """Triton exists on Linux only; None in sys.modules makes its import fail as it would there.

    One module is for GPUs alone, and no other may import it before a tensor is on one.
    """
    gpu = "minillm.ops.triton"
    modules = [name for name in GRAPH if not name.endswith("__main__") and name != gpu]
    loads = "\n".join(f"import {module}" for module in ["minillm_kernels", *modules])
    run_python(f"import sys\nsys.modules['triton'] = None\n{loads}")


# The checks above are worth what they catch: each is given a violation.


def planted(files: dict[str, str]) -> dict[str, list[Import]]:
    """The import graph of a made-up package."""
    return {
        name: imports(name, text, name == "minillm", set(files)) for name, text in files.items()
    }


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("minillm.config", "from minillm.ops import norm", "floor 0 may not import floor 1"),
        (
            "minillm.layers.mlp",
            "from minillm.execution import runner",
            "floor 2 may not import floor 5",
        ),
        ("minillm.layers.mlp", "from ..runner import Runner", "floor 2 may not import floor 5"),
        ("minillm.text.stop", "def f():\n    import minillm.engine.loop", "floor 4 may not import"),
        ("minillm.execution.runner", "import minillm", "floor 5 may not import floor 9"),
        ("minillm.runner", "from minillm import LLM", "floor 5 may not import floor 9"),
        ("minillm.llm", "from minillm.lab.training import corpus", "never imports training/"),
        ("minillm.engine.loop", "import minillm.lab.benchmarks", "never imports benchmarks/"),
    ],
)
def test_an_upward_import_is_found(module: str, source: str, message: str) -> None:
    others = {
        name: "" for name in ("minillm", "minillm.execution.runner", "minillm.lab.training.corpus")
    }
    (found,) = upward_imports(planted({**others, module: source}))
    assert message in found
    assert found.startswith(module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("minillm.layers.mlp", "from minillm.layers import norm\nfrom minillm.ops import silu"),
        ("minillm.cli", "import minillm.lab.benchmarks.latency"),
        ("minillm.training.loop", "from minillm.llm import LLM\nfrom minillm.assets import x"),
        ("minillm", "from minillm.llm import LLM"),
    ],
)
def test_a_downward_import_is_accepted(module: str, source: str) -> None:
    assert upward_imports(planted({module: source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch.nn import functional",
        "import safetensors.torch",
        "try:\n    import triton\nexcept ImportError:\n    triton = None",
        "class A:\n    import torch",
        "from minillm.ops import norm",  # whose package imports torch
    ],
)
def test_a_module_that_needs_torch_is_found(source: str) -> None:
    files = {"minillm": "", "minillm.ops": "import torch", "minillm.ops.norm": ""}
    graph = planted({**files, "minillm.config": source})
    assert len(torch_chains(graph, "minillm.config")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def measure():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "import torchlike",
    ],
)
def test_a_late_import_of_torch_is_accepted(source: str) -> None:
    assert torch_chains(planted({"minillm.plan.hardware": source}), "minillm.plan.hardware") == []
