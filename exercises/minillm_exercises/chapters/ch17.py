"""Chapter 17: trees that are watched, passes over trees, and trees that grow at random."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from minillm import LLM
from minillm.models.batches import BlockTables, make_batch
from minillm.models.forward_pass import Chunk
from minillm.models.trees import ROOT, Tree, tree_batch
from minillm.speculative.heads import HEADS_FILE, heads_folder
from minillm.speculative.proposer import Draft, DraftRow
from minillm.speculative.trees import Path, Table
from minillm_exercises.chapters import ch16


@dataclass(frozen=True)
class Step:
    """A step: drafts behind `known` tokens, the accepted nodes, and the token that comes last."""

    known: tuple[int, ...]
    tree: Tree
    drafts: tuple[int, ...]
    path: tuple[int, ...]
    last: int


class Watch:
    """Notes what the proposer of an engine drafts, and the seconds that it needs."""

    def __init__(self, llm: LLM):
        runner: Any = llm.engine.runner
        self.llm, self.asked, self.seconds = llm, runner.speculator.proposer, 0.0
        self.rounds = list[tuple[int, tuple[int, ...], Tree]]()
        runner.speculator.proposer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asked, name)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """The drafts of each row."""
        began = perf_counter()
        given: list[Draft] = self.asked.propose(rows)
        self.seconds += perf_counter() - began
        for row, draft in zip(rows, given, strict=True):
            parents = draft.parents or range(ROOT, len(draft.token_ids) - 1)
            self.rounds.append((len(row.token_ids), tuple(draft.token_ids), Tree(tuple(parents))))
        return given

    def write(self, prompt: Sequence[int], **params: Any) -> tuple[list[int], list[Step]]:
        """The tokens after a prompt, and the steps with drafts, judged by the text."""
        self.rounds, self.seconds = [], 0.0
        tokens, _ = ch16.write(self.llm, prompt, **params)
        text, found = (*prompt, *tokens), list[Step]()
        for start, drafts, tree in self.rounds:
            samples = [dict(enumerate(text[start:])).get(depth, -1) for depth in tree.depths]
            path = tuple(tree.walk(samples, drafts))
            last = text[min(start + len(path), len(text)) - 1]
            found.append(Step(text[:start], tree, drafts, path, last))
        return tokens, found


class Pass:
    """Passes of a model over drafts behind a text: nothing of them is kept."""

    def __init__(self, llm: LLM, text: Sequence[int], most: int = 64):
        self.run, self.start = llm.engine.forward_pass, len(text)
        self.kv = self.run.allocate(1, self.start + most)
        self.tables = BlockTables(1, 1, self.run.device)
        self.run.run([Chunk(0, 0, list(text))], self.kv)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], tree: Tree | None = None) -> Tensor:
        """Logits behind each node of a tree, or each token of a chain: [n, V]."""
        parts = self.tables, self.kv.block_size, [0], [self.start], [len(tokens)], list(tokens)
        batch = make_batch(*parts)
        if tree is not None:
            batch = tree_batch(batch, [self.start], [len(tokens)], [tree])
        return self.run.model.logits(self.run.model(batch, self.kv)).clone()


def row_seconds(llm: LLM, trees: Mapping[int, Tree | None], behind: int) -> dict[int, float]:
    """Median seconds of a pass with so many rows over a tree, or a chain, `behind` some tokens."""
    passes = Pass(llm, [1] * behind)
    return ch16.sweeps(lambda rows: passes.logits([1] * rows, trees[rows]), [*trees], "cpu")


def paths_of(tree: Tree) -> list[list[int]]:
    """The nodes from the root to each leaf."""
    ends = {*range(len(tree.depths))} - {parent + 1 for parent in tree.parents}
    return [tree.paths[node, : tree.depths[node] + 1].tolist() for node in sorted(ends)]


def accuracies(heads: str, temperature: str) -> list[list[float]]:
    """The stored table of draft heads, [heads, ranks]: how often the token of a rank is right."""
    data = json.loads((heads_folder(heads) / HEADS_FILE).read_text("utf-8"))
    return data["rank_accuracy"][temperature]


def random_paths(accuracy: Table, most: int, seed: int) -> list[Path]:
    """A tree that grows at random: the first child or the next sibling of any draft is next."""
    dice, found = Random(seed), list[Path]()
    edge: list[Path] = [(0,)]
    while edge and len(found) < most:
        path = edge.pop(dice.randrange(len(edge)))
        found.append(path)
        near = [(*path[:-1], path[-1] + 1), (*path, 0)]
        edge += [p for p in near if len(p) <= len(accuracy) and p[-1] < len(accuracy[0])]
    return found
