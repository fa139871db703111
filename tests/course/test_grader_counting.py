"""What checks count of a solution's tensors, and what they refuse it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from minillm_exercises.checking import CheckFailedError
from minillm_exercises.counting import banned_calls, counting

Q = torch.ones(1, 2, 4, 8)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("step", "flops", "product"), [
    (lambda: torch.ones(3, 5) @ torch.ones(5, 7), 2 * 3 * 5 * 7, "mm"),
    (lambda: Q @ Q.mT, 2 * 2 * 4 * 8 * 4, "bmm"),
    (lambda: F.linear(torch.ones(3, 5), torch.ones(7, 5), torch.ones(7)), 210, "addmm"),
    (lambda: torch.ones(3, 5) @ torch.ones(5), 2 * 3 * 5, "mv"),
    (lambda: torch.ones(3) @ torch.ones(3, 5), 2 * 3 * 5, "mm"),
    (lambda: torch.addmv(torch.ones(3), torch.ones(3, 5), torch.ones(5)), 30, "addmv"),
    (lambda: torch.ones(7) @ torch.ones(7), 2 * 7, "dot"),
    (lambda: torch.einsum("bhid,bhjd->bhij", Q, Q), 2 * 2 * 4 * 8 * 4, "bmm"),
])  # fmt: skip
def test_products_are_counted(grad, step, flops, product):
    with grad(), counting() as counts:
        step()
    assert counts.flops == flops
    assert counts.of(product) == 1


def test_the_largest_tensor_and_the_order_of_operations() -> None:
    with counting() as counts:
        x = torch.zeros(4, 25)
        x = (x + 1)[:2].exp()
    assert counts.max_numel == 100
    assert counts.ops == ["zeros", "add", "slice", "exp"]
    assert counts.flops == 0
    torch.zeros(1000)
    assert counts.max_numel == 100


@pytest.mark.parametrize(("step", "new"), [
    (lambda x: x.T.view(5, 4, 2)[1:].permute(2, 0, 1), 0), (lambda x: x.mul_(2).add_(1), 0),
    (lambda x: x[:, :1].expand(8, 100), 0), (lambda x: x[:, :1].expand(8, 100).contiguous(), 800),
    (lambda x: x[:, None] @ x[:, :, None].expand(8, 5, 7), 8 * 7),
    (lambda x: x[:2].repeat_interleave(3, dim=0), 30), (lambda x: x[[0, 0, 1]], 15),
    (lambda x: torch.cat([x, x]), 80), (lambda x: x.split(4)[1].sum(1), 4),
])  # fmt: skip
def test_a_view_is_no_new_tensor(step: Callable[[torch.Tensor], object], new: int) -> None:
    x = torch.ones(8, 5)
    with counting() as counts:
        step(x)
    assert counts.max_new == new


REFUSED = {
    "function": lambda: torch.softmax(Q, -1), "method": lambda: Q.softmax(-1),
    "functional": lambda: F.softmax(Q, -1),
    "computed name": lambda: getattr(F, "soft" + "max")(Q, -1),
    "special": lambda: torch.special.softmax(Q, -1), "module": lambda: torch.nn.Softmax(-1)(Q),
    "operator": lambda: torch.ops.aten._softmax(Q, -1, False),
    "attention": lambda: F.scaled_dot_product_attention(Q, Q, Q),
    "attention inside": lambda: torch.nn.MultiheadAttention(8, 2)(Q[0], Q[0], Q[0]),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_an_operation_is_refused_under_any_name(call: Callable[[], object]) -> None:
    with (
        banned_calls("softmax", "scaled_dot_product_attention"),
        pytest.raises(CheckFailedError, match="the exercise is to build it yourself"),
    ):
        call()


def test_others_are_allowed_and_so_is_everything_afterwards() -> None:
    with banned_calls("softmax"):
        (Q - Q.amax(-1, keepdim=True)).exp().log_softmax(-1)
    torch.softmax(Q, -1)
