"""The engine, imported when a command needs it: with torch, most of the time to a first token."""

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minillm.llm import LLM


def import_engine() -> type["LLM"]:
    """The class `LLM`.

    Python looks for garbage whenever some more objects were made. An import makes half a million
    and leaves no garbage, so looking costs a tenth of torch's second; and as these objects stay,
    they are never looked at again. Where torch was imported before, there is nothing to gain.
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
