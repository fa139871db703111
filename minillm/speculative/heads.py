"""The files of draft heads, which are trained for one target model and refused with any other.

heads.json           method, sizes, and the hash of the target's weight files
model.safetensors    the weights

An EAGLE layer has such files, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from minillm.api.checks import is_whole
from minillm.api.speculative_config import MAX_DRAFTS, SpeculativeConfig
from minillm.api.tree_config import AUTO
from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ConfigError
from minillm.layers.kv_cache import KVCache
from minillm.layers.linear_methods import CheckpointTensor
from minillm.models.checkpoint import (
    ASSETS,
    WEIGHTS,
    ModelSource,
    read_json,
    shard_headers,
    weight_files,
)
from minillm.models.decoder import Decoder, tensors_of
from minillm.models.loader import fill
from minillm.models.packing import into_panels, list_matrices
from minillm.ops import cpu
from minillm.speculative import trees
from minillm.speculative.eagle import DraftLayer, Eagle, EagleLayer, Taps
from minillm.speculative.eagle_trees import EagleTrees
from minillm.speculative.features import Features
from minillm.speculative.medusa import Medusa, MedusaHeads
from minillm.speculative.parallel_eagle import ParallelEagle
from minillm.speculative.proposer import Proposer
from minillm.speculative.trees import Path as TreePath

HEADS_FILE, MAX_WIDTH = "heads.json", 2**16
SIZES: Mapping[str, tuple[tuple[str, int], ...]] = {  # by method: fields, and their maximum
    "medusa": (("num_heads", MAX_DRAFTS), ("width", MAX_WIDTH)),
    "eagle": (),
}
PAGE, MOST_PAGES = 4096, 256  # bytes; pages of each file that are hashed, evenly spaced


@dataclass(frozen=True)
class HeadsSource:
    """Draft heads before their weights are read, checked against the target.

    Attributes:
        most: maximum drafts of a row: the number of heads, any number with an EAGLE layer.
        target: configuration of the target.
        width: of Medusa's hidden layer.
        depths: numbers of layers after which EAGLE's hidden states are taken.
        parallel: whether an EAGLE layer drafts in parallel.
        tree: the paths of a token tree, in the order in which they are drafted; None for a chain.
        values: of its paths, the measured probability that all of each is accepted, if adaptive.
    """

    method: str
    folder: Path
    most: int
    target: ModelConfig
    width: int = 0
    depths: tuple[int, ...] = ()
    parallel: bool = False
    tree: tuple[TreePath, ...] | None = None
    values: tuple[float, ...] = ()
    context: None = None  # that of the target
    source: None = None  # no model of its own

    def build(
        self, dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> MedusaHeads | DraftLayer:
        """The heads, with uninitialised weights."""
        if self.method == "eagle":
            return EagleLayer(self.target, len(self.depths), dtype, device, self.parallel)
        return MedusaHeads(self.most, self.target.hidden_size, self.width, dtype, device)

    def load(
        self, dtype: torch.dtype, device: torch.device, packs: bool
    ) -> MedusaHeads | DraftLayer:
        """The heads with their weights; packed if `packs`.

        Raises:
            CheckpointError: the file is damaged, or has other names or shapes.
        """
        heads = self.build(dtype, device)
        load_heads(heads, self.folder, packs)
        return heads

    def proposer(
        self,
        heads: MedusaHeads | DraftLayer,
        model: Decoder,
        features: Features,
        kv: KVCache,
        max_num_tokens: int,
        coupled: bool,
    ) -> Proposer:
        """The proposer that runs the loaded heads. A layer's target stores `features` from now on,
        beside its KV cache `kv`."""
        if not isinstance(heads, DraftLayer):
            return Medusa(heads, features, model.logits, coupled, self.tree)
        model.all_layers = Taps(model, self.depths, features, kv)
        parts = heads, model, features, heads.cache(features, kv), max_num_tokens, coupled
        if self.tree is not None:
            return EagleTrees(*parts, tree=self.tree)
        return (ParallelEagle if self.parallel else Eagle)(*parts)

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model of which the KV cache is."""
        return self.target

    @property
    def state_size(self) -> int:
        """Values of a position that the heads read: a hidden state, or one for each depth."""
        return self.target.hidden_size * max(len(self.depths), 1)

    def planned(self, copied: torch.dtype | None = None) -> dict[str, Any]:
        """As `DraftSource.planned`."""
        heads, values = self.build(torch.float32), self.state_size
        weights = sum(parameter.numel() for parameter in heads.parameters())
        if isinstance(heads, DraftLayer):
            values += cache_spec(heads.config).block_values(1)
        return {"head_weights": weights, "head_values": values}


def base_hash(source: ModelSource) -> str:
    """A hash of a model's weight files: their sizes, and up to 256 pages of each. Training changes
    nearly all pages. Empty for a model without files."""
    digest, files = sha256(), weight_files(source)
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for place in range(0, size, max(size // MOST_PAGES, PAGE)):
                file.seek(place)
                digest.update(file.read(PAGE))
    return digest.hexdigest()[:32] if files else ""


def heads_folder(name: str) -> Path:
    """The folder of heads: embedded ones by name, others by their path."""
    embedded = ASSETS / name
    return embedded if (embedded / HEADS_FILE).is_file() else Path(name).expanduser()


def open_heads(config: SpeculativeConfig, target: ModelSource) -> HeadsSource:
    """The heads of a `speculative_config`.

    Raises:
        ConfigError: there are none, or for another method or model, or too few.
        CheckpointError: `heads.json` is damaged.
    """
    name, method = f"speculative_config's model {config.model!r}", config.method
    file = heads_folder(str(config.model)) / HEADS_FILE
    if not file.is_file():
        raise ConfigError(
            f"{name} has no {HEADS_FILE}; give a folder that 'minillm train {method}' wrote."
        )
    data = read_json(file)
    if data.get("method") != method:
        raise ConfigError(f"{name} has heads of method {data.get('method')!r}, not {method!r}.")
    if (mine := base_hash(target)) != data.get("base_hash") or not mine:
        raise ConfigError(
            f"{name} was trained for the weights of {data.get('base_model')!r} with hash "
            f"{data.get('base_hash')!r}, and those of {target.name} have {mine!r}; train heads for "
            f"this model with 'minillm train {method}'."
        )
    sizes = {}
    for key, limit in SIZES[method]:
        if not is_whole(data.get(key)) or not 1 <= data[key] <= limit:
            raise CheckpointError(f"{file} has {key} {data.get(key)!r}; it must be 1 to {limit}.")
        sizes[key] = data[key]
    depths: tuple[int, ...] = ()
    if method == "eagle":
        depths = depths_of(data.get("depths"), target.config.num_layers, file)
    most = sizes.get("num_heads", MAX_DRAFTS)
    if config.tree is None and not config.adapts and config.most > most:
        raise ConfigError(
            f"{name} has heads for {most} drafts and num_speculative_tokens is {config.most}; set "
            f"it to at most {most}."
        )
    width, parallel = sizes.get("width", 0), data.get("parallel", False)
    if not isinstance(parallel, bool):
        raise CheckpointError(f"{file} has parallel {parallel!r}; it must be true or false.")
    if parallel and config.tree is not None:
        raise ConfigError(
            f"{name} drafts all tokens in parallel, as a chain; leave out 'tree' of "
            "speculative_config, or train the layer without --parallel."
        )
    tree = heads_tree(config, data, name, most)
    return HeadsSource(method, file.parent, most, target.config, width, depths, parallel, *tree)


def depths_of(given: Any, num_layers: int, file: Path) -> tuple[int, ...]:
    """The depths of an EAGLE layer.

    Raises:
        CheckpointError: they are no increasing numbers of layers of the target.
    """
    whole = isinstance(given, list) and all(is_whole(number) for number in given)
    if (
        not whole
        or not given
        or sorted({*given}) != given
        or not 1 <= given[0] <= given[-1] <= num_layers
    ):
        raise CheckpointError(
            f"{file} has depths {given!r}; they must be increasing numbers of layers, from 1 to "
            f"{num_layers}, the layers of this target."
        )
    return tuple(given)


def heads_tree(
    config: SpeculativeConfig, data: Mapping[str, Any], name: str, most: int
) -> tuple[tuple[TreePath, ...] | None, tuple[float, ...]]:
    """The tree of a `speculative_config` for heads with this `heads.json`, and its values.

    Raises:
        ConfigError: the heads are too few for it, or have no stored accuracies that it needs.
    """
    if config.tree is None:
        return None, ()
    given = () if config.tree == AUTO else config.tree
    if (depth := max(map(len, given), default=0)) > most:
        raise ConfigError(
            f"speculative_config's 'tree' has a path of {depth} ranks and {name} drafts at most "
            f"{most} tokens one after another; give paths of at most {most}."
        )
    table = mean_accuracy(data.get("rank_accuracy"), None if config.method == "eagle" else most)
    if table is not None:  # drafts of a layer behind those that were measured: as the last of them
        table = [*table, *[table[-1]] * (most - len(table))]
    if table is None and (config.adapts or not given):
        raise ConfigError(
            f"{name} has no valid rank_accuracy in {HEADS_FILE}, which an adaptive tree is built "
            "from; give a tree and a number for num_speculative_tokens, or train the heads again."
        )
    paths = trees.in_order(given, table) if given else trees.grown(table or (), config.most)
    paths = paths[: config.most]
    values = trees.values(paths, table) if table and config.adapts else ()
    return tuple(paths), tuple(values)


def mean_accuracy(given: Any, num_heads: int | None) -> trees.Table | None:
    """The mean over temperatures of `rank_accuracy` of a `heads.json`, [heads, ranks]: how often
    each rank of each head is the token that comes, by falling rate. None if it has another form, or
    no token ever came."""
    try:
        tables = np.array(list(given.values()), dtype=np.float64)
    except (AttributeError, TypeError, ValueError):
        return None
    right = tables.ndim == 3 and tables.size and num_heads in (None, tables.shape[1])
    if not right or not ((tables >= 0) & (tables <= 1)).all() or not tables[:, 0, 0].any():
        return None
    return np.minimum.accumulate(tables.mean(axis=0), axis=1).tolist()


def check_shapes(
    path: Path, headers: Mapping[str, Any], wanted: Mapping[str, CheckpointTensor], source: str
) -> None:
    """CheckpointError unless a file has exactly the tensors whose shapes follow from `source`."""
    stored = {name: tuple(header.shape) for name, header in headers.items()}
    shapes = {name: tensor.slice.shape for name, tensor in wanted.items()}
    for name in sorted(stored.keys() | shapes.keys()):
        if stored.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{path} has {name} of shape {stored.get(name)}, and {source} gives "
                f"{shapes.get(name)}; use the files of one training."
            )


@torch.inference_mode()
def load_heads(module: nn.Module, folder: Path, packs: bool) -> None:
    """Read the weights of heads, which must be exactly those of the module.

    Raises:
        CheckpointError: the file is damaged, or has other names or shapes.
    """
    path, wanted = folder / WEIGHTS, tensors_of(module)
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS}.")
    check_shapes(path, shard_headers(path), wanted, f"{HEADS_FILE} with this target")
    fill(wanted, [path])
    if packs:
        chosen = [matrix for matrix in list_matrices(module) if cpu.takes_panels(matrix.values())]
        into_panels(chosen) if chosen else None
