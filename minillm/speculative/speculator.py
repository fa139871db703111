"""The executor's side of speculative decoding: adds drafts to the rows of a plan."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.errors import in_one_line
from minillm.models.trees import Tree
from minillm.scheduling.plan import NewSequence, Row, StepPlan
from minillm.speculative.proposer import Draft, DraftRow, Proposer
from minillm.speculative.trees import valid_tree

DIST_ERROR = 1e-3  # maximum error of the sum of a distribution

logger = logging.getLogger(__name__)


class Drafted(Protocol):
    """What the speculator reads and writes of a sequence (the runner's `SequenceRow`)."""

    row: int
    new: NewSequence
    token_ids: list[int]
    drafts: list[int]
    dist: Tensor | None
    tree: Tree | None


Answer = tuple[list[int], Tensor | None, Tree | None]  # drafts, their distributions, their tree


class Speculator:
    """Calls a proposer and validates its drafts. If the proposer fails, one warning is logged and
    decoding continues without drafts."""

    def __init__(self, proposer: Proposer, vocab_size: int):
        self.vocab_size = vocab_size
        self.proposer: Proposer | None = proposer
        # row, drafts, maximum number, whether others may replace them -> drafts; with constraints
        self.constrain: Callable[[int, list[int], int, bool], list[int]] | None = None
        # row -> whether it can verify a token tree; without, trees are refused
        self.takes_tree: Callable[[int], bool] | None = None
        self._has_seen_dist = False

    def draft(self, plan: StepPlan, states: Mapping[int, Drafted]) -> list[Row]:
        """The rows of a plan, each with the number of drafts that were proposed. The draft tokens
        are stored in `SequenceRow.drafts`."""
        self.forget(plan.dropped)  # first: a dropped sequence may also be among the new ones
        self._call("follow", plan)
        for new in plan.new:
            self._call("begin", new, states[new.seq_id].token_ids)
        asked = [row for row in plan.rows if row.num_logits > 1]
        if not asked:
            return plan.rows
        wanted = [
            DraftRow(
                states[row.seq_id].new,
                states[row.seq_id].token_ids,
                row.num_logits - 1,
                states[row.seq_id].row,
            )
            for row in asked
        ]
        counts = {}
        # What a draft model has in its own cache are the drafts that it proposed.
        forces = not hasattr(self.proposer, "follow")
        for row, (drafts, dist, tree) in zip(asked, self._propose(wanted), strict=True):
            state = states[row.seq_id]
            if tree is not None and self.takes_tree is not None and not self.takes_tree(state.row):
                drafts, tree = [drafts[i] for i in tree.chain], None
            if self.constrain is not None and dist is None and tree is None:
                drafts = self.constrain(state.row, drafts, row.num_logits - 1, forces)
            counts[row.seq_id] = 1 + len(drafts)
            state.drafts, state.dist, state.tree = drafts, dist, tree
        return [
            row._replace(num_tokens=count, num_logits=count)
            if (count := counts.get(row.seq_id))
            else row
            for row in plan.rows
        ]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Remove these sequences."""
        for seq_id in seq_ids:
            self._call("forget", seq_id)

    def allocated(self) -> dict[str, int]:
        """Bytes allocated by the proposer, by name; empty if it does not report them."""
        return getattr(self.proposer, "allocated", dict)()

    def _propose(self, wanted: Sequence[DraftRow]) -> list[Answer]:
        """Validated drafts of each row."""
        nothing: list[Answer] = [([], None, None) for _ in wanted]
        given = self._call("propose", wanted)
        if given is None:
            return nothing
        try:
            if len(given) != len(wanted):
                raise ValueError(f"it returned {len(given)} drafts for {len(wanted)} sequences")
            return [self._valid(draft, row) for draft, row in zip(given, wanted, strict=True)]
        except Exception as error:
            self._give_up(error)
            return nothing

    def _valid(self, given: Sequence[int] | Draft, row: DraftRow) -> Answer:
        ids, dist, parents = given if isinstance(given, Draft) else Draft(given)
        tokens = [int(token) for token in ids[: row.num_drafts]]
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"it returned token id {token}; ids are from 0 to {self.vocab_size - 1}"
                )
        if dist is not None:
            self._check_dist(dist, len(tokens))
        tree = None if parents is None else valid_tree(parents, tokens)
        if tree is not None and self.takes_tree is None:
            raise ValueError("it returned a token tree; trees are verified strictly, and in one "
                             "process")  # fmt: skip
        return tokens, dist, tree

    def _check_dist(self, dist: Tensor, num_tokens: int) -> None:
        """Check the shape of every distribution, but the values only of the first one: reading
        values synchronises with a GPU."""
        due, given = [num_tokens, self.vocab_size], list(dist.shape)
        if given[1:] != due[1:] or given[0] < due[0] or not dist.is_floating_point():
            raise ValueError(
                f"the distribution of its drafts is {given}, {dist.dtype}; probabilities {due} are "
                "expected"
            )
        if num_tokens and not self._has_seen_dist:
            self._has_seen_dist = True
            least = float(dist.min())
            off = float((dist.sum(dim=-1, dtype=torch.float64) - 1).abs().max())
            if not (least >= 0 and off < DIST_ERROR):
                raise ValueError(
                    f"the distribution of its drafts has a value {least:.6g} and a row whose sum "
                    f"is {off:.6g} off 1; each row must be probabilities that sum to 1"
                )

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call an optional method of the proposer; None if it is missing or fails."""
        method = getattr(self.proposer, name, None)
        if method is None:
            return None
        try:
            return method(*arguments)
        except Exception as error:
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "Speculative decoding is off from now on, because its proposer failed: %s",
            in_one_line(error),
        )
        self.proposer = None
