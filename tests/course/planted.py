"""Bugs of the engine that the chapters' facts must find: `bug` names the chapter and the functions
that are replaced. The replacement gets the right function before its arguments."""

import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from minillm import ops
from minillm.cache.prefix import Match
from minillm.cache.radix import Overlap
from minillm.plan.cost import dtype_bytes
from minillm.sampling.sampler import Sampler
from minillm.scheduling import policies
from minillm.scheduling.record import Blocked

# By chapter, or chapter, "_" and another mechanism: what is wrong, and where.
BUGS: dict[str, list[tuple[Callable[..., Any], tuple[str, ...]]]] = {}


def with_right(wrong: Callable[..., Any], right: Any) -> Callable[..., Any]:
    """A function, and not a partial one, because only functions become methods."""
    return lambda *args, **options: wrong(right, *args, **options)


def plant(name: str) -> None:
    """Put a bug into this process; one without places puts itself there."""
    if name.partition("_")[0] in ("10", "11"):
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run here
    for wrong, places in BUGS[name]:
        if not places:
            wrong()
        for place in places:
            module, _, path = place.partition(":")
            full = module if module.startswith("minillm_") else f"minillm.{module}"
            *outer, last = path.split(".")
            owner = functools.reduce(getattr, outer, importlib.import_module(full))
            setattr(owner, last, with_right(wrong, getattr(owner, last)))


def bug(names: str, *places: str) -> Callable[[Callable[..., Any]], None]:
    """What follows is planted in `places`: a module of minillm, ":", a name or "class.name"."""

    def add(wrong: Callable[..., Any]) -> None:
        for name in names.split():
            BUGS.setdefault(name, []).append((wrong, places))

    return add


# ---- Counting: what a step reads ----------------------------------------------------------------

STEP_COST = "lab.roofline:step_cost"


@bug("00", STEP_COST)
def _(right, config, query_lens, seq_lens, **settings):
    """A table shared by both ends of the model is counted twice."""
    found = right(config, query_lens, seq_lens, **settings)
    table = config.vocab_size * config.hidden_size * dtype_bytes(found.dtype)
    return replace(found, weight_bytes=found.weight_bytes + table * int(config.tie_word_embeddings))


@bug("01", "lab.roofline:attention_widths")
def _(right, config):
    """Grouped-query attention is counted by its key-value heads: the queries per head are lost."""
    return (config.num_kv_heads * config.head_dim,) * 2


@bug("05_cache", STEP_COST)
def _(right, config, query_lens, seq_lens, **settings):
    """The cache is read once per step, as if a batch shared it."""
    found = right(config, query_lens, seq_lens, **settings)
    return replace(found, kv_read_bytes=found.kv_read_bytes // len(query_lens))


@bug("05_weights", STEP_COST)
def _(right, config, query_lens, seq_lens, **settings):
    """The weights are counted once for each sequence."""
    found = right(config, query_lens, seq_lens, **settings)
    return replace(found, weight_bytes=found.weight_bytes * len(query_lens))


@bug("10_share", STEP_COST)
def _(right, config, *lengths, **settings):
    """Every query head reads keys and values of its own."""
    found = right(config, *lengths, **settings)
    group = config.num_heads // config.num_kv_heads
    return replace(found, kv_read_bytes=found.kv_read_bytes * group)


@bug("16_weights", STEP_COST)
def _(right, *arguments, **settings):
    """The weights are counted once per row and not once per step."""
    found = right(*arguments, **settings)
    return replace(found, weight_bytes=found.weight_bytes * found.num_tokens)


# A step reads no matrices of the layers, only the head.
bug("13_bytes", "plan.parameters:Product.parameters_read")(lambda right, product, num_tokens: 0)
# A step is thought to read other experts for each of its tokens.
bug("18_distinct", "plan.parameters:expected_distinct")(
    lambda right, num_experts, per_token, num_tokens: min(num_experts, per_token * num_tokens)
)


@bug("04_rotated", "cache.spec:CacheSpec.block_values")
def _(right, spec, block_size):
    """The price of a token forgets MLA's rotated key, which is cached beside the latent."""
    return block_size * spec.value_dim if spec.value_in_key else right(spec, block_size)


@bug("10_counter", "minillm_exercises.chapters.ch10:Slow.write")
def _(right, slow, name, tile, rows=slice(None)):
    """What is written to slow memory is not counted, as if only reading moved anything."""
    before = slow.of.copy()
    right(slow, name, tile, rows)
    slow.of = before


# ---- The model ----------------------------------------------------------------------------------


@bug("02", "minillm_kernels.reference:top_p_mask")
def _(right, mass, goal):
    """Top-p stops one token early: the token that crosses p is dropped."""

    kept = mass.cumsum(dim=-1) <= goal
    kept[..., :1] = True
    return kept


# C has a top-p of its own, which is right.
bug("02", "ops.cpu_sampling:takes")(lambda *_: False)


@bug("03", "models.forward_pass:ForwardPass.batch")
def _(right, forward_pass, chunks, block_size):
    """Every step after the first rotates one position too far; the slots are right."""
    made = right(forward_pass, chunks, block_size)
    return replace(made, positions=made.positions + int(chunks[0].start > 0))


@bug("01b", "models.forward_pass:ForwardPass.batch")
def _(right, run, chunks, block_size):
    """Positions grow by two for each token, so rotations are twice as fast."""
    made = right(run, chunks, block_size)
    return replace(made, positions=made.positions * 2)


@bug("04", "ops:causal_attention")
def _(right, q, k, v, scale, window=None):
    """Query head h attends with key head h % number of key heads: groups are dealt like cards."""
    dealt = q.view(len(q), -1, len(k), q.shape[2]).transpose(1, 2).reshape(q.shape)
    out = right(dealt, k, v, scale, window)
    return out.view(len(q), len(k), q.shape[1] // len(k), -1).transpose(1, 2).reshape(out.shape)


@bug("04_latent", "layers.mla:MLAttention.__init__")
def _(right, attention, config, mla, layer, prefix):
    """MLA scales scores by the width of what is cached, not by that of a query head."""
    right(attention, config, mla, layer, prefix)
    attention.scale = (mla.kv_lora_rank + mla.qk_rope_head_dim) ** -0.5


@bug("04_room", "execution.setup:cache_spec", "models.forward_pass:cache_spec")
def _(right, config, *kind):
    """The engine makes its cache with a key head for every query head."""
    return right(config if config.mla else replace(config, num_kv_heads=config.num_heads), *kind)


@bug("18", "ops:moe_route")
def _(right, scores, bias, num_chosen, *groups, normalize=True):
    """The weights of a token's experts are its scores as they are: they do not add up to 1."""
    return right(scores, bias, num_chosen, *groups, normalize=False)


@bug("18_bias", "ops:moe_route")
def _(right, scores, bias, *rest, **more):
    """The bias of an expert is in its weight, too."""
    return right(scores if bias is None else scores + bias, None, *rest, **more)


@bug("18_everyone", "ops:moe_route")
def _(right, scores, *rest, **more):
    """All tokens of a step go to the first one's experts."""
    return right(scores[:1].expand_as(scores), *rest, **more)


@bug("18_groups", "ops:moe_route")
def _(right, scores, bias, num_chosen, *groups, normalize=True, **more):
    """Experts are chosen from all groups."""
    return right(scores, bias, num_chosen, normalize=normalize)


@bug("18_capacity", "ops:moe_experts")
def _(right, x, gate_up, down, weights, ids):
    """Every expert computes its equal share of the rows and leaves out the others."""
    kept = weights.clone()
    room = -(-ids.numel() // len(gate_up))
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        kept[rows[room:], places[room:]] = 0
    return right(x, gate_up, down, kept, ids)


@bug("20_round", "ops:add_rms_norm")
def _(right, x, residual, weight, eps):
    """The norm of a sum does not round the sum first: a boundary that sends it changes bits."""
    total = x.float() + residual.float()
    return ops.rms_norm(total, weight.float(), eps).to(x.dtype), total.to(x.dtype)


# ---- The scheduler ------------------------------------------------------------------------------

SCHEDULER = "scheduling.scheduler:Scheduler."


@bug("05", f"{SCHEDULER}schedule")
def _(right, scheduler):
    """One sequence at a time is let in: none share a step."""
    scheduler.config = replace(scheduler.config, max_num_seqs=1)
    return right(scheduler)


@bug("06", f"{SCHEDULER}_refusal")
def _(right, scheduler, budget):
    """None is admitted while any runs: batching is static again."""
    if scheduler.running:
        return Blocked.of(scheduler.waiting[0], "batch slots", 1, 0)
    return right(scheduler, budget)


@bug("06_seats", f"{SCHEDULER}_stop_running")
def _(right, scheduler, sequence):
    """The seat of the first request that ends is never given back: one fewer for all who follow."""
    right(scheduler, sequence)
    if not hasattr(scheduler, "lost"):
        scheduler.lost = True
        scheduler.num_seqs += 1


@bug("07", f"{SCHEDULER}_add_row")
def _(right, scheduler, plan, sequence, num_tokens):
    """Paging is off: a sequence gets at once, and waits for, the blocks of its longest form."""
    if not sequence.table.blocks:
        scheduler.blocks.grow(sequence.table, 0, sequence.request.max_computed)
    right(scheduler, plan, sequence, num_tokens)


@bug("07", "scheduling.admission:Admission.target")
def _(right, admission, sequence):
    return policies.reserve_max(sequence, admission.blocks.block_size)


@bug("08 22_chunk", f"{SCHEDULER}_chunk")
def _(right, scheduler, sequence, budget):
    """A prompt is always taken whole: the token budget cuts nothing."""
    return sequence.num_uncomputed


@bug("08_recompute", f"{SCHEDULER}_begin")
def _(right, scheduler, sequence, match):
    """A preempted sequence begins one block too late: that block's contents are lost."""
    right(scheduler, sequence, match)
    if sequence.num_preemptions:
        sequence.num_computed = max(sequence.num_computed, scheduler.blocks.block_size)


@bug("08_reserve", "scheduling.admission:Admission.target")
def _(right, admission, sequence):
    """Admission reserve_max sets aside what a request has, not what it may write."""
    return policies.watermark(sequence, admission.blocks.block_size)


# No step is ever planned before the tokens of the one before are there.
bug("12_ahead", f"{SCHEDULER}schedule_ahead")(lambda right, scheduler: None)
# Every plan takes all sequences that decode, so that no other plan has any.
bug("20", "scheduling.scheduler:most_decoding")(lambda right, num_running, config: num_running)
# A chunk waits for the chunk before it, as if that made a token.
bug("20_chunks", "scheduling.ahead:is_predictable")(lambda right, row, sequence: False)


# ---- The cache ----------------------------------------------------------------------------------

# Nothing is copied: who writes into a shared block writes into all holders' block.
bug("07_copy_on_write", "cache.manager:BlockManager._must_copy")(
    lambda right, manager, table, start: False
)
# Swapping silently computes again: host memory is never found to have room.
bug("08_swap", "cache.manager:BlockManager.can_swap_out")(lambda right, manager, table: False)

INDEXES = ("cache.hash_chain:HashChain.", "cache.radix:RadixTree.")


@bug("09 22_prefix", *(f"{index}match" for index in INDEXES))
def _(right, index, token_ids, limit, salt):
    """No prompt finds anything in the prefix cache: every search comes back empty."""
    return Match([], 0, index.start(salt))


# The cache salt is ignored: all users share one cache, whatever they ask for.
bug("09_salt", *(f"{index}start" for index in INDEXES))(lambda right, index, salt: right(index, ""))


@bug("09_partial", "cache.radix:overlap")
def _(right, node, token_ids):
    """The tree shares whole blocks only: the block in which two texts part is not copied."""
    return Overlap(None, 0)


@bug("09_lru", "cache.blocks:BlockPool.allocate")
def _(right, pool, count):
    """When memory ends, the cached block that was used last is evicted first."""
    if any(block in pool._index for block in islice(pool._free, count)):
        for block in list(islice(reversed(pool._free), count)):
            pool._free.move_to_end(block, last=False)
    return right(pool, count)


# ---- Kernels, graphs, packed weights ------------------------------------------------------------


def reread(module: str, old: str, new: str) -> None:
    """Replace a part of a module's text; from a file, because Triton reads the text of a kernel."""
    right = Path(importlib.util.find_spec(module).origin).read_text("utf-8")
    assert old in right, old
    path = Path(tempfile.mkdtemp()) / "module.py"
    path.write_text(right.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location(module, path)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])


FLASH = "minillm_kernels.flash_attention"
# The kernel does not shrink its sums when a tile brings a larger score.
bug("10")(
    functools.partial(
        reread, FLASH, "correction = tl.exp2(row_max - base)", "correction = tl.exp2(base - base)"
    )
)
# The causal mask is aligned at the top left: query 0 stands beside key 0.
bug("10_alignment")(
    functools.partial(reread, FLASH, "first_row + num_keys - num_queries", "first_row")
)
# The engine never splits a text: one program reads all of its keys, and the others wait.
bug("11", "minillm_kernels.paged_config:count_splits")(
    lambda right, programs, most_tiles, multiprocessors, min_tiles: 1
)
# The interpreter looks at no bounds: a kernel that reads behind a tensor is not reported.
bug("11_bounds", "minillm_kernels.interpreter:_check_bounds")(lambda right, module: None)


@bug("11_group", "minillm_kernels.paged_attention:paged_attention")
def _(right, q, k_cache, v_cache, *rest, **options):
    """The engine gives every query head a copy of its keys: a group reads them four times."""
    group = q.shape[1] // k_cache.shape[1]
    caches = [cache.repeat_interleave(group, 1) for cache in (k_cache, v_cache)]
    return right(q, *caches, *rest, **options)


# Packed weights are a little too large: faster rungs write other tokens.
bug(
    "12",
    "layers.linear_methods:PackedLinearMethod.apply",
    "layers.linear_methods:PanelLinearMethod.apply",
)(lambda right, method, matrix, x, bias: right(method, matrix, x * 1.5, bias))


@bug("12_late", "execution.runner:Runner._feed")
def _(right, runner, taken, tokens):
    """A step that was launched ahead reads the token of another sequence."""
    ahead = any(row.start + row.num_tokens > len(state.token_ids) for row, state in taken)
    right(runner, taken, tokens.roll(1) if ahead else tokens)


# Padding of a graph has slot 0, where a sequence's keys are.
bug("12_padding", "execution.graphs:DecodeGraphs._clear")(
    lambda right, graphs: graphs._host.fill(0)
)
# There is one graph only, for the largest batch, and all others are padded up to it.
bug("12_sizes", "execution.graphs:bucket_sizes")(lambda right, most: (most,))


# ---- Quantisation -------------------------------------------------------------------------------

DENSE = "quantization.quantized:Quantized.dense"


@bug("13 14_zero", DENSE)
def _(right, matrix, *arguments):
    """A weight is restored with a zero point that is one too large, the trap of GPTQ files."""
    if matrix.zeros is not None:
        matrix = replace(matrix, zeros=matrix.zeros + 1)
    return right(matrix, *arguments)


@bug("13_neighbour", DENSE)
def _(right, matrix, *arguments):
    """Every group is restored with the step of its neighbour."""
    return right(replace(matrix, scales=matrix.scales.roll(1, -1)), *arguments)


# NF4 has eight levels below 0 and seven above: the table is mirrored.
bug("13_levels", "lab.quantise.nf4:nf4_levels")(lambda right: -right().flip(0))
# The first code of a byte is in its high half when it is read.
bug("13_nibbles", "quantization.quantized:split_bytes")(
    lambda right, packed: torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
)


@bug("13_range", "lab.quantise.grid:Grid.fit")
def _(right, grid, weights):
    """A grid covers the largest magnitude on both sides, although one side has smaller weights."""
    largest = weights.abs().amax(-1, keepdim=True)
    return right(grid, largest * weights.new_tensor([-1.0, 1.0]))


@bug("14", "lab.quantise.gptq:inverse_factor")
def _(right, hessian, damp):
    """GPTQ moves the later columns in the direction of the error instead of against it."""
    upper = right(hessian, damp)
    return 2 * upper.diagonal().diag() - upper


@bug("14_factor", "lab.quantise.gptq:inverse_factor")
def _(right, hessian, damp):
    """GPTQ takes the Cholesky factor of H instead of that of its inverse."""
    damped = hessian.double()
    damped.diagonal().add_(damp * float(damped.diagonal().mean()))
    return torch.linalg.cholesky(damped, upper=True).to(hessian.dtype)


# AWQ divides by the importance instead of multiplying: large channels are made smaller.
bug("14_scales", "lab.quantise.awq:candidate")(lambda right, *arguments: 1 / right(*arguments))
# SmoothQuant forgets the inputs: its scales come from the weights alone.
bug("14_smooth", "lab.quantise.smoothquant:smooth_scales")(
    lambda right, weight, statistics, alpha=0.5: (
        1 / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)
    )
)


@bug("14_rows", "quantization.panels:PanelQuantizedMethod.apply")
def _(right, method, matrix, x, bias):
    """Products with codes round their inputs with one step for a row, not for each 32 inputs."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    return right(method, matrix, ((x / step).round() * step).to(x.dtype), bias)


@bug("15", "cache.spec:CacheSpec.block_bytes")
def _(right, spec, block_size, value_bytes):
    """A pool of codes is counted with 2 bytes for each number: it has half of its blocks."""
    return right(replace(spec, int8=False), block_size, 2)


@bug("15_nearest", "minillm_kernels.int8_cache:quantize")
def _(right, x):
    """The scale is the nearest 16-bit number, not one that is large enough."""
    scale = (x.float().abs().amax(-1) / 127).half()
    divides = (scale > 0).unsqueeze(-1)
    return torch.where(divides, (x.float() / scale.float().unsqueeze(-1)).round(), 0.0), scale


@bug("15_scale", "ops:paged_attention")
def _(right, q, pages, *arguments):
    """A position is read with the key scale of the position before."""
    if pages.key_scale is not None:
        pages = pages._replace(key_scale=pages.key_scale.roll(1, -1))
    return right(q, pages, *arguments)


@bug("15_fresh", "layers.kv_cache:KVCache.attend")
def _(right, kv, layer, query, batch, *arguments):
    """The queries of a chunk read rounded queries of their neighbour: a result depends on the
    chunk."""
    if kv.spec.int8 and len(query) > 1:
        query = query + 1e-3 * query.roll(1, 0)
    return right(kv, layer, query, batch, *arguments)


# ---- Sampling and drafts ------------------------------------------------------------------------

# Every draft is accepted, right or wrong.
bug("16", "execution.collect:match")(lambda right, samples, drafts: len(samples))


@bug("16_noise", "sampling.sampler:Sampler.choose")
def _(right, sampler, logits, rows, positions, *rest, **more):
    """All rows of a step are sampled with the noise of the first one's position."""
    first: dict[int, int] = {}
    pairs = zip(rows, positions, strict=True)
    positions = [first.setdefault(row, position) for row, position in pairs]
    return right(sampler, logits, rows, positions, *rest, **more)


# Penalties do not see the drafts before a row: all rows of a step are edited alike.
bug("16_penalty", "sampling.sampler:Sampler._edited")(
    lambda right, sampler, members, *rest: iter([members])
)


# ---- Token trees --------------------------------------------------------------------------------


@bug("17", "models.trees:Tree.walk")
def _(right, tree, samples, drafts):
    """Only the first child of a node is looked at, as in a chain."""
    path = right(tree, samples, drafts)
    firsts = [0, *(draft + 1 for draft in tree.chain)]
    return [node for node, first in zip(path, firsts, strict=False) if node == first]


# A node sees the slots before it instead of the nodes of its path.
bug("17_siblings", "models.trees:tree_batch")(
    lambda right, *arguments: replace(right(*arguments), tails=None)
)
# An accepted path stays where it was computed.
bug("17_moves", "execution.runner:keep_path")(lambda right, *arguments: None)


@bug("17_values", "speculative.trees:values")
def _(right, paths, accuracy):
    """The value of a draft is the accuracy of its own head: its parent is not asked."""
    return [accuracy[len(path) - 1][path[-1]] for path in paths]


@bug("17_grown", "speculative.trees:grown")
def _(right, accuracy, most):
    """A tree grows in the order of its depths, not of its values."""
    return [(rank,) for rank in range(min(most, len(accuracy[0])))]


# ---- Several processes --------------------------------------------------------------------------

# Every rank draws the noise of its tokens as if they began at 0.
bug("19", "parallel.sampler:draw_from_shard")(
    lambda right, logits, pack, before, *rest: right(logits, pack, 0, *rest)
)


@bug("19_cost", "lab.links:all_reduce_seconds")
def _(right, link, size, num_bytes, algorithm):
    """The cost of a ring counts half of the bytes: each is sent when it is added, and not again."""
    return right(link, size, num_bytes / 2 if algorithm == "ring" else num_bytes, algorithm)


@bug("19_gather", "parallel.sampler:ShardedSampler.choose")
def _(right, sampler, logits, *arguments, **more):
    """The logits of all ranks are gathered for every token."""
    return Sampler.choose(sampler, sampler.whole(logits), *arguments, **more)


@bug("19_heads", "parallel.split:Split.kv_heads")
def _(right, split, num_kv_heads):
    """With more ranks than KV heads, rank r holds KV head r mod (KV heads)."""
    if split.size <= num_kv_heads:
        return right(split, num_kv_heads)
    return range(split.rank % num_kv_heads, split.rank % num_kv_heads + 1)


@bug("19_order", "parallel.communicator:Communicator.add_up")
def _(right, communicator, part):
    """Each rank begins a sum with its own part: with three ranks they get different bits."""
    parts = communicator.exchange(part)
    first = communicator.rank
    part.copy_(sum(each.float() for each in [*parts[first:], *parts[:first]]))


@bug("20_boundary", "parallel.pipes:Pipe._count")
def _(right, pipe, x):
    """A stage sends what was added and what is to be added, apart: twice the bytes."""
    right(pipe, x)
    pipe.num_bytes += x.nbytes


# Layers are cut by their number: the output matrix costs nothing.
bug("20_cut", "parallel.split:cut_layers", "minillm_exercises.chapters.ch20:cut_layers")(
    lambda right, costs, output_cost, count: right(costs, 0.0, count)
)
# The second rank computes with its experts what chose the first ones.
bug("20_experts", "parallel.experts:OwnExperts.forward")(
    lambda right, own, x, weights, ids: own.experts(x, weights, ids % len(own.held))
)
# A token is sent to its experts one by one, not once to each rank that has some of them.
bug("20_travel", "lab.expert_load:ranks_of_a_token", "lab.parallel_cost:ranks_of_a_token")(
    lambda right, size, k, *groups: k
)


# ---- Measuring a server -------------------------------------------------------------------------

SERVING = "lab.benchmarks.serving."


@bug("22", f"{SERVING}measures:vllm")
def _(right, reply):
    """Latencies count from the time of sending, not from when a request was due."""
    reply.intended = reply.sent
    return right(reply)


@bug("22_one_limit", f"{SERVING}slo:met")
def _(right, reply, objectives):
    """A request is good if it meets one of the limits, not all of them."""
    return dict.fromkeys(objectives, any(right(reply, objectives).values()))


@bug("22_percentile", f"{SERVING}percentiles:percentile")
def _(right, values, q):
    """A percentile is the value at place int(q * n / 100): p99 of few values is the largest one."""
    return sorted(values)[min(int(len(values) * q / 100), len(values) - 1)]


@bug("22_refused", f"{SERVING}slo:evaluate")
def _(right, replies, objectives, wall):
    """Attainment is a share of the answered requests; those that were refused are left out."""
    return right([reply for reply in replies if reply.error is None], objectives, wall)


# ---- Structured output --------------------------------------------------------------------------


@bug("23", "structured.dfa:Dfa.mask")
def _(right, dfa, state, vocabulary):
    """A token may come if its first byte may."""
    return (vocabulary.length > 0) & (dfa.next[state][vocabulary.first] > 0)


@bug("23_late", "structured.grammars:Constraint._fill")
def _(right, constraint, position, drafts, out):
    """The mask behind each draft is that of the position before."""
    right(constraint, position, drafts, out)
    out[1:] = out[:-1].copy()


# Text that must come next is never drafted.
bug("23_forced", "structured.grammars:Constraint._forced")(lambda right, constraint, *rest: b"")
