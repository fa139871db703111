"""Every kernel at the sizes of real models, compiled for GPUs that are not there.

`make test` compiles the first launch of each kernel for one architecture, `make test-full` every
launch for all three. What is read from the machine code: no register was spilled, shared memory
fits, products run on tensor cores and tiles come by bulk copies where a launch says so.
"""

import ast
import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("triton")

import torch

from minillm_kernels import compiled_table
from minillm_kernels.check.case import Launch
from minillm_kernels.compiled_table import README
from minillm_kernels.families import CHECKED, launches
from minillm_kernels.launch import SHARED_MEMORY, KernelError, TensorDescriptor, tl, triton
from minillm_kernels.mla import mla_attention
from minillm_kernels.offline import ARCHITECTURES, Compiled, compile_for, compiling
from minillm_kernels.paged_attention import paged_attention
from tests.pairs import some

TABLES = compiled_table.read(README.read_text("utf-8"))


def parsed(row: str) -> tuple[str, list[str], list[str]]:
    """The kernel, the names of launches and the figures by architecture."""
    kernel, launches, *figures = row.removeprefix("| ").removesuffix(" |").split(" | ")
    return kernel.strip("`"), launches.split("; "), figures


STATED = {family: [parsed(row) for row in compiled_table.rows(table)]
          for family, table in TABLES.items()}  # fmt: skip
CALLS = [(family, launch, place) for family in CHECKED
         for place, launch in enumerate(launches(family))]  # fmt: skip


def first_architecture(launch: Launch, place: int) -> int:
    """One on which the launch makes the strongest claim there is, in turn."""
    claimed = launch.bulk_copies or launch.tensor_cores or ARCHITECTURES
    return claimed[place % len(claimed)]


def stated(family: str, launch: Launch, capability: int) -> dict[str, str]:
    """The README's figures for the kernels of one launch."""
    column = ARCHITECTURES.index(capability)
    found = {kernel: figures[column] for kernel, launches, figures in STATED[family]
             if launch.name in launches}  # fmt: skip
    return {kernel: text for kernel, text in found.items() if text != compiled_table.ABSENT}


def parameters():
    """Every launch on every architecture. The first of each kernel is not slow, on one of them."""
    seen: set[tuple[str, str]] = set()
    for family, launch, place in CALLS:
        # To know without the README which kernels a launch has is to compile it.
        names = [name for each in ARCHITECTURES for name in stated(family, launch, each)]
        kernels = {(family, name.partition(" ")[0]) for name in names or [launch.name]}
        first = None if kernels <= seen else first_architecture(launch, place)
        seen |= kernels
        for capability in ARCHITECTURES:
            marks = [] if capability == first else [pytest.mark.slow]
            name = f"{family}-{launch.name}-sm_{capability}"
            yield pytest.param(launch, capability, id=name, marks=marks)


def test_no_kernel_returns_none() -> None:
    """Triton 3.6, the oldest that is supported, compiles no function that does, nor a part of it;
    the pinned one does."""
    found = []
    for path in sorted((README.parent / "minillm_kernels").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = map(ast.unparse, getattr(function, "decorator_list", ()))
            if any(name.startswith("triton.jit") for name in names):
                returns = [each for each in ast.walk(function) if isinstance(each, ast.Return)]
                parts = [
                    part for each in returns for part in getattr(each.value, "elts", [each.value])
                ]
                found += [
                    f"{path.name}:{part.lineno}"
                    for part in parts
                    if isinstance(part, ast.Constant) and part.value is None
                ]
    assert not found


def describe(compiled: Compiled) -> str:
    return f"{compiled.kernel} on sm_{compiled.arch}: {compiled_table.figures(compiled)}"


def broken_claims(launch: Launch, found: list[Compiled], capability: int) -> list[str]:
    """Everything that a launch says of itself and that its machine code does not show."""
    broken = [] if found else [f"{launch.name} launches no kernel"]
    if capability not in launch.may_spill:
        broken += [f"spills: {describe(each)}" for each in found if each.spills]
    most = SHARED_MEMORY[capability]
    broken += [f"needs more than {most} B shared: {describe(each)}" for each in found
               if not each.fits]  # fmt: skip
    claims = (
        ("tensor cores", launch.tensor_cores, lambda each: each.uses_tensor_cores),
        ("bulk copies", launch.bulk_copies, lambda each: each.opcodes["UTMALDG"] > 0),
    )
    for what, claimed, shows in claims:
        if capability in claimed and not any(shows(each) for each in found):
            broken += [f"no {what}: {describe(each)}" for each in found]
    return broken


@pytest.mark.parametrize(("launch", "capability"), parameters())
def test_a_launch_compiles_to_what_it_claims(launch, capability):
    found = compile_for(capability, launch.run)
    broken = broken_claims(launch, found, capability)
    assert not broken, "\n".join(broken)


def test_steps_of_other_lengths_and_addresses_do_not_compile_mla_again():
    def step(rows: int, width: int, gap: int) -> None:
        starts, lens = torch.zeros(gap + rows + 1, dtype=torch.int32)[gap:], torch.zeros(rows)
        tables = torch.zeros(gap + rows * width, dtype=torch.int32)[gap:].view(rows, width)
        mla_attention(
            torch.empty(2 * rows, 16, 40), torch.empty(3, 1, 512, 40), 32, starts, lens.int(),
            tables, 1.0, window=rows * width,
        )  # fmt: skip

    with compiling(80) as found:
        for rows, width, gap in ((16, 16, 0), (1, 1, 1), (3, 2, 1), (32, 5, 2)):
            step(rows, width, gap)
    kernels = {(kernel.metadata.name, kernel.hash) for kernel in found}
    assert sorted(name for name, _ in kernels) == [
        "_combine_kernel", "_decode_kernel", "_prefill_kernel",
    ]  # fmt: skip


def test_mla_of_several_queries_is_compiled_once():
    """No number of queries or sequences makes another kernel; in the batch-invariant mode that
    would be other bits."""

    def call(rows: int, most: int | None, **options) -> None:
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        mla_attention(
            torch.empty(16 * rows, 16, 40, dtype=torch.bfloat16),
            torch.empty(rows, 1, 512, 40, dtype=torch.bfloat16), 32, starts, starts[1:],
            torch.zeros(rows, 1 + 7 * bool(options), dtype=torch.int32), 1.0, max_query_len=most,
            **options,
        )  # fmt: skip

    def kernels(found: list) -> list[str]:
        return sorted(name for name, _ in {(each.metadata.name, each.hash) for each in found})

    with compiling(80) as found:
        for rows in (1, 3):
            for most in (2, 3, 16):  # one tile has two of them
                call(rows, most)
    assert kernels(found) == ["_combine_kernel", "_decode_kernel"]
    with compiling(80) as found:
        for rows in (1, 3):
            for most in (1, 2, 5, 16, 17, None):
                call(rows, most, batch_invariant=True)
    assert kernels(found) == ["_combine_kernel", "_decode_kernel", "_prefill_kernel"]


def test_attention_and_products_claim_the_newest_hardware():
    """A claim that is dropped would not be missed otherwise."""
    for family in ("paged_attention", "mla", "moe"):
        assert any(90 in launch.bulk_copies for launch in launches(family)), family
        for capability in ARCHITECTURES:
            claims = [launch for launch in launches(family) if capability in launch.tensor_cores]
            assert claims, f"{family} on sm_{capability}"


def test_paged_attention_is_compiled_once_for_all_batches():
    """No count of rows, sequences, columns or blocks, no window and no place of a table within a
    larger one makes another kernel; in the batch-invariant mode that would be other bits."""

    def call(count, columns, blocks, window, offset, **options):
        q = torch.empty(2 * count, 2, 16, dtype=torch.float16)
        cache = torch.empty(blocks, 1, 16, 16, dtype=torch.float16)
        tables = torch.empty(count + offset, columns, dtype=torch.int64)[offset:]
        ints = torch.empty(count + 1 + offset, dtype=torch.int32)[offset:]
        paged_attention(q, cache, cache, ints, ints[1:], tables, 0.25, window, **options)

    invariant, alone = {"batch_invariant": True}, {"max_query_len": 1}
    with compiling(80) as found:
        for options in ({}, {"max_query_len": 2}, invariant, invariant | alone):
            call(1, 1024, 1, 5, 0, **options)
            call(2, 2048, 16, 1, 0, **options)
            call(3, 1025, 33, 2**40, 1, **options)
        for most in (2, 5, 16):
            call(1, 1024, 1, 5, 0, **invariant, max_query_len=most)
            call(20, 1024, 1, 5, 0, **invariant, max_query_len=most)
        for most in (3, 4, 5, 8):  # of groups of 2: one tile of 16 rows
            call(most, 1024, 1, 5, 0, max_query_len=most)
    kernels = {(kernel.metadata.name, kernel.hash) for kernel in found}
    names = Counter(name for name, _ in kernels)
    assert names == dict.fromkeys(
        ("prefill_kernel", "decode_kernel", "invariant_kernel", "combine_kernel"), 1
    )


# ---- a claim that is broken -------------------------------------------------------------------


def compiled(**figures) -> Compiled:
    usual = {"kernel": "k", "arch": 90, "registers": 8, "stack": 0, "shared": 0, "num_warps": 4}
    usual["opcodes"] = {"HMMA": 8, "UTMALDG": 1}
    figures = usual | figures
    return Compiled(**figures | {"opcodes": Counter(figures["opcodes"])})


# ---- the reader of machine code ---------------------------------------------------------------


@triton.jit
def product(a, b, out, K: tl.constexpr, TILE: tl.constexpr, DESCRIBED: tl.constexpr):
    """One tile of out = a b, [TILE, K] by [K, TILE]; by descriptors or by pointers."""
    m, k = tl.arange(0, TILE), tl.arange(0, 64)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, 64):
        if DESCRIBED:
            left, right = a.load([0, start]), b.load([start, 0])
        else:
            left = tl.load(a + m[:, None] * K + start + k[None, :])
            right = tl.load(b + (start + k[:, None]) * TILE + m[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(out + m[:, None] * TILE + m[None, :], acc)


def run_product(described: bool, tile: int = 128, num_warps: int = 8, num_stages: int = 3):
    def run() -> None:
        a = torch.empty(tile, 512, dtype=torch.bfloat16)
        b = torch.empty(512, tile, dtype=torch.bfloat16)
        out = torch.empty(tile, tile)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if described:
            left = TensorDescriptor.from_tensor(a, [tile, 64])
            right = TensorDescriptor.from_tensor(b, [64, tile])
            product[(1,)](left, right, out, 512, tile, True, **options)
        else:
            product[(1,)](a, b, out, 512, tile, False, **options)

    return run


MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


@pytest.mark.parametrize("capability", some([90], ARCHITECTURES))
def test_bulk_copies_are_seen_and_missed(capability):
    (by_descriptor,) = compile_for(capability, run_product(described=True))
    (by_pointer,) = compile_for(capability, run_product(described=False))
    assert by_descriptor.opcodes["UTMALDG"] == 0 if capability == 80 else True
    assert (by_descriptor.opcodes["UTMALDG"] > 0) == (capability >= 90)
    assert by_pointer.opcodes["UTMALDG"] == 0
    assert by_pointer.opcodes["LDGSTS"] > 0
    for found in (by_descriptor, by_pointer):
        assert (found.kernel, found.arch) == ("product", capability)
        assert found.opcodes[MATRIX[capability]] > 0
        assert found.uses_tensor_cores
        assert not found.spills
        assert found.fits
        assert 16 <= found.registers <= 255


def test_spilling_is_seen():
    """128 x 128 sums in one warp are 512 registers per thread, and there are 255."""
    (found,) = compile_for(80, run_product(described=False, num_warps=1))
    assert found.spills
    assert found.stack > 0
    assert found.opcodes["STL"] > 0
    assert found.opcodes["LDL"] > 0


def test_too_much_shared_memory_is_seen():
    """Six stages of two tiles of 256 x 64 numbers are 384 KiB; the compiler does not mind."""
    (found,) = compile_for(90, run_product(described=True, tile=256, num_stages=6))
    assert found.shared > SHARED_MEMORY[90]
    assert not found.fits


@triton.jit
def add(x, out, n, SIZE: tl.constexpr):
    """A kernel without products."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_afterwards_there_is_no_driver_left_over():
    from triton.runtime.driver import driver

    before = getattr(driver, "_active", None)
    launch = triton.runtime.jit.KernelInterface.__getitem__
    with pytest.raises(RuntimeError, match="stop"), compiling(90):
        raise RuntimeError("stop")
    assert getattr(driver, "_active", None) is before
    assert triton.runtime.jit.KernelInterface.__getitem__ is launch


def test_an_unknown_architecture_is_refused():
    with pytest.raises(KernelError, match="the architecture is 70; known are 80, 86, 89, 90, 100"):
        compile_for(70, lambda: None)


@pytest.mark.slow
def test_interpreted_kernels_are_not_compiled():
    code = "from minillm_kernels.offline import compile_for\ncompile_for(90, lambda: None)"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled." in done.stderr


# ---- the table in the README ------------------------------------------------------------------


def test_the_table_has_a_line_for_every_launch_and_architecture():
    assert list(TABLES) == list(CHECKED)
    for family, launch, _ in CALLS:
        for capability in ARCHITECTURES:
            assert stated(family, launch, capability), (
                f"{family}, {launch.name}, sm_{capability}: run "
                "python -m minillm_kernels.compiled_table --write"
            )
    listed = {(family, name) for family, lines in STATED.items()
              for _, names, _ in lines for name in names}  # fmt: skip
    assert listed == {(family, launch.name) for family, launch, _ in CALLS}


def skip_with_another_triton() -> None:
    made_with = compiled_table.made_with(README.read_text("utf-8"))
    if made_with != triton.__version__:
        pytest.skip(f"the table is of Triton {made_with}, this is {triton.__version__}")


@pytest.mark.parametrize("family", CHECKED)
def test_a_sample_of_the_table_agrees(family):
    launch = launches(family)[0]
    capability = first_architecture(launch, 0)  # compiled above, too
    skip_with_another_triton()
    assert compiled_table.cells(launch, capability) == stated(family, launch, capability), (
        "run python -m minillm_kernels.compiled_table --write"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKED)
def test_the_whole_table_agrees(family):
    skip_with_another_triton()
    assert compiled_table.main([family, "--check"]) == 0, (
        "run python -m minillm_kernels.compiled_table --write"
    )


def test_the_command(tmp_path, monkeypatch, capsys):
    """Two kernels with equal figures share a row; other families and texts stay as they are."""
    x = torch.empty(1000)
    tiny = [Launch(name, lambda: add[(8,)](x, x, 1000, 128)) for name in ("one", "two")]
    monkeypatch.setattr(compiled_table.families, "launches", lambda family: tiny)
    file = tmp_path / "README.md"
    monkeypatch.setattr(compiled_table, "README", file)

    def run(*arguments: str) -> str:
        compiled_table.main(arguments)
        said = capsys.readouterr()
        return said.out + said.err

    file.write_text("nothing")
    assert "has no lines '<!-- compiled: begin" in run("mla", "--write")
    file.write_text(f"before\n{compiled_table.BEGIN}\n{compiled_table.END}\nbehind")
    assert "is empty; fill it with --write" in run("mla", "--check")
    assert run("moe", "mla", "--write") == ""
    written = file.read_text()
    assert written.startswith("before\n")
    assert written.endswith("\nbehind")
    tables = compiled_table.read(written)
    assert list(tables) == ["mla", "moe"]
    ((kernel, names, figures),) = map(parsed, compiled_table.rows(tables["moe"]))
    assert (kernel, names, len(figures)) == ("add", ["one", "two"], len(ARCHITECTURES))
    file.write_text(written.replace("---", "-----").replace("\n\n", "\n"))
    assert run("--check", "mla") == "The table is up to date.\n"  # only figures count
    file.write_text(written.replace(" regs", "9 regs", 1))
    told = run("--check", "mla").splitlines()
    assert [line[:7] for line in told] == ["- | `ad", "+ | `ad"]
    assert "9 regs" in told[0]
    assert run("moe", "--check") == "The table is up to date.\n"
    file.write_text(written.replace(f"Triton {triton.__version__}", "Triton 1.0"))
    assert "figures of different versions cannot be compared" in run("mla", "--check")
    assert "There is no kernel family 'mlaa'" in run("mlaa")
    assert compiled_table.main(["mlaa"]) == 2
