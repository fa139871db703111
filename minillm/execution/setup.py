"""Builds the runner of an engine: prepared model, KV cache, proposer of drafts, CUDA graphs."""

import logging
from math import ceil, inf

import torch

from minillm.api.arguments import EngineArgs
from minillm.api.speculative_config import SpeculativeConfig
from minillm.cache.spec import cache_spec
from minillm.errors import ConfigError, MinillmError, ModelNotFoundError
from minillm.execution.executor import Executor
from minillm.execution.feature_runner import FeatureRunner
from minillm.execution.graphs import CudaCapture, has_graphs
from minillm.execution.runner import Runner
from minillm.execution.warm_up import warm_up
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import ModelSource, find_folder
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TiledDecoder
from minillm.models.fixed_sums import make_deterministic
from minillm.models.fused_layers import FusedLayers
from minillm.models.loader import DTYPES, load_model
from minillm.models.packing import keep_plain, pack_weights
from minillm.ops.batch import AttentionMode
from minillm.plan import machine
from minillm.plan.cost import MemoryPlan
from minillm.quantization.kernels import pack_for_kernels
from minillm.scheduling.config import scheduler_config
from minillm.speculative.draft_model import DraftModel
from minillm.speculative.features import Features
from minillm.speculative.heads import HeadsSource
from minillm.speculative.setup import (
    DraftSource,
    build_heads,
    build_proposer,
    build_rule,
    speculation_of,
)
from minillm.speculative.shadow import Shadow
from minillm.speculative.speculator import Speculator
from minillm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def open_tokenizer(args: EngineArgs, source: ModelSource) -> Tokenizer | None:
    """The tokenizer given in `args`, else the model's; None with a warning if it has none."""
    if args.tokenizer is not None:
        return Tokenizer.from_folder(find_folder(str(args.tokenizer)))
    if source.folder is None:
        return None
    try:
        return Tokenizer.from_folder(source.folder)
    except ModelNotFoundError as error:
        logger.warning("%s", str(error))  # str: a kept log record must not keep the traceback
        return None


def limit_threads() -> None:
    """Use at most as many torch threads as processors. torch ignores a container's CPU quota, and
    with more threads than processors every matrix product waits for a time slice."""
    torch.set_num_threads(min(torch.get_num_threads(), machine.cpu_count()))


def packs(args: EngineArgs, device: torch.device) -> bool:
    """Whether weights are packed. Packed oneDNN products are not batch-invariant."""
    return device.type == "cpu" and not (args.deterministic or args.enforce_eager)


def records(args: EngineArgs, device: torch.device) -> bool:
    """Whether decode steps are captured as CUDA graphs. Deterministic mode cuts each batch into
    tiles on the host, which a graph cannot repeat; so do exchanges of experts' rows."""
    special = args.enforce_eager or args.deterministic or args.enable_expert_parallel
    shares = args.num_ranks == args.tensor_parallel_size and (
        args.distributed_executor_backend != "threads"
    )
    return has_graphs(device) and not special and shares


def record_graphs(args: EngineArgs, runner: Runner, room: int) -> None:
    """Capture the decode steps of a runner, in at most `room` bytes. Several ranks have no limit of
    bytes or time, at which one of them would stop and the others wait for it."""
    speculation, limits = speculation_of(args), [room] if args.num_ranks == 1 else [inf, inf]
    num_drafts = 0 if speculation is None else speculation.most
    runner.use_graphs(CudaCapture(runner.device), *limits, num_drafts=num_drafts)


def num_host_blocks(args: EngineArgs, plan: MemoryPlan) -> int:
    """Blocks of host memory for swapped-out sequences."""
    count = int(args.swap_space * 2**30) // plan.block_bytes
    if args.swap_space and not count:
        raise ConfigError(
            f"swap_space is {args.swap_space} GiB, which is less than one block of the KV cache "
            f"({plan.block_bytes:,} bytes)."
        )
    return count


def build_executor(
    args: EngineArgs,
    model: Decoder,
    plan: MemoryPlan,
    max_model_len: int,
    draft: DraftSource | HeadsSource | None = None,
    kind: type[Runner] = Runner,
) -> Runner:
    """The runner over the blocks of a plan, with its proposer of drafts and its CUDA graphs."""
    runs, kv, host = with_cache(args, model, plan)
    num_rows = scheduler_config(args).max_num_seqs
    if isinstance(draft, HeadsSource) and draft.method == "medusa":
        kind = FeatureRunner
    runner = kind(runs, kv, host, num_rows, ceil(max_model_len / plan.settings.block_size))
    if (speculation := speculation_of(args)) is not None:
        if isinstance(draft, HeadsSource):
            if isinstance(runner, FeatureRunner):  # which writes them; an EAGLE layer does itself
                features = runner.features
            else:
                features = Features(kv, host, runner.rows.tables, draft.state_size)
                runner.by_slot = *kv.tensors, *features.pages.tensors
            parts = features, packs(args, model.device), kv, plan.settings.max_num_batched_tokens
            proposer = build_heads(speculation, draft, model, *parts)
        elif isinstance(draft, DraftSource):
            proposer = build_draft_model(args, speculation, draft, plan, runner)
        else:
            proposer = build_proposer(speculation)
        runner.speculator = Speculator(proposer, model.config.vocab_size)
        runner.sampler.rule = build_rule(speculation)
        # The sampler of a rank is replaced later, so it is looked up when it is needed.
        runner.speculator.constrain = lambda *given: runner.sampler.edits.drafts(*given)
        if args.num_ranks == 1 and runner.sampler.rule is None:
            runner.speculator.takes_tree = lambda row: not runner.sampler.edits.follows(row)
    if args.num_ranks == 1 and records(args, model.device):
        record_graphs(args, runner, plan.graph_bytes + plan.reserve_bytes // 2)
    if has_graphs(model.device) and not args.deterministic and args.num_ranks == 1:
        warm_up(runner, plan.settings.max_num_batched_tokens)
    return runner


def with_cache(
    args: EngineArgs, model: Decoder, plan: MemoryPlan
) -> tuple[Decoder | TiledDecoder, KVCache, KVCache | None]:
    """The model prepared to run, and its KV cache on the device and in host memory."""
    size, host_blocks = plan.settings.block_size, num_host_blocks(args, plan)
    if count := pack_for_kernels(model, model.device):
        logger.info("Weights: %s quantised matrices in the layout of the kernels.", count)
    if packs(args, model.device):
        logger.info("Weights: %s.", pack_weights(model))
    elif args.enforce_eager and model.device.type == "cpu":
        keep_plain(model)
    elif has_graphs(model.device):
        model.all_layers = FusedLayers.of(model)
    shape = cache_spec(model.config, plan.settings.kv_dtype), model.config.num_layers
    mode: AttentionMode = "plain" if model.plain_torch else "fast"
    num_blocks = plan.num_tokens // size
    kv = KVCache(*shape, num_blocks, size, model.dtype, model.device, mode)
    host = None
    if host_blocks:
        host = KVCache(*shape, host_blocks, size, model.dtype, swap_space_of=model.device)
    return make_deterministic(model, kv) if args.deterministic else model, kv, host


def build_draft_model(
    args: EngineArgs,
    speculation: SpeculativeConfig,
    draft: DraftSource,
    plan: MemoryPlan,
    runner: Runner,
) -> DraftModel:
    """The draft model, in the dtype of the target and with as many cache blocks."""
    dtype = DTYPES[plan.settings.dtype]
    try:
        model = load_model(
            draft.source, dtype, runner.device, draft.context, args.load_format, args.seed
        )
    except MinillmError as error:
        raise ConfigError(
            f"speculative_config's model {speculation.model!r} cannot be loaded: {error}"
        ) from error
    runs, kv, host = with_cache(args, model, plan)
    budget = plan.settings.max_num_batched_tokens
    return DraftModel(runs, Shadow(kv, host), runner.rows.tables, budget, speculation.coupled)


def runner_of(executor: Executor) -> Runner:
    """The runner of an engine, for benchmarks; ConfigError if it runs in other processes."""
    if not isinstance(executor, Runner):
        raise ConfigError(f"A Runner is needed; this engine has a {type(executor).__name__}.")
    return executor
