"""How often each rank of each head is the token that comes: what token trees are built from.

Measured in an engine that drafts nothing: at each position the heads' tokens are ranked as for a
tree, with the noise of the target, and compared with what the target then says.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minillm.api.sampling_params import SamplingParams
from minillm.execution.runner import runner_of
from minillm.lab.training import own_text
from minillm.llm import LLM
from minillm.scheduling.plan import StepPlan
from minillm.speculative.medusa import Medusa
from minillm.speculative.proposer import DraftRow

RANKS, PROMPTS = 10, 48


class Watcher:
    """A proposer that drafts nothing, and keeps what it would have drafted."""

    def __init__(self, medusa: Medusa):
        self.medusa = medusa
        self.seen: list[tuple[Sequence[int], int, np.ndarray]] = []

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's block copies and swaps."""
        self.medusa.follow(plan)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Nothing; keeps the ranked tokens of all heads."""
        found = self.medusa.ranks(rows, self.medusa.heads.count, RANKS).numpy()
        for i, row in enumerate(rows):  # the list of tokens grows later
            self.seen.append((row.token_ids, len(row.token_ids), found[:, :, i]))
        return [[] for _ in rows]

    def accuracy(self) -> list[list[float]]:
        """By head and rank; forgets what it saw."""
        right, total = np.zeros((self.medusa.heads.count, RANKS)), 0
        for token_ids, place, found in self.seen:
            truth = token_ids[place : place + len(right)]
            if len(truth) == len(right):
                right += (found == np.array(truth)).T
                total += 1
        self.seen = []
        return [[round(float(rate), 3) for rate in head] for head in right / max(total, 1)]


def rank_accuracy(
    model: str, heads: Path, text: Path | None = None
) -> dict[str, list[list[float]]]:
    """By temperature, [heads, ranks], on continuations of held-out prompts."""
    config = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 1}
    new = own_text.NEW
    with LLM(model, speculative_config=config, max_num_seqs=PROMPTS,
             max_model_len=own_text.PROMPT + new,
             enable_prefix_caching=False, disable_log_stats=True) as llm:  # fmt: skip
        speculator = runner_of(llm.engine.runner).speculator
        if speculator is None or not isinstance(speculator.proposer, Medusa):
            raise TypeError("the engine has no heads.")
        watcher = speculator.proposer = Watcher(speculator.proposer)
        pieces, found = own_text.pieces_of(llm, text)[1][:PROMPTS], {}
        for temperature in own_text.TEMPERATURES:
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=new, ignore_eos=True)
                for i in range(len(pieces))
            ]
            given = [{"prompt_token_ids": piece.tolist()} for piece in pieces]
            llm.generate(given, params, use_tqdm=False)
            found[f"{temperature:g}"] = watcher.accuracy()
    return found
