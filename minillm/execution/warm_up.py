"""Compiles at start what steps launch outside of CUDA graphs, so that no request waits for it.

A kernel compiles when it is first launched, for a fifth of a second to a second. Capturing the
graphs compiles what they hold; the rest is launched here once: steps with prompts, logits and
sampling. What the kernels of a model compile for is its shape, not the number of rows, except
where they have several tiles, as those of experts and quantised matrices.
"""

import logging
from time import perf_counter

import torch
from torch import Tensor

from minillm.errors import in_one_line
from minillm.execution.runner import Runner
from minillm.layers.linear_methods import Matrix, PlainLinearMethod
from minillm.models.batches import make_batch
from minillm.ops.sampling import Pack, choose

logger = logging.getLogger(__name__)

# Tokens of each sequence of a step: a prompt beside a decode, a few tokens of one sequence and of
# several, and decodes alone, if no graph has them.
MIXED = ((20, 1), (40,), (2, 1), (5, 5), (9, 1), (16, 1), (1,), (1,) * 2, (1,) * 9)
LOGITS = (1, 2, 9)  # rows of the output matrix: other kernels from 2 and from 9 on
# Rows of a step, and of the output matrix: more than `FUSED_ROWS` of ops/triton.py, and those
# beyond which experts and quantised matrices have other tiles.
SIZES, TILES = (65,), tuple(2**n + 1 for n in range(4, 14))
SAMPLED = (1, 17)  # rows of logits: kernels have other blocks from 17 on


def warm_up(runner: Runner, max_num_tokens: int) -> None:
    """Launch everything once, in steps of up to so many tokens, on block 0, which no request uses
    yet. A failure is logged: the request that needs what failed will say it, and others may not."""
    from minillm_kernels.launch import compiled

    began = perf_counter()
    with compiled() as names:
        try:
            with torch.inference_mode(), torch.accelerator.device_index(runner.device.index):
                launch_steps(runner, max_num_tokens)
        except Exception as error:
            logger.warning("Compiling kernels at start failed: %s", in_one_line(error))
    seconds = perf_counter() - began
    logger.info("Kernels: %d more compiled or loaded in %.1f s.", len(names), seconds)


def launch_steps(runner: Runner, max_num_tokens: int) -> None:
    """One step of each kind."""
    most, room = runner.rows.num_rows, runner.rows.tables.host.shape[1] * runner.kv.block_size
    sizes = TILES if has_tiles(runner) else SIZES
    longer = ([min(room, size - at) for at in range(0, size, room)] for size in sizes)
    hidden: Tensor | None = None
    for counts in (*MIXED, *longer):
        if len(counts) <= most and max(counts) <= room and sum(counts) <= max_num_tokens:
            rows, ids = range(len(counts)), [0] * sum(counts)
            size, starts = runner.kv.block_size, [0] * len(counts)
            batch = make_batch(runner.rows.tables, size, rows, starts, counts, ids)
            states = runner.model(batch, runner.kv)
            hidden = states if hidden is None or len(states) > len(hidden) else hidden
    if hidden is None:
        return
    for count in (*LOGITS, *(size for size in sizes if size <= most)):
        if count <= len(hidden):
            logits = runner.model.logits(hidden[:count])
    for count in SAMPLED:
        every = logits[:1].expand(count, -1).contiguous()
        # Edited logits: in float32, in rows as `Edits.apply` makes them.
        columns = (every.shape[1] // 16 + 1) * 16
        wide = torch.zeros(count, columns, device=every.device)[:, : every.shape[1]]
        for each in (every, wide):
            for truncates in (False, True):
                choose(each, pack_of(count, truncates, every.device))


def has_tiles(runner: Runner) -> bool:
    """Whether the model has experts or quantised matrices."""
    model = runner.model
    methods = (matrix.method for matrix in model.modules() if isinstance(matrix, Matrix))
    return model.config.moe is not None or not all(type(m) is PlainLinearMethod for m in methods)


def pack_of(count: int, truncates: bool, device: torch.device) -> Pack:
    """Parameters of `count` rows."""
    ones, zeros = torch.ones(count, device=device), torch.zeros(count, device=device)
    top_k = torch.ones(count, dtype=torch.int32, device=device)
    stream = torch.zeros(count, dtype=torch.int64, device=device)
    return Pack(ones, zeros, ones, top_k, stream, stream, stream, truncates)
