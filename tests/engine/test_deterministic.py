"""Deterministic mode: batches of every size, tiles, how they are found, and what it asks of others.

That no setting of an engine changes a bit is in `tests/matrix`.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.execution import runner
from minillm.layers.linear_methods import PlainLinearMethod
from minillm.layers.moe import Experts
from minillm.models import deterministic
from minillm.models.decoder import Decoder
from minillm.models.deterministic import (
    TILES,
    TiledDecoder,
    find_tiles,
    model_outputs,
    product_outputs,
    spans,
)
from minillm.ops import cpu, cpu_sampling
from minillm.sampling import logprobs
from minillm.sampling.logprobs import token_logprobs
from minillm_kernels import reference
from tests.engine.small import make
from tests.matrix.cells import LONGEST, Cell, Reference, folder_of, reference_of, run_cell
from tests.matrix.jobs import Job, everything, generate
from tests.sampling.sampling_rows import SamplingRow, sample

# GQA, GQA with a sliding window, MLA with experts beside a dense layer, experts in every layer.
FAMILIES = ("llama", "mistral", "deepseek_v2", "qwen3_moe")
DTYPES = ("float32", "bfloat16")
MODELS = tuple(itertools.product(FAMILIES, DTYPES))
PROMPT = [3 + 7 * i % 89 for i in range(80)]


def open_engine(family: str, dtype: str = "float32", **arguments: object) -> LLM:
    """An engine in deterministic mode, unless it is to be off."""
    usual = {"deterministic": True, "dtype": dtype, "max_model_len": LONGEST, "max_num_seqs": 8}
    usual |= {"num_gpu_blocks_override": 300, "enable_prefix_caching": False}
    return make(folder_of(family), **(usual | arguments))


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense models are cut into tiles, too, as where there is no C."""
    monkeypatch.setenv(cpu.PANELS, "0")


def decoder_of(llm: LLM) -> Decoder:
    model = llm.engine.runner.model
    return model.model if isinstance(model, TiledDecoder) else model


@pytest.mark.mutation
def test_with_the_mode_off_a_bit_differs():
    """Else all of this would show nothing. In plain torch: our own C functions have the same bits
    in every batch, and oneDNN meets a few numbers of rows only."""
    alone = Reference(Cell("llama", path="torch"))
    cell = Cell("llama", path="torch", chunk=7)
    outputs = run_cell(make(folder_of("llama"), **cell.fields()), alone)
    assert alone.differences(outputs, exact=True)
    assert not alone.differences(outputs)  # only bits: not the text


# ---- batches ----------------------------------------------------------------------------------


def wide_jobs(count: int) -> list[Job]:
    """Short requests, every second one drawn."""
    return [
        Job(
            "",
            [3 + (7 * place + i) % 90 for i in range(1 + place % 19)],
            SamplingParams(temperature=place % 2, seed=place, max_tokens=5, logprobs=5,
                           prompt_logprobs=1 if place % 5 == 0 else None, ignore_eos=True),
        )
        for place in range(count)
    ]  # fmt: skip


def check_batches(family: str, dtype: str, sizes: tuple[int, ...]) -> None:
    llm, listed = open_engine(family, dtype, max_num_seqs=64), wide_jobs(64)
    alone = [everything(generate(llm, [job])[0]) for job in listed]
    for turn, size in enumerate(sizes):
        chosen = [(place * 5 + turn * 11) % 64 for place in range(size)]
        before = llm.engine.scheduler.counters.max_num_running
        outputs = generate(llm, [listed[place] for place in chosen])
        assert llm.engine.scheduler.counters.max_num_running == max(before, size)
        assert [everything(output) for output in outputs] == [alone[place] for place in chosen]


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16")])
def test_batches_of_2_to_64(family, dtype):
    check_batches(family, dtype, (2, 3, 8, 17, 64))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_batches_of_every_size_to_64(family, dtype):
    check_batches(family, dtype, tuple(range(2, 65)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_every_row_of_a_batch_of_64(family, dtype):
    """The same request in all of 61 rows, between others."""
    llm, job = open_engine(family, dtype, max_num_seqs=64), wide_jobs(8)[7]
    alone = everything(generate(llm, [job])[0])
    outputs = generate(llm, [*wide_jobs(2), *[job] * 61, wide_jobs(3)[2]])
    assert llm.engine.scheduler.counters.max_num_running == 64
    assert all(everything(output) == alone for output in outputs[2:63])


def test_another_thread_and_another_engine_give_the_same_bits():
    reference, results = reference_of(Cell("llama", "exact float32")), []
    llm = open_engine("llama", block_size=16)
    some = [reference.job("long prompt"), reference.job("penalties")]
    thread = threading.Thread(target=lambda: results.extend(generate(llm, some)))
    thread.start()
    thread.join()
    assert not reference.differences(results, some, exact=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_same_model(family, dtype, tolerance):
    """The first logprobs with the mode on and off agree as far as rounding goes."""
    job = Job("", PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0))
    rows = []
    for mode in (True, False):
        llm = open_engine(family, dtype, deterministic=mode)
        prompt = generate(llm, [job])[0].prompt_logprobs
        rows.append([next(iter(entry.values())).logprob for entry in prompt[1:]])
    error = (torch.tensor(rows[0]) - torch.tensor(rows[1])).abs()
    assert error.max() < tolerance


# ---- tiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [(1,), (8,), (16,), (8, 16, 32), (16, 128)])
def test_spans_cover_all_rows_in_order(tiles):
    for num_rows in range(1, 300):
        found = list(spans(num_rows, tiles))
        assert [row for start, stop, _ in found for row in range(start, stop)] == [*range(num_rows)]
        assert all(0 < stop - start <= size and size in tiles for start, stop, size in found)
        assert sum(size for *_, size in found) <= num_rows + max(tiles[0] - 1, 32)


def test_a_tile_is_filled_with_copies_of_its_last_row(tiled):
    llm, seen = open_engine("llama", "float32"), []
    tiled = llm.engine.runner.model
    tiled.tiles = (16,)
    forward = tiled.model.forward
    tiled.model.forward = lambda batch, kv: seen.append(batch) or forward(batch, kv)
    generate(llm, [Job("", list(range(3, 22)), SamplingParams(max_tokens=1))])
    assert [batch.input_ids.tolist() for batch in seen] == [[*range(3, 19)], [19, 20] + [21] * 14]
    assert [batch.positions.tolist()[:4] for batch in seen] == [[0, 1, 2, 3], [16, 17, 18, 18]]
    assert [len(batch.slot_mapping) for batch in seen] == [16, 3]
    assert [batch.seq_lens.tolist() for batch in seen] == [[16], [19]]


# ---- the sampler ------------------------------------------------------------------------------

DRAWN = ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 40, "temperature": 1.3}, {"min_p": 0.02})


def sampling_rows(count: int) -> list[SamplingRow]:
    """Greedy and drawn rows, some with logprobs."""
    kinds = [DRAWN[i % 4] if i % 3 else {"temperature": 0} for i in range(count)]
    params = [SamplingParams(**kind, logprobs=i % 7) for i, kind in enumerate(kinds)]
    return [SamplingRow(one, i, 0, i) for i, one in enumerate(params)]


def test_a_row_is_drawn_and_described_as_if_alone():
    logits = torch.randn(24, 1009, generator=torch.Generator().manual_seed(0)) * 3
    rows, together = sampling_rows(24), sample(logits, sampling_rows(24), row_by_row=True)
    for place, row in enumerate(rows):
        alone = sample(logits[place : place + 1].clone(), [row])
        assert alone.token_ids[0] == together.token_ids[place]
        assert list(alone.logprobs[0].items()) == list(together.logprobs[place].items())


@pytest.mark.parametrize("mode", [True, False])
def test_the_runner_has_rows_described_one_by_one(mode, monkeypatch):
    seen = []
    for name in ("describe", "token_logprobs"):
        original = getattr(runner, name)

        def watched(*arguments, name=name, original=original, **named):
            seen.append((name, named.get("row_by_row", arguments[-1])))
            return original(*arguments, **named)

        monkeypatch.setattr(runner, name, watched)
    params = SamplingParams(prompt_logprobs=3, logprobs=5, max_tokens=6)
    generate(open_engine("llama", "float32", deterministic=mode), [Job("", PROMPT, params)])
    assert set(seen) == {("describe", mode), ("token_logprobs", mode)}


@pytest.mark.parametrize("row_by_row", [True, False])
def test_what_rounds_sees_one_row_at_a_time(row_by_row, monkeypatch):
    """With torch; the functions of C know single rows only."""
    monkeypatch.setattr(cpu_sampling, "takes", lambda *_: False)
    seen: dict[str, list[int]] = {"scale": [], "_describe": []}

    def watch(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def watched(logits, *others):
            seen[name].append(len(logits))
            return original(logits, *others)

        monkeypatch.setattr(module, name, watched)

    watch(reference, "scale")
    watch(logprobs, "_describe")
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    sample(logits, sampling_rows(12), row_by_row)
    token_logprobs(lambda x: x, logits, torch.arange(12), 2, row_by_row=row_by_row)
    assert set(seen["scale"]) == {1}
    asked = sum(row.params.logprobs is not None for row in sampling_rows(12))
    assert seen["_describe"] == ([1] * (asked + 12) if row_by_row else [asked, 12])


# ---- the probe --------------------------------------------------------------------------------


def test_the_probe_takes_all_sizes_that_agree_with_16(tiled):
    llm = open_engine("llama", "float32")
    tiles = llm.engine.runner.model.tiles
    assert set(tiles) <= set(TILES) or tiles == (1,)
    assert find_tiles(decoder_of(llm)) == tiles


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    """A product that is changed behind the model's back."""
    apply = PlainLinearMethod.apply
    monkeypatch.setattr(
        PlainLinearMethod,
        "apply",
        lambda self, matrix, x, b: change(apply(self, matrix, x, b), x, matrix.weight),
    )


def last_bit(out: torch.Tensor) -> torch.Tensor:
    """The next number up, which is the smallest difference there is."""
    return torch.nextafter(out, torch.full_like(out, torch.inf))


@pytest.mark.parametrize(("row", "expected"), [(1, (1,)), (9, (8,)), (20, (8, 16))])
def test_a_product_that_depends_on_the_row_excludes_tiles(row, expected, monkeypatch, caplog):
    llm = open_engine("llama", "float32", deterministic=False)
    assert set(expected) <= {1, *find_tiles(decoder_of(llm))}

    def change(out, x, w):
        if len(out) > row:
            out[row, 0] = last_bit(out[row, 0])
        return out

    plant(monkeypatch, change)
    caplog.set_level("INFO")
    assert find_tiles(decoder_of(llm)) == expected
    assert "does not use tiles of" in caplog.text
    assert f"uses tiles of {' or '.join(map(str, expected))} rows" in caplog.text


def in_two_halves(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Another order of the same sum, in float32 as kernels do it."""
    if len(x) <= 16:
        return out
    half = x.shape[1] // 2
    parts = [x[:, part].float() @ w[:, part].float().T for part in (slice(half), slice(half, None))]
    return (parts[0] + parts[1]).to(x.dtype)


def test_another_order_of_sums_shows_in_half_precision_too(monkeypatch):
    llm = open_engine("llama", "bfloat16", deterministic=False)
    model = decoder_of(llm)
    plant(monkeypatch, in_two_halves)
    differ = [
        any(not torch.equal(one[0], other[0]) for one, other in zip(f(16), f(32), strict=True))
        for f in (partial(product_outputs, model), partial(model_outputs, model))
    ]
    assert differ == [True, False]  # and the model itself would not have shown it
    assert 32 not in find_tiles(model)


def test_what_the_probe_runs_has_all_the_model_s_products():
    llm = open_engine("deepseek_v2", "bfloat16", deterministic=False)
    model = decoder_of(llm)
    shapes = {(shape, dtype) for shape, dtype in deterministic.product_shapes(model)}
    with torch.device("meta"):
        plain = Decoder(model.config, torch.bfloat16, "meta")  # as the checkpoint has its weights
    for name, weight in plain.named_parameters():
        if weight.dim() > 1:
            dtype = torch.float32 if "router" in name else torch.bfloat16
            assert (tuple(weight.shape[-2:]), dtype) in shapes, name
    assert ((4, 32, 16), torch.bfloat16) in shapes  # queries absorbed, per head
    assert ((4, 12, 32), torch.bfloat16) in shapes
    for weight, x in (deterministic.cancelling(*each, "cpu") for each in shapes):
        assert weight.any()
        assert torch.einsum("...oi,n...i->n...o", weight.double(), x.double()).abs().max() < 1e-12


def test_every_expert_of_the_engine_s_model_is_tiled():
    for mode in (True, False):
        llm = open_engine("qwen3_moe", "float32", deterministic=mode)
        experts = [m for m in decoder_of(llm).modules() if isinstance(m, Experts)]
        assert experts
        assert all(each.tiled is mode for each in experts)
        assert llm.engine.runner.kv.mode == ("invariant" if mode else "fast")
        assert llm.engine.runner.row_by_row is mode
        assert isinstance(llm.engine.runner, runner.Runner)


# ---- the option -------------------------------------------------------------------------------


def test_the_memory_plan_counts_what_tiles_add():
    """A step of one token computes a tile, and its logits."""
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    on, off = (
        open_engine("llama", "float32", deterministic=mode, **sizes).plan()
        for mode in (True, False)
    )
    assert on.settings == replace(off.settings, padding=deterministic.PASS_ROWS)
    rows = deterministic.PASS_ROWS + 1
    assert on.activation_bytes >= rows * 131 * 8
    assert on.activation_bytes > off.activation_bytes
    for num_rows in range(1, 40):
        for _, _, size in spans(num_rows, (16, 32, 64, 128)):
            assert size <= num_rows + deterministic.PASS_ROWS
