"""The engine never splits a text: one program reads all of its keys, and the others wait."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in this process

from minillm_kernels import paged_config

paged_config.count_splits = lambda programs, most_tiles, multiprocessors, min_tiles: 1
