"""What the first run on a machine makes once and later ones find: `python -m tests.first_run`.

`make test` does it beforehand, so that no test is charged for it and no two workers do the same.
"""

import os
from contextlib import suppress
from importlib import import_module

import pytest
import torch

from minillm.lab import ceilings
from minillm.ops import c_library
from minillm.plan.machine import cpu_count
from tests.ops.c_variants import ELEMENTS, QUICK, built

if __name__ == "__main__":
    import_module("matplotlib.font_manager")  # reads every font
    # For chapters in a hurry, each of which would measure the rates of this machine.
    torch.set_num_threads(max(1, cpu_count() // int(os.environ.get("WORKERS", "1"))))
    ceilings.measure()
    for element in ELEMENTS:
        c_library.library(element)
        for path in QUICK:
            with suppress(pytest.skip.Exception):  # no compiler, or not for this processor
                built(path, element)
