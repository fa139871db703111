"""Proposers of token trees, and what a run with trees leaves behind."""

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from minillm import LLM
from minillm.models.forward_pass import Chunk
from minillm.models.trees import ROOT, Tree
from minillm.speculative.proposer import Draft, DraftRow
from tests.matrix.proposers import Known, key_of

CANARY = 77  # a token that only rejected drafts have, where a test says so


def random_parents(dice: Random, count: int) -> list[int]:
    reach = dice.choice([1, 2, 4, 64])
    return [dice.randrange(max(ROOT, i - 1 - reach), i) for i in range(count)]


class Branching:
    """Random trees in which what plain decoding gives is a path, seldom the first one; the other
    drafts are wrong. `wrong` is their token; None: any."""

    def __init__(self, known: Known, vocab_size: int, wrong: int | None = None):
        self.known, self.vocab_size, self.wrong = known, vocab_size, wrong
        self.num_branched = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Draft:
        dice = Random(hash((row.new.seed, row.new.sample_index, len(row.token_ids))))
        done = len(row.token_ids) - row.new.num_prompt_tokens
        truth = self.known.get(key_of(row.new), ())[done:]
        parents = random_parents(dice, dice.randint(0, row.num_drafts))
        tree, tokens, used = Tree(tuple(parents)), [], set()
        right = {ROOT}  # drafts that are accepted, and the root
        for draft, parent in enumerate(parents):
            depth = tree.depths[draft + 1] - 1
            due = truth[depth] if depth < len(truth) else None
            free = parent in right and due is not None and (parent, due) not in used
            if free and dice.random() < 0.6:
                token = due
                right.add(draft)
            else:
                token = self._other(dice, {t for p, t in used if p == parent} | {due})
            used.add((parent, token))
            tokens.append(token)
        self.num_branched += not tree.is_chain
        return Draft(tokens, None, parents)

    def _other(self, dice: Random, excluded: set[Any]) -> int:
        if self.wrong is not None and self.wrong not in excluded:
            return self.wrong
        return dice.choice([t for t in range(self.vocab_size) if t not in excluded])


class Cached:
    """Every block that enters the prefix cache, with the tokens up to its end."""

    def __init__(self, llm: LLM, monkeypatch: Any):
        self.llm, self.tokens = llm, dict[int, tuple[int, ...]]()
        blocks = llm.engine.scheduler.blocks
        index_blocks, size = blocks.index_blocks, blocks.block_size

        def watched(table: Any, token_ids: Sequence[int], num_computed: int, *rest: Any) -> None:
            index_blocks(table, token_ids, num_computed, *rest)
            for place in range(table.num_indexed):
                if (block := table.blocks[place]) in blocks.index:
                    self.tokens[block] = tuple(token_ids[: (place + 1) * size])

        monkeypatch.setattr(blocks, "index_blocks", watched)

    def assert_right(self, least: int) -> None:
        """What is cached is what a pass over its tokens gives, in every layer."""
        engine, checked = self.llm.engine, 0
        index, kv = engine.scheduler.blocks.index, engine.runner.kv
        for block, tokens in self.tokens.items():
            if block not in index:
                continue
            forward = engine.forward_pass
            own = forward.allocate(1, len(tokens))
            forward.run([Chunk(0, 0, tokens)], own)
            first = len(tokens) - kv.block_size
            for mine, theirs in ((kv.key, own.key), (kv.value, own.value)):
                right = theirs[:, 0, :, first : len(tokens)]
                torch.testing.assert_close(mine[:, block], right, atol=1e-4, rtol=1e-4)
            checked += 1
        assert checked >= least
