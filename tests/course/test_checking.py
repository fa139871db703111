"""What the comparisons of checks say; nothing that a submission returns can agree for itself."""

import math
import sys
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from minillm_exercises.checking import (
    CheckFailedError,
    accept,
    close,
    equal,
    number,
    plain,
    run_traced,
)
from minillm_exercises.ranks import MOST, together


class Agrees:
    """Comparisons that always hold, arithmetic that changes nothing."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __sub__(self, other):
        return self

    __add__ = __mul__ = __radd__ = __rsub__ = __sub__


def derived(base, **more):
    return type("Yes", (Agrees, base), more)


class SameClass(type):
    """A class that says it is every other class."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(int)


class Pretender(Agrees, metaclass=SameClass):
    """No int, whatever it says."""

    __class__ = int


class Torchlike(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return derived(float)(2.0)


class FakeTensor:
    """The methods of a tensor, and the right numbers from them."""

    shape = (2,)

    def detach(self):
        return self

    double = flatten = detach

    def tolist(self):
        return [1.0, 2.0]


def said(compare, *arguments):
    """What a comparison says when it fails."""
    with pytest.raises(CheckFailedError) as caught:
        run_traced(lambda impl: compare(*arguments), None)
    assert not isinstance(caught.value.trace.seen[-1], Agrees), "the trace holds the object itself"
    return str(caught.value)


HOSTILE = [
    (derived(int)(3), 3, "int"), (derived(int)(4), 3, "int"), (derived(float)(), 3, "float"),
    (derived(str)(), "x", "str"), (derived(bytes)(), b"x", "bytes"), (derived(list)(), [1], "list"),
    (derived(list, __iter__=lambda self: iter([1]), __len__=lambda self: 1)(), [1], "list"),
    (derived(tuple)((7,)), (1,), "tuple"),
    (derived(dict, items=lambda self: [("a", 1)])(), {"a": 1}, "dict"),
    (derived(set)(), {1}, "set"), ([1, derived(int)(3)], [1, 2], "int"),
    ({"a": (derived(int)(3),)}, {"a": (2,)}, "int"), ({derived(str)("b"): 1}, {"a": 1}, "str"),
    (namedtuple("Yes", "x")(1), (1,), "tuple"), (derived(int)(0), None, "int"),
]  # fmt: skip


@pytest.mark.parametrize(("got", "want", "kind"), HOSTILE)
def test_a_class_of_ones_own_passes_no_comparison(got, want, kind):
    sentence = f"the sum (f(1)): got a Yes, which is a kind of {kind} of your own; return a plain"
    assert said(equal, got, want, "the sum", "f(1)") == f"{sentence} {kind}."
    assert said(close, got, want, "the sum", "f(1)").startswith("the sum (f(1)): got a Yes, ")
    assert said(accept, got, "the sum", "f(1)") == f"{sentence} {kind}."
    assert said(number, got, "the sum", "f(1)") == f"{sentence} {kind}."


@pytest.mark.parametrize(
    "got", [Agrees(), Pretender(), FakeTensor()], ids=["agrees", "pretender", "tensor"]
)
@pytest.mark.parametrize("want", [3, [1.0, 2.0], None, "x", torch.tensor([1.0, 2.0])])
def test_an_object_that_agrees_is_none_of_the_plain_types(got, want):
    for value in (got, [got]):
        wanted = [want] if value is not got else want
        assert "expected " in said(equal, value, wanted, "the sum")
        assert "expected " in said(close, value, wanted, "the sum")
        said(accept, value, "the sum")
        said(number, value, "the sum")


def test_a_tensor_that_answers_for_itself_passes_nothing():
    want = torch.tensor([1.0, 2.0])
    mine = torch.tensor([5.0, 6.0]).as_subclass(Torchlike)
    for compare in (equal, close):
        assert said(compare, mine, want, "y") == (
            "y: got a Torchlike, which is a kind of Tensor of your own; return a plain Tensor."
        )
    patched = torch.tensor([5.0, 6.0])
    patched.detach = lambda: want
    assert "expected 1 at [0], got 5" in said(close, patched, want, "y")
    assert "5, 6" in said(equal, patched, want, "y")


def test_plain_values_are_accepted_as_they_are():
    values = [
        3, 2.5, True, None, "x", b"x", [1, (2,)], {"a": {1}}, OrderedDict(a=1), defaultdict(int),
        range(3), torch.tensor([1.0]), torch.nn.Parameter(torch.tensor([1.0])), torch.Size([2]),
    ]  # fmt: skip
    for value in values:
        assert accept(value, "it") is value
        plain(value)
    close(torch.nn.Parameter(torch.tensor([1.0])), [1.0], "it")
    equal(torch.Size([2, 3]), (2, 3), "the shape")
    equal(OrderedDict(a=1), {"a": 1}, "it")
    assert number(2**70, "it") - number(2.0, "it") == 2.0**70
    for value in (True, None, "3", [3], torch.tensor(3)):
        assert "it: expected a number, got " in said(number, value, "it")
    assert said(number, None, "it").endswith("got None (is there a return?).")


def test_families():
    equal(2, 2.0, "it")
    equal((1, 2), [1, 2], "it")
    for got, want in ((True, 1), (1, True), ("2", 2), (2, "2"), (range(2), [0, 1]), ({}, [])):
        said(equal, got, want, "it")
    said(equal, ("tensor", (1,), (2.0,)), torch.tensor([2.0]), "it")


def test_what_is_close():
    close([1, [2.0]], [1.0000001, [2]], "it")
    said(close, [math.nan], [math.nan], "it")
    said(close, 10**400, 1, "it")
    ragged = [[1, 2], [3]]
    assert said(close, ragged, [[1, 2], [3, 4]], "it").endswith("got [[1, 2], [3]].")


def test_without_torch_nothing_is_a_tensor(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    equal([1], [1], "it")
    assert said(equal, derived(int)(3), 3, "it").endswith("return a plain int.")


def test_together_gives_each_rank_the_answers_in_order():
    def call(rank, meet):
        first = meet(rank)
        return [first, meet(10 * rank)]

    done = together(3, call, sum, "meet")
    assert done.results == [[3, 30]] * 3
    assert done.meetings == [[0, 1, 2], [0, 10, 20]]
    assert together(2, lambda rank, meet: rank, sum, "meet").results == [0, 1]


def test_a_solution_that_catches_every_exception_still_meets():
    def call(rank, meet):
        try:
            return meet(rank)
        except Exception:
            return None

    assert together(2, call, sum, "meet").results == [1, 1]


def test_ranks_that_never_end_are_stopped():
    def call(rank, meet):
        while True:
            meet(rank)

    with pytest.raises(CheckFailedError, match=f"After {MOST} calls of meet"):
        together(2, call, sum, "meet")
