"""Stage "engine": the right tokens and logits, eager and from graphs.

"tiny": in float32 the tokens of the CPU, by every way that the engine has. MODEL: in bf16 with the
real widths of a few layers, logits of kernels beside those of plain torch on the same GPU, eager
and replayed. "launches": no launch of a step waits for the GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.cache.spec import cache_spec
from minillm.execution.graphs import CudaCapture, DecodeGraphs
from minillm.execution.setup import runner_of
from minillm.execution.state import DeviceRows
from minillm.lab.gpu.emulate import Again
from minillm.lab.gpu.worker import Case, Context, Found
from minillm.layers.kv_cache import KVCache
from minillm.layers.moe import Router
from minillm.models.batches import make_batch
from minillm.models.decoder import Decoder
from minillm.models.fused_layers import FusedLayers
from minillm.models.presets import preset
from minillm.ops import dispatch
from minillm.ops.batch import AttentionMode, Batch
from minillm.ops.dispatch import Backend
from minillm.parallel.split import stage_config
from minillm.sampling import penalties

LAYERS: Mapping[str, int] = {
    "qwen3-0.6b": 4,
    "llama-3.1-8b": 2,
    "deepseek-v2-lite": 2,
    "qwen3-30b-a3b": 1,
}
ROWS = (1, 3, 8, 9, 40, 130, 256)
BLOCK, POSITIONS = 16, 48  # of a sequence, the new token included
TOLERANCE = 2e-2  # of the largest logit: rounding in bf16
SAME_EXPERTS = 0.8  # share of the tokens
TEXTS = (
    "def fib(n):",
    "import os\n",
    "class Stack:\n    def push",
    "for i in range(9):\n",
    "x = [",
)
SHARED = "def add(a, b):\n    return a + b\n\n"
ENGINE: Mapping[str, Any] = {
    "dtype": "float32", "block_size": 16, "max_model_len": 256, "max_num_seqs": 16,
    "num_gpu_blocks_override": 256, "seed": 3,
}  # fmt: skip
FEW: Mapping[str, Any] = {"num_gpu_blocks_override": 20}  # sequences are preempted
WAYS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"async_scheduling": False},
    "graphs and overlap": {"async_scheduling": True},
    "chunks of 8": {"long_prefill_token_threshold": 8},
    "recompute": FEW,
    "swap": {**FEW, "swap_space": 0.01},
    "drafts": {"speculative_config": {"model": "tiny-draft", "num_speculative_tokens": 3}},
    "deterministic": {"deterministic": True},
}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Twelve prompts, with the sampling parameters that have a way of their own."""
    drawn: dict[str, Any] = {"temperature": 0.9}
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.3}
    stops = {"presence_penalty": 0.5, "min_tokens": 2, "stop_token_ids": [10]}
    return [
        (TEXTS[0], {"temperature": 0.0, "logprobs": 2}),
        (TEXTS[1], drawn),
        (TEXTS[2], drawn | {"top_k": 20}),
        (TEXTS[3], drawn | {"top_p": 0.8, "min_p": 0.02}),
        (TEXTS[4], drawn | {"n": 3, "logit_bias": {65: 2.0, 66: -3.0}}),
        (TEXTS[0], {"temperature": 0.0, **penalties}),
        (TEXTS[1], drawn | stops),
        (TEXTS[2], drawn | {"allowed_token_ids": list(range(40, 90))}),
        (SHARED + TEXTS[0], {"temperature": 0.0, "bad_words": ["return"]}),
        (SHARED + TEXTS[1], drawn | {"n": 2, "top_k": 9, "presence_penalty": 0.4}),
        (SHARED * 3, {"temperature": 0.0, "prompt_logprobs": 1}),
        (SHARED * 2 + TEXTS[4], drawn),
    ]


def generate(llm: LLM, most: int) -> list[RequestOutput]:
    """Outputs of `requests`."""
    texts, given = zip(*requests(), strict=True)
    params = [
        SamplingParams(seed=7 + i, max_tokens=most, ignore_eos=True, **options)
        for i, options in enumerate(given)
    ]
    return llm.generate(list(texts), params, use_tqdm=False)


def cases(context: Context) -> list[Case]:
    """Of "tiny", "launches" or a model."""
    if context.task == "tiny":
        expected: list = []
        return [
            Case(way, partial(same_tokens, way, expected, context), patience=75) for way in WAYS
        ]
    if context.task == "launches":
        return [Case("no launch waits", partial(no_launch_waits, context), patience=40)]
    made: dict[str, Decoder] = {}
    rows = ROWS[:-1] if context.dry else ROWS
    return [
        Case(f"{count} rows", partial(same_logits, context, made, count), patience=40)
        for count in rows
    ]


# ---- tokens ----------------------------------------------------------------------------------


def tokens(device: str, most: int, **arguments: Any) -> tuple[list[list[list[int]]], int]:
    """Of every sample of every request, and how often one was preempted. The second round finds the
    prompts' blocks cached."""
    with LLM("tiny", device=device, **(dict(ENGINE) | arguments)) as llm:
        found = []
        for _ in range(2):
            outputs = generate(llm, most)
            for output in outputs:
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        raise AssertionError(f"request {output.request_id}: {completion.error}")
            found += [[list(each.token_ids) for each in output.outputs] for output in outputs]
        return found, sum(len(record.preempted) for record in llm.trace)


def same_tokens(way: str, expected: list, context: Context) -> Found:
    """One way of the engine gives the CPU's tokens."""
    if context.dry:
        tokens("cpu", 3, **WAYS[way])
        return None
    if not expected:
        expected += tokens("cpu", 24)[0]
    found, preempted = tokens(context.device, 24, **WAYS[way])
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if got != wanted:
            request = requests()[number % len(requests())]
            raise AssertionError(f"request {number} {request}: {got}, not {wanted}")
    if not preempted and "num_gpu_blocks_override" in WAYS[way]:
        raise AssertionError("nothing was preempted, so this shows nothing")
    return {"figures": {"preempted": preempted}}


def no_launch_waits(context: Context) -> None:
    """`Runner.launch` of steps with all kinds of requests, where waiting for the GPU is an error.

    The first steps compile and fill caches, so only those after the first round are watched. There
    are more tokens than the first room for a penalty's counts has places.
    """
    most = 12 if context.dry else penalties.ROOM + 8
    with LLM("tiny", device=context.device, **ENGINE) as llm:
        generate(llm, most)
        runner: Any = runner_of(llm.engine.runner)
        launch = runner.launch

        def watched(plan: Any) -> Any:
            if not context.dry:
                torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                if not context.dry:
                    torch.cuda.set_sync_debug_mode("default")

        runner.launch, runner.isolates = watched, False  # an error is raised, not retried
        generate(llm, most)


# ---- logits ----------------------------------------------------------------------------------


@contextmanager
def routes(known: list[tuple[Tensor, Tensor]] | None = None) -> Iterator[list]:
    """For the block, the list of what routers choose, in order. If `known`, they have to choose
    nearly the same, and then do: where two experts are as good, rounding decides between them, and
    logits are others."""
    forward, found = Router.forward, list[tuple[Tensor, Tensor]]()

    def chosen(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
        own = forward(router, x)
        found.append(own)
        if known is None:
            return own
        given = known[len(found) - 1]
        (weights, ids), (own_weights, own_ids) = (in_order(*top) for top in (given, own))
        same = (ids == own_ids).all(-1)
        if not same.float().mean() >= SAME_EXPERTS:
            raise AssertionError(f"routers choose other experts for {int((~same).sum())} tokens")
        apart = float((weights - own_weights)[same].abs().max())
        if not apart <= TOLERANCE:
            raise AssertionError(f"routers weigh experts otherwise, by {apart:.3g}")
        return given

    with patch.object(Router, "forward", chosen):
        yield found


def in_order(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids [N, k] by ascending id."""
    ids, order = ids.sort(-1)
    return weights.gather(-1, order), ids


@contextmanager
def plain_torch() -> Iterator[None]:
    """For the block, all operations are those of the reference, on any device."""
    plain = Backend("reference", "asked for")
    with patch.object(dispatch, "backend_of", lambda device: plain):
        yield


def same_logits(context: Context, made: dict[str, Decoder], count: int) -> dict[str, Any]:
    """After prompts of several lengths, the logits of a decode step of `count` rows."""
    if "model" not in made:
        config = stage_config(preset(context.task), range(LAYERS[context.task]))
        made["model"] = Decoder(config, torch.bfloat16, context.device, 4096)
        made["model"].initialize(std=0.05)
        made["model"].all_layers = FusedLayers.of(made["model"])
    model = made["model"]
    with torch.inference_mode():
        eager, replayed, known = with_kernels(model, count, context)
        if context.dry:
            return {}
        with plain_torch(), routes(known):
            expected, _ = decode(model, count, "plain")
    worst = {}
    for name, got in (("eager", eager), ("replayed", replayed)):
        scale = float(expected.abs().max())
        worst[name] = float((got.float() - expected.float()).abs().max()) / scale
        if not worst[name] <= TOLERANCE:  # NaN, too
            raise AssertionError(f"{name}: {worst[name]:.3g} of the largest logit, {scale:.3g}")
    return {"figures": {f"error, {name}": value for name, value in worst.items()}}


def with_kernels(model: Decoder, count: int, context: Context) -> tuple[Tensor, Tensor, list]:
    """Logits of an eager step and of a replay, and what routers chose."""
    with routes() as known:
        eager, (kv, rows, starts) = decode(model, count, "fast")
    graphs = DecodeGraphs(model, kv, rows, Again() if context.dry else CudaCapture(model.device))
    graphs.record_all()
    places = graphs.launch(range(count), starts, [1] * count)
    if places is None:
        raise AssertionError(f"there is no graph of {count} rows: {graphs.missing}")
    return eager, model.logits(graphs.hidden[: len(places)]), known


def decode(
    model: Decoder, count: int, mode: AttentionMode
) -> tuple[Tensor, tuple[KVCache, DeviceRows, Sequence[int]]]:
    """Prefill of prompts of different lengths and one decode step, all in shuffled blocks."""
    device, width = model.device, POSITIONS // BLOCK
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(count * width, generator=generator).tolist()
    kv = KVCache(
        cache_spec(model.config), model.config.num_layers, count * width, BLOCK, model.dtype,
        device, mode,
    )  # fmt: skip
    rows = DeviceRows(count, width, device)
    rows.tables.write([(i, 0, order[i * width : (i + 1) * width]) for i in range(count)])
    starts = [1 + (7 * i) % (POSITIONS - 2) for i in range(count)]
    ids = torch.randint(0, model.config.vocab_size, (sum(starts) + count,), generator=generator)
    batch = make_batch(rows.tables, BLOCK, range(count), [0] * count, starts, ids[count:].tolist())
    model(batch, kv)
    rows.last.copy_(ids[:count])
    step: Batch = make_batch(
        rows.tables, BLOCK, range(count), starts, [1] * count, ids[:count].tolist()
    )
    return model.logits(model(step, kv)), (kv, rows, starts)
