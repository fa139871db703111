"""Verification as a recorded graph, without a GPU: a recording is the function itself, called again
on the same tensors (`tests/execution/test_graphs.py`)."""

import random

import pytest

from minillm.scheduling.drafts import Drafts
from tests.engine.small import make, num_ahead, tokens
from tests.execution.test_graphs import PROMPTS, run
from tests.matrix.cells import Again, give_graphs, poison


class Guesses:
    """Drafts of any length that are sometimes right: it knows what plain decoding gives."""

    def __init__(self, texts, right=0.7):
        self.texts, self.right, self.random = texts, right, random.Random(3)

    def propose(self, rows):
        drafts = []
        for row in rows:
            known = list(row.token_ids)
            follows = next(text for text in self.texts if text[: len(known)] == known)
            wanted = follows[len(known) :][: self.random.randrange(row.num_drafts + 1)]
            drafts.append(
                [
                    t if self.random.random() < self.right else self.random.randrange(256)
                    for t in wanted
                ]
            )
        return drafts


@pytest.fixture(scope="module")
def expected(folder):
    return [tokens(output) for output in run(make(folder))]


def speculating(folder, expected, num_drafts=4, **arguments):
    texts = [[*ids, *one[0]] for ids, one in zip(PROMPTS, expected, strict=True)]
    config = {"method": Guesses(texts), "num_speculative_tokens": num_drafts}
    llm = make(folder, speculative_config=config, **arguments)
    return llm, give_graphs(llm, num_drafts=num_drafts)


class EverySecond(Drafts):
    """Only some sequences draft; the others are planned ahead."""

    def lengths(self, sequences):
        return [self.num_tokens * (one.seq_id % 2) for one in sequences]

    def wants(self, sequence, num_running):
        return sequence.seq_id % 2 == 1


def test_rows_that_were_planned_ahead_are_beside_rows_with_drafts(folder, expected):
    llm, _ = speculating(folder, expected, async_scheduling=True)
    llm.engine.scheduler.drafts = EverySecond(4)
    poison(llm)
    assert [tokens(output) for output in run(llm)] == expected
    mixed = [
        record
        for record in llm.trace
        if record.graph_rows and 0 < len(record.drafted) < len(record.rows)
    ]
    assert len(mixed) > 5
    assert num_ahead(llm) > 5


def test_more_drafts_than_a_graph_has_room_for_run_eagerly(folder, expected):
    llm, _ = speculating(folder, expected)
    llm.engine.runner.use_graphs(Again(), num_drafts=1)
    assert [tokens(output) for output in run(llm)] == expected
    assert any(
        record.why_eager and not record.num_prefill_tokens
        for record in llm.trace
        if any(drafted.num_drafted > 1 for drafted in record.drafted)
    )


def test_the_memory_of_both_kinds_is_counted(folder, expected):
    llm, again = speculating(folder, expected)
    runner = llm.engine.runner
    both = again.num_bytes + runner.graphs.own_bytes + runner.verify_graphs.own_bytes
    assert llm.engine.allocated()["cuda_graphs"] == both
    assert runner.verify_graphs.own_bytes > 4 * runner.graphs.hidden.nbytes
