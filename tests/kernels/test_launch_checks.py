"""Every check before a launch: what it lets through, and the sentence where it does not."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from minillm_kernels import launch
from minillm_kernels.families import FAMILIES
from minillm_kernels.launch import (
    FLOATS,
    KernelError,
    check_block_tables,
    check_contiguous,
    check_device,
    check_dtype,
    check_groups,
    check_head_dim,
    check_last_contiguous,
    check_same_dtype,
    check_shape,
    check_starts,
    output,
    padded,
)
from minillm_kernels.offline import compiling

CPU = torch.zeros(2)


def on(device: str):
    """Something that says it is on another device."""
    return SimpleNamespace(device=torch.device(device))


def refused(sentence: str):
    return pytest.raises(KernelError, match=f"^{sentence}$")


@pytest.fixture(autouse=True)
def as_if_compiled(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "compiles_only", lambda: False)


# ---- devices ----------------------------------------------------------------------------------


def test_tensors_on_different_devices():
    with refused("q is on cuda:0 and k on cuda:1; move one of them."):
        check_device(q=on("cuda:0"), bias=None, k=on("cuda:1"))


def test_a_cpu_tensor_for_a_compiled_kernel():
    with refused(
        "q is on cpu; a compiled kernel needs CUDA tensors. Use minillm_kernels.reference there, "
        "or set TRITON_INTERPRET=1 before the import."
    ):
        check_device(out=None, q=CPU)


def test_a_cuda_tensor_for_an_interpreted_kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert check_device(q=CPU) == CPU.device
    with refused("q is on cuda:0; interpreted kernels need CPU tensors."):
        check_device(q=on("cuda:0"))


def test_an_old_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with refused(
        r"q is on cuda:0 with compute capability 7\.5; these kernels need 8\.0 \(Ampere\) or "
        r"newer\. Use minillm_kernels.reference there\."
    ):
        check_device(q=on("cuda:0"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability in ((8, 0), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert check_device(q=on("cuda:0"), k=on("cuda:0")) == torch.device("cuda:0")


def test_another_device_than_the_current_one(monkeypatch):
    """Triton launches on the current one, whatever the tensors say."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with refused(
        r"q is on cuda:1 and the current device is cuda:0; launch inside torch\.cuda\.device\(1\)\."
    ):
        check_device(q=on("cuda:1"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert check_device(q=on("cuda:1")).index == 1


def test_any_tensor_will_do_for_compiling(monkeypatch):
    monkeypatch.undo()
    if launch.INTERPRETED:
        pytest.skip("interpreted kernels cannot be compiled")
    with compiling(90):
        assert launch.compiles_only()
        assert launch.arch() == 90
        assert check_device(q=CPU) == CPU.device
    assert not launch.compiles_only() or torch.cuda.is_available()
    assert launch.num_multiprocessors(CPU.device) == 132


# ---- dtypes -----------------------------------------------------------------------------------


def test_a_wrong_dtype():
    check_dtype((torch.int32, torch.int64), ids=torch.zeros(2, dtype=torch.int64), other=None)
    with refused(r"ids is torch\.float32; it must be int32 or int64\."):
        check_dtype((torch.int32, torch.int64), ids=CPU)


def test_dtypes_that_differ():
    assert check_same_dtype(q=CPU, k=None, v=CPU) == torch.float32
    with refused(r"q is torch\.float32 and v torch\.float16; they must be the same\."):
        check_same_dtype(q=CPU, k=None, v=CPU.half())
    with refused(r"q is torch\.int64; it must be float32 or float16 or bfloat16\."):
        check_same_dtype(q=CPU.long(), v=CPU.long())
    assert len(FLOATS) == 3


# ---- shapes -----------------------------------------------------------------------------------


def test_a_wrong_shape():
    check_shape("q", torch.zeros(3, 4), "tokens", 4)
    check_shape("q", torch.zeros(0, 4), "tokens", 4)
    for wrong in ((3, 5), (4,), (1, 3, 4), ()):
        sizes = ", ".join(map(str, wrong))
        with refused(rf"q is \[{sizes}\]; it must be \[tokens, 4\]\."):
            check_shape("q", torch.zeros(wrong), "tokens", 4)


def test_gaps_in_the_last_dimension():
    whole = torch.zeros(4, 6)
    check_last_contiguous(x=whole, y=whole[:, 1:3], z=whole[::2], one=whole.t()[:, :1], none=None)
    with refused(
        r"x has strides \(1, 6\); its last dimension must be contiguous \(stride 1\): call "
        r"x\.contiguous\(\)\."
    ):
        check_last_contiguous(x=whole.t())


def test_gaps_anywhere():
    whole = torch.zeros(4, 6)
    check_contiguous(x=whole, y=whole[1:], none=None)
    with refused(
        r"x has shape \[4, 3\] and strides \(6, 1\); it must be contiguous: call "
        r"x\.contiguous\(\)\."
    ):
        check_contiguous(x=whole[:, :3])


@pytest.mark.parametrize("head_dim", [0, -8, 4, 12, 100, 264])
def test_a_head_that_does_not_fit(head_dim):
    with refused(f"q has a head_dim of {head_dim}; it must be a multiple of 8 and at most 256."):
        check_head_dim("q", head_dim)


def test_heads_that_fit():
    for head_dim in (8, 64, 80, 96, 128, 256):
        check_head_dim("q", head_dim)
    check_head_dim("latent", 576, most=576)
    with refused("latent has a head_dim of 584; it must be a multiple of 8 and at most 576."):
        check_head_dim("latent", 584, most=576)


def test_groups():
    assert check_groups(32, 8) == 4
    assert check_groups(3, 1) == 3
    for heads, kv_heads in ((6, 4), (4, 0), (2, 4)):
        with refused(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly; the first must be a "
            "multiple of the second."
        ):
            check_groups(heads, kv_heads)


def test_blocks_are_powers_of_two():
    assert [padded(size) for size in (1, 16, 17, 80, 128, 129)] == [16, 16, 32, 128, 128, 256]
    assert padded(3, least=1) == 4
    assert padded(1, least=1) == 1


# ---- outputs ----------------------------------------------------------------------------------


def test_an_output_is_made_or_checked():
    like = torch.zeros(2, 3, dtype=torch.float16)
    made = output(None, (4, 5), like)
    assert (made.shape, made.dtype, made.device) == ((4, 5), like.dtype, like.device)
    mine = torch.zeros(4, 8, dtype=torch.float16)[:, :5]
    assert output(mine, (4, 5), like) is mine
    with refused(r"out is \[4, 4\]; it must be \[4, 5\]\."):
        output(mine[:, :4], (4, 5), like)
    with refused(r"sum is torch\.float32 on cpu; it must be torch\.float16 on cpu\."):
        output(mine.float(), (4, 5), like, "sum")
    with refused(r"out has strides \(1, 4\); its last dimension must be contiguous .*"):
        output(torch.zeros(5, 4, dtype=torch.float16).t(), (4, 5), like)


# ---- block tables -----------------------------------------------------------------------------


def tables(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_block_tables_are_looked_at_when_debugging(monkeypatch):
    wrong, lengths = tables([0, 99]), torch.tensor([20])
    check_block_tables(wrong, lengths, num_blocks=4, block_size=16)  # a GPU would have to wait
    monkeypatch.setattr(launch, "DEBUG", True)
    with refused(r"block_tables\[0, 1\] is 99; the cache has blocks 0 to 3\."):
        check_block_tables(wrong, lengths, num_blocks=4, block_size=16)


def test_block_tables_are_looked_at_when_interpreted(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    check_block_tables(tables([3, 99], [-1, -1]), torch.tensor([16, 0]), 4, 16)
    with refused(r"block_tables\[1, 0\] is -1; the cache has blocks 0 to 3\."):
        check_block_tables(tables([3, 99], [-1, -1]), torch.tensor([16, 1]), 4, 16)
    with refused(r"seq_lens\[1\] is 33, which needs 3 blocks of 16; its block table has 2\."):
        check_block_tables(tables([0, 1], [2, 3]), torch.tensor([32, 33]), 4, 16)
    with refused(r"seq_lens\[0\] is -3; it must be 0 or more\."):
        check_block_tables(tables([0, 1]), torch.tensor([-3]), 4, 16)


@pytest.mark.parametrize("bounds", [[1, 2], [0, 3, 1], [0, 2, 6], []])
def test_bounds_of_sequences_are_looked_at_when_debugging(bounds, monkeypatch):
    starts = torch.tensor(bounds, dtype=torch.int32)
    check_starts("query_start", starts, 5)
    monkeypatch.setattr(launch, "DEBUG", True)
    check_starts("query_start", torch.tensor([0, 0, 3, 5]), 5)
    with refused(rf"query_start is {re.escape(str(bounds))}; it must begin with 0, not decrease, "
                 "and end with at most 5, the number of rows."):  # fmt: skip
        check_starts("query_start", starts, 5)


# ---- without Triton ---------------------------------------------------------------------------

HOOK = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
"""


def without_triton(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", HOOK + code]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_kernel_says_that_triton_is_missing():
    """One process tries all: what failed to be imported is tried anew by the next."""
    modules = [*FAMILIES, "interpreter", "offline"]
    done = without_triton(
        "import importlib, traceback\n"
        f"for name in {modules!r}:\n"
        "    try:\n"
        "        importlib.import_module(f'minillm_kernels.{name}')\n"
        "        print(name, 'was imported')\n"
        "    except Exception as error:\n"
        "        print(name, *traceback.format_exception_only(error), end='')\n"
    )
    assert done.stdout.splitlines() == [
        f"{name} minillm_kernels.launch.TritonMissingError: minillm's kernels need Triton, which "
        "is not installed (on Linux: pip install triton); minillm_kernels.reference has "
        "the same operations in plain torch."
        for name in modules
    ]
    assert done.returncode == 0, done.stderr


def test_everything_else_works_without_triton():
    modules = ["minillm_kernels.reference", "minillm_kernels.philox", "minillm_kernels.families"]
    modules += ["minillm_kernels.bench.__main__", "minillm", "minillm.ops", "minillm.llm"]
    loads = "\n".join(f"import {name}" for name in modules)
    done = without_triton(
        loads
        + "\nimport torch\nfrom minillm_kernels import reference"
        + "\nprint(reference.silu_mul(torch.ones(1, 4)).shape)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 2])\n"


def test_the_benchmark_says_that_triton_is_missing(tmp_path):
    done = without_triton(
        "from minillm_kernels.bench.__main__ import main\n"
        f"raise SystemExit(main(['mla', '--json', {str(tmp_path / 'a.json')!r}]))"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("minillm's kernels need Triton, which is not installed")
    assert done.stderr.count("\n") == 1
