"""Stage "warm": compiles beside the first stages what the next ones launch, without the GPU.

A kernel that is compiled here has the source, target and options of the real launch, so that
Triton's cache on disk serves it. The tasks are dry runs of tasks of other stages.
"""

from dataclasses import replace

from minillm.lab.gpu import engine, speed
from minillm.lab.gpu.worker import Case, Context


def cases(context: Context) -> list[Case]:
    """Of "engine MODEL" or "decode MODEL"."""
    stage, _, model = context.task.partition(" ")
    inner = replace(context, stage=stage, task=model if stage == "engine" else context.task)
    return (engine if stage == "engine" else speed).cases(inner)
