"""A rank whose CPU is a GPU that compiles kernels: ``python -m tests.parallel.emulated_worker``."""

import sys
from typing import Any

from minillm.lab.gpu.emulate import emulated
from minillm.parallel import worker

if __name__ == "__main__":
    with emulated() as kernels:
        build = worker.build

        def seen(*given: Any) -> Any:
            """A runner that says what it has recorded."""
            runner = build(*given)
            runner.stats = lambda: {
                "graphs": len(runner.graphs.sizes),
                "launches": len(kernels),
                "sums": given[1].communicator.traffic["sum"].calls,
            }
            return runner

        worker.build = seen
        worker.main(int(sys.argv[1]))
