"""C structures made from dataclasses: addresses of tensors, and sizes."""

from collections.abc import Mapping
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import fields
from typing import Any

from torch import Tensor

NUMBERS: Mapping[type, type] = {int: c_int64, bool: c_int64, float: c_float}


class Addresses(Structure):
    """The addresses of a dataclass's tensors, in its order; subclasses set `_fields_`."""


class Numbers(Structure):
    """The numbers of a dataclass, in its order; subclasses set `_fields_`."""


def pointers(kind: type) -> tuple[tuple[str, type], ...]:
    """`_fields_` of `Addresses` for a dataclass of tensors."""
    return tuple((each.name, c_void_p) for each in fields(kind))


def numbers(kind: type) -> tuple[tuple[str, type], ...]:
    """`_fields_` of `Numbers` for a dataclass of int, bool and float."""
    return tuple((each.name, NUMBERS[each.type]) for each in fields(kind))  # type: ignore[index]


def filled(structure: type[Structure], values: Any) -> Structure:
    """The structure for a dataclass instance. The caller keeps its tensors alive."""
    given = (getattr(values, each.name) for each in fields(values))
    return structure(*(each.data_ptr() if isinstance(each, Tensor) else each for each in given))


def address(structure: Structure | None) -> int | None:
    """The address of a structure, which the caller keeps alive; None for NULL."""
    return None if structure is None else addressof(structure)
