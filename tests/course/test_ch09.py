"""Chapter 09's own functions: reasons, and both indices."""

from fractions import Fraction

import pytest

from minillm.cache.hash_chain import HashChain
from minillm.cache.radix import RadixTree
from minillm.lab.simulation import Simulation, linear
from minillm_exercises.chapters import ch09, ch09_pictures
from minillm_exercises.chapters.ch09 import serve

KINDS = ("hash", "radix")


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


def test_known_tokens_are_those_of_texts_before():
    jobs = {name: make() for name, make in
            {"shared": ch09.shared, "chat": ch09.chat, "tree": ch09.tree}.items()}  # fmt: skip
    assert ch09_pictures.known_tokens(jobs["shared"][:3]) == [0, 500, 500]
    chat = jobs["chat"]
    assert ch09_pictures.known_tokens(chat[:6]) == [
        0, *(len(job.prompt + job.answer) for job in chat[:4]), 0,
    ]  # fmt: skip


def test_wait_is_the_time_of_what_was_not_found():
    sim = Simulation(20, 4, prefix_cache="radix", seconds=linear(0, 1))
    text = tuple(range(1, 13))
    assert ch09.wait(sim, text) == 12
    assert ch09.wait(sim, (*text[:6], 50)) == 1
    assert ch09.wait(sim, (*text[:6], 51), "salt") == 7
