"""How frozen parameters answer a misspelt name, an assignment and a wrong value."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from functools import wraps
from typing import Any, TypeVar

from minillm.errors import InvalidRequestError, UnknownArgumentError, did_you_mean

T = TypeVar("T")


def refuse_unknown_arguments(cls: type[T]) -> type[T]:
    """Class decorator over a dataclass: an unknown keyword raises `UnknownArgumentError`.

    The message suggests the nearest name. The error is also a TypeError, like Python's own.
    """
    names = [item.name for item in fields(cls) if item.init]  # type: ignore[arg-type]
    init: Callable[..., None] = cls.__init__

    @wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise UnknownArgumentError(
                    f"{cls.__name__} has no argument {shown(name)}.{did_you_mean(name, names)}"
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls


class FrozenParamsError(InvalidRequestError, FrozenInstanceError):
    """An assignment to frozen parameters; also a FrozenInstanceError, as Python raises."""


def explain_frozen(cls: type[T]) -> type[T]:
    """Class decorator over a frozen dataclass: an assignment raises an error that says what to
    write instead."""
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]

    def refuse(self: T, name: str, value: object) -> None:
        if name not in names:
            raise FrozenParamsError(
                f"{cls.__name__} has no argument {shown(name)}.{did_you_mean(name, names)}"
            )
        raise FrozenParamsError(
            f"{cls.__name__} cannot be changed, because a request must not change while it runs; "
            f"use dataclasses.replace(params, {name}={shown(value)}) to make a changed copy."
        )

    cls.__setattr__ = refuse  # type: ignore[method-assign, assignment]
    return cls


def shown(value: object) -> str:
    """`repr(value)`, cut to 80 characters for use in an error message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a value of type {type(value).__name__} that is too large to print"
    return text if len(text) <= 80 else text[:77] + "..."
