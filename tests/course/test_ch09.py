"""Chapter 09's own functions, and the claims about prefix caching, recomputed."""

from fractions import Fraction
from itertools import pairwise

import pytest

from minillm import LLM
from minillm.api.outputs import PrefixReport
from minillm.cache.hash_chain import HashChain
from minillm.cache.radix import RadixTree
from minillm.lab.simulation import Simulation, linear
from minillm_exercises.chapters import ch09, ch09_pictures
from minillm_exercises.chapters.ch09 import serve

KINDS = ("hash", "radix")


def common(one: ch09.Ids, other: ch09.Ids) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("jobs", [ch09.one_chat(4, 7, 3), ch09.chat(chats=1, turns=4)])
def test_a_turn_begins_with_the_turn_before_and_its_answer(jobs):
    assert len(jobs) == 4
    for before, after in pairwise(jobs):
        said = before.prompt + before.answer
        assert after.prompt[: len(said)] == said
        assert len(after.prompt) > len(said)


def test_a_tree_has_a_job_for_each_node_and_parts_after_each_answer():
    jobs = ch09.tree(depth=2, branches=3)
    assert len(jobs) == 1 + 3 + 9
    root = jobs[0].prompt + jobs[0].answer
    assert all(common(root, job.prompt) == len(root) for job in jobs[1:])
    children = [job for job in jobs[1:] if len(set(job.prompt) - set(root)) < 45]
    assert {common(a.prompt, b.prompt) for a in children for b in children if a is not b} == {
        len(root)
    }


def test_documents_come_in_turn_or_by_popularity():
    jobs = ch09.documents(number=3, rounds=2)
    starts = [job.prompt[0] for job in jobs]
    assert starts == starts[:3] * 2
    assert len(set(starts)) == 3
    found = [job.prompt[0] for job in ch09.documents(popular=True, number=5, rounds=40)]
    assert found.count(1) > 2 * found.count(4 * 320 + 1) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jobs", [ch09.shared(6), ch09.chat(2), ch09.tree(2)])
def test_every_prompt_token_has_one_reason_and_the_hits_are_those_of_the_index(kind, jobs):
    found = serve(jobs, kind, 16)
    assert found.total == sum(len(job.prompt) for job in jobs)
    if kind == "hash":
        blocks = sum(map(len, ch09.matches(HashChain(16), jobs, 16)))
        assert found.tokens["cached"] == 16 * blocks
        assert found.copies == 0
    assert found.hit_rate == Fraction(found.tokens["cached"], found.total)


def test_both_indices_find_the_same_whole_blocks():
    jobs = ch09.tree(2)
    by_hash, by_tree = (
        list(ch09.matches(index, jobs, 16)) for index in (HashChain(16), RadixTree(16))
    )
    assert by_hash == by_tree
    assert any(by_hash)


def test_serve_runs_one_after_the_other_and_reports_what_was_evicted():
    jobs = ch09.documents(number=4, rounds=2)
    short, enough = (serve(jobs, "hash", 16, blocks) for blocks in (60, 4 * 21 + 1))
    assert short.tokens["evicted"] == 4 * 320
    assert short.hit_rate == 0
    assert enough.tokens["cached"] == 4 * 320


def test_wait_is_the_time_of_what_was_not_found():
    sim = Simulation(20, 4, prefix_cache="radix", seconds=linear(0, 1))
    text = tuple(range(1, 13))
    assert ch09.wait(sim, text) == 12
    assert ch09.wait(sim, (*text[:6], 50)) == 1
    assert ch09.wait(sim, (*text[:6], 51), "salt") == 7


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", block_size=16)


def test_first_token_is_the_engines_own_report(tiny):
    text = ch09.tokens(1, 64)
    assert ch09.first_token(tiny, text, "a").prefix == PrefixReport(new=64)
    again = ch09.first_token(tiny, text, "a")
    assert again.prefix == PrefixReport(cached=48, last_token=16)
    assert again.ttft > 0
    assert ch09.first_token(tiny, text, "b").prefix == PrefixReport(salt=64)


def test_known_tokens_are_those_of_texts_before():
    jobs = {name: make() for name, make in
            {"shared": ch09.shared, "chat": ch09.chat, "tree": ch09.tree}.items()}  # fmt: skip
    assert ch09_pictures.known_tokens(jobs["shared"][:3]) == [0, 500, 500]
    chat = jobs["chat"]
    assert ch09_pictures.known_tokens(chat[:6]) == [
        0, *(len(job.prompt + job.answer) for job in chat[:4]), 0,
    ]  # fmt: skip
