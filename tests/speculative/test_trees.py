"""Token trees: what is accepted is a path, and no token, bit or cached block shows the others."""

import json
import logging
import random
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from minillm.cache.spec import CacheSpec
from minillm.errors import ConfigError
from minillm.execution import runner as runner_module
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import BlockTables, make_batch
from minillm.models.forward_pass import Chunk
from minillm.models.trees import ROOT, Tree, tree_batch
from minillm.ops.sampling import Pack
from minillm.scheduling.adaptive_drafts import AdaptiveDrafts
from minillm.speculative.proposer import Draft
from minillm.speculative.trees import (
    grown,
    in_order,
    keep_path,
    ranked,
    tree_of,
    valid_tree,
    values,
)
from minillm_kernels import int8_cache
from minillm_kernels.philox import Purpose, random_words_of_vocabulary, to_gumbel
from tests.engine.small import assert_idle, make
from tests.matrix.cells import Cell, check, folder_of, heads_of, reference_of
from tests.matrix.proposers import Now
from tests.pairs import one_in
from tests.speculative.headed import COUNT, medusa_of, with_heads, write_heads
from tests.speculative.test_draft_model import LONG, SAMPLED, generate, params_of
from tests.speculative.treed import CANARY, Branching, Cached, random_parents

MEDUSA = {"method": "medusa", "model": "tiny-medusa"}
PATHS = [[0], [1], [0, 0], [2], [1, 0], [0, 1], [0, 0, 0], [0, 0, 0, 0], [3], [1, 0, 1]]
TABLE = [[0.5, 0.2, 0.1], [0.3, 0.2, 0.05], [0.2, 0.1, 0.1], [0.1, 0.1, 0.1]]

# ---- trees -------------------------------------------------------------------------------------


def paths_to(tree: Tree, node: int) -> list[int]:
    """The nodes from the root to a node, from the parents alone."""
    found = [node]
    while found[-1]:
        found.append(tree.parents[found[-1] - 1] + 1)
    return found[::-1]


def test_depths_paths_and_walks():
    """Against the parents alone: the walk is the longest path whose drafts are all samples."""
    for seed in range(500):
        dice = random.Random(seed)
        count = dice.randint(1, 20)
        tree, tokens, used = Tree(tuple(random_parents(dice, count))), [], set()
        for parent in tree.parents:
            tokens.append(next(t for t in dice.sample(range(30), 30) if (parent, t) not in used))
            used.add((parent, tokens[-1]))
        samples = [dice.randrange(30) for _ in range(count + 1)]
        for node, parent in enumerate(tree.parents, start=1):
            if dice.random() < 0.5:
                samples[parent + 1] = tokens[node - 1]
        for node in range(count + 1):
            path = paths_to(tree, node)
            assert tree.depths[node] == len(path) - 1
            assert tree.paths[node].tolist() == path + [0] * (len(tree.paths[0]) - len(path))
        longest = max(
            (paths_to(tree, node) for node in range(count + 1)),
            key=lambda path: len(path) * all(
                samples[a] == tokens[b - 1] for a, b in pairwise(path)
            ),
        )  # fmt: skip
        assert tree.walk(samples, tokens) == longest
        chain = [0, *(draft + 1 for draft in tree.chain)]
        assert chain == paths_to(tree, chain[-1])
        assert chain[-1] - 1 not in tree.parents  # to a leaf


@pytest.mark.parametrize("kind", ["plain", "int8", "mla"])
def test_moves_of_a_path_that_overlap(kind):
    """Codes move with their scales, whichever four of them are interleaved."""
    spec = CacheSpec(1 if kind == "mla" else 2, 16, 16, kind == "mla", kind == "int8")
    for seed in range(100):
        dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
        kv = KVCache(spec, 3, 12, 4, torch.float32)
        for tensor in kv.tensors:
            tensor.copy_(torch.randint(0, 120, tensor.shape, generator=draw))
        tables, start = BlockTables(2, 8, torch.device("cpu")), dice.randrange(8)
        tables.write([(1, 0, dice.sample(range(12), 8))])
        count = dice.randint(1, 30 - start)
        path = [0, *sorted(dice.sample(range(1, count + 1), dice.randint(0, count)))]

        def stored(pages: Any, table: torch.Tensor = tables.device[1]) -> list[torch.Tensor]:
            return [
                int8_cache.gather(each, table, 32)[:, :32] for each in pages if each is not None
            ]

        before = [stored(pages) for pages in kv.pages]
        keep_path(kv.tensors, tables, 1, start, path)
        for pages, old in zip(kv.pages, before, strict=True):
            for now, then in zip(stored(pages), old, strict=True):
                assert torch.equal(now[:, :start], then[:, :start])
                moved = then[:, [start + node for node in path]]
                assert torch.equal(now[:, start : start + len(path)], moved)


def test_trees_grow_greedily_to_the_best():
    """As good as the best of all trees with as many drafts, of up to five."""
    every = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for seed in range(6):
        dice = random.Random(seed)
        table = [sorted((dice.random() for _ in range(3)), reverse=True) for _ in range(2)]
        for count in range(1, 5):
            best = max(
                sum(values(chosen, table)) for chosen in combinations(every, count)
                if all(path[:-1] in ((), *chosen) for path in chosen)
            )  # fmt: skip
            found = grown(table, count)
            assert sum(values(found, table)) == pytest.approx(best)
            assert in_order(dice.sample(found, count), table) == found
    assert tree_of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]).parents == (-1, -1, 0, 0, 1, 2)


# ---- one pass ----------------------------------------------------------------------------------

# Bits are compared, but for torch and MLA, whose products of one row and of several differ.
ONE_PASS = {
    "float32": ("bytes", {}), "bf16": ("bytes", {"dtype": "bfloat16"}),
    "int8": ("bytes", {"kv_cache_dtype": "int8"}), "window": ("mistral", {}),
    "mla": ("deepseek_v2", {}), "exact": ("llama", {"deterministic": True}),
    "exact int8": ("mistral", {"deterministic": True, "kv_cache_dtype": "int8"}),
    "torch": ("llama", {"enforce_eager": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_over_a_tree_is_passes_over_its_paths(name):
    model, fields = ONE_PASS[name]
    llm = make(folder_of(model), **({"max_model_len": 128} | fields))
    runner, dice = llm.engine.runner, random.Random(0)
    tables, size, kv = runner.rows.tables, runner.kv.block_size, runner.kv
    tables.write([(0, 0, range(32)), (1, 0, range(32, 64))])

    def run(row: int, start: int, ids: list[int], tree: Tree | None = None) -> torch.Tensor:
        batch = make_batch(tables, size, [row], [start], [len(ids)], ids)
        batch = batch if tree is None else tree_batch(batch, [start], [len(ids)], [tree])
        with torch.inference_mode():
            return runner.model.logits(runner.model(batch, kv)).clone()

    for _ in range(12):
        start, prompt = dice.choice([1, 15, 16, 30, 62, 64]), [dice.randrange(99) for _ in LONG]
        tree = Tree(tuple(random_parents(dice, dice.randint(1, 14))))
        tokens = [dice.randrange(99) for _ in tree.depths]
        for row in (0, 1):
            run(row, 0, prompt[:start])
        found = run(0, start, tokens, tree)
        for path in sorted(paths_to(tree, node) for node in range(len(tokens))):
            node = path[-1]  # the others were written before it
            alone = run(1, start + len(path) - 1, [tokens[node]])
            if name in ("torch", "mla"):
                torch.testing.assert_close(found[node], alone[0], atol=2e-4, rtol=0)
            else:
                assert torch.equal(found[node], alone[0])


# ---- an engine ---------------------------------------------------------------------------------

EXACT, FAST = "exact float32", "exact bfloat16"
CELLS = [
    Cell("bytes", chunk=7, cache="hash", pool="swap"),
    Cell("bytes", cache="radix", pool="recompute", overlaps=True),
    Cell("mistral", EXACT, chunk=32, cache="hash", pool="swap", kv="int8"),
    Cell("deepseek_v2", FAST, chunk=7, cache="radix", pool="recompute"),
    Cell("qwen2", FAST, chunk=7, cache="hash", pool="recompute", kv="int8"),
    Cell("llama", path="operations", chunk=7, cache="radix", pool="swap"),
    Cell("bytes", path="torch", cache="hash", overlaps=True),
    Cell("qwen3_moe", path="torch", cache="hash", overlaps=True),
]


@pytest.mark.parametrize("cell", one_in(2, CELLS), ids=str)
def test_trees_change_no_token(cell):
    """Greedy and sampled, alone and among others, with penalties, constraints and forks."""
    reference = reference_of(cell)
    width = reference.llm.engine.source.config.vocab_size
    proposer = Branching(reference.known, width)
    llm = check(cell, {"method": proposer, "num_speculative_tokens": 15})
    counters = llm.engine.scheduler.counters
    assert proposer.num_branched > 60
    assert counters.num_accepted_tokens / counters.num_drafts > 0.8


TREE_CELLS = [Cell("bytes", chunk=7, cache="hash", pool="swap"),
              Cell("llama", FAST, cache="radix", kv="int8")]  # fmt: skip


@pytest.mark.parametrize("cell", TREE_CELLS, ids=str)
def test_trees_of_heads_change_no_token(cell):
    config = {"method": "medusa", "model": heads_of(cell.model, "medusa"), "tree": PATHS}
    counters = check(cell, config).engine.scheduler.counters
    assert counters.num_accepted_tokens > 0


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_of_a_rejected_branch_is_cached(folder, monkeypatch, how):
    """Rejected drafts are canaries. No cached block holds one, as a token or as keys and values,
    though they fill whole blocks."""
    fields = {"max_model_len": 128, "num_gpu_blocks_override": 100, "enable_prefix_caching": True}
    prompts, params = [LONG[:9], LONG[20:21], LONG[40:70]], params_of(60, **how)
    plain = generate(make(folder, **fields), prompts, params)
    assert all(CANARY not in one for found in plain for one in found)
    llm = make(folder, **fields)
    known = {}
    for place, prompt in enumerate(prompts):
        request = llm.engine.make_request(str(place), None, prompt, params)
        known[tuple(prompt), request.seed, 0, repr(request.params)] = plain[place][0]
    proposer = Branching(known, 264, CANARY)
    llm = make(folder, **fields,
               speculative_config={"method": proposer, "num_speculative_tokens": 15})  # fmt: skip
    cached = Cached(llm, monkeypatch)
    assert generate(llm, prompts, params) == plain
    assert llm.engine.scheduler.counters.num_accepted_tokens > 50
    assert all(CANARY not in tokens for tokens in cached.tokens.values())
    cached.assert_right(least=30)
    longer = [prompt + found[0][:40] for prompt, found in zip(prompts, plain, strict=True)]
    again = generate(llm, longer, params)
    assert again == generate(make(folder, **fields), longer, params)
    assert llm.engine.scheduler.counters.num_cached_tokens > 60
    assert_idle(llm.engine)


def test_tokens_are_ranked_with_the_noise_of_the_target():
    """As the sampler adds it: logits over temperature plus noise, by falling sum."""
    draw = torch.Generator().manual_seed(0)
    logits, at = torch.randn(6, 50, generator=draw), torch.arange(6)
    zeros, ones = torch.zeros(6), torch.ones(6)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 0.0])
    pack = Pack(temperature, zeros, ones, zeros.int(), at + 3, at * 0, 7 * at, False)
    words = random_words_of_vocabulary(at + 3, at * 0, 7 * at, Purpose.SAMPLE, 50)
    noisy = logits / temperature[:, None] + to_gumbel(words)
    wanted = torch.where(temperature[:, None] > 0, noisy, logits).topk(5).indices.T
    assert torch.equal(ranked(logits, pack, 5), wanted)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_that_is_a_chain_drafts_what_a_chain_drafts(folder, tmp_path, how):
    """So each head has the noise of its position."""
    heads, counts = write_heads(folder, tmp_path / "heads"), []
    for config in ({}, {"tree": [[0] * i for i in range(1, 5)]}):
        llm = with_heads(folder, heads, config=config)
        generate(llm, [LONG[:9], LONG[20:21], LONG[40:60]], params_of(60, **how))
        counters = llm.engine.scheduler.counters
        counts.append((counters.num_steps, counters.num_drafts, counters.num_accepted_at))
    assert counts[0] == counts[1]


def test_hidden_states_move_with_their_positions(folder, tmp_path, monkeypatch):
    """The state that heads read is that of a pass over the text, whichever node it was."""
    heads = write_heads(folder, tmp_path / "heads")
    llm = with_heads(folder, heads, num_drafts=10, config={"tree": PATHS})
    medusa, forward, wrong = medusa_of(llm), llm.engine.forward_pass, []
    propose, moved, keep = medusa.propose, [], runner_module.keep_path
    monkeypatch.setattr(runner_module, "keep_path", lambda *given: (
        moved.extend(n != i for i, n in enumerate(given[-1])), keep(*given)))  # fmt: skip

    def watched(rows: Any) -> Any:
        for row in rows:
            last = len(row.token_ids) - 2
            ids = list(row.token_ids[: last + 1])
            alone, _ = forward.run([Chunk(0, 0, ids)], forward.allocate(1, len(ids)))
            (found,) = medusa.features.read([(row.place, last, 1)])
            wrong.append(not torch.allclose(found, alone[-1], atol=1e-4))
        return propose(rows)

    monkeypatch.setattr(medusa, "propose", watched)
    generate(llm, [LONG[:9], LONG[20:21], LONG[40:60]], params_of(60, **SAMPLED))
    assert sum(moved) > 10
    assert not any(wrong)
    assert len(wrong) > 60


def test_log_probabilities_are_those_of_the_path(folder):
    params = params_of(30, temperature=0.0, logprobs=2)
    plain = make(folder, max_model_len=128)
    (output,) = plain.generate([{"prompt_token_ids": LONG[:9]}], params, use_tqdm=False)
    request = plain.engine.make_request("x", None, LONG[:9], params)
    key = tuple(LONG[:9]), request.seed, 0, repr(request.params)
    proposer = Branching({key: output.outputs[0].token_ids}, 264)
    llm = make(folder, max_model_len=128,
               speculative_config={"method": proposer, "num_speculative_tokens": 15})  # fmt: skip
    (found,) = llm.generate([{"prompt_token_ids": LONG[:9]}], params, use_tqdm=False)
    assert found.outputs[0].token_ids == output.outputs[0].token_ids
    for mine, theirs in zip(found.outputs[0].logprobs, output.outputs[0].logprobs, strict=True):
        assert mine.keys() == theirs.keys()
        for token, one in mine.items():
            assert one.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


# ---- size --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("price", "least", "most"), [(0.5, 0, 0), (0.15, 2, 4), (0.001, 8, 8)])
def test_as_much_of_a_tree_as_pays(price, least, most):
    """Values .4, .2, .1 and so on: a draft is worth its value, and costs this much of a step."""
    policy = AdaptiveDrafts(12, values=[0.4 / 2 ** (i // 2) for i in range(12)])
    policy.times.add_plain(1, 1.0)
    for count in (0, 1, 2, 4, 8, 12):
        for _ in range(9):
            policy.times.add(1, count, 1 + price * count)
    curves = policy.acceptance.curves([5])
    level = policy._best_level(curves)
    found = 0 if level is None else curves[0].nums[level]
    assert least <= found <= most


def test_values_are_corrected_by_what_is_accepted():
    policy = AdaptiveDrafts(3, values=[0.4, 0.2, 0.1])
    for _ in range(50):
        policy.acceptance.observe(1, 3, 2)
        policy.acceptance.observe(2, 3, 0)
    one, two, other = (policy.acceptance.curves([i])[0].survival for i in (1, 2, 3))
    assert one[0] > 0.9 > 0.7 > other[0] > two[0]
    assert two[0] < 0.2
    assert other[1] / other[0] == pytest.approx(0.5)
    assert sum(other) == pytest.approx(1.0, abs=0.25)  # of both, one each
    none = AdaptiveDrafts(2, values=[0.0, 0.0]).acceptance  # a tree of ranks that never came
    assert none.curves([1])[0].survival == [0.0, 0.0]
    policy.acceptance.keep([2])
    assert policy.acceptance.curves([1])[0].survival == pytest.approx(other, abs=0.05)


def test_an_adaptive_tree_of_the_embedded_heads(folder, tmp_path):
    llm = with_heads("tiny", "tiny-medusa", "auto", max_model_len=256,
                     num_gpu_blocks_override=None, config={"tree": "auto"})  # fmt: skip
    drafts, medusa = llm.engine.scheduler.drafts, llm.engine.runner.speculator.proposer
    assert isinstance(drafts, AdaptiveDrafts)
    assert drafts.num_tokens == len(medusa.tree) == 31
    assert medusa.tree[0] == (0,)
    assert sorted(drafts.acceptance.values, reverse=True) == list(drafts.acceptance.values)
    assert llm.plan().settings.num_drafts == 31


# ---- what is refused ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tree": 7}, "'tree' is 7; it must be 'auto', or a list of paths"),
    "no paths": ({"tree": []}, r"'tree' is \[\]; it must be"),
    "another word": ({"tree": "full"}, "'tree' is 'full'; it must be 'auto'"),
    "no path": ({"tree": [[0], []]}, r"has the path \[\]; it must be ranks"),
    "no rank": ({"tree": [[0], [-1]]}, r"path \[-1\]; it must be ranks from 0 to 15"),
    "true": ({"tree": [[True]]}, r"path \[True\]; it must be ranks"),
    "no parent": ({"tree": [[0], [1, 0]]}, r"path \[1, 0\]; .* add \[1\]"),
    "twice": ({"tree": [[0], [0]]}, r"path \[0\] twice"),
    "too many": ({"tree": [[a, b] for a in range(8) for b in range(8)]}, "64 paths; .* most 63"),
    "too deep": (
        {"tree": [[0] * i for i in range(1, 6)]},
        "of 5 ranks and .* at most 4 tokens .*; give",
    ),
    "too deep for its accuracies": (
        {"tree": [[0] * i for i in range(1, 6)], "rank_accuracy": {"0": TABLE}},
        "of 5 ranks and .* at most 4 tokens .*; give",
    ),
    "ngram": (
        {"method": "ngram", "model": None, "tree": [[0]]},
        "a tree belongs to 'medusa', 'eagle', 'mtp'",
    ),
    "standard": ({"rejection_sample_method": "standard", "tree": [[0]]}, "is verified 'strict'"),
    "no accuracies": ({"tree": "auto"}, "no valid rank_accuracy in heads.json, .* train the heads"),
    "none for a number": ({"tree": "auto", "num_speculative_tokens": 4}, "no valid rank_accuracy"),
    "none for a size": (
        {"tree": [[0]], "num_speculative_tokens": "auto"},
        "no valid rank_accuracy",
    ),
    "a long chain": (
        {"num_speculative_tokens": 16},
        "is 16; it must be a whole number from 1 to 15",
    ),
    "64 drafts": ({"tree": [[0]], "num_speculative_tokens": 64}, "is 64; it must be a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tree(folder, tmp_path, name):
    wrong, message = REFUSED[name]
    table = wrong.get("rank_accuracy")  # of heads.json
    heads = write_heads(folder, tmp_path / "heads", rank_accuracy=table)
    config = {"method": "medusa", "model": str(heads)} | wrong | {"rank_accuracy": None}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=message) as error:
        make(folder, speculative_config=config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", [None, 7, {}, {"0": [[0.1]]}, {"0": [[2.0]] * COUNT},
                                   {"0": [["a"]] * COUNT}, {"0": [[]] * COUNT},
                                   {"0": [[0.0]] * COUNT}])  # fmt: skip
def test_accuracies_of_another_form(folder, tmp_path, table):
    heads = write_heads(folder, tmp_path / "heads", rank_accuracy=table)
    with pytest.raises(ConfigError, match="no valid rank_accuracy"):
        with_heads(folder, heads, "auto", config={"tree": "auto"})


def test_accuracies_are_a_mean_of_temperatures(folder, tmp_path):
    worse = [[rate / 2 for rate in head] for head in TABLE]
    heads = write_heads(folder, tmp_path / "heads", rank_accuracy={"0": TABLE, "1": worse})
    llm = with_heads(folder, heads, "auto", config={"tree": "auto"})
    wanted = np.mean([TABLE, worse], axis=0).tolist()
    assert llm.engine.runner.speculator.proposer.tree == tuple(grown(wanted, 31))
    assert json.loads((heads / "heads.json").read_text())["rank_accuracy"]["0"] == TABLE


ANSWERS = {
    "a parent too few": (Draft([1, 2], None, [-1]), "2 drafts with 1 parents"),
    "a parent behind": (
        Draft([1, 2], None, [1, -1]),
        "draft 0 has parent 1; it must be an earlier",
    ),
    "its own parent": (Draft([1, 2], None, [-1, 1]), "draft 1 has parent 1"),
    "before the root": (Draft([1], None, [-2]), "has parent -2"),
    "twins": (Draft([1, 1], None, [-1, -1]), "same parent and token"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_proposer_that_returns_no_tree_is_left_out(folder, caplog, name):
    answer, message = ANSWERS[name]
    proposer = Now(lambda rows, _: [answer for _ in rows])
    llm = make(folder, speculative_config={"method": proposer, "num_speculative_tokens": 4})
    with caplog.at_level(logging.WARNING):
        found = generate(llm, [LONG[:9]], params_of(12, temperature=0.0))
    assert message in caplog.text
    assert found == generate(make(folder), [LONG[:9]], params_of(12, temperature=0.0))


def test_a_chain_with_parents_is_a_chain():
    assert valid_tree([-1, 0, 1], [5, 5, 5]) is None
    assert valid_tree([-1, 0, 0, 7], [5, 5, 6]) == Tree((ROOT, 0, 0))
