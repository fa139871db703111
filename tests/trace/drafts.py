"""Proposers whose drafts are right as often as a test wants: they ask a plain engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from minillm import LLM
from minillm.speculative.proposer import DraftRow
from tests.engine.small import make

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
LONGEST = 28  # tokens of an answer with its drafts


@cache
def plain_of(folder: Path) -> tuple[LLM, dict[tuple[object, ...], list[list[int]]]]:
    """A plain engine, and what is known of its answers."""
    return make(folder), {}


class Truth:
    """Drafts what the sequence will be, but for a share of `wrong` tokens."""

    def __init__(self, folder: Path, wrong: float = 0.0):
        self.wrong, self.rng = wrong, random.Random(0)
        self.plain, self.known = plain_of(folder)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The next tokens of each row."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        new, params = row.new, replace(row.new.params, stop=[], prompt_logprobs=None)
        prompt = list(new.token_ids[: new.num_prompt_tokens])
        if (key := (*prompt, repr(params))) not in self.known:
            most = min(LONGEST, (params.max_tokens or LONGEST) + 8)
            (output,) = self.plain.generate(
                [prompt], replace(params, max_tokens=most), use_tqdm=False
            )
            self.known[key] = [list(each.token_ids) for each in output.outputs]
        place = len(row.token_ids) - len(prompt)
        drafts = self.known[key][new.sample_index][place : place + row.num_drafts]
        return [each if self.rng.random() >= self.wrong else (each + 1) % 256 for each in drafts]


def speculating(proposer: Any, num_tokens: int = 4) -> dict[str, Any]:
    """The arguments of an engine with it."""
    return {"speculative_config": {"method": proposer, "num_speculative_tokens": num_tokens}}
