"""Scheduling and admission policies, as pure functions; add your own here.

A scheduling policy gives each request a key. Waiting sequences are admitted in ascending order of
their keys; the running sequence with the largest key is preempted first. If the first waiting
sequence does not fit, those behind it wait, too. So a request waits only for requests that the
policy puts ahead of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minillm.scheduling.request import Key, Request, Sequence

TOKENS_PER_PLACE = 16  # tokens that move a request by one place in the queue
WINDOW = 128  # number of waiting sequences looked up in the prefix cache per step


@dataclass(frozen=True)
class Policy:
    """A scheduling policy: `key(request, arrival, num_cached)`, the smallest key first.

    `arrival` is the request's number in order of arrival. With `reads_cache` the keys of the first
    `WINDOW` waiting sequences are computed in every step, with `num_cached` tokens in the prefix
    cache. Otherwise `num_cached` is 0 and a key is computed once.

    `bound(longest)` is the maximum number of later arrivals that overtake a request if prompts have
    at most `longest` tokens; without a bound a request may starve. The tests hold a policy to it.
    """

    key: Callable[[Request, int, int], Key]
    reads_cache: bool = False
    bound: Callable[[int], int] | None = None


def fcfs(request: Request, arrival: int, num_cached: int) -> Key:
    """First come, first served: no request is overtaken."""
    return (arrival,)


def priority(request: Request, arrival: int, num_cached: int) -> Key:
    """The lowest `priority` first. A request may starve: any number of others may overtake it."""
    return (request.priority, arrival)


def shortest_prefill_first(request: Request, arrival: int, num_cached: int) -> Key:
    """Short prompts first: a request moves back one place per 16 prompt tokens.

    Fewer than L / 16 later arrivals overtake a prompt of L tokens.
    """
    return (arrival + len(request.prompt_token_ids) / TOKENS_PER_PLACE, arrival)


def longest_prefix_match(request: Request, arrival: int, num_cached: int) -> Key:
    """Cached prompts first, before their blocks are evicted: a request moves forward one place per
    16 cached tokens.

    With prompts of at most L tokens, fewer than L / 16 later arrivals overtake a request.
    """
    return (arrival - num_cached / TOKENS_PER_PLACE, arrival)


def places(longest: int) -> int:
    """Whole places below longest / 16: the most later arrivals that overtake a request."""
    return max(-(-longest // TOKENS_PER_PLACE) - 1, 0)


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs, bound=lambda longest: 0),
    "priority": Policy(priority),
    "shortest_prefill_first": Policy(shortest_prefill_first, bound=places),
    "longest_prefix_match": Policy(longest_prefix_match, reads_cache=True, bound=places),
}


def watermark(sequence: Sequence, block_size: int) -> int:
    """Blocks for the tokens known so far, and one for each completion that will fork from it.

    Blocks for later tokens are not reserved: many sequences run at once, and some may be preempted.
    Admission keeps the fraction `SchedulerConfig.watermark` of the pool free, so that running
    sequences can grow.
    """
    return -(-sequence.num_tokens // block_size) + sequence.num_forks


def reserve_max(sequence: Sequence, block_size: int) -> int:
    """Blocks for `max_tokens` new tokens of every completion: no sequence is preempted, but most of
    the reserved blocks are never written."""
    request = sequence.request
    shared = len(request.prompt_token_ids) // block_size
    return shared + sequence.num_seqs * (-(-request.max_computed // block_size) - shared)


ADMISSIONS: Mapping[str, Callable[[Sequence, int], int]] = {
    "watermark": watermark,
    "reserve_max": reserve_max,
}
