"""One rank: its part of the model, and the runner that executes the same plans as the others."""

import logging
from functools import partial

import torch
from torch import Tensor

from minillm.api.arguments import EngineArgs
from minillm.config import ModelConfig
from minillm.errors import UnsupportedFeatureError
from minillm.execution.runner import Runner
from minillm.execution.setup import build_executor, open_tokenizer, record_graphs, records
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import ModelSource
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TILES, TiledDecoder, find_tiles
from minillm.models.fixed_sums import why_tiles
from minillm.models.loader import DTYPES, load_model
from minillm.models.packing import list_matrices
from minillm.models.quantize import quantize_weights, quantize_while_reading
from minillm.parallel.balance import balance_experts
from minillm.parallel.communicator import Communicator
from minillm.parallel.experts import LockstepRunner, dispatch_experts
from minillm.parallel.messages import SetUp
from minillm.parallel.place import Place
from minillm.parallel.placement import Placement, first_placement
from minillm.parallel.sampler import ShardedSampler
from minillm.parallel.shard import connect, slice_matrices
from minillm.parallel.split import rank_config
from minillm.parallel.stages import StageRunner, cut_model, join_pipes
from minillm.structured.grammars import Grammars

logger = logging.getLogger(__name__)


def build_rank(set_up: SetUp, place: Place) -> Runner:
    """The runner of a rank. The memory plan is the same on all ranks."""
    args, source, plan = set_up.args, set_up.source, set_up.plan
    device, dtype = torch.device(set_up.device), DTYPES[plan.settings.dtype]
    limit = plan.settings.max_model_len
    model = load_rank(args, source, dtype, device, limit, place)
    if args.quantization:
        quantize_weights(model, args.quantization)
    if args.deterministic and place.stage.count > 1 and (obstacle := why_tiles(model)):
        raise UnsupportedFeatureError(
            "deterministic with pipeline_parallel_size above 1 computes every row by itself, which "
            f"this model does not: {obstacle}; leave one of them out."
        )
    kind = Runner if place.stage.is_last else StageRunner
    kind = kind if place.experts is None else LockstepRunner
    runner = build_executor(args, model, plan, limit, set_up.draft, kind)
    runner.isolates = False  # retrying rows one by one on one rank would desynchronise the ranks
    join_pipes(model, place)
    placement = initial_placement(args, source.config, place)
    num_slots = placement.num_slots if placement else 0
    if place.experts is not None:
        dispatch_experts(model, num_slots, place.experts)
    if place.split.size > 1:
        connect(model, source.config, place.communicator, num_slots)
        if isinstance(runner.model, TiledDecoder):
            agree(runner.model, place.communicator)
        sampler, width = runner.sampler, source.config.vocab_size
        runner.sampler = ShardedSampler(runner.rows.num_rows, width, device, place.communicator)
        runner.sampler.rule = sampler.rule
    if records(args, device):
        record_graphs(args, runner, 0)
        agree_on_graphs(runner, place.communicator)
    tokenizer = partial(open_tokenizer, args, source)
    runner.sampler.edits.grammars = Grammars(tokenizer, source.config.vocab_size)
    if placement is not None and args.eplb is not None:
        balance_experts(model, placement, place, args.eplb.window_size)
    return runner


def agree(tiled: TiledDecoder, communicator: Communicator) -> None:
    """Restrict all ranks to the tile sizes that each of them supports: otherwise they would cut a
    batch differently and make different calls. All ranks gather, with or without tiles."""
    if tiled.obstacle and communicator.rank == 0:
        logger.warning(
            "Deterministic mode: a request has the same bits in every batch of %d ranks, but other "
            "bits on another number of ranks, because %s.",
            communicator.size,
            tiled.obstacle,
        )
    if not tiled.tiles:
        return
    own = find_tiles(tiled.model)
    masks = communicator.gather(torch.tensor([size in own for size in TILES], dtype=torch.uint8))
    common = [size for size, mask in zip(TILES, masks.T, strict=True) if mask.all()]
    tiled.use(common or (1,))


def agree_on_graphs(runner: Runner, communicator: Communicator) -> None:
    """Restrict all ranks to the graphs that each of them has: a replay pads a step's rows, and a
    rank that did not would make calls of another size."""
    for graphs in (runner.graphs, runner.verify_graphs):
        if graphs is not None:
            every = range(graphs.rows.num_rows + 1)
            own = torch.tensor([size in graphs.sizes for size in every], dtype=torch.uint8)
            common = communicator.gather(own).all(dim=0)
            graphs.sizes = tuple(size for size in graphs.sizes if common[size])


def initial_placement(args: EngineArgs, config: ModelConfig, place: Place) -> Placement | None:
    """Which whole experts each rank loads; None where a rank has a share of each, or all."""
    if not args.enable_expert_parallel or config.moe is None:
        return None
    sizes = config.moe.num_experts, place.expert_split.size, args.num_redundant_experts
    return first_placement(*sizes)


def load_rank(
    args: EngineArgs,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    place: Place,
) -> Decoder:
    """A rank's slices of the checkpoint: peak memory is the shard and one tensor. Random weights
    ("dummy") are slices of those of one rank."""
    whole = source.config
    mine = rank_config(whole, place.split.size, args.enable_expert_parallel)
    placement = initial_placement(args, whole, place)
    experts = placement.slots[place.expert_split.rank] if placement else None

    def shard(model: Decoder) -> None:
        if place.stage.count > 1:
            cut_model(model, place.stage, whole, dtype)
        slice_matrices(model, whole, place.split, experts)
        if args.quantization and args.load_format != "dummy":
            quantize_while_reading(model, args.quantization)

    if args.load_format != "dummy":
        format = args.load_format
        return load_model(source, dtype, device, max_model_len, format, shard=shard, config=mine)
    model = Decoder(mine, dtype, device, max_model_len, shard=shard)
    initialize_slices(model, Decoder(whole, dtype, "meta"), args.seed)
    return model.eval()


@torch.no_grad()
def initialize_slices(model: Decoder, whole: Decoder, seed: int, std: float = 0.02) -> None:
    """A rank's slices of the random weights that `Decoder.initialize` gives the whole model: whole
    parameters are drawn one at a time and cut."""
    generator = torch.Generator(model.device).manual_seed(seed)
    held = {part.name: module for module in list_matrices(model) for part in module.parts}
    model.initialize()  # norms and biases
    for matrix in list_matrices(whole):
        drawn = torch.empty(matrix.shape, dtype=model.dtype, device=model.device)
        drawn.normal_(0.0, std, generator=generator)
        names = [part.name for part in matrix.parts]  # of a stack of experts some may be held
        if mine := next((held[name] for name in names if name in held), None):
            mine.weight.copy_(held_of(mine, matrix, drawn))


def held_of(mine: Matrix, whole: Matrix, drawn: Tensor) -> Tensor:
    """A rank's slices of the `drawn` values of a whole matrix [.., out, in]."""
    pieces, drawn = [drawn.new_empty(0, mine.in_features)], drawn.flatten(0, -2)
    for part in mine.parts:
        for all_rows, start in zip(whole.parts, whole.starts, strict=True):
            if all_rows.name == part.name and part.rows.start in all_rows.rows:
                first = start + part.rows.start - all_rows.rows.start
                columns = slice(part.columns.start, part.columns.stop)
                pieces.append(drawn[first : first + len(part.rows), columns])
    return torch.cat(pieces).view(mine.shape)
