"""What the first run on a machine makes once and later ones find: `python -m tests.first_run`.

`make test` does it beforehand, so that no test is charged for it and no two workers do the same.
"""

from contextlib import suppress
from importlib import import_module

import pytest

from minillm.ops import c_library
from tests.ops.c_variants import ELEMENTS, PRODUCT_PATHS, built

if __name__ == "__main__":
    import_module("matplotlib.font_manager")  # reads every font
    for element in ELEMENTS:
        c_library.library(element)
        for path in PRODUCT_PATHS:
            with suppress(pytest.skip.Exception):  # no compiler, or not for this processor
                built(path, element)
