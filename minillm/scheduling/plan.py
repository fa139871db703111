"""What the scheduler decides, as plain data for the runner; `record.py` has what people ask."""

from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.cache.manager import BlockCopy
from minillm.scheduling.request import Request


class Row(NamedTuple):
    """Tokens of one sequence to compute now: positions `start` to `start + num_tokens`.

    Its block table is the first `num_kept` blocks of the last step, then `blocks`.
    `num_samples` tokens follow the last position: none after a chunk that does not reach the end
    of what is known, several where the completions of a request part.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_samples: int
    num_kept: int
    blocks: tuple[int, ...] = ()


class NewSequence(NamedTuple):
    """A sequence that the runner does not know: admitted, resumed or forked since the last step."""

    seq_id: int
    request: Request
    sample_index: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One step. Per sequence it holds only what changed, so it is small and can be sent anywhere.

    The order matters: forget `dropped`, copy `swap_out` (device, host), then `copies`, then
    `swap_in` (host, device), then compute `rows`, of which those with one token come first. A
    block that one of these frees may be the target of the next.
    """

    step: int
    dropped: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
