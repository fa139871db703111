"""A rank with a fault: ``MINILLM_ODD="1 raises"`` is rank 1 with the fault `raises`."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

from minillm.parallel import executor, worker

RANK, _, FAULT = os.environ["MINILLM_ODD"].partition(" ")
NORMAL = worker.build


def build(set_up: Any, place: Any) -> Any:
    if RANK not in ("all", str(set_up.rank)):
        return NORMAL(set_up, place)
    if FAULT == "never ready":
        print("this rank never gets ready", file=sys.stderr, flush=True)
        time.sleep(600)
    if FAULT == "no memory":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes.")
    runner = NORMAL(set_up, place)
    if FAULT == "fewer blocks":
        capacity = runner.capacity()
        runner.capacity = lambda: replace(capacity, num_blocks=capacity.num_blocks - 5)
    execute, plans = runner.execute, []

    def odd_execute(plan: Any) -> Any:
        plans.append(plan)
        if len(plans) == 4:
            if FAULT == "sleeps":
                time.sleep(600)
            if FAULT == "raises":
                raise ValueError("planted")
            if FAULT == "leaves":
                print("a library says goodbye", file=sys.stderr, flush=True)
                os._exit(7)
            if FAULT == "other tokens":
                executor.token_hash = lambda result: 16 * "0"
        return execute(plan)

    runner.execute = odd_execute
    return runner


if __name__ == "__main__":
    worker.build = build
    worker.main(int(sys.argv[1]))
