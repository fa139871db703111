"""What a step copies and launches beside the model, and that it never waits for a GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minillm import SamplingParams
from minillm.api.arguments import EngineArgs
from minillm.cache.spec import cache_spec
from minillm.engine import setup
from minillm.execution.graphs import DecodeGraphs
from minillm.execution.runner import Runner
from minillm.lab.benchmarks.decode_steps import fill_with_numbers
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import ModelSource
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TiledDecoder
from minillm.models.fused_layers import FusedLayers
from minillm.models.presets import preset
from minillm.models.quantize import quantize_weights
from minillm.ops.sampling import Pack
from minillm.parallel.sampler import ShardedSampler
from minillm.parallel.split import stage_config
from minillm.quantization.kernels import KernelQuantizedMethod, pack_for_kernels
from minillm.sampling import penalties
from minillm.sampling.ratio import Ratio
from minillm.sampling.rules import DraftedToken, Verification
from minillm.sampling.synthetic import Synthetic
from minillm.sampling.typical import Typical
from minillm.scheduling.plan import StepPlan
from minillm.speculative.draft_model import Chunk
from minillm.speculative.eagle import Eagle
from minillm.speculative.proposer import DraftRow
from tests.engine.small import BLOCK_SIZE, make
from tests.execution.fake_gpu import DEVICE, FakeGpu, WaitError, fake_gpu
from tests.execution.test_graphs import OPTIONS
from tests.sampling.sampling_rows import SamplingRow


def plans_of(folder: Path, params: list[SamplingParams], **arguments: Any) -> tuple[Any, list]:
    """The model's configuration, and the plans of some requests, made on the CPU."""
    llm, plans = make(folder, **arguments), list[StepPlan]()
    runner = llm.engine.runner
    launch = runner.launch
    runner.launch = lambda plan: plans.append(deepcopy(plan)) or launch(plan)
    prompts = [[20 + i, 30 + i, 40 + i] for i in range(len(params))]
    llm.generate(prompts, params, use_tqdm=False)
    return runner.model.config, plans


class Recorded:
    """A `Capture` whose replay does nothing."""

    num_bytes = 0

    def capture(self, run: Any) -> Any:
        return lambda: None


def runner_on_gpu(config: Any, most: int = 8, weights: str | None = None) -> Runner:
    model = Decoder(config, torch.bfloat16, DEVICE, 64)
    if weights is not None:
        quantize_weights(model, weights)
        assert pack_for_kernels(model, DEVICE)
    model.all_layers = FusedLayers.of(model)
    shape = cache_spec(config), config.num_layers, 64, BLOCK_SIZE, model.dtype
    host = KVCache(*shape, swap_space_of=DEVICE)
    runner = Runner(model, KVCache(*shape, DEVICE), host, most, 64 // BLOCK_SIZE)
    runner.graphs = DecodeGraphs(model, runner.kv, runner.rows, Recorded())
    runner.graphs.record_all()
    runner.isolates = False
    return runner


def counted(runner: Runner, plan: StepPlan, gpu: FakeGpu) -> tuple[int, dict[str, int]]:
    """Rows of the graph of a step, and what it copies and launches."""
    with gpu.watching() as seen:
        flight = runner.launch(plan)
    for row in plan.rows:
        runner._rows[row.seq_id].token_ids += [0] * row.num_logits
    assert not flight.result.errors
    return flight.result.graph_rows, dict(+seen)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHORT, DRAWN = replace(GREEDY, max_tokens=5), replace(GREEDY, temperature=0.8, seed=3)
ONCE = {"to device": 1, "to host": 1, "_best_of_block": 1, "_draw": 1, "copy_": 1}


def test_what_a_decode_step_copies_and_launches_outside_of_its_graph(folder):
    """The graph's inputs go up in one copy, tokens come down in another. Launches are the output
    matrix, two of sampling, the next positions, and the last tokens for the next step. It was 3
    copies up, or 4 and a gather with rows in another order than the device's, 2 down, and 2 more
    launches for the largest logit."""
    config, plans = plans_of(folder, [GREEDY, SHORT, DRAWN, GREEDY])
    with fake_gpu() as gpu, torch.inference_mode():
        runner = runner_on_gpu(config)
        graph_rows, found = zip(*(counted(runner, plan, gpu) for plan in plans), strict=True)
    assert graph_rows == (0,) + (4,) * 11
    steady = ONCE | {"_several_rows": 1, "add": 1}
    blocks = steady | {"to device": 2, "index_put_": 1}  # each 4 steps
    fewer = ONCE | {"_several_rows": 1, "to device": 2, "copy_": 3}  # other rows, one moved
    assert list(found[1:6]) == [steady, blocks, steady, steady, fewer]
    assert list(found[6:]) == [blocks, steady, steady, steady, blocks, steady]


def test_no_step_of_any_kind_waits_for_the_gpu(folder, monkeypatch):
    """Prompts in chunks, every option, forks, preemption by swapping, counts of more tokens than
    there is room for."""
    monkeypatch.setattr(penalties, "ROOM", 2)
    kinds = OPTIONS.keys() - {"chosen logprob", "presence", "frequency", "stop string"}
    params = [replace(GREEDY, **{"max_tokens": 9} | OPTIONS[kind]) for kind in sorted(kinds)]
    few = {"num_gpu_blocks_override": 28, "swap_space": 0.001, "max_num_batched_tokens": 24}
    config, plans = plans_of(folder, params, max_num_seqs=16, **few)
    with fake_gpu() as gpu, torch.inference_mode():
        runner = runner_on_gpu(config, 16)
        graph_rows = {counted(runner, plan, gpu)[0] for plan in plans}
    assert graph_rows >= {0, 4, 16}
    assert any(plan.swap_in for plan in plans)
    assert any(plan.copies for plan in plans)


def test_a_router_converts_no_weight_and_chooses_in_one_launch(monkeypatch):
    """It had ten launches: two conversions, softmax, topk, gather, sum, clamp_min, div, mul."""
    config = replace(stage_config(preset("qwen3-30b-a3b"), range(1)), vocab_size=64)
    monkeypatch.setattr(setup, "free_memory", lambda device: 10**10)
    args, source = EngineArgs("tiny", max_model_len=64), ModelSource(None, config)
    with fake_gpu() as gpu, torch.inference_mode():
        model = Decoder(config, torch.bfloat16, DEVICE)
        _, plan = setup.plan_memory(args, source, "bfloat16", DEVICE)
        router = model.layers[0].mlp.router
        x = torch.empty(3, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        with gpu.watching() as seen:
            weights, ids = router(x)
    assert dict(+seen) == {"conversion": 1, "linear": 1, "_route": 1}
    assert (weights.shape, weights.dtype, ids.dtype) == ((3, 8), torch.float32, torch.int64)
    assert router.weight.dtype == torch.float32
    assert plan.weight_bytes == model.num_bytes


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(("weights", "size"), [("int8", 48), ("int4", 96)])
def test_quantised_weights_wait_for_nothing_either(folder, weights, size, planted, monkeypatch):
    """And a product that looks at its weights would be found."""
    config, plans = plans_of(folder, [GREEDY])
    apply = KernelQuantizedMethod.apply

    def looks(self: Any, matrix: Any, *rest: Any) -> Tensor:
        matrix.get_buffer("scales").max().item()
        return apply(self, matrix, *rest)

    with fake_gpu() as gpu, torch.inference_mode():
        runner = runner_on_gpu(replace(config, intermediate_size=size), weights=weights)
        if planted:
            monkeypatch.setattr(KernelQuantizedMethod, "apply", looks)
        with pytest.raises(RuntimeError, match="local_scalar") if planted else nullcontext():
            counted(runner, plans[0], gpu)


def test_a_deterministic_step_is_cut_into_tiles_without_waiting(folder):
    """Also prompts: bounds of sequences are known on the host."""
    config, plans = plans_of(folder, [GREEDY, SHORT, DRAWN], max_num_batched_tokens=8)
    with fake_gpu() as gpu, torch.inference_mode():
        model = Decoder(config, torch.bfloat16, DEVICE, 64)
        shape = cache_spec(config), config.num_layers, 64, BLOCK_SIZE, model.dtype, DEVICE
        tiled = TiledDecoder(model, (2, 4))
        runner = Runner(tiled, KVCache(*shape, "invariant"), None, 8, 64 // BLOCK_SIZE)
        runner.isolates = False
        tiles = [counted(runner, plan, gpu)[1]["invariant_kernel"] for plan in plans]
    assert max(tiles) > config.num_layers
    assert len(plans) > 8


def test_memory_of_a_cache_is_not_filled_through_the_host():
    """A copy from a smaller tensor of the host would be expanded there: on a GPU of 140 GB that is
    half the host's memory, and a minute."""
    with fake_gpu():
        cache = torch.empty(2, 50, 2, 4, 8, dtype=torch.bfloat16, device=DEVICE)
        fill_with_numbers(cache)
        with pytest.raises(WaitError, match=r"copy_ expands \[4, 8\] on the host"):
            cache.copy_(torch.zeros(4, 8))


def pack_on_gpu(count: int) -> Pack:
    zeros = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(count, device=DEVICE)
    return Pack(ones, zeros.float(), ones, zeros.int(), zeros, zeros, zeros, True)


@pytest.mark.parametrize("rule", [Ratio(), Typical(0.3, 0.1), Synthetic([0.5] * 4)])
@pytest.mark.parametrize("known", [2, 4])
def test_a_rule_decides_about_drafts_without_waiting(rule, known):
    """Of four drafts two or all have a distribution."""
    with fake_gpu() as gpu:
        samples = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        logits, pack = torch.zeros(4, 50, device=DEVICE), pack_on_gpu(4)
        dists = [torch.zeros(50, device=DEVICE) if i < known else None for i in range(4)]
        drafted = [DraftedToken(7, i, dist) for i, dist in enumerate(dists)]
        with gpu.watching():
            tokens = rule.choose(Verification(samples, logits, pack, drafted, torch.bfloat16))
    assert (tokens.shape, tokens.dtype) == ((4,), torch.int64)


@pytest.mark.parametrize(
    "params", [[GREEDY, DRAWN], [GREEDY] * 2, [DRAWN, replace(DRAWN, top_k=3)]]
)
@pytest.mark.parametrize("forks", [(), (1, 0)])
def test_a_rank_samples_without_waiting(params, forks):
    """Its own tokens, with and without rows that gather their logits."""
    ranks = SimpleNamespace(rank=0, size=2, gather=lambda part: torch.stack((part, part)))
    with fake_gpu() as gpu:
        sampler = ShardedSampler(2, 128, DEVICE, ranks)
        for row, each in enumerate(params):
            sampler.set_row(row, SamplingRow(each, 3, 0, 4, (1, 2), (), (), ()))
        logits = torch.zeros(2, 64, device=DEVICE)
        with gpu.watching():
            tokens, best = sampler.choose(logits, (0, 1), (4, 4), forks)
    assert tokens.shape == best.shape == (2 + sum(forks),)
    assert tokens.device == best.device == DEVICE


def test_features_of_a_new_sequence_come_without_waiting():
    """The first position of a sequence has none."""
    rows = [DraftRow(None, [1, 2, 3], 2, 0), DraftRow(None, [4, 5], 2, 1)]
    chunks = [Chunk(rows[0], 0, 3), Chunk(rows[1], 1, 2)]
    with fake_gpu() as gpu:
        read = SimpleNamespace(read=lambda spans: torch.zeros(3, 8, device=DEVICE))
        eagle: Any = SimpleNamespace(feature=lambda states: states, features=read)
        with gpu.watching():
            features = Eagle._features(eagle, chunks, torch.zeros(4, device=DEVICE))
    assert features.shape == (4, 8)


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda last: torch.tensor([1, 2], device=last.device),
    "pageable memory": lambda last: torch.zeros(8).to(last.device, non_blocking=True),
    "a copy down": lambda last: last.cpu(),
    "item": lambda last: last[0].item(),
    "tolist": lambda last: last.tolist(),
    "a mask": lambda last: last[last > 0],
    "a mask to write": lambda last: last.__setitem__(last > 0, last),
    "indices of the host": lambda last: last[torch.arange(2)],
    "mixed devices": lambda last: last.repeat_interleave(torch.ones(8, dtype=torch.int64)),
}


WORDS = "on the host|counts a mask|a copy|local_scalar|nonzero|repeat_interleave|empty_strided"


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_found(folder, what, monkeypatch):
    config, plans = plans_of(folder, [GREEDY])
    with fake_gpu() as gpu, torch.inference_mode():
        runner = runner_on_gpu(config)
        monkeypatch.setattr(runner.sampler, "append", lambda *given: WAITS[what](runner.rows.last))
        with pytest.raises((WaitError, RuntimeError), match=WORDS):
            counted(runner, plans[0], gpu)
