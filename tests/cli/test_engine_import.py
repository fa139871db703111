"""What a command imports before it can compute: without looking for garbage, and only once."""

import subprocess
import sys

PROGRAM = """
import gc
import sys
from minillm.cli.engine_import import import_engine

looked = []
gc.callbacks.append(lambda phase, info: looked.append(phase))
assert "torch" not in sys.modules
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
FAILING = """
import gc
import sys
from minillm.cli.engine_import import import_engine

sys.modules["minillm.engine.loop"] = None
try:
    import_engine()
except ImportError:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
else:
    raise AssertionError("it was imported")
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nobody_looks_for_garbage_during_the_import():
    run(PROGRAM)


def test_an_import_that_fails_leaves_the_collector_on():
    run(FAILING)
