"""Interpreted tests need an interpreter of their own: TRITON_INTERPRET counts when Triton is
imported, and the compiler's tests need it unset. `test_interpreted.py` starts one per file."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compiled.py", "test_interpreted.py"] if INTERPRETED else ["interpreted"]
