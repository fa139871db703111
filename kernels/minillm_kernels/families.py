"""The kernel families and their modules.

A family FAMILY consists of `minillm_kernels.FAMILY` (launchers), `minillm_kernels.check.FAMILY`
(test cases and launches to compile) and `minillm_kernels.bench.FAMILY` (measurements; not of
kernels for reading, which the engine does not call). They are imported lazily, because launchers
need Triton.
"""

import difflib
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm_kernels.bench.case import Measurement
    from minillm_kernels.check.case import Launch

FAMILIES = ("paged_attention", "int8_pages", "mla", "fused", "gemv", "sampling", "moe", "quantized")
CHECKED = ("flash_attention", *FAMILIES)


class UnknownFamilyError(ValueError):
    """There is no kernel family with this name."""


def chosen(names: Sequence[str], known: Sequence[str] = FAMILIES) -> tuple[str, ...]:
    """The named families in the order of `known`; all of `known` if none is named."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UnknownFamilyError(
                f"There is no kernel family '{name}'; the families are {', '.join(known)}.{hint}"
            )
    return tuple(family for family in known if family in names or not names)


def checks(family: str) -> ModuleType:
    """The module with a family's test cases: `CASES`, `random_case`, `verify`, `LAUNCHES`."""
    return import_module(f"minillm_kernels.check.{family}")


def launches(family: str) -> "tuple[Launch, ...]":
    """Launches with the shapes of real models, to compile without a GPU."""
    return tuple(checks(family).LAUNCHES)


def measurements(family: str, tiny: bool = False) -> "list[Measurement]":
    """A family's benchmarks on the GPU; with `tiny`, at toy sizes on the CPU."""
    module = import_module(f"minillm_kernels.bench.{family}")
    sizes, device = (module.TINY, "cpu") if tiny else (module.SIZES, "cuda")
    return [size.measurement(family, device) for size in sizes]
