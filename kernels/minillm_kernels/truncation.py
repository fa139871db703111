"""Top-k and top-p without a sort.

Top-k and top-p keep a prefix of the tokens in descending order, ties by id. The prefix is described
by its last token, the *cut*: the token's distance from the best logit, and its id. A search for the
cut counts the weight within a distance; a token weighs 1 for top-k and its probability for top-p::

    distance(token) = the bits of (best logit - logit) / temperature       an ordered integer
    top-k:  the smallest distance that contains k tokens
    top-p:  the smallest distance that contains a fraction p of the mass after top-k

The bits of non-negative floats have the order of their values, so a bisection of 31-bit integers
ends at the exact edge. A pass tests three distances: the middle in bits, which limits the search to
31 passes, and two in value, which divide the range of typical logits into quarters. When few enough
tokens are left, they are gathered, and the search continues among them.

Masses are exp(-distance) as integers, in units of 2^-44 for 2^18 tokens. Integer sums are exact, so
they do not depend on the order of blocks, the batch or the number of warps.

Shapes: `logits` [K, V] -> float32 [K, V]; float32, float16 or bfloat16, any row stride.

Memory: a row is read once for its best logit and once to write the result, by programs of one block
each: (2 b + 4) K V bytes with logits of b bytes, the second read from the L2 cache if the batch
fits (50 MB of an H100 are 82 rows of 152k float32). One program searches a row, reading it from the
L2 cache: once for the total, two or three times to narrow, once to gather; in the worst case, if
more than `Config.gather` tokens remain, 31 times more. Operations: about 40 per logit and pass,
which on the 128 lanes of one multiprocessor takes longer than the read.

Top-k: Fan et al. (2018); top-p: Holtzman et al. (2019); selection by pivots without a sort, as in
FlashInfer (Ye et al., 2025).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minillm_kernels.launch import arch, padded, tl, triton

FARTHEST = tl.constexpr(0x7F800000)  # distance of a token with the logit -inf
NOWHERE = tl.constexpr(0x7FFFFFFF)  # larger than the distance of any token
# 4.0 and 10.0, the first two pivots: nuclei of language models usually end near these distances.
NEAR = tl.constexpr(0x40800000)
MIDDLE = tl.constexpr(0x41200000)


@dataclass(frozen=True)
class Config:
    """Sizes of the two kinds of programs; results do not depend on them.

    Attributes:
        block: tokens of a program that processes one block of the vocabulary.
        num_warps: warps of such a program.
        search_block: tokens that a program searching a whole row reads at a time.
        search_warps: warps of such a program.
        gather: number of tokens from which on they are gathered; at most `search_block`.
    """

    block: int
    num_warps: int
    search_block: int
    search_warps: int
    gather: int


PER_ROW = ("top_k_ptr", "top_p_ptr", "temperature_ptr", "min_p_ptr")
LATENCY = Config(block=1024, num_warps=4, search_block=2048, search_warps=16, gather=2048)
THROUGHPUT = replace(LATENCY, block=2048, num_warps=8)
FEW_ROWS = 16
INTERPRETED_BLOCK = 16_384  # the cost of an interpreted operation does not depend on its size


def pick_config(num_rows: int, vocab_size: int) -> Config:
    """Small blocks for few rows, so that the programs fill all multiprocessors."""
    if arch() == 0:
        block = min(padded(vocab_size), INTERPRETED_BLOCK)
        return Config(block, 4, block, 4, min(block, 512))
    return LATENCY if num_rows <= FEW_ROWS else THROUGHPUT


# ---- distances and masses ---------------------------------------------------------------------


@triton.jit
def nan_if_any(best, values):
    """The best of some values; NaN if one of them is, which a maximum leaves out."""
    return tl.where(tl.max((values != values).to(tl.int32), axis=0) > 0, float("nan"), best)


@triton.jit
def best_of_row(values_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """The row's best logit, from the best of each block; NaN if it has one."""
    blocks = tl.arange(0, BLOCKS)
    values = tl.load(
        values_ptr + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf")
    )
    return nan_if_any(tl.max(values, axis=0), values)


@triton.jit
def scale(logits, peak, temperature, floor):
    """(logit - best) / temperature, rounded as in torch; at most 0, and -inf below `floor`."""
    scaled = logits - peak
    if temperature != 1.0:
        scaled = tl.div_rn(scaled, temperature)
    return tl.where(scaled < floor, float("-inf"), scaled)


@triton.jit
def scaling(temperature_ptr, min_p_ptr, row):
    """Temperature of a row, and log(min_p), rounded once; -inf if min_p is 0."""
    temperature, min_p = tl.load(temperature_ptr + row), tl.load(min_p_ptr + row)
    floor = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)).to(tl.float32)
    return temperature, tl.where(min_p > 0, floor, float("-inf"))


@triton.jit
def distance_of(scaled):
    """The ordered integer of a number that is at most 0."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mass_of(distances, unit):
    """exp(-distance) as an integer; 0 for the farthest distance and for NaN."""
    depth = tl.minimum(distances, FARTHEST).to(tl.float32, bitcast=True)
    return (tl.exp(-depth) * unit).to(tl.int64)


@triton.jit
def _distances(row, ids):
    """Distances of the tokens `ids` of a row from its best token, NOWHERE after its end."""
    row_ptr, size, peak, temperature, floor, _ = row
    logits = tl.load(row_ptr + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    distances = distance_of(scale(logits, peak, temperature, floor))
    return tl.where(ids < size, distances, NOWHERE)


@triton.jit
def _weigh(row, by_mass, a, b, c, BLOCK: tl.constexpr):
    """Weight and number of the tokens within the distances a, b and c, in one pass."""
    size = row[1]
    weight_a = tl.zeros((BLOCK,), tl.int64)
    weight_b, weight_c = weight_a, weight_a
    count_a = tl.zeros((BLOCK,), tl.int32)
    count_b, count_c = count_a, count_a
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        distances = _distances(row, ids)
        weights = tl.where(by_mass, mass_of(distances, row[5]), 1)
        weight_a += tl.where(distances <= a, weights, 0)
        weight_b += tl.where(distances <= b, weights, 0)
        weight_c += tl.where(distances <= c, weights, 0)
        count_a += (distances <= a).to(tl.int32)
        count_b += (distances <= b).to(tl.int32)
        count_c += (distances <= c).to(tl.int32)
    return (
        tl.sum(weight_a, axis=0),
        tl.sum(weight_b, axis=0),
        tl.sum(weight_c, axis=0),
        tl.sum(count_a, axis=0),
        tl.sum(count_b, axis=0),
        tl.sum(count_c, axis=0),
    )


@triton.jit
def cut_off(scaled, ids, cuts_ptr, row):
    """-inf for tokens after the row's cut."""
    edge, last = tl.load(cuts_ptr + 2 * row), tl.load(cuts_ptr + 2 * row + 1)
    distances = distance_of(scaled)
    stays = (distances < edge) | ((distances == edge) & (ids <= last))
    return tl.where(stays, scaled, float("-inf"))


# ---- the search -------------------------------------------------------------------------------


@triton.jit
def _tighten(low, high, inside, distance, weight, count, goal):
    """Narrow the search by one result: the edge is in (low, high], with `inside` tokens within
    high."""
    reached = weight >= goal
    lower = reached & (distance < high)
    inside = tl.where(lower, count, inside)
    high = tl.where(lower, distance, high)
    low = tl.where(reached, low, tl.maximum(low, distance))
    return low, high, inside


@triton.jit
def _pivots(low, high):
    """Three distances in (low, high): a quarter and three quarters in value, a half in bits."""
    nearest = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    farthest = tl.minimum(high, FARTHEST - 1).to(tl.float32, bitcast=True)
    a = (0.75 * nearest + 0.25 * farthest).to(tl.int32, bitcast=True)
    b = low + (high - low) // 2
    c = (0.25 * nearest + 0.75 * farthest).to(tl.int32, bitcast=True)
    a = tl.minimum(tl.maximum(a, low + 1), high - 1)
    c = tl.minimum(tl.maximum(c, low + 1), high - 1)
    return a, b, c


@triton.jit
def _narrow(row, by_mass, low, high, inside, goal, enough, BLOCK: tl.constexpr):
    """Search until the edge is found (high = low + 1) or few enough tokens are within high."""
    while (high - low > 1) & (inside > enough):
        a, b, c = _pivots(low, high)
        weight_a, weight_b, weight_c, count_a, count_b, count_c = _weigh(
            row, by_mass, a, b, c, BLOCK
        )
        low, high, inside = _tighten(low, high, inside, a, weight_a, count_a, goal)
        low, high, inside = _tighten(low, high, inside, b, weight_b, count_b, goal)
        low, high, inside = _tighten(low, high, inside, c, weight_c, count_c, goal)
    return low, high, inside


@triton.jit
def _share(total, top_p):
    """A fraction p of the total mass, rounded up to a whole number of units; at least one."""
    product = total.to(tl.float64) * top_p.to(tl.float64)
    goal = product.to(tl.int64)
    goal += (goal.to(tl.float64) < product).to(tl.int64)
    return tl.maximum(goal, 1)


@triton.jit
def _gather(row, high, distances_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Store distances and ids of all tokens within `high`, in the order of ids; returns how
    many."""
    size = row[1]
    count = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        distances = _distances(row, ids)
        stays = (distances <= high).to(tl.int32)
        places = count + tl.cumsum(stays, axis=0) - 1
        tl.store(distances_ptr + places, distances, mask=stays != 0)
        tl.store(ids_ptr + places, ids, mask=stays != 0)
        count += tl.sum(stays, axis=0)
    tl.debug_barrier()  # other threads load what this thread stored
    return count


@triton.jit
def _edge_among(distances, weights, low, high, goal):
    """The edge in (low, high], searched among tokens in registers.

    Both ends move to existing distances, so the search ends between neighbours.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(distances <= middle, weights, 0), axis=0) >= goal:
            high = tl.max(tl.where(distances <= middle, distances, -1), axis=0)
        else:
            low = tl.min(tl.where(distances > middle, distances, NOWHERE), axis=0) - 1
    return high


@triton.jit
def _finish_among_gathered(
    row, distances_ptr, ids_ptr, count, low, high, goal, top_p, by_count, GATHER: tl.constexpr
):
    """The edge after top-k and top-p, and the last id at the edge that is kept."""
    last = row[1]  # all
    places = tl.arange(0, GATHER)
    distances = tl.load(distances_ptr + places, mask=places < count, other=NOWHERE)
    masses = mass_of(distances, row[5])
    high = _edge_among(distances, tl.where(by_count, 1, masses), low, high, goal)
    if top_p < 1:
        if by_count:
            left = tl.where(distances <= high, masses, 0)
            goal = _share(tl.sum(left, axis=0), top_p)
            high = _edge_among(distances, left, tl.full((), -1, tl.int32), high, goal)
        before = tl.sum(tl.where(distances < high, masses, 0), axis=0)
        mass = tl.max(tl.where(distances == high, masses, 1), axis=0)  # of each at the edge
        needed = (goal - before + mass - 1) // mass
        ties = (distances == high).to(tl.int32)
        if needed < tl.sum(ties, axis=0):
            is_last = (ties != 0) & (tl.cumsum(ties, axis=0) == needed)
            last = tl.load(ids_ptr + tl.max(tl.where(is_last, places, 0), axis=0))
    return high, last


@triton.jit
def _id_of_tie(row, edge, number, BLOCK: tl.constexpr):
    """The id of the `number`-th token (from 1) at the distance `edge`."""
    size = row[1]
    seen, last = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        distances = _distances(row, ids)
        ties = (distances == edge).to(tl.int32)
        is_last = (ties != 0) & (seen + tl.cumsum(ties, axis=0) == number)
        last = tl.maximum(last, tl.max(tl.where(is_last, ids, 0), axis=0))
        seen += tl.sum(ties, axis=0)
    return last


@triton.jit
def _finish_in_row(row, high, goal, top_p, by_count, BLOCK: tl.constexpr):
    """`_finish_among_gathered` for too many tokens to gather; `high` is the edge of top-k."""
    size = row[1]
    last = size
    if top_p < 1:
        if by_count:
            total, near, middle, _, _, _ = _weigh(row, True, high, NEAR, MIDDLE, BLOCK)
            goal = _share(total, top_p)
            low = tl.full((), -1, tl.int32)
            low, high, _ = _tighten(low, high, size, NEAR, near, size, goal)
            low, high, _ = _tighten(low, high, size, MIDDLE, middle, size, goal)
            low, high, _ = _narrow(row, True, low, high, size, goal, 0, BLOCK)
        before, within, _, nearer, ties, _ = _weigh(row, True, high - 1, high, high, BLOCK)
        ties -= nearer
        mass = tl.maximum((within - before) // tl.maximum(ties, 1), 1)  # of each at the edge
        needed = (goal - before + mass - 1) // mass
        if needed < ties:
            last = _id_of_tie(row, high, needed, BLOCK)
    return high, last


@triton.jit
def _search(
    row, top_k, top_p, by_count, distances_ptr, ids_ptr, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    """The cut of one row: distance of the edge, and the last id at the edge that is kept."""
    size = row[1]
    near, middle, total, near_count, middle_count, _ = _weigh(
        row, by_count == 0, NEAR, MIDDLE, FARTHEST, BLOCK
    )
    goal = tl.where(by_count, top_k.to(tl.int64), _share(total, top_p))
    low, high = tl.full((), -1, tl.int32), tl.full((), FARTHEST, tl.int32)
    low, high, inside = _tighten(low, high, size, NEAR, near, near_count, goal)
    low, high, inside = _tighten(low, high, inside, MIDDLE, middle, middle_count, goal)
    low, high, inside = _narrow(row, by_count == 0, low, high, inside, goal, GATHER, BLOCK)
    if inside <= GATHER:
        count = _gather(row, high, distances_ptr, ids_ptr, BLOCK)
        edge, last = _finish_among_gathered(
            row, distances_ptr, ids_ptr, count, low, high, goal, top_p, by_count, GATHER
        )
    else:
        edge, last = _finish_in_row(row, high, goal, top_p, by_count, BLOCK)
    return edge, last


@triton.jit(do_not_specialize_on_alignment=PER_ROW)  # see `sampling._draw`
def _cut_of_row(
    logits_ptr, values_ptr, top_k_ptr, top_p_ptr, temperature_ptr, min_p_ptr,
    distances_ptr, ids_ptr, cuts_ptr, row_stride, size, num_blocks, unit,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Program (row): its cut, `cuts[row]` = (edge distance, last id at the edge)."""
    index = tl.program_id(0)
    top_k, top_p = tl.load(top_k_ptr + index), tl.load(top_p_ptr + index)
    by_count = (top_k > 0) & (top_k < size)
    searches = by_count | (top_p < 1)
    temperature, floor = 1.0, float("-inf")
    if temperature_ptr is not None:
        temperature, floor = scaling(temperature_ptr, min_p_ptr, index)
        searches = searches & (temperature > 0)
    edge, last = tl.full((), FARTHEST, tl.int32), size
    if searches:
        peak = best_of_row(values_ptr, index, num_blocks, BLOCKS)
        row_ptr = logits_ptr + index.to(tl.int64) * row_stride
        row = (row_ptr, size, peak, temperature, floor, unit)
        distances_ptr += index * GATHER
        ids_ptr += index * GATHER
        edge, last = _search(row, top_k, top_p, by_count, distances_ptr, ids_ptr, BLOCK, GATHER)
    tl.store(cuts_ptr + 2 * index, edge)
    tl.store(cuts_ptr + 2 * index + 1, last)


def find_cuts(
    logits: Tensor,
    best_values: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    config: Config,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The cut of each row, after temperature and min-p if they are given: int32 [K, 2].

    A token is kept if (distance, id) <= (cut[0], cut[1]) in lexicographic order. `best_values`
    [K, blocks] comes from `best_of_blocks`.
    """
    num_rows, vocab_size = logits.shape
    cuts = torch.empty((num_rows, 2), dtype=torch.int32, device=logits.device)
    gathered = torch.empty((2, num_rows, config.gather), dtype=torch.int32, device=logits.device)
    _cut_of_row[(num_rows,)](
        logits, best_values, top_k, top_p, temperature, min_p, gathered[0], gathered[1], cuts,
        logits.stride(0), vocab_size, best_values.shape[1], 2.0 ** (62 - vocab_size.bit_length()),
        BLOCKS=padded(best_values.shape[1]), BLOCK=config.search_block, GATHER=config.gather,
        num_warps=config.search_warps,
    )  # fmt: skip
    return cuts
