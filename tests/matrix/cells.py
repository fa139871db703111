"""One engine in each way that it can be run. No way changes what a request gets.

`Reference` has what each request gets alone; `check` runs one cell, sees that it did what it is
there for, and compares.
"""

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.api.outputs import CompletionOutput, RequestOutput
from minillm.api.speculative_config import HEAD_METHODS
from minillm.engine.live_request import LiveRequest
from minillm.models.forward_pass import Chunk
from minillm.ops import cpu, dispatch
from minillm.ops.dispatch import Backend
from minillm.quantization.kernels import KernelQuantizedMethod, pack_for_kernels
from minillm.scheduling.data_parallel import schedulers_of
from tests.engine.small import BLOCK_SIZE, assert_idle, make, num_ahead, write_model
from tests.matrix.jobs import (
    FEWER,
    KINDS,
    SOME,
    WITHOUT_TEXT,
    Job,
    everything,
    generate,
    jobs_of,
    prompt_of,
    unequal,
)
from tests.matrix.proposers import K, Known, config_of
from tests.models.tiny import Tiny
from tests.quantization import test_reader_matrix as readers
from tests.sampling.sampling_rows import SamplingRow, sample
from tests.speculative.eagled import write_eagle
from tests.speculative.headed import write_heads

LONGEST = 96
NUM_BLOCKS = {"ample": 300, "recompute": 40, "swap": 40}
MOST_STEPS = 4000  # of a cell, far more than any needs
MARGIN = 1e-4  # between two logits, below which either token is right in float32
SHORT = {"num_hidden_layers": 2}
# Sizes that make mistakes visible: vocabularies that no number of ranks divides, one to three KV
# heads, biases wherever a family can have them, heads that C takes and heads that it does not.
MODELS = {
    "llama": Tiny("llama", SHORT | {"attention_bias": True, "mlp_bias": True, "vocab_size": 131}),
    "mistral": Tiny("mistral", SHORT | {"sliding_window": 20, "num_key_value_heads": 4}),
    "qwen2": Tiny("qwen2", SHORT | {"tie_word_embeddings": True, "vocab_size": 127}, seed=1),
    "qwen3": Tiny(
        "qwen3", SHORT | {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 149}, seed=1
    ),
    "mixtral": Tiny("mixtral", SHORT, seed=2),
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"vocab_size": 101, "attention_bias": True}, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", SHORT | {"attention_bias": True}, seed=1),
    "deepseek_v3": Tiny("deepseek_v3", SHORT | {"vocab_size": 113}, seed=3),
    "three KV heads": Tiny(
        "llama",
        SHORT
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
        | {"vocab_size": 103},
    ),
    "eight heads": Tiny(
        "llama", SHORT | {"num_attention_heads": 8, "hidden_size": 128, "mlp_bias": True}, seed=4
    ),
    "uneven": Tiny("llama", SHORT | {"intermediate_size": 100}),
}
QUANTISED = {
    "llama, int8": ("llama", "int8"),
    "llama, llm.int8": ("llama", "llm.int8"),
    "qwen3_moe, int4": ("qwen3_moe", "int4"),
    "deepseek_v3, gptq": ("deepseek_v3", "gptq, act order"),
}
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
DENSE = ("llama", "mistral", "qwen2", "qwen3", "eight heads")  # deterministic: with fixed sums
TWO = {"distributed_executor_backend": "threads", "tensor_parallel_size": 2}
STAGES, EXPERTS = {"pipeline_parallel_size": 2}, {"enable_expert_parallel": True}
COPIES = TWO | EXPERTS | {"tensor_parallel_size": 1, "data_parallel_size": 2}
RANKS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {  # and the models that can have them
    "one": ({}, ("bytes", "embedded", *MODELS, *QUANTISED)),
    "tp 2": (TWO, ("bytes", *DENSE, *MIXTURES)),
    "tp 3": (TWO | {"tensor_parallel_size": 3}, ("three KV heads",)),
    "tp 4": (TWO | {"tensor_parallel_size": 4}, (*DENSE, *MIXTURES)),
    "tp 6": (TWO | {"tensor_parallel_size": 6}, ("three KV heads",)),
    "tp 8": (TWO | {"tensor_parallel_size": 8}, ("eight heads",)),
    "pp 2": (TWO | STAGES | {"tensor_parallel_size": 1}, ("bytes", *MODELS)),
    "tp 2, pp 2": (TWO | STAGES, (*DENSE, *MIXTURES)),
    "tp 3, pp 2": (TWO | STAGES | {"tensor_parallel_size": 3}, ("three KV heads",)),
    "experts 2": (TWO | EXPERTS, MIXTURES),
    "experts 4": (
        TWO | EXPERTS | {"tensor_parallel_size": 4},
        ("mixtral", "deepseek_v2", "deepseek_v3"),  # qwen3_moe has 6 experts
    ),
    "experts 2, pp 2": (TWO | EXPERTS | STAGES, MIXTURES),
    "copies 2": (COPIES, MIXTURES),
    "copies 3": (COPIES | {"data_parallel_size": 3}, ("qwen3_moe",)),
    "copies apart": (COPIES | {"enable_expert_parallel": False}, ("llama", "qwen3_moe")),
}
PATHS = {"usual": {}, "panels": {cpu.PANELS: "1"}, "operations": {cpu.PANELS: "0"}, "torch": {}}


# ---- engines ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One engine. The defaults are the plainest one.

    Attributes:
        mode: "float32", or of deterministic mode "exact float32" or "exact bfloat16".
        path: on a CPU: all layers in one call of C, functions of C one by one, or torch alone.
        chunk: tokens of a prompt per step; 0: whole prompts.
        pool: blocks for everybody, or too few.
        graphs: decode steps are recorded. A recording is the function itself.
        drafts: a proposer of `proposers.py`, a draft model, draft heads, or an EAGLE layer.
        kv: the dtype of the KV cache. That of 8 bits rounds away what is left of near ties, so it
            is compared in deterministic mode.
    """

    model: str = "bytes"
    mode: str = "float32"
    path: str = "usual"
    chunk: int = 0
    cache: str = "off"
    pool: str = "ample"
    overlaps: bool = False
    graphs: bool = False
    drafts: str = "none"
    ranks: str = "one"
    kv: str = "auto"

    def __str__(self) -> str:
        named = {"overlaps": "ahead", "graphs": "graphs"}
        parts = [
            named.get(name, str(value))
            for name, value in vars(self).items()
            if value != getattr(Cell, name) or name == "model"
        ]
        return "-".join(parts)

    @property
    def exact(self) -> bool:
        """Whether every bit is compared."""
        return self.mode != "float32"

    def alone(self) -> "Cell":
        """The engine whose answers are those of this one."""
        path = self.path if self.exact or self.model in QUANTISED else "usual"
        return Cell(self.model, self.mode, path, kv=self.kv)

    def fields(self) -> dict[str, Any]:
        """Arguments of the engine but for its drafts."""
        found: dict[str, Any] = {
            "max_model_len": LONGEST, "max_num_seqs": 12,
            "num_gpu_blocks_override": NUM_BLOCKS[self.pool],
            "swap_space": 2**-7 if self.pool == "swap" else 0,
            "long_prefill_token_threshold": self.chunk, "async_scheduling": self.overlaps,
            "enforce_eager": self.path == "torch", "enable_prefix_caching": self.cache != "off",
            "kv_cache_dtype": self.kv,
        }  # fmt: skip
        if self.cache != "off":
            found["prefix_cache"] = self.cache
        if self.exact:
            found |= {"deterministic": True, "dtype": self.mode.removeprefix("exact ")}
        weights = QUANTISED.get(self.model, ("", ""))[1]
        if weights in ("int8", "int4"):
            found["quantization"] = weights
        return found | RANKS[self.ranks][0]


@cache
def temporary() -> TemporaryDirectory[str]:
    """Where the checkpoints are; removed when this process ends."""
    return TemporaryDirectory()


@cache
def folder_of(model: str) -> Path | str:
    """The checkpoint of a model; written when first asked for."""
    if model == "embedded":
        return "tiny"
    folder = Path(temporary().name) / model.replace(", ", "-").replace(" ", "-")
    folder.mkdir()
    if model == "bytes":
        return write_model(folder)
    if model not in QUANTISED:
        return MODELS[model].write(folder).folder
    family, weights = QUANTISED[model]
    checkpoint = readers.tiny(family).write(folder)
    if weights not in ("int8", "int4"):
        readers.write(checkpoint, weights, "plain", folder)
    return folder


def changed(model: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of the model with other weights."""
    folder = Path(temporary().name) / f"{model}-{name}"
    shutil.copytree(folder_of(model), folder)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    save_file({key: change(each) for key, each in tensors}, folder / "model.safetensors")
    return folder


@cache
def noisy(model: str) -> Path:
    """The model with noise on its weights: a draft model that is often right."""
    dice = torch.Generator().manual_seed(1)
    return changed(model, "noisy", lambda x: x + torch.randn(x.shape, generator=dice) * 0.01)


@cache
def heads_of(model: str, method: str) -> str:
    """Random heads, or a random EAGLE layer, for the model."""
    if model == "embedded":
        return f"tiny-{method}"
    write = {"medusa": write_heads, "eagle": write_eagle}[method]
    return str(write(Path(folder_of(model)), Path(temporary().name) / f"{model}-{method}"))


@contextmanager
def on(path: str) -> Iterator[None]:
    """Engines that are made and run here take this path."""
    if path == "panels" and cpu.functions(torch.float32) is None:
        pytest.skip(cpu.describe(torch.float32))
    before = {name: os.environ.get(name) for name in PATHS[path]}
    os.environ.update(PATHS[path])
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


class Again:
    """Calls the function once when it is recorded, as a warm-up does, and then for each replay."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.num_bytes += 1000

        def replay() -> None:
            self.replays += 1
            run()

        return replay


def give_graphs(llm: LLM, again: Again | None = None, **more: int) -> Again:
    """What a GPU does with padding, on this machine's reference operations."""
    runner, again = llm.engine.runner, again or Again()
    runner.kv.mode = "plain"
    proposer = runner.speculator and runner.speculator.proposer
    if hasattr(proposer, "shadow"):
        proposer.shadow.kv.mode = "plain"
    runner.use_graphs(again, **more)
    return again


def poison(llm: LLM) -> None:
    """Whatever nobody may read is a number that would show."""
    runner = llm.engine.runner
    for tensor in runner.kv.tensors:  # codes have no NaN, but their scales do
        tensor.fill_(math.nan if tensor.is_floating_point() else 91)
    runner.rows.tables.host.fill(12345678)
    runner.rows.last.fill_(3)


def open_cell(cell: Cell, config: dict[str, Any] | None = None, **more: Any) -> LLM:
    """The engine of a cell, with its own drafts or those of `config`."""
    fields = cell.fields() | {"speculative_config": config or config_for(cell)} | more
    llm = make(folder_of(cell.model), **fields)
    if cell.graphs and cell.model in QUANTISED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
            assert pack_for_kernels(llm.engine.runner.model, torch.device("cpu")) > 0
        found = {type(getattr(each, "method", 0)) for each in llm.engine.runner.model.modules()}
        assert KernelQuantizedMethod in found
    if cell.graphs:
        give_graphs(llm, **({"num_drafts": K} if cell.drafts != "none" else {}))
    if cell.ranks == "one" and cell.path == "usual":
        poison(llm)
    step, numbers = llm.engine.step, itertools.count()

    def limited() -> list:
        assert next(numbers) < MOST_STEPS, "the engine does not come to an end"
        return step()

    llm.engine.step = limited  # type: ignore[method-assign]
    return llm


def config_for(cell: Cell) -> dict[str, Any] | None:
    """The `speculative_config` of a cell; its proposer knows what the plain engine answers."""
    if cell.drafts == "none":
        return None
    if cell.drafts == "draft model":
        return {"model": str(noisy(cell.model)), "num_speculative_tokens": K}
    if cell.drafts in HEAD_METHODS:
        own = heads_of(cell.model, cell.drafts)
        return {"method": cell.drafts, "model": own, "num_speculative_tokens": K}
    reference = reference_of(cell)
    width = reference.llm.engine.source.config.vocab_size
    return config_of(cell.drafts, reference.known, width)


# ---- alone -----------------------------------------------------------------------------------


@cache
def _reference(cell: Cell) -> "Reference":
    return Reference(cell)


def reference_of(cell: Cell) -> "Reference":
    """What the requests of a cell get alone; computed once, before a test breaks anything."""
    found = _reference(cell.alone())
    assert found.known
    return found


class Reference:
    """Each request alone, by the plainest engine; its answers are computed when first asked for."""

    def __init__(self, cell: Cell) -> None:
        kinds = {"bytes": tuple(KINDS), "embedded": SOME, "llama": WITHOUT_TEXT}.get(
            cell.model, FEWER
        )
        self.path = cell.path
        with on(self.path):
            self.llm = make(folder_of(cell.model), **cell.fields())
            self.jobs = jobs_of(self.llm, kinds)

    @cached_property
    def outputs(self) -> dict[str, RequestOutput]:
        """By kind."""
        with on(self.path):
            found = {job.kind: generate(self.llm, [job])[0] for job in self.jobs}
        counters = self.llm.engine.scheduler.counters
        assert counters.num_drafts == counters.num_mixed_steps == counters.num_cached_tokens == 0
        return found

    @cached_property
    def known(self) -> Known:
        """The tokens of each completion, and those that would follow its stop text."""
        known = {}
        for job in self.jobs:
            output, free = self.outputs[job.kind], without_stop(job.params)
            if free != job.params:
                with on(self.path):
                    (output,) = generate(self.llm, [replace(job, params=free)])
            for one in output.outputs:
                key = job.ids, job.params.seed, one.index, repr(job.params)
                known[key] = list(one.token_ids)
        return known

    def job(self, kind: str) -> Job:
        """The request of a kind."""
        return next(job for job in self.jobs if job.kind == kind)

    def differences(
        self, outputs: Sequence[RequestOutput], jobs: Sequence[Job] | None = None, exact=False
    ) -> list[str]:
        """What differs; `exact`: in any bit. One completion may differ after a near tie."""
        found, ties = [], []
        for job, output in zip(self.jobs if jobs is None else jobs, outputs, strict=True):
            mine = self.outputs[job.kind]
            if exact:
                found += [job.kind] * (everything(mine) != everything(output))
                continue
            for one, other in zip(mine.outputs, output.outputs, strict=True):
                differs = [f"{job.kind}, {one.index}: {what}" for what in unequal(one, other)]
                (ties if differs and self.near_tie(job, one, other) else found).extend(differs[:1])
            logprobs = [replace(mine.outputs[0], logprobs=each.prompt_logprobs, token_ids=[])
                        for each in (mine, output)]  # fmt: skip
            found += [f"{job.kind}: prompt {what}" for what in unequal(*logprobs)]
        return found + ties[1:]

    def near_tie(self, job: Job, one: CompletionOutput, other: CompletionOutput) -> bool:
        """Whether the other's first other token would have been chosen, had the model's logit of it
        been higher by MARGIN."""
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        step = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if step is None:
            return False
        before, token = list(one.token_ids[:step]), other.token_ids[step]
        logits = self.logits(job, before)[-1:].clone()
        logits[0, token] += MARGIN
        return self.choose(job, one.index, before, logits) == token

    def logits(self, job: Job, ids: Sequence[int]) -> torch.Tensor:
        """[1 + len(ids), V]: after the prompt and after each of these tokens, all computed at once
        without scheduler or cache."""
        whole, forward = [*job.ids, *ids], self.llm.engine.forward_pass
        hidden, _ = forward.run([Chunk(0, 0, whole)], forward.allocate(1, len(whole)))
        return forward.logits(hidden[len(job.ids) - 1 :])

    def choose(
        self, job: Job, sample_index: int, generated: list[int], logits: torch.Tensor
    ) -> int:
        """The token that the sampler takes from these logits."""
        request = self.llm.engine.make_request("x", None, job.ids, job.params)
        drawn = request.params, request.seed, sample_index, len(job.ids) + len(generated)
        row = SamplingRow(*drawn, job.ids, generated, request.stop_ids)
        return sample(logits, [row], grammars=self.llm.engine.grammars).token_ids[0]


def without_stop(params: SamplingParams) -> SamplingParams:
    """The same without texts and ids to stop at: these end a text and change no token of it, but
    for ids that are masked at first."""
    params = replace(params, stop=(), include_stop_str_in_output=False)
    return params if params.min_tokens else replace(params, stop_token_ids=())


# ---- a run -----------------------------------------------------------------------------------


def run_cell(llm: LLM, reference: Reference) -> list[RequestOutput]:
    """All requests, in three waves a few steps apart, and three texts to score beside them."""
    engine = llm.engine
    waves = [reference.jobs[start::3] for start in range(3)]
    lives: dict[str, LiveRequest] = {}
    scored: list[LiveRequest] = []
    for number, wave in enumerate(waves):
        for place, job in enumerate(wave):
            request = engine.make_request(f"{number}-{place}", None, job.ids, job.params)
            lives[job.kind] = engine.add(request)
        ids = (*prompt_of(number)[:30], 5, 6)
        scored.append(engine.add(engine.make_scoring_request(f"score {number}", ids)))
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    assert_idle(engine)
    for live in scored:
        (output,) = live.output().outputs
        assert (output.finish_reason, output.token_ids) == ("length", [])
    outputs = [lives[job.kind].output() for job in reference.jobs]
    check_metrics(llm, [*outputs, *(live.output() for live in scored)])
    return outputs


def check_metrics(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """What the outputs say of themselves adds up to the scheduler's counters."""
    counters = llm.engine.scheduler.counters
    preemptions = counters.num_preemptions_recompute + counters.num_preemptions_swap
    for name, total in (
        ("num_cached_tokens", counters.num_cached_tokens),
        ("num_preemptions", preemptions),
        ("num_recomputed_tokens", counters.num_recomputed_tokens),
    ):
        assert sum(getattr(output.metrics, name) for output in outputs) == total, name


def check_claims(cell: Cell, llm: LLM) -> None:
    """A run counts only if it did what the cell is there for."""
    scheduler, records = llm.engine.scheduler, list(llm.trace)
    counters = scheduler.counters
    assert counters.num_mixed_steps > 0
    if cell.overlaps and cell.drafts == "none" and not ("pp" in cell.ranks or "co" in cell.ranks):
        assert num_ahead(llm) > 5  # rows that verify drafts wait for their tokens
    rows = [row.num_tokens for record in records for row in record.rows if row.num_logits < 2]
    assert max(rows) == cell.chunk if cell.chunk else max(rows) > 60
    if cell.graphs:
        least = 4 if cell.drafts == "right" else 6  # right drafts leave few steps
        assert sum(record.graph_rows > 0 for record in records) >= least
    if cell.drafts != "none":
        forced = cell.model in ("bytes", "embedded")  # their constraints draft what they force
        check_drafts(cell.drafts, counters.num_accepted_tokens, counters.num_draft_tokens, forced)
        assert len(counters.num_accepted_at) <= K
    if "copies" in cell.ranks:  # each with a pool of its own
        assert all(each.counters.num_steps for each in schedulers_of(scheduler))
        return
    assert (counters.num_cached_tokens > 0) == (cell.cache != "off")
    assert (scheduler.blocks.num_copies > 0) or cell.pool != "ample"
    preempted = counters.num_preemptions_recompute, counters.num_preemptions_swap
    assert [count > 0 for count in preempted] == [cell.pool == "recompute", cell.pool == "swap"]
    if cell.pool != "recompute":
        assert counters.num_recomputed_tokens == 0


def check_drafts(proposer: str, accepted: int, drafted: int, forced: bool) -> None:
    """The proposer did what it is there for."""
    assert (drafted > 50) == (proposer != "nothing")
    if proposer in ("right", "too many"):
        assert accepted > 0.9 * drafted
    elif proposer == "nothing":
        assert forced or accepted == 0
    elif proposer == "wrong":
        assert accepted <= (drafted / 4 if forced else 0)
    elif proposer != "anything":
        assert 0 < accepted < drafted


def check_again(llm: LLM, reference: Reference, exact: bool) -> None:
    """All of a prompt is cached but for its last token, also after one that differs in its last
    block has gone on from a part of that."""
    job = reference.job("long prompt")
    generate(llm, [replace(job, ids=(*job.ids[:-3], 1, 2, 3))])
    (again,) = generate(llm, [job])
    assert len(job.ids) - 1 - again.metrics.num_cached_tokens < BLOCK_SIZE
    assert not reference.differences([again], [job], exact=exact)


def check(cell: Cell, config: dict[str, Any] | None = None, **more: Any) -> LLM:
    """One engine gives each request what the plainest one gives it alone; the closed engine."""
    reference = reference_of(cell)
    with on(cell.path):
        llm = open_cell(cell, config, **more)
        try:
            outputs = run_cell(llm, reference)
            assert not reference.differences(outputs, exact=cell.exact)
            if config is None and not more:
                check_claims(cell, llm)
            if cell.cache != "off" and cell.pool == "ample" and "copies" not in cell.ranks:
                check_again(llm, reference, cell.exact)
        finally:
            llm.close()
    return llm
