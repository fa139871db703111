"""Chapter 09's own functions, and the claims about prefix caching, recomputed."""

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from minillm import LLM, SamplingParams
from minillm.api.outputs import PrefixReport
from minillm.cache.hash_chain import HashChain
from minillm.cache.radix import RadixTree
from minillm.lab.simulation import Simulation, linear
from minillm.models.presets import preset
from minillm.plan.cost import step_cost
from minillm_exercises.chapters import ch09, ch09_pictures
from minillm_exercises.chapters.ch09 import Job, serve

KINDS = ("hash", "radix")


# ---- workloads -------------------------------------------------------------------------------


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


# ---- serving ---------------------------------------------------------------------------------


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


def test_the_order_by_longest_match_finds_more_where_lru_finds_nothing():
    jobs = ch09.documents(number=4, rounds=3)
    by_policy = [serve(jobs, "hash", 16, 60, name) for name in ("fcfs", "longest_prefix_match")]
    assert by_policy[0].hit_rate == 0
    assert by_policy[1].hit_rate > Fraction(1, 2)


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


# ---- drawings --------------------------------------------------------------------------------


def test_known_tokens_are_those_of_texts_before():
    jobs = {name: make() for name, make in
            {"shared": ch09.shared, "chat": ch09.chat, "tree": ch09.tree}.items()}  # fmt: skip
    assert ch09_pictures.known_tokens(jobs["shared"][:3]) == [0, 500, 500]
    chat = jobs["chat"]
    assert ch09_pictures.known_tokens(chat[:6]) == [
        0, *(len(job.prompt + job.answer) for job in chat[:4]), 0,
    ]  # fmt: skip


# ---- claims ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenths", "speedup"), [(0, 1), (5, 2), (9, 10)])
def test_p1_and_p8_a_hit_saves_its_share_of_the_prefill_and_no_decode(tenths, speedup):
    sim = Simulation(1000, 20, prefix_cache="hash", seconds=linear(0, 1))
    write = ch09.Author()
    prompt = write(1000)
    for ids in (prompt[: 100 * tenths] + write(1), prompt):
        sim.add(ids, 20)
        sim.run()
    last = sim.trace.requests()[-1]
    assert last.ttft == Fraction(1000, speedup)
    assert last.tpot == 1
    config = preset("llama-3.1-8b")
    decode = [step_cost(config, [1], [1001]) for _ in range(2)]  # a cost knows no past
    assert decode[0] == decode[1]


def batches(steps_between: int) -> list[int]:
    """Cached tokens of 4 prompts with one system prompt, and of the same 4 once more."""
    sim = Simulation(4000, 16, prefix_cache="hash", max_num_batched_tokens=8192)
    jobs = ch09.shared(users=4, system=512)
    for start in (0, 1000):
        for place, job in enumerate(jobs):
            sim.add(job.prompt, 100, arrival=start + steps_between * place)
    return [request.num_cached_tokens for request in sim.run().requests()]


def test_p2_the_warm_batch_finds_whole_prompts_and_a_cold_one_the_system_prompt():
    together, apart = batches(0), batches(1)
    assert together[:4] == apart[:4] == [0, 512, 512, 512]
    for found in (together, apart):
        prompts = [len(job.prompt) for job in ch09.shared(users=4, system=512)]
        assert found[4:] == [(length - 1) // 16 * 16 for length in prompts]
        assert min(found[4:]) > 512


def test_p2_with_100_new_tokens_most_steps_are_decode():
    sim = Simulation(4000, 16, prefix_cache="hash", max_num_batched_tokens=8192)
    for job in ch09.shared(users=4, system=512):
        sim.add(job.prompt, 100)
    records = list(sim.run())
    assert [record.num_prefill_tokens > 0 for record in records] == [True] + [False] * 99


class Trie:
    """A cache as it was published: a node per token, the block at the end of what was inserted."""

    def __init__(self):
        self.root = self.node()
        self.num_nodes = self.hits = self.lookups = 0

    def node(self):
        return {"children": {}, "block": None}

    def insert(self, tokens, block):
        node = self.root
        for token in tokens:
            if token not in node["children"]:
                node["children"][token] = self.node()
                self.num_nodes += 1
            node = node["children"][token]
        node["block"] = block

    def lookup(self, tokens):
        node, length, block = self.root, 0, None
        for token in tokens:
            if token not in node["children"]:
                break
            node, length = node["children"][token], length + 1
            block = node["block"] if node["block"] is not None else block
        self.lookups += 1
        self.hits += block is not None
        return length, block


def test_p4_the_published_tree_has_a_node_per_token_and_the_engines_one_per_block():
    text = tuple(range(1000))
    trie, tree = Trie(), RadixTree(16)
    trie.insert(text, 1)
    list(ch09.matches(tree, [Job(text, (1,))], 16))
    assert (trie.num_nodes, len(tree)) == (1000, 62)


def test_p5_the_published_lookup_claims_more_than_its_block_holds():
    trie = Trie()
    trie.insert(range(100), 1)
    assert trie.lookup([*range(50), 999]) == (50, None)
    trie = Trie()
    trie.insert([1, 2], 7)
    trie.insert([1, 2, 3, 4], 9)
    assert trie.lookup([1, 2, 3, 5]) == (3, 7)


def test_p5_the_chapter_answers_as_the_published_class_does():
    dice = random.Random(1)
    for _ in range(300):
        trie, inserted = Trie(), {}
        for block in range(1, 4):
            text = tuple(dice.randrange(2) for _ in range(dice.randrange(1, 6)))
            inserted[text] = block
            trie.insert(text, block)
        asked = [dice.randrange(2) for _ in range(6)]
        assert ch09.as_published(inserted, asked) == trie.lookup(asked)


@pytest.mark.parametrize("index", [HashChain, RadixTree])
def test_p5_what_the_engine_finds_are_blocks_that_hold_it(index):
    """The property that the published class lacks, over random texts of a small alphabet."""
    dice, known, size = random.Random(0), {}, 4
    found = index(size)
    for number in range(300):
        text = tuple(dice.randrange(2) for _ in range(16))
        match = found.match(text, 15, "")
        held = [*match.blocks, *([] if match.partial is None else [match.partial])]
        stored = sum((known[block][-size:] for block in held), ())
        assert stored[: match.num_tokens] == text[: match.num_tokens]
        assert all(known[block][:-size] == text[: size * n] for n, block in enumerate(held))
        place = found.start("")
        for end in range(size, 17, size):
            block = 10 * number + end // size
            place = found.insert(place, text[end - size : end], block)
            known[block] = text[:end]


def test_p6_requests_and_tokens_have_different_hit_rates_and_a_block_is_replaced_silently():
    trie = Trie()
    trie.insert([1], 1)
    trie.lookup([1, *range(100, 199)])
    assert Fraction(trie.hits, trie.lookups) == 1  # one token of a hundred
    trie.insert([1], 2)
    assert trie.lookup([1]) == (1, 2)
    chain = HashChain(1)
    chain.insert(chain.start(""), (1,), 1)
    chain.insert(chain.start(""), (1,), 2)
    assert chain.match((1,), 1, "").blocks == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_p7_equal_beginnings_are_shared_and_the_text_is_the_same(kind):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[*ch09.tokens(1, 40), *ch09.tokens(number, 9)] for number in (2, 3)]

    def texts(**options: object) -> tuple[list[list[int]], int]:
        llm = LLM("tiny", dtype="float32", device="cpu", block_size=16, **options)
        outs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        return [out.outputs[0].token_ids for out in outs], outs[1].num_cached_tokens

    plain, cached = texts(enable_prefix_caching=False), texts(prefix_cache=kind)
    assert plain[0] == cached[0]
    assert (plain[1], cached[1]) == (0, {"hash": 32, "radix": 40}[kind])


def test_e16_a_chain_copies_nothing_and_completions_copy_their_last_block():
    assert serve(ch09.tree(2), "hash").copies == 0
    assert serve(ch09.tree(2), "radix").copies > 0
    sim = Simulation(100, 16)
    sim.add(20, 8, n=3)
    sim.run()
    assert sim.blocks.num_copies == 2
