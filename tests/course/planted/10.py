"""The kernel does not shrink what it has added up when a tile brings a larger score."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
name = "minillm_kernels.flash_attention"
right = Path(importlib.util.find_spec(name).origin).read_text("utf-8")
wrong = right.replace("correction = tl.exp2(row_max - base)", "correction = tl.exp2(base - base)")
assert wrong != right
path = Path(tempfile.mkdtemp()) / "flash_attention.py"  # Triton reads the text of a kernel
path.write_text(wrong, "utf-8")
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
