"""The kernel aligns its causal mask at the top left: query 0 stands beside key 0."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
name = "minillm_kernels.flash_attention"
right = Path(importlib.util.find_spec(name).origin).read_text("utf-8")
wrong = right.replace("first_row + num_keys - num_queries", "first_row")
assert wrong != right
path = Path(tempfile.mkdtemp()) / "flash_attention.py"  # Triton reads the text of a kernel
path.write_text(wrong, "utf-8")
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
