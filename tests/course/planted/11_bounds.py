"""The interpreter looks at no bounds: a kernel reads behind a tensor, and nobody says so."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in this process

from minillm_kernels import interpreter

interpreter._check_bounds = lambda module: None
