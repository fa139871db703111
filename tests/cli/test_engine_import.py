"""What a command imports before it can compute: without looking for garbage, and only once.

A stand-in for `minillm.llm`, and for the torch that comes with it, creates as many objects.
"""

import subprocess
import sys

PROGRAM = """
import gc
import sys
from importlib.machinery import ModuleSpec
from minillm.cli.engine_import import import_engine

class StandIn:
    fails = True

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "minillm.llm" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.kept = [[] for _ in range(200_000)]
        if self.fails:
            raise ImportError("half of it")
        module.LLM = object()
        sys.modules["torch"] = module

looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
sys.meta_path.insert(0, StandIn())
assert "torch" not in sys.modules
try:
    import_engine()
except ImportError:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
else:
    raise AssertionError("it was imported")
looked.clear()
StandIn.fails = False
first = import_engine()
assert not looked, len(looked)
assert gc.isenabled()
kept = gc.get_freeze_count()
assert kept > 100_000, kept
garbage = [None]
garbage.append(garbage)
assert import_engine() is first
assert gc.get_freeze_count() == kept
gc.collect()
assert looked and gc.isenabled()
"""


def test_nobody_looks_for_garbage_during_the_import_even_if_it_fails():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
