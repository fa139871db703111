"""The stages' own arithmetic, and one of each walked without a GPU: every kernel compiled."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from minillm import LLM, SamplingParams
from minillm.api.arguments import EngineArgs
from minillm.cache.spec import cache_spec
from minillm.cli import main as minillm_main
from minillm.engine.setup import free_memory, with_defaults_of
from minillm.execution.state import DeviceRows
from minillm.lab import ceilings
from minillm.lab.commands import bench_compare
from minillm.lab.gpu import engine, families, speed, stages, warm
from minillm.lab.gpu.emulate import emulated
from minillm.lab.gpu.worker import Case, Context, tried
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import make_batch
from minillm.models.decoder import Decoder
from minillm.models.forward_pass import ForwardPass
from minillm.models.fused_layers import FusedLayers
from minillm.models.presets import preset
from minillm.ops import triton
from minillm.parallel.split import stage_config
from minillm.plan import machine
from minillm_kernels import families as kernel_families
from minillm_kernels import reference
from minillm_kernels.check.case import Mismatch


def context(stage, task, **more):
    return Context(stage, task, dry=True, end=time.monotonic() + 100, **more)


def walk(module, given, some=slice(None)):
    """Launches of each case that passed."""
    found = {}
    with emulated() as kernels:
        for case in module.cases(given)[some]:
            status, data = tried(case, kernels)
            assert status == "passed", (case.name, data)
            found[case.name] = data["launches"]
    return found


def test_nano_vllm_s_requests_are_its_own():
    """Its README: 256 requests, 133,966 output tokens."""
    prompts, lengths = speed.nano_requests()
    assert len(prompts) == len(lengths) == 256
    assert sum(lengths) == 133_966
    assert sum(map(len, prompts)) == 142_827


def test_gaps_are_what_no_kernel_fills():
    spans = [(0, 4, "a"), (3, 6, "b"), (8, 9, "a"), (9, 10, "c"), (12, 20, "b")]
    found = speed.kernel_table(spans, 2)
    assert found["figures"] == {"kernels per step": 2.5, "us busy": 8.5, "us gaps": 2.0}
    assert [each["kernel"] for each in found["kernels"]] == ["b", "a", "c"]
    assert found["kernels"][1] == {"kernel": "a", "calls": 1.0, "us": 2.5, "share": 5 / 17}
    assert speed.kernel_table([], 2)["kernels"] == []


def test_every_task_has_cases_with_names_of_their_own():
    """And the families are those of the kernels, which the parent cannot import."""
    assert set(stages.FAMILIES) == set(kernel_families.FAMILIES)
    assert set(stages.CHECKED) == set(kernel_families.CHECKED)
    modules = {"families": families, "engine": engine, "speed": speed, "warm": warm}
    for stage in stages.STAGES[1:]:
        for task in stage.tasks:
            names = [each.name for each in modules[stage.module].cases(context(stage.name, task))]
            assert names
            assert len(set(names)) == len(names), (stage.name, task)
            assert not [name for name in names if " at 0x" in name]


def test_a_case_that_is_wrong_or_broken_says_where():
    def wrong():
        raise Mismatch("1, not 2")

    line = wrong.__code__.co_firstlineno + 1
    assert tried(Case("", wrong), None) == (
        "failed", {"error": f"Mismatch: 1, not 2 ({Path(__file__).name}:{line})"}
    )  # fmt: skip
    status, found = tried(Case("", lambda: {}["key"]), None)
    assert status == "error"
    assert found["error"].startswith("KeyError: 'key' (")
    assert tried(Case("", lambda: {"figures": {"x": 1}}), [])[1] == {
        "figures": {"x": 1},
        "launches": 0,
    }


def test_wrong_tokens_and_logits_are_found(monkeypatch):
    """On this CPU, with one token of the expected ones changed, and one kernel that is wrong."""
    here = context("engine", "tiny")
    monkeypatch.setattr(Context, "device", "cpu")
    live = Context("engine", "tiny")
    some = engine.requests()[:3]
    monkeypatch.setattr(engine, "requests", lambda: some)
    expected: list = []
    assert engine.same_tokens("eager", expected, live) == {"figures": {"preempted": 0}}
    with pytest.raises(AssertionError, match="nothing was preempted"):
        engine.same_tokens("recompute", expected, live)
    expected[1][0][3] += 1
    with pytest.raises(AssertionError, match="request 1 \\('import os"):
        engine.same_tokens("graphs", expected, live)
    assert here.dry


def test_other_logits_than_plain_torch_s_are_found(monkeypatch):
    """A model of two small layers, replayed by running it again."""
    monkeypatch.setattr(Context, "device", "cpu")
    monkeypatch.setattr(engine, "CudaCapture", engine.Again)
    monkeypatch.setitem(engine.LAYERS, "smollm2-135m", 1)
    live, made = Context("engine", "smollm2-135m"), {}
    found = engine.same_logits(live, made, 3)["figures"]
    assert set(found) == {"error, eager", "error, replayed"}
    assert all(0 < error < 2e-2 for error in found.values())
    decode = engine.decode

    def wrong(model, count, mode):
        logits, rest = decode(model, count, mode)
        return logits + (mode == "plain") * 0.1 * logits.abs().max(), rest

    monkeypatch.setattr(engine, "decode", wrong)
    with pytest.raises(AssertionError, match=r"eager: 0.0.* of the largest logit"):
        engine.same_logits(live, made, 3)


def test_a_router_s_near_ties_are_no_error_and_other_choices_are(monkeypatch):
    """128 experts: among 130 rows rounding decides some choices, which moves logits by 7%."""
    monkeypatch.setattr(Context, "device", "cpu")
    monkeypatch.setattr(engine, "CudaCapture", engine.Again)
    full = preset("qwen3-30b-a3b")
    shape = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    moe = replace(full.moe, intermediate_size=64)
    monkeypatch.setattr(engine, "preset", lambda name: replace(
        full, vocab_size=2000, moe=moe, **shape))  # fmt: skip
    live, made = Context("engine", "qwen3-30b-a3b"), {}
    assert max(engine.same_logits(live, made, 130)["figures"].values()) < 1e-2
    with_kernels = engine.with_kernels

    def moved(*given):
        eager, replayed, known = with_kernels(*given)
        return eager, replayed, [change(*each) for each in known]

    monkeypatch.setattr(engine, "with_kernels", moved)
    change = lambda weights, ids: (weights, (ids + 1) % 128)  # noqa: E731
    with pytest.raises(AssertionError, match="routers choose other experts for"):
        engine.same_logits(live, made, 3)
    change = lambda weights, ids: (weights + 0.03, ids)  # noqa: E731
    with pytest.raises(AssertionError, match=r"routers weigh experts otherwise, by 0\.03"):
        engine.same_logits(live, made, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "stage", "task"),
    [
        (engine, "engine", "tiny"), (engine, "engine", "launches"),
        (engine, "engine", "qwen3-30b-a3b"), (engine, "engine", "deepseek-v2-lite"),
        (speed, "decode", "decode qwen3-0.6b"), (speed, "nano", "nano"),
        (speed, "profile", "profile llama-3.1-8b"), (families, "smoke", "flash_attention"),
        (families, "memcheck", "sampling"), (families, "kernels", "fused"),
        (families, "rest", "moe"), (warm, "warm", "decode llama-3.1-8b"),
    ],
)  # fmt: skip
def test_a_task_walks_on_a_cpu(module, stage, task):
    """The engine takes the way of a GPU, up to the launch."""
    with torch.inference_mode():
        launches = walk(module, context(stage, task))
    some = any if module is families else all  # among the cases of a family are empty calls
    assert some(count > 0 for count in launches.values()), launches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3-0.6b", {}), ("qwen3-30b-a3b", {}), ("llama-3.1-8b", {"quantization": "int4"})],
)
def test_nothing_compiles_while_requests_run(name, options):
    """The parameters of a step's rows come in one upload, so that where each begins depends on the
    number of rows; edited logits are float32, in rows of their own length."""
    with emulated() as found:

        def kinds() -> set[tuple[str, str]]:
            return {(kernel.metadata.name, kernel.hash) for kernel in found}

        llm = LLM(
            f"preset:{name}", load_format="dummy", device="cpu", dtype="bfloat16",
            block_size=16, max_model_len=256, max_num_seqs=24, num_gpu_blocks_override=512,
            async_scheduling=True, **options,
        )  # fmt: skip
        start = kinds()
        assert {"prefill_kernel", "decode_kernel", "_draw", "_cut_of_row"} <= {n for n, _ in start}
        for rows in (1, 2, 3, 4, 5, 17, 18):
            for more in ({}, {"top_p": 0.8, "top_k": 5}, {"presence_penalty": 0.3}):
                params = [
                    SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True, seed=i, **more)
                    for i in range(rows)
                ]
                prompts = [[1 + i] * (rows + 5 * i % 17) for i in range(rows)]
                llm.generate(prompts, params, use_tqdm=False)
        assert kinds() == start


@pytest.mark.slow
def test_pages_of_8_bits_take_their_kernels():
    """A prompt in chunks and graphs of decode steps."""
    with emulated() as found:
        llm = LLM(
            "preset:qwen3-0.6b", load_format="dummy", device="cpu", dtype="bfloat16",
            kv_cache_dtype="int8", block_size=16, max_model_len=256, max_num_seqs=2,
            num_gpu_blocks_override=64, max_num_batched_tokens=32,
        )  # fmt: skip
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate([[1] * 40, [2]], params, use_tqdm=False)
        names = {kernel.metadata.name for kernel in found}
    assert {"attention_kernel", "rope_write_kernel"} <= names
    assert not names & {"decode_kernel", "prefill_kernel", "write_kernel", "_rotate"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_layer_of_a_decode_step_has_so_many_launches(kind, monkeypatch):
    """Four products, rotation and writes, attention, which merges its splits itself. With more than
    64 rows products are cuBLAS's, and two norms and SwiGLU are launches, too, unless the limit is
    moved. Before anything was fused there were 10 launches up to 16 rows, and 9 with 256, whose
    attention has no splits; with pages of 8 bits 14."""
    most = triton.FUSED_ROWS
    steps = *((rows, most) for rows in (1, 2, 8, 16, 64, 256)), (256, 256)
    config = replace(stage_config(preset("qwen3-0.6b"), range(2)), vocab_size=64)
    cublas, plain = [], reference.linear
    monkeypatch.setattr(reference, "linear", lambda *given: cublas.append(1) or plain(*given))
    with emulated() as kernels, torch.inference_mode():
        model = Decoder(config, torch.bfloat16, "cpu", 4096)
        model.all_layers = FusedLayers.of(model)
        kv = KVCache(
            cache_spec(config, kind or "auto"), 2, 32, 16, model.dtype, model.device, "fast"
        )

        def launches(rows: int, most: int) -> int:
            kernels.clear()
            cublas.clear()
            monkeypatch.setattr(triton, "FUSED_ROWS", most)
            tables = DeviceRows(rows, 32, model.device).tables
            tables.write([(row, 0, list(range(32))) for row in range(rows)])
            places = range(rows), [500] * rows, [1] * rows, [1] * rows
            model(make_batch(tables, 16, *places), kv)
            return len(kernels) + len(cublas)

        both = [launches(*step) for step in steps]
        model.layers = model.layers[:1]
        model.all_layers = FusedLayers.of(model)
        one = [launches(*step) for step in steps]
    assert [x - y for x, y in zip(both, one, strict=True)] == [6, 6, 6, 6, 6, 9, 6]


def test_memory_of_an_engine_before_is_free(monkeypatch):
    """torch keeps what was freed, and an engine has cycles: a second one in a process would be told
    that nothing is left."""
    calls = []

    class Engine:
        def __init__(self):
            self.own = self

        def __del__(self):
            calls.append("collected")

    fake = SimpleNamespace(
        empty_cache=lambda: calls.append("emptied"),
        mem_get_info=lambda device: calls.append("asked") or (7, 9),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    Engine()
    assert free_memory(torch.device("cuda")) == 7
    assert calls == ["collected", "emptied", "asked"]


def test_what_a_gpu_gets_without_being_asked(monkeypatch):
    """Tokens per step by its memory, blocks of powers of two, bf16 in benchmarks; and an int8 rate
    that cannot be measured is none."""
    memory = {"bytes": 80 * 10**9}
    fake = SimpleNamespace(mem_get_info=lambda device: (0, memory["bytes"]))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    args, gpu = EngineArgs("tiny"), torch.device("cuda:0")
    assert with_defaults_of(args, gpu).max_num_batched_tokens == 8192
    assert with_defaults_of(args, torch.device("cpu")) is args
    given = replace(args, max_num_batched_tokens=300)
    assert with_defaults_of(given, gpu) is given
    memory["bytes"] = 24 * 10**9
    assert with_defaults_of(args, gpu) is args

    model = SimpleNamespace(
        dtype=torch.float32, device=torch.device("meta"), plain_torch=False,
        config=preset("smollm2-135m"),
    )  # fmt: skip
    for length, size in ((1, 1), (5, 8), (16, 16), (17, 32)):
        assert ForwardPass(model).allocate(1, length).block_size == size

    def refuses(*matrices):
        raise RuntimeError("_int_mm is not supported here")

    monkeypatch.setattr(torch, "_int_mm", refuses)
    monkeypatch.setattr(torch, "randint", lambda *given, **more: torch.zeros(2, 2))
    monkeypatch.setattr(ceilings, "_our_int8", lambda n: pytest.fail("the CPU was asked"))
    assert ceilings._int8_rate(2, "cuda", 0.01) == 0.0

    seen = []
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(bench_compare, "run", lambda args, terminal: seen.append(args.dtype) or 0)
    for device in ("cuda", "cpu"):
        minillm_main(["bench", "decode", "--device", device])
    assert seen == ["bfloat16", "float32"]
