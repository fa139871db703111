"""Which device gets which implementation, asked of devices that are not there."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minillm import ops
from minillm.cli import main
from minillm.ops import cpu, dispatch
from minillm.ops.batch import Batch, Pages, Prologue
from minillm.ops.dispatch import Backend
from minillm_kernels import batch_invariant, reference

CUDA = torch.device("cuda:0")


def gpu(monkeypatch, capability):
    """A machine whose GPU has this compute capability."""
    module = SimpleNamespace(get_device_capability=lambda device: capability)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    return dispatch.backend_of.__wrapped__(CUDA)


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "reference"), ((8, 0), "triton"),
                                                  ((8, 9), "triton"), ((9, 0), "triton"),
                                                  ((10, 0), "triton")])  # fmt: skip
def test_kernels_need_ampere(monkeypatch, capability, name):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    backend = gpu(monkeypatch, capability)
    assert backend.name == name
    if name == "reference":
        assert backend.why == (
            "plain torch: compute capability 7.5 is older than 8.0, which the Triton kernels need"
        )


def test_another_maker_s_gpu_has_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu(monkeypatch, (9, 4)).name == "reference"
    assert dispatch.backend_of.__wrapped__(torch.device("mps")).name == "reference"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert gpu(monkeypatch, (9, 0)).why == "plain torch: Triton is not installed"


def test_info_says_which_path_a_cpu_takes(capsys):
    cpu = torch.device("cpu")
    assert dispatch.backend_of(cpu).name == "cpu"
    assert main(["info"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "operations  " in line]
    assert line.split("operations")[1].strip() == dispatch.explain(cpu)


def test_a_gradient_comes_from_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
    x = torch.zeros(2, requires_grad=True)
    assert not dispatch.uses_kernels(x)
    with torch.no_grad():
        assert dispatch.uses_kernels(x)
    assert not dispatch.uses_kernels(torch.zeros(2, dtype=torch.float64))


def test_a_gradient_of_a_weight_alone_comes_from_torch(monkeypatch):
    """Behind frozen layers only the weights want one; a kernel would forget it silently."""
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
    x, weight = torch.randn(2, 8), torch.randn(8, requires_grad=True)
    matrix, experts = torch.randn(8, 8, requires_grad=True), torch.randn(1, 8, 8)
    ids, shares = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for result in (
        ops.rms_norm(x, weight, 1e-5),
        ops.add_rms_norm(x, x, weight, 1e-5)[0],
        ops.linear(x, matrix),
        ops.linear(x, matrix.detach(), weight),
        ops.moe_experts(x, experts, matrix[None, :, :4], shares, ids),
        ops.tiled_moe_experts(x, experts, matrix[None, :, :4], shares, ids),
    ):
        assert result.requires_grad


def test_autocast_is_torch_s_business(monkeypatch):
    """A product becomes bfloat16 beside a residual stream in float32, as in the trainer."""
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not dispatch.uses_kernels(torch.zeros(2))


def batch_of(query_start: Tensor, seq_lens: Tensor, tables: Tensor) -> Batch:
    """What attention reads of a batch of single tokens; the other fields are empty."""
    unread = tables.flatten()[:0]
    return Batch(unread, unread, unread, query_start, seq_lens, tables, unread, 1)


# D, Dv, block size, H, and whether values lie in the keys: what no attention kernel takes
REFUSED = [
    (20, 20, 4, 2, False),
    (264, 264, 4, 2, False),
    (16, 16, 300, 2, False),  # a block that holds a whole sequence, as in `ForwardPass`
    (16, 16, 4, 129, False),
    (16, 16, 4, 2, True),
    (528, 520, 4, 2, True),
    (152, 16, 4, 2, True),
]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("dim", "value_dim", "block_size", "heads", "in_key"), REFUSED)
def test_attention_that_no_kernel_takes_goes_to_torch(
    dim, value_dim, block_size, heads, in_key, invariant
):
    pytest.importorskip("triton")
    from minillm.ops import triton

    key = torch.randn(3, 1, block_size, dim)
    value = key[..., :value_dim] if in_key else torch.randn(3, 1, block_size, value_dim)
    q = torch.randn(2, heads, dim)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 4])
    where = Pages(key, value), batch_of(starts.int(), lengths.int(), torch.tensor([[0], [2]]))
    expected = ops.paged_attention(q, *where, 0.2)
    got = triton.paged_attention(q, *where, 0.2, None, batch_invariant=invariant)
    torch.testing.assert_close(got, expected)
    if not in_key:
        assert triton.takes_head_dims(key) == (dim == 16)


def test_every_operation_of_the_engine_goes_through_the_choice(monkeypatch):
    """Each public operation asks, except those that have one implementation."""
    asked = []
    monkeypatch.setattr(
        dispatch, "backend_of", lambda device: asked.append(1) or Backend("cpu", "")
    )
    x, w = torch.randn(2, 1, 8), torch.randn(8)
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    cache, angles = torch.zeros(2, 1, 4, 8), torch.zeros(2, 4)
    slots, lengths = torch.tensor([0, 4]), torch.tensor([1, 1], dtype=torch.int32)
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    batch = batch_of(bounds, lengths, torch.tensor([[0], [1]]))
    pages, rope = Pages(cache, cache.clone()), (angles, angles)
    prologue = Prologue(1, None, None, 0.0, interleaved=False)
    experts = torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    calls = {
        "rms_norm": (x, w, 1e-5),
        "add_rms_norm": (x[:, 0], x[:, 0], w, 1e-5),
        "silu_mul": (x[:, 0],),
        "invariant_silu_mul": (x[:, 0],),
        "embedding": (ids[:, 0], experts[0][0]),
        "linear": (x[:, 0], experts[0][0]),
        "rotate": (x, angles, angles),
        "write_cache": (x, x, pages, slots),
        "norm_rope": (torch.randn(2, 3, 8), prologue, rope),
        "norm_rope_write": (torch.randn(2, 3, 8), prologue, rope, pages, slots),
        "paged_attention": (x, pages, batch, 0.3),
        "moe_experts": (x[:, 0], *experts, weights, ids),
        "tiled_moe_experts": (x[:, 0], *experts, weights, ids),
    }  # fmt: skip
    own = (each for each in vars(ops).values() if getattr(each, "__module__", "") == ops.__name__)
    single = {"cos_sin", "has_int8_kernels"}  # no kernel
    assert {*calls} == {each.__name__ for each in own if each.__name__[0] != "_"} - single
    for name, arguments in calls.items():
        asked.clear()
        getattr(ops, name)(*arguments)
        assert asked, name


def pages_of(*scales: Tensor) -> Pages:
    """Two blocks of four positions of two heads."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, 2, 4, 16, generator=generator) for _ in range(2))
    return Pages(key, value, *scales)


def test_the_mode_of_attention_chooses_the_arithmetic(monkeypatch):
    """One operation instead of three: what it calls is what it says."""
    called = []
    for owner, name in (
        (cpu, "paged_attention"),
        (reference, "paged_attention"),
        (batch_invariant, "tiled_attention"),
    ):
        works, path = getattr(owner, name), f"{owner.__name__}.{name}".removeprefix("minillm.")

        def seen(*arguments, works=works, path=path):
            called.append(path)
            return works(*arguments)

        monkeypatch.setattr(owner, name, seen)
    bounds, lengths = torch.tensor([0, 1, 2]).int(), torch.tensor([3, 7]).int()
    batch, pages = batch_of(bounds, lengths, torch.tensor([[0, 1], [1, 0]])), pages_of()
    q = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    outputs = [ops.paged_attention(q, pages, batch, 0.3, 5, mode)
               for mode in ("fast", "plain", "invariant")]  # fmt: skip
    fast = "ops.cpu" if cpu.takes(q) else "minillm_kernels.reference"
    assert called == [
        f"{fast}.paged_attention",
        "minillm_kernels.reference.paged_attention",
        "minillm_kernels.batch_invariant.tiled_attention",
    ]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["fast", "plain"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [16, 18])
def test_the_prologue_is_the_reference_s(mode, normed, dim):
    """In one launch or in several, to the same slots."""
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(3, 4 + 2 * 2, dim, generator=generator)
    norms = [torch.randn(dim, generator=generator) if normed else None for _ in range(2)]
    rope = tuple(torch.randn(3, dim // 2, generator=generator) for _ in range(2))
    slots = torch.tensor([6, -1, 0])
    caches = [torch.zeros(2, 2, 4, dim) for _ in range(4)]
    got = ops.norm_rope_write(qkv, Prologue(2, *norms, 1e-5, False), rope,
                              Pages(*caches[:2]), slots, mode)  # fmt: skip
    expected = reference.norm_rope_write(qkv, *norms, 1e-5, *rope, False, *caches[2:], slots)
    for one, other in zip((got, *caches[:2]), (expected, *caches[2:]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
