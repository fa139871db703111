"""Imports the engine when a command needs it; importing torch dominates the startup time."""

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.llm import LLM


def import_engine() -> type["LLM"]:
    """Import and return the class `LLM`, with garbage collection off during the first import.

    The import creates half a million objects and no garbage, and garbage collection would take a
    tenth of its time. `gc.freeze` excludes these objects from later collections.
    """
    if "torch" in sys.modules or not gc.isenabled():
        from minillm.llm import LLM
    else:
        gc.disable()
        try:
            from minillm.llm import LLM

            gc.freeze()
        finally:
            gc.enable()
    return LLM
