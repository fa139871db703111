"""Deliberate bugs are caught: each makes the comparison of `test_parity.py` fail."""

from pathlib import Path

import pytest

from minillm.ops import cpu
from tests.models.mutants import MUTANTS, Mutant, shifted_rope
from tests.models.parity import TOLERANCE, load, measure
from tests.models.tiny import CASES, ROPES


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """The bugs are planted into the reference, which C would pass by (tests/ops has its own)."""
    monkeypatch.setattr(cpu, "functions", lambda dtype: None)


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, checkpoint_of, monkeypatch):
    checkpoint = checkpoint_of(mutant.case)
    model = load(checkpoint)
    mutant.apply(monkeypatch, model)
    parity = measure(checkpoint, model, new_tokens=0)
    assert not parity.holds
    # Where a bug shows is part of what the suite teaches: some never show in a whole prefill.
    assert (parity.whole_error > TOLERANCE) == mutant.whole, parity


def test_shift_of_all_positions_is_no_bug(checkpoint_of, monkeypatch):
    """RoPE is relative: a bug that moves every position alike cannot be seen, nor matter."""
    checkpoint = checkpoint_of("llama")
    model = load(checkpoint)
    shifted_rope(only_decode=False)(monkeypatch, model)
    assert measure(checkpoint, model, new_tokens=0).holds


def test_the_committed_table_is_of_this_suite():
    """PARITY.md has a row for every case, RoPE type and bug (its digits depend on the machine)."""
    page = (Path(__file__).parent / "PARITY.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines()}
    assert rows >= {*CASES, *ROPES, *(mutant.name for mutant in MUTANTS)}
