"""Who is next, and when is there room: pure functions, for the researcher to add to.

A policy gives every sequence a key, and smaller keys go first, into the running set and back into
it; the last in this order is preempted first. The next in line is never passed over because it
does not fit, so a policy that bounds how many later arrivals may overtake bounds the wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minillm.scheduling.request import Key, Request, Sequence

TOKENS_PER_PLACE = 16
WINDOW = 128  # waiting sequences that are looked up in the prefix cache in one step


@dataclass(frozen=True)
class Policy:
    """`key(request, arrival, num_cached)` orders sequences; `arrival` counts requests.

    With `reads_cache` the first `WINDOW` by arrival are ordered anew in every step, by how many of
    their tokens are cached then; otherwise `num_cached` is 0 and the key never changes.
    """

    key: Callable[[Request, int, int], Key]
    reads_cache: bool = False


def fcfs(request: Request, arrival: int, num_cached: int) -> Key:
    """First come, first served. Nobody is overtaken."""
    return (arrival,)


def priority(request: Request, arrival: int, num_cached: int) -> Key:
    """The lowest `priority` first. No bound: urgent requests can keep others out for ever."""
    return (request.priority, arrival)


def shortest_prefill_first(request: Request, arrival: int, num_cached: int) -> Key:
    """Short prompts first: each 16 tokens of a prompt put it one place back.

    A prompt of L tokens is overtaken by fewer than L / 16 later arrivals.
    """
    return (arrival + len(request.prompt_token_ids) / TOKENS_PER_PLACE, arrival)


def longest_prefix_match(request: Request, arrival: int, num_cached: int) -> Key:
    """Cached prompts first, before their blocks are evicted: each 16 cached tokens put a request
    one place forward.

    Overtaken by fewer than L / 16 later arrivals, with L the longest prompt.
    """
    return (arrival - num_cached / TOKENS_PER_PLACE, arrival)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "fcfs": Policy(fcfs),
        "priority": Policy(priority),
        "shortest_prefill_first": Policy(shortest_prefill_first),
        "longest_prefix_match": Policy(longest_prefix_match, reads_cache=True),
    }
)


def watermark(sequence: Sequence, block_size: int) -> int:
    """Blocks a sequence must be able to get before it is admitted: for the tokens it has, and one
    for each completion that parts from it.

    Its future is left to preemption, so many run at once; a few blocks are kept free for them.
    """
    return -(-sequence.num_tokens // block_size) + sequence.num_forks


def reserve_max(sequence: Sequence, block_size: int) -> int:
    """Blocks for all tokens it may ever have: nobody is preempted, and most of the memory that is
    set aside is never written."""
    request = sequence.request
    shared = len(request.prompt_token_ids) // block_size
    return shared + sequence.num_seats * (-(-request.max_computed // block_size) - shared)


ADMISSIONS: Mapping[str, Callable[[Sequence, int], int]] = MappingProxyType(
    {"watermark": watermark, "reserve_max": reserve_max}
)
