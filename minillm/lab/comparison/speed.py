"""Decode speed of all models in one engine, in one process.

The engine of the 16-bit model times real steps (`benchmarks/decode_steps.py`). Other models take
the place of its model. Rounds alternate between the 16-bit model and the other one, so that
disturbances affect both; the read ceiling is measured beside them.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from minillm.api.arguments import EngineArgs
from minillm.engine.setup import CPU_BLOCK_SIZE, choose_dtype
from minillm.lab.benchmarks.ceiling import Ceiling, measure_ceiling
from minillm.lab.benchmarks.decode_steps import DecodeSteps
from minillm.lab.benchmarks.others import LEAST_SECONDS, Calm, calmest, calmly
from minillm.models.checkpoint import ModelSource
from minillm.models.decoder import Decoder

BATCHES, CONTEXT, STEPS, ROUNDS = (1, 16), 128, 16, 3


class Speed:
    """An engine in which models take turns.

    Args:
        dtype: "auto" (as the engine chooses), "bfloat16" or "float32".
        kv_cache_dtype: "auto" or "int8".
    """

    def __init__(self, source: ModelSource, dtype: str, threads: int, kv_cache_dtype: str = "auto"):
        torch.set_num_threads(threads)
        self.threads = threads
        self.dtype = choose_dtype(dtype, source.config, torch.device("cpu"))
        blocks = max(BATCHES) * -(-CONTEXT // CPU_BLOCK_SIZE)
        self.steps = DecodeSteps(
            EngineArgs(
                source.name,
                load_format="auto" if source.folder else "dummy",
                dtype=self.dtype,
                kv_cache_dtype=kv_cache_dtype,
                device="cpu",
                block_size=CPU_BLOCK_SIZE,
                max_model_len=CONTEXT,
                max_num_seqs=max(BATCHES),
                num_gpu_blocks_override=int(blocks * 1.05) + 2,
                enable_prefix_caching=False,
            )
        )
        self.base = self.steps.model

    def measure(self, model: Decoder | None, say: Callable[[str], Any]) -> dict[str, Any]:
        """Time a packed model against the 16-bit model; None: the 16-bit model itself."""
        say("read ceiling")
        ceiling = measure_ceiling("cpu", self.threads)
        return {
            "threads": self.threads,
            "dtype": self.dtype,
            "read_bytes_per_second": ceiling.bandwidth,
            "machine": ceiling.machine,
            "by_batch": [self._case(model, batch, ceiling, say) for batch in BATCHES],
        }

    def _case(
        self, model: Decoder | None, batch: int, ceiling: Ceiling, say: Callable[[str], Any]
    ) -> dict[str, Any]:
        rounds: dict[str, list[Calm[float]]] = {"base": [], "own": []}
        for number in range(ROUNDS):
            say(f"speed, batch {batch}, round {number + 1}")
            for name, timed in (("base", self.base), ("own", model)):
                if timed is not None:
                    rounds[name].append(calmly(partial(self._seconds, timed, batch)))
        own, measured = rounds["own"] or rounds["base"], model or self.base
        seconds = median(run.value for run in calmest(own))
        base = median(run.value for run in calmest(rounds["base"]))
        read = bytes_read(measured)
        return {
            "batch": batch,
            "context": CONTEXT,
            "tokens_per_second": batch / seconds,
            "over_16_bit": base / seconds,
            "bytes_per_step": read,
            "of_read_ceiling": read / seconds / ceiling.bandwidth,
            "others": max(run.others for run in calmest(own)),
        }

    def _seconds(self, model: Decoder, batch: int) -> float:
        """Median seconds of a step."""
        self.steps.use(model)
        found: list[float] = []
        end = perf_counter() + LEAST_SECONDS
        while not found or perf_counter() < end:
            found += self.steps.run(batch, CONTEXT, STEPS)
        return median(found)

    def close(self) -> None:
        """Free the memory."""
        self.steps.use(self.base)
        self.steps.close()


def bytes_read(model: Decoder) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is not the output."""
    unread = 0 if model.lm_head is None else model.embedding.num_bytes
    return model.num_bytes - unread
