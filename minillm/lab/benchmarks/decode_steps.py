"""Times decode steps of the real engine at long contexts, without computing the prompts.

The values in the KV cache do not affect the time of attention; the order of its blocks does. The
cache is therefore filled with random numbers once and its free blocks are shuffled, as in a pool
that has been in use. A stand-in model that returns zeros "computes" the prompts in one step of the
real scheduler and runner. The timed steps use the real model: they are calls of `Engine.step`, with
scheduling, input preparation, all layers, logits, sampling and bookkeeping.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from minillm.api.arguments import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.engine.loop import Engine
from minillm.errors import MinillmError
from minillm.execution.setup import runner_of
from minillm.layers.kv_cache import AttentionBackend
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch
from minillm.scheduling.data_parallel import schedulers_of

NOT_TIMED = 3  # tokens of a sequence that are not timed: two before the timed ones, one after
SEED = 12


class StepsFailedError(MinillmError, RuntimeError):
    """A step did not decode exactly one token of each sequence."""


class HollowModel:
    """A stand-in model: returns zeros as hidden states; logits are computed by the real model."""

    def __init__(self, model: Decoder):
        self._zeros = torch.zeros_like(model.norm.weight)[None]  # [1, d]
        self.logits = model.logits

    def __call__(self, batch: Batch, kv: AttentionBackend) -> Tensor:
        """Zeros [N, d], a view of one row."""
        return self._zeros.expand(len(batch.input_ids), -1)


class DecodeSteps:
    """An engine on a CPU with a filled KV cache, whose decode steps are timed."""

    def __init__(self, args: EngineArgs):
        self.engine = Engine(args)
        runner, pool = runner_of(self.engine.runner), self.engine.scheduler.blocks.pool
        if not isinstance(runner.model, Decoder):
            raise StepsFailedError(
                "Decode steps of a deterministic engine cannot be timed; leave out deterministic."
            )
        self._model = runner.model
        fill_with_numbers(runner.kv.key)
        fill_with_numbers(runner.kv.value)
        blocks = pool.allocate(pool.num_free)
        random.Random(SEED).shuffle(blocks)
        pool.release(blocks)

    @property
    def model(self) -> Decoder:
        """The model whose steps are timed."""
        return self._model

    def use(self, model: Decoder) -> None:
        """Time another model of the same shape, packed for the same dtype."""
        self._model = runner_of(self.engine.runner).model = model

    def run(
        self, batch: int, context: int, count: int, around: AbstractContextManager | None = None
    ) -> list[float]:
        """Seconds of each of `count` steps of `batch` sequences; the last step attends to
        `context` - 2 positions of each. `around`, a profiler, is entered for these steps."""
        engine = self.engine
        params = SamplingParams(temperature=0.0, max_tokens=count + NOT_TIMED, ignore_eos=True)
        prompt = [1] * (context - count - NOT_TIMED)
        names = [str(number) for number in range(batch)]
        for name in names:
            engine.add(engine.make_request(name, None, prompt, params))
        try:
            with self._hollow(batch * context):
                self._step(batch)
            self._step(batch)
            with around or nullcontext():
                return [self._step(batch) for _ in range(count)]
        finally:
            for name in names:
                engine.abort(name)

    def _step(self, batch: int) -> float:
        """Seconds of one step; checks that every sequence got one token."""
        start = perf_counter()
        touched = self.engine.step()
        seconds = perf_counter() - start
        if len(touched) != batch or any(live.finished for live in touched):
            raise StepsFailedError(
                f"A step had {len(touched)} of {batch} sequences, or finished some of them."
            )
        return seconds

    @contextmanager
    def _hollow(self, budget: int) -> Iterator[None]:
        """For the block, use the stand-in model and a token budget that fits all prompts."""
        (scheduler,), runner = schedulers_of(self.engine.scheduler), runner_of(self.engine.runner)
        config = scheduler.config
        large = replace(config, max_num_batched_tokens=max(budget, config.max_num_batched_tokens))
        stand_in: Any = HollowModel(self._model)
        scheduler.config = scheduler.admission.config = large
        runner.model = stand_in
        try:
            yield
        finally:
            scheduler.config = scheduler.admission.config = config
            runner.model = self._model

    def close(self) -> None:
        """Free the memory."""
        self.engine.close()


def fill_with_numbers(cache: Tensor) -> None:
    """Fill with random numbers. Memory that was never written maps to a single page of zeros, which
    the CPU's cache would hold."""
    generator = torch.Generator().manual_seed(SEED)
    block = torch.randn(cache.shape[2:], generator=generator)
    cache.copy_(block.to(cache.device, cache.dtype))  # a copy from the host would be of its size
