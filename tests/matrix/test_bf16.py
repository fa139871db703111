"""Requests in bf16 on the C functions, where a sum depends on how many rows it is computed with.

So every token of a run is put to plain torch in float32, with the same weights: after the tokens
before it, would the sampler have taken this one, had its logit been higher by what bf16 rounds off?
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from minillm.api.outputs import CompletionOutput, Logprobs
from minillm.ops import cpu
from tests.engine.small import make
from tests.matrix.cells import Cell, Reference, changed, check_claims, on, run_cell
from tests.matrix.jobs import KINDS, WITHOUT_TEXT, Job, jobs_of
from tests.matrix.test_matrix_planted import BUGS

TOLERANCE = 0.15  # of a logit; they are up to about 10 here
# Those that cut tokens off compare logits with each other, which differ by that much.
CHOSEN = [kind for kind in WITHOUT_TEXT if not KINDS[kind].keys() & {"top_k", "top_p", "min_p"}]
MODELS = ("llama", "mistral", "qwen3", "qwen2")  # a window, norms of q and k, biases
CELLS = [
    Cell(
        MODELS[i % 4],
        path=("panels", "operations")[(i // 4) % 2],
        chunk=(7, 0, 1, 32)[(i + i // 4) % 4],
        cache=("off", "hash", "radix")[i % 3],
        pool=("ample", "recompute", "swap")[(i // 3 + i) % 3],
        overlaps=bool(i // 2 % 2),
    )
    for i in range(24)
]


@cache
def rounded(model: str) -> Path:
    """The model with weights that are bf16 in its file, so that float32 has the same."""
    return changed(model, "bf16", torch.Tensor.bfloat16)


class Exact(Reference):
    """What plain torch computes in float32. It runs no request: it is asked about theirs."""

    def __init__(self, model: str) -> None:
        self.llm = make(rounded(model), **Cell(model, path="torch").fields())
        self.jobs = jobs_of(self.llm, CHOSEN)

    def odd(self, job: Job, completion: CompletionOutput) -> list[int]:
        """At which steps the sampler would not even nearly have taken the token."""
        ids = list(completion.token_ids)
        rows = self.logits(job, ids[:-1]).clone()
        own = rows.log_softmax(-1)
        rows[torch.arange(len(ids)), ids] += TOLERANCE
        if completion.logprobs is not None:
            check_logprobs(completion.logprobs, own)
        return [
            step
            for step, token in enumerate(ids)
            if self.choose(job, completion.index, ids[:step], rows[step : step + 1]) != token
        ]


def check_logprobs(given: list[Logprobs] | list[Logprobs | None], rows: torch.Tensor) -> None:
    """The numbers of each position are near those of its row."""
    assert len(rows) == len(given)
    for row, entries in zip(rows, given, strict=True):
        for token, entry in (entries or {}).items():
            assert abs(entry.logprob - row[token].item()) < TOLERANCE


@cache
def exact_of(model: str) -> Exact:
    """Computed once."""
    return Exact(model)


def run(cell: Cell) -> None:
    """All requests in bf16: their tokens, ends and log-probabilities."""
    if cell.path == "panels" and cpu.functions(torch.bfloat16) is None:
        pytest.skip(cpu.describe(torch.bfloat16))
    exact = exact_of(cell.model)
    with on(cell.path):
        llm = make(rounded(cell.model), **cell.fields() | {"dtype": "bfloat16"})
        outputs = run_cell(llm, exact)
    check_claims(cell, llm)
    wrong = []
    for job, output in zip(exact.jobs, outputs, strict=True):
        for each in output.outputs:
            wrong += [(job.kind, step) for step in exact.odd(job, each)]
            stopped = each.finish_reason == "stop"
            assert stopped or len(each.token_ids) == (job.params.max_tokens or 96 - len(job.ids))
        if output.prompt_logprobs is not None:
            before = Job("", job.ids[:1], job.params)
            rows = exact.logits(before, job.ids[1:-1]).log_softmax(-1)
            check_logprobs(output.prompt_logprobs[1:], rows)
    assert not wrong


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] * (place >= len(MODELS)))
        for place, cell in enumerate(CELLS)  # the first ones have each model
    ],
)
def test_tokens_are_what_plain_torch_would_have_taken(cell: Cell) -> None:
    run(cell)


@pytest.mark.mutation
@pytest.mark.parametrize("path", ["panels", "operations"])
@pytest.mark.parametrize("name", ["positions of a chunk", "copies are not made", "no window"])
def test_a_planted_bug_shows(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "no window" and path == "operations":
        pytest.skip("it is in the call of all layers")
    exact_of("mistral")
    BUGS[name][0](monkeypatch)
    with pytest.raises(AssertionError):
        run(Cell("mistral", path=path, chunk=7))
