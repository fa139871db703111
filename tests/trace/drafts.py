"""Proposers whose drafts are right as often as a test wants: they ask a plain engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minillm.speculative.proposer import DraftRow
from tests.engine.small import make

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
LONGEST = 28  # tokens of an answer with its drafts


class Truth:
    """Drafts what the sequence will be, but for a share of `wrong` tokens."""

    def __init__(self, folder: Path, wrong: float = 0.0):
        self.plain, self.wrong, self.rng = make(folder), wrong, random.Random(0)
        self.known: dict[tuple[object, ...], list[int]] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The next tokens of each row."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        new = row.new
        prompt = list(new.token_ids[: new.num_prompt_tokens])
        key = (*prompt, new.params.seed, new.sample_index, tuple(new.params.stop_token_ids))
        if key not in self.known:
            most = min(LONGEST, (new.params.max_tokens or LONGEST) + 8)
            params = replace(new.params, n=new.sample_index + 1, max_tokens=most, stop=[])
            (output,) = self.plain.generate([prompt], params, use_tqdm=False)
            self.known[key] = list(output.outputs[new.sample_index].token_ids)
        place = len(row.token_ids) - len(prompt)
        drafts = self.known[key][place : place + row.num_drafts]
        return [each if self.rng.random() >= self.wrong else (each + 1) % 256 for each in drafts]


def speculating(proposer: Any, num_tokens: int = 4) -> dict[str, Any]:
    """The arguments of an engine with it."""
    return {"speculative_config": {"method": proposer, "num_speculative_tokens": num_tokens}}
