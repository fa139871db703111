"""Random work for a small engine: everything that a trace has a word for happens in it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minillm import LLM, SamplingParams
from minillm.engine.live_request import LiveRequest
from tests.engine.small import EOS, make

BLOCKS = 18
HOST_GIB = 14 * 4 * 128 / 2**30 * 2  # a good dozen blocks


def engine(folder: Path, **arguments: Any) -> LLM:
    """An engine that is too small for what it gets."""
    defaults = {
        "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 6, "max_num_batched_tokens": 12,
        "max_model_len": 48,
    }  # fmt: skip
    return make(folder, **(defaults | arguments))


def params(rng: random.Random) -> SamplingParams:
    """Some end by a stop token, some by length, some draw several completions; some fail."""
    kind = rng.random()
    fails = kind < 0.06  # no token is left to choose from
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]), temperature=0.9, seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 16), min_tokens=1 if fails else 0,
        allowed_token_ids=[EOS] if fails else None, ignore_eos=not fails,
        stop_token_ids=list(range(40)) if kind > 0.8 else [],
        prompt_logprobs=1 if kind > 0.93 else None,
    )  # fmt: skip


def run(
    llm: LLM, seed: int, count: int, after_step: Callable[[], None] = lambda: None
) -> list[LiveRequest]:
    """Add `count` requests at random times, abort some between steps, and run to the end.

    `after_step` is called when all that belongs to a step's record has happened.
    """
    rng, core = random.Random(seed), llm.engine
    shared = [rng.randrange(200) for _ in range(20)]
    lives: list[LiveRequest] = []
    while len(lives) < count or core.has_work:
        for _ in range(rng.choice([0, 0, 1, 1, 2]) if len(lives) < count else 0):
            start = rng.choice([0, 0, 9, 16])
            ids = shared[:start] + [rng.randrange(200) for _ in range(rng.randrange(1, 20))]
            request = core.make_request(f"r{len(lives)}", None, ids, params(rng))
            lives.append(core.add(request))
        if rng.random() < 0.1 and lives:
            core.abort(rng.choice(lives).request.request_id)
        after_step()
        core.step()
    after_step()
    return lives
