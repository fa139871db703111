"""Every check before a launch: what it lets through, and the sentence where it does not."""

import re
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from minillm_kernels import launch, require
from minillm_kernels.families import FAMILIES
from minillm_kernels.launch import KernelError, padded
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
    fresh = cache(launch._check_capability.__wrapped__)
    monkeypatch.setattr(launch, "_check_capability", fresh)


# ---- devices ----------------------------------------------------------------------------------


def test_tensors_on_different_devices():
    with refused("q is on cuda:0 and k on cuda:1; move one of them."):
        require.device(q=on("cuda:0"), bias=None, k=on("cuda:1"))


def test_a_cpu_tensor_for_a_compiled_kernel():
    with refused(
        "q is on cpu; a compiled kernel needs CUDA tensors. Use minillm_kernels.reference there, "
        "or set TRITON_INTERPRET=1 before the import."
    ):
        require.device(out=None, q=CPU)


def test_a_cuda_tensor_for_an_interpreted_kernel(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert require.device(q=CPU) == CPU.device
    with refused("q is on cuda:0; interpreted kernels need CPU tensors."):
        require.device(q=on("cuda:0"))


def test_an_old_gpu(monkeypatch):
    """Each device is asked once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with refused(
        r"q is on cuda:0 with compute capability 7\.5; these kernels need 8\.0 \(Ampere\) or "
        r"newer\. Use minillm_kernels.reference there\."
    ):
        require.device(q=on("cuda:0"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability in ((8, 0), (9, 0), (12, 0)):
        launch._check_capability.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert require.device(q=on("cuda:0"), k=on("cuda:0")) == torch.device("cuda:0")
    assert launch._check_capability.cache_info().misses == 1


def test_another_device_than_the_current_one(monkeypatch):
    """Triton launches on the current one, whatever the tensors say."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with refused(
        r"q is on cuda:1 and the current device is cuda:0; launch inside torch\.cuda\.device\(1\)\."
    ):
        require.device(q=on("cuda:1"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert require.device(q=on("cuda:1")).index == 1


def test_any_tensor_will_do_for_compiling(monkeypatch):
    monkeypatch.undo()
    if launch.INTERPRETED:
        pytest.skip("interpreted kernels cannot be compiled")
    with compiling(90):
        assert launch.compiles_only()
        assert launch.arch() == 90
        assert require.device(q=CPU) == CPU.device
    assert not launch.compiles_only() or torch.cuda.is_available()
    assert launch.num_multiprocessors(CPU.device) == 132


# ---- everything else -------------------------------------------------------------------------

WHOLE, HALF = torch.zeros(4, 6), torch.zeros(2, 3, dtype=torch.float16)
MINE = torch.zeros(4, 8, dtype=torch.float16)[:, :5]
IDS = (torch.int32, torch.int64)


def tables(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_what_fits_is_let_through():
    require.dtype(IDS, ids=torch.zeros(2, dtype=torch.int64), other=None)
    assert require.same_dtype(q=CPU, k=None, v=CPU) == torch.float32
    assert len(require.FLOATS) == 3
    require.shape("q", torch.zeros(3, 4), "tokens", 4)
    require.shape("q", torch.zeros(0, 4), "tokens", 4)
    require.last_contiguous(x=WHOLE, y=WHOLE[:, 1:3], z=WHOLE[::2], one=WHOLE.t()[:, :1], none=None)
    require.contiguous(x=WHOLE, y=WHOLE[1:], none=None)
    for head_dim in (8, 64, 80, 96, 128, 256):
        require.head_dim("q", head_dim)
    require.head_dim("latent", 576, most=576)
    assert require.groups(32, 8) == 4
    assert require.groups(3, 1) == 3
    assert [padded(size) for size in (1, 16, 17, 80, 128, 129)] == [16, 16, 32, 128, 128, 256]
    assert [padded(size, least=1) for size in (1, 3)] == [1, 4]
    made = require.output(None, (4, 5), HALF)
    assert (made.shape, made.dtype, made.device) == ((4, 5), HALF.dtype, HALF.device)
    assert require.output(MINE, (4, 5), HALF) is MINE


HEAD_DIM = "it must be a multiple of 8 and at most"
GROUPS = "evenly; the first must be a multiple of the second."


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: require.dtype(IDS, ids=CPU), "ids is torch.float32; it must be int32 or int64."),
        (lambda: require.same_dtype(q=CPU, k=None, v=CPU.half()),
         "q is torch.float32 and v torch.float16; they must be the same."),
        (lambda: require.same_dtype(q=CPU.long(), v=CPU.long()),
         "q is torch.int64; it must be float32 or float16 or bfloat16."),
        *((lambda wrong=wrong: require.shape("q", torch.zeros(wrong), "tokens", 4),
           f"q is {list(wrong)}; it must be [tokens, 4].")
          for wrong in ((3, 5), (4,), (1, 3, 4), ())),
        (lambda: require.last_contiguous(x=WHOLE.t()),
         "x has strides (1, 6); its last dimension must be contiguous (stride 1): call "
         "x.contiguous()."),
        (lambda: require.contiguous(x=WHOLE[:, :3]),
         "x has shape [4, 3] and strides (6, 1); it must be contiguous: call x.contiguous()."),
        *((lambda size=size: require.head_dim("q", size),
           f"q has a head_dim of {size}; {HEAD_DIM} 256.")
          for size in (0, -8, 4, 12, 100, 264)),
        (lambda: require.head_dim("latent", 584, most=576),
         f"latent has a head_dim of 584; {HEAD_DIM} 576."),
        *((lambda heads=heads, kv=kv: require.groups(heads, kv),
           f"{heads} query heads cannot share {kv} KV heads {GROUPS}")
          for heads, kv in ((6, 4), (4, 0), (2, 4))),
        (lambda: require.output(MINE[:, :4], (4, 5), HALF), "out is [4, 4]; it must be [4, 5]."),
        (lambda: require.output(MINE.float(), (4, 5), HALF, "sum"),
         "sum is torch.float32 on cpu; it must be torch.float16 on cpu."),
        (lambda: require.output(torch.zeros(5, 4, dtype=torch.float16).t(), (4, 5), HALF),
         "out has strides (1, 4); its last dimension must be contiguous (stride 1): call "
         "out.contiguous()."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, sentence):
    with refused(re.escape(sentence)):
        call()


VALUES = [  # which are looked at when debugging and when interpreted; a GPU would have to wait
    (lambda: require.entries(tables([0, 99]), torch.tensor([20]), 4, 16),
     "block_tables[0, 1] is 99; the cache has blocks 0 to 3."),
    (lambda: require.entries(tables([3, 99], [-1, -1]), torch.tensor([16, 1]), 4, 16),
     "block_tables[1, 0] is -1; the cache has blocks 0 to 3."),
    (lambda: require.entries(tables([0, 1], [2, 3]), torch.tensor([32, 33]), 4, 16),
     "seq_lens[1] is 33, which needs 3 blocks of 16; its block table has 2."),
    (lambda: require.entries(tables([0, 1]), torch.tensor([-3]), 4, 16),
     "seq_lens[0] is -3; it must be 0 or more."),
    *((lambda bounds=bounds: require.starts("query_start", torch.tensor(bounds).int(), 5),
       f"query_start is {bounds}; it must begin with 0, not decrease, and end with at most 5, the "
       "number of rows.")
      for bounds in ([1, 2], [0, 3, 1], [0, 2, 6], [])),
]  # fmt: skip


@pytest.mark.parametrize("flag", ["DEBUG", "INTERPRETED"])
@pytest.mark.parametrize(("call", "sentence"), VALUES)
def test_values_are_looked_at_when_debugging(call, sentence, flag, monkeypatch):
    call()
    monkeypatch.setattr(launch, flag, True)
    require.entries(tables([3, 99], [-1, -1]), torch.tensor([16, 0]), 4, 16)  # stale entries
    require.starts("query_start", torch.tensor([0, 0, 3, 5]), 5)
    with refused(re.escape(sentence)):
        call()


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_everything_else_works_without_triton():
    modules = ["minillm_kernels.reference", "minillm_kernels.philox", "minillm_kernels.families"]
    modules += ["minillm_kernels.bench.measure", "minillm", "minillm.ops", "minillm.llm"]
    loads = "\n".join(f"import {name}" for name in modules)
    done = without_triton(
        loads
        + "\nimport torch\nfrom minillm_kernels import reference"
        + "\nprint(reference.silu_mul(torch.ones(1, 4)).shape)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 2])\n"
