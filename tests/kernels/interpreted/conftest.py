"""Every test here runs in a process with TRITON_INTERPRET=1, its interpreter mended."""

from minillm_kernels import interpreter

interpreter.install()
