"""The engine on the C functions: requests that are cut, cached, preempted, aborted and run together
get what they get alone. The models are small, but their heads are whole vectors, so that C takes
them: all layers in one call where weights lie in panels, or else operation by operation. Both ways
are taken on every processor.

In float32 that is the same tokens as on the same path alone. In bf16 a sum depends on how many rows
it is computed with, so every token of a run is put to plain torch in float32, with the same
weights: after the tokens before it, would the sampler have taken this one, had its logit been
higher by what bf16 rounds away?
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.api.outputs import CompletionOutput, Logprobs, RequestOutput
from minillm.models.all_layers import AllLayers
from minillm.models.forward_pass import Chunk
from minillm.ops import cpu
from minillm.ops.cpu_layers import Layers
from minillm.scheduling.invariants import check_invariants
from tests.engine.families import (
    AGAIN,
    BLOCK,
    LONGEST,
    SECOND_ONLY,
    Cell,
    Reference,
    jobs_of,
    pairwise_cells,
    run_cell,
)
from tests.engine.small import num_ahead
from tests.engine.test_equality import (
    check_claims,
    positions_of_a_chunk_begin_at_zero,
    prefix_hits_name_a_wrong_block,
    without_moves,
)
from tests.models.tiny import Tiny

BF16 = torch.bfloat16
MODELS = {
    "llama": Tiny("llama", {"num_hidden_layers": 2}),
    "mistral": Tiny("mistral", {"num_hidden_layers": 2}, seed=3),  # a sliding window
    "qwen3": Tiny("qwen3", {"num_hidden_layers": 2, "head_dim": 32}, seed=4),  # norms of q and k
    "qwen2": Tiny("qwen2", {"num_hidden_layers": 2}, seed=5),  # biases
}
CELLS = [Cell(7, "hash", "recompute", 1), Cell(0, "radix", "swap", 3), Cell(1, "off", "ample", 1)]
SOME = (0, 3, 4, 7, 8, 11)  # of twelve: each setting twice, or nearly
BF16_CELLS = {
    "llama": pairwise_cells(0),
    "mistral": [pairwise_cells(1)[i] for i in SOME],
    "qwen3": [pairwise_cells(2)[i] for i in SOME],
    "qwen2": [pairwise_cells(0)[i] for i in SOME],
}
TOLERANCE = 0.15  # of a logit in bf16; they are up to about 10 here


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """A model whose weights are bf16 in its file, so that float32 has the same; written once."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            checkpoint = MODELS[name].write(tmp_path_factory.mktemp("c_path"))
            checkpoint.reference.to(BF16).save_pretrained(checkpoint.folder)
            written[name] = checkpoint.folder
        return written[name]

    return get


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the C functions, and all layers at once, did the work."""
    count: Counter[str] = Counter()
    for name in ("norm_rope_write", "paged_attention", "rms_norm", "silu_mul"):
        inner = getattr(cpu, name)

        def counted(*arguments, name=name, inner=inner):
            count[name] += 1
            return inner(*arguments)

        monkeypatch.setattr(cpu, name, counted)
    run = AllLayers.__call__

    def watched(self, *arguments):
        result = run(self, *arguments)
        count["all layers"] += result is not None
        count["stepped aside"] += result is None
        return result

    monkeypatch.setattr(AllLayers, "__call__", watched)
    return count


def take(panels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers in one call, or not."""
    if panels and cpu.functions(dtype) is None:
        pytest.skip(cpu.describe(dtype))
    monkeypatch.setenv(cpu.PANELS, str(int(panels)))


def check_path(calls: Counter[str], least: int, panels: bool) -> None:
    """All went the way that was asked for."""
    if panels:
        assert calls["all layers"] > least
        assert calls["stepped aside"] == calls["paged_attention"] == 0
    elif cpu.functions(BF16) is not None:
        assert calls["paged_attention"] > least
        assert calls["all layers"] == 0


# ---- float32 -------------------------------------------------------------------------------------


@pytest.mark.skipif(cpu.functions(torch.float32) is None, reason="no C library")
@pytest.mark.parametrize(
    ("name", "panels"), [("llama", False), ("mistral", True), ("qwen3", False), ("qwen3", True)]
)
def test_float32_tokens_are_those_that_a_request_gets_alone(
    name, panels, folder_of, calls, monkeypatch
):
    take(panels, torch.float32, monkeypatch)
    folder = folder_of(name)
    for n in (1, 3):
        reference = Reference(folder, n)
        for cell in CELLS:
            if cell.n != n:
                continue
            before = calls.total()
            found, excused = reference.differences(run_cell(cell, folder))
            assert not found
            assert len(excused) <= 1
            assert calls.total() > before
    assert (calls["all layers"] > 100) == panels
    if not panels:
        assert all(calls[name] > 100 for name in ("norm_rope_write", "paged_attention", "silu_mul"))


# ---- bf16 ----------------------------------------------------------------------------------------


def borders_of(params: SamplingParams) -> list[SamplingParams]:
    """The parameters, and the same with the border of what is kept a little further out or in:
    top-k, top-p and min-p compare logits, and these differ in bf16."""
    if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
        return [params]
    return [
        params,
        *(
            replace(
                params,
                top_k=max(params.top_k + step, 1) if params.top_k else 0,
                top_p=min(params.top_p * (1 + 0.02 * step), 1.0) if params.top_p < 1 else 1.0,
                min_p=params.min_p * (1 - 0.1 * step),
            )
            for step in (1, -1)
        ),
    ]


class Exact(Reference):
    """What plain torch computes in float32. It runs no request: it is asked about theirs."""

    def __init__(self, folder: Path, n: int):
        self.llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=LONGEST,
            num_gpu_blocks_override=LONGEST // BLOCK,
        )
        self.jobs = jobs_of(self.llm, n)
        self._known: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}

    def rows(self, index: int, ids: Iterable[int]) -> torch.Tensor:
        """[tokens of the prompt and all but the last id, V]: logits of what comes after each."""
        whole = [*self.jobs[index].ids, *ids][:-1]
        forward = self.llm.engine.forward_pass
        hidden, _ = forward.run([Chunk(0, 0, whole)], forward.allocate(1, len(whole)))
        return forward.logits(hidden)

    def odd_tokens(self, index: int, completion: CompletionOutput) -> list[int]:
        """At which steps the sampler would not even nearly have taken the token."""
        ids = tuple(completion.token_ids)
        key = index, completion.index, ids
        if key not in self._known:
            rows = self.rows(index, ids)[len(self.jobs[index].ids) - 1 :].clone()
            rows[torch.arange(len(ids)), list(ids)] += TOLERANCE
            borders = borders_of(self.jobs[index].params)
            self._known[key] = [
                step
                for step, token in enumerate(ids)
                if all(
                    self.choose(
                        index, completion.index, list(ids[:step]), rows[step : step + 1], params
                    )
                    != token
                    for params in borders
                )
            ]
        return self._known[key]

    def check(self, outputs: Iterable[tuple[int, RequestOutput]]) -> None:
        """Tokens, their ends and log-probabilities of these requests, by their index."""
        wrong, edges = [], []
        for index, output in outputs:
            params = self.jobs[index].params
            truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
            for each in output.outputs:
                odd = [(index, each.index, step) for step in self.odd_tokens(index, each)]
                (edges if truncated else wrong).extend(odd)
                self.check_end(index, each)
                if each.logprobs is not None:
                    start = len(self.jobs[index].ids) - 1
                    self.check_logprobs(index, each.token_ids, start, each.logprobs)
            if output.prompt_logprobs is not None:
                assert output.prompt_logprobs[0] is None
                self.check_logprobs(index, [], 0, output.prompt_logprobs[1:])
        assert not wrong
        assert len(edges) <= 1, edges

    def check_end(self, index: int, completion: CompletionOutput) -> None:
        """It is as long as was asked for, or ends with a stop token."""
        if completion.finish_reason == "abort":
            return
        request = self.request(index)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in request.stop_ids
        else:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == request.max_tokens

    def check_logprobs(
        self, index: int, ids: list[int], start: int, given: list[Logprobs] | list[Logprobs | None]
    ) -> None:
        """The numbers given for positions from `start` on."""
        rows = self.rows(index, ids)[start:].log_softmax(-1)
        assert len(rows) == len(given)
        for row, entries in zip(rows, given, strict=True):
            assert entries is not None
            for token, entry in entries.items():
                assert abs(entry.logprob - row[token].item()) < TOLERANCE


@pytest.fixture(scope="module")
def exact_of(folder_of) -> Callable[[str, int], Exact]:
    known: dict[tuple[str, int], Exact] = {}

    def get(name: str, n: int) -> Exact:
        if (name, n) not in known:
            known[name, n] = Exact(folder_of(name), n)
        return known[name, n]

    return get


def check_cell(name: str, cell: Cell, overlaps: bool, folder_of, exact_of) -> None:
    run = run_cell(cell, folder_of(name), "bfloat16", async_scheduling=overlaps)
    check_claims(cell, run)
    outputs = zip((*range(SECOND_ONLY), *AGAIN), (*run.first, *run.again), strict=False)
    exact_of(name, cell.n).check(outputs)
    assert (num_ahead(run.llm) > 20) == overlaps


WAYS = [(False, True), (True, True), (False, False), (True, False)] * 3  # overlaps, panels
NAMED = [
    pytest.param(name, cell, *way, id=f"{name}-{cell}{'-overlap' * way[0]}{'-one call' * way[1]}")
    for name, cells in BF16_CELLS.items()
    for way, cell in zip(WAYS, cells, strict=False)
]


@pytest.mark.parametrize(("name", "cell", "overlaps", "panels"), NAMED)
def test_bf16_tokens_are_what_plain_torch_would_have_taken(
    name, cell, overlaps, panels, folder_of, exact_of, calls, monkeypatch
):
    take(panels, BF16, monkeypatch)
    check_cell(name, cell, overlaps, folder_of, exact_of)
    check_path(calls, 20, panels)


VICTIMS = (12, 2, 9, 6, 1, 13, 4)  # the long prompt first, while it is cut
MIDDLE = [Cell(7, "radix", "recompute", 3), Cell(64, "hash", "swap", 1), Cell(7, "off", "ample", 3)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("cell", MIDDLE, ids=str)
def test_who_is_aborted_in_the_middle_leaves_the_others_alone(
    cell, overlaps, folder_of, exact_of, calls, monkeypatch
):
    panels = cell is not MIDDLE[-1]
    take(panels, BF16, monkeypatch)
    exact = exact_of("mistral", cell.n)
    llm = cell.open(folder_of("mistral"), "bfloat16", async_scheduling=overlaps)
    engine = llm.engine
    lives = [
        engine.add(engine.make_request(str(index), None, job.ids, job.params))
        for index, job in enumerate(exact.jobs)
    ]
    victims, cut_short = list(VICTIMS), []
    while engine.has_work:
        engine.step()
        if victims and len(engine.trace) % 3 == 0:
            victim = lives[victims.pop(0)]
            cut_short += [len(each.token_ids) for each in victim.completions if not victim.finished]
            engine.abort(victim.request.request_id)
    outputs = [live.output() for live in lives]
    aborted = [each.finish_reason == "abort" for output in outputs for each in output.outputs]
    assert sum(aborted) >= 3
    assert 0 in cut_short  # in its prompt
    assert max(cut_short) > 1  # and among its tokens
    exact.check(enumerate(outputs))
    check_invariants(engine.scheduler)
    assert engine.scheduler.blocks.pool.num_free == cell.num_blocks
    check_path(calls, 20, panels)


def windows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call of all layers."""
    init = Layers.__init__

    def broken(self, *arguments):
        init(self, *arguments)
        for layer in self._layers:
            layer.window = 0

    monkeypatch.setattr(Layers, "__init__", broken)


PLANTED = {
    "positions of a chunk": (positions_of_a_chunk_begin_at_zero, Cell(7, "off", "ample", 1)),
    "copies are not made": (without_moves("copies"), Cell(7, "off", "ample", 3)),
    "nothing is swapped in": (without_moves("swap_in"), Cell(64, "off", "swap", 1)),
    "wrong block, radix": (prefix_hits_name_a_wrong_block, Cell(7, "radix", "ample", 3)),
    "no window": (windows_are_forgotten, Cell(0, "hash", "ample", 3)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bug_shows_in_bf16(what, overlaps, folder_of, exact_of, monkeypatch):
    plant, cell = PLANTED[what]
    take(plant is windows_are_forgotten or overlaps, BF16, monkeypatch)
    exact = exact_of("mistral", cell.n)
    plant(monkeypatch)
    run = run_cell(cell, folder_of("mistral"), "bfloat16", async_scheduling=overlaps)
    monkeypatch.undo()
    outputs = zip((*range(SECOND_ONLY), *AGAIN), (*run.first, *run.again), strict=False)
    with pytest.raises(AssertionError):
        exact.check(outputs)
