"""Which device gets which implementation, asked of devices that are not there."""

from types import SimpleNamespace

import pytest
import torch

from minillm import ops
from minillm.cli import main
from minillm.ops import dispatch
from minillm.ops.dispatch import Backend

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


def test_without_triton_a_gpu_has_plain_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu(monkeypatch, (9, 0)) == Backend("reference", "plain torch: Triton is not installed")


def test_another_maker_s_gpu_has_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert gpu(monkeypatch, (9, 4)).name == "reference"
    assert dispatch.backend_of.__wrapped__(torch.device("mps")).name == "reference"


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
    dim, value_dim, block_size, heads, in_key, invariant, monkeypatch
):
    pytest.importorskip("triton")
    from minillm.ops import triton

    key = torch.randn(3, 1, block_size, dim)
    value = key[..., :value_dim] if in_key else torch.randn(3, 1, block_size, value_dim)
    q = torch.randn(2, heads, dim)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 4])
    where = (starts.int(), lengths.int(), torch.tensor([[0], [2]]), 0.2, None)
    expected = ops.paged_attention(q, key, value, *where)
    got = triton.paged_attention(q, key, value, *where, 1, batch_invariant=invariant)
    torch.testing.assert_close(got, expected)
    if not in_key:
        monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
        assert ops.fuses_projections(key) == (dim == 16)


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
    where = torch.tensor([0, 1, 2], dtype=torch.int32), lengths, torch.tensor([[0], [1]])
    experts = torch.randn(2, 8, 8), torch.randn(2, 8, 4)
    calls = {
        "rms_norm": (x, w, 1e-5),
        "add_rms_norm": (x[:, 0], x[:, 0], w, 1e-5),
        "silu_mul": (x[:, 0],),
        "invariant_silu_mul": (x[:, 0],),
        "embedding": (ids[:, 0], experts[0][0]),
        "linear": (x[:, 0], experts[0][0]),
        "rotate": (x, angles, angles),
        "fuses_projections": (cache,),
        "write_cache": (x, x, cache, cache, slots),
        "norm_rope_write": (torch.randn(2, 3, 8), None, None, 0.0, angles, angles, False, cache,
                            cache, slots),
        "paged_attention": (x, cache, cache.clone(), *where, 0.3),
        "tiled_attention": (x, cache, cache.clone(), *where, 0.3),
        "moe_experts": (x[:, 0], *experts, weights, ids),
        "tiled_moe_experts": (x[:, 0], *experts, weights, ids),
    }  # fmt: skip
    single = {"backend_of", "uses_kernels", "causal_attention", "moe_route", "plain_attention"}
    assert {*calls} == {*ops.__all__} - single
    for name, arguments in calls.items():
        asked.clear()
        getattr(ops, name)(*arguments)
        assert asked, name
