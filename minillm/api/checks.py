"""Arguments that carry their checks as field metadata: a type, a range and a sentence."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Self

from minillm.api.sampling_params import shown
from minillm.errors import ConfigError, UnknownArgumentError, did_you_mean


def is_whole(value: object) -> bool:
    """Whether `value` is a Python or numpy integer; booleans are not."""
    # `int` first: an abstract class takes ten times as long to ask, and prompts have many tokens.
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def checked(
    default: Any,
    kind: type | UnionType,
    must_be: str,
    allowed: Callable[[Any], bool] = lambda value: True,
    names: tuple[str, ...] = (),
) -> Any:
    """A dataclass field for a `kind` that is `allowed`, or for None if that is the default.

    The error says what the value `must_be`, and suggests the nearest of `names`.
    """
    check = {"kind": kind, "must_be": must_be, "allowed": allowed, "names": names}
    return field(default=default, metadata=check)


def whole(default: int | None, least: int = 1, most: int | None = None) -> Any:
    """A field for an integer in [least, most], or in [least, 2**63) without `most`."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    high = 2**63 - 1 if most is None else most
    return checked(default, Integral, f"a whole number {limits}", lambda n: least <= n <= high)


def number(default: float, least: float, most: float, must_be: str) -> Any:
    """A field for a number in [least, most]."""
    return checked(default, Real, must_be, lambda x: least <= x <= most)  # also refuses NaN


def choice(default: str | None, *names: str, note: str = "") -> Any:
    """A field for one of `names`."""
    return checked(default, str, f"one of {', '.join(names)}{note}", names.__contains__, names)


def flag(default: bool | None) -> Any:
    """A field for a bool."""
    return checked(default, bool, "a bool or None" if default is None else "a bool")


@dataclass(frozen=True)
class CheckedArguments:
    """Checks the fields of a derived dataclass, and stores numpy numbers as Python's.

    If the dataclass is itself the value of an argument, `_argument` is that argument's name and
    `_example` a value of it.
    """

    _argument: ClassVar[str] = ""
    _example: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, check = getattr(self, item.name), item.metadata
            if not check or (value is None and item.default is None):
                continue
            right_type = isinstance(value, check["kind"])
            right_type &= isinstance(value, bool) == (check["kind"] is bool)  # a bool is an int
            if not (right_type and check["allowed"](value)):
                name = f"{self._argument}'s {item.name!r}" if self._argument else item.name
                raise ConfigError(
                    f"{name} is {shown(value)}; it must be {check['must_be']}."
                    f"{did_you_mean(value, check['names']) if isinstance(value, str) else ''}"
                )
            if is_whole(value):
                self._set(item.name, int(value))
            elif check["kind"] is Real:
                self._set(item.name, float(value))

    def _set(self, name: str, value: object) -> None:
        """Store the normalised form of an argument; used only by `__post_init__`."""
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: object) -> Self:
        """The arguments for a mapping of names to values."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{cls._argument} is {shown(given)}; it must be a dictionary such as "
                f"{cls._example}."
            )
        known = {item.name: item for item in fields(cls)}
        for name in given:
            if name not in known:
                raise UnknownArgumentError(
                    f"{cls._argument} has no key {shown(name)}; it has "
                    f"{', '.join(map(repr, known))}.{did_you_mean(str(name), known)}"
                )
        for name, item in known.items():
            if item.default is MISSING and name not in given:
                raise ConfigError(
                    f"{cls._argument} has no {name!r}; set it to {item.metadata['must_be']}."
                )
        return cls(**given)
