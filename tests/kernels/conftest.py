"""Interpreted tests need an interpreter of their own: TRITON_INTERPRET counts when Triton is
imported, and the compiler's tests need it unset. `make test` runs them by a call of their own:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compiled.py"] if INTERPRETED else ["interpreted"]
