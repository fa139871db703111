"""C structures made from dataclasses of numbers and tensors."""

from collections.abc import Mapping
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor

NUMBERS: Mapping[Any, type] = {int: c_int64, bool: c_int64, float: c_float}


@cache
def structure_of(kind: type) -> type[Structure]:
    """The C structure with the fields of a dataclass, in its order: numbers, and addresses."""
    members = [(field.name, NUMBERS.get(field.type, c_void_p)) for field in fields(kind)]
    return type(kind.__name__, (Structure,), {"_fields_": members})


def filled(values: Any) -> Structure:
    """The C structure of a dataclass instance, whose fields may be others. The caller keeps its
    tensors alive."""
    given = [getattr(values, field.name) for field in fields(values)]
    inner = [filled(value) if is_dataclass(value) else None for value in given]
    numbers = (
        address(part) if part else value.data_ptr() if isinstance(value, Tensor) else value
        for value, part in zip(given, inner, strict=True)
    )
    kind: Any = type(values)
    found: Any = structure_of(kind)(*numbers)
    found.inner = inner  # keeps them alive
    return found


def address(structure: Structure | None) -> int | None:
    """The address of a structure, which the caller keeps alive; None for NULL."""
    return None if structure is None else addressof(structure)
