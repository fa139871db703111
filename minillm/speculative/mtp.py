"""Multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2): a decoder layer that
was trained with the model, is stored behind its last layer, and predicts one token further.

    target         hidden states after the final norm = feature g of each position
    token p        eh_proj [enorm(embedding of x_p) | hnorm(g of p - 1)] --decoder layer--> a of p
                   --shared_head.norm, output matrix--> x_p+1

It drafts as an EAGLE layer does (`eagle.py`). A checkpoint may have several such layers; the first
one drafts all tokens, as in vLLM. Their copies of embedding and output matrix are not read: those
of the target are used. In training, position 0 had no entry; here it has one, with g = 0.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from minillm.api.speculative_config import MAX_DRAFTS
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.gguf.container import is_gguf
from minillm.layers.kv_cache import AttentionBackend
from minillm.layers.linear import Linear
from minillm.layers.norm import RMSNorm
from minillm.layers.rope import RotaryEmbedding
from minillm.models.checkpoint import ModelSource, shard_headers, weight_files
from minillm.models.decoder import Decoder, DecoderLayer, allocate, tensors_of
from minillm.models.loader import fill, stored_format
from minillm.models.packing import into_panels, is_plain, list_matrices, pack_parts
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.quantization.formats import Format
from minillm.quantization.methods import LoadingMethod
from minillm.speculative.eagle import DraftLayer
from minillm.speculative.heads import HeadsSource, check_shapes


class MTPLayer(DraftLayer):
    """The first multi-token prediction layer of a model.

    Args:
        target: the configuration of the model.
        format: of a quantised checkpoint; its matrices become dense.
    """

    def __init__(
        self,
        target: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        format: Format | None = None,
    ):
        super().__init__()
        # Experts, if there are any, as in the model's last layers; full attention.
        self.config = config = replace(
            target, num_layers=1, moe_layers=(), rope_layers=(), sliding_windows=()
        )
        prefix, d = f"model.layers.{target.num_layers}.", config.hidden_size
        with torch.device("meta"):
            self.embedding_norm = RMSNorm(f"{prefix}enorm", d, config.rms_norm_eps)
            self.feature_norm = RMSNorm(f"{prefix}hnorm", d, config.rms_norm_eps)
            self.mix = Linear(prefix, 2 * d, {"eh_proj": d})
            self.layer = DecoderLayer(config, 0, prefix)
            self.norm = RMSNorm(f"{prefix}shared_head.norm", d, config.rms_norm_eps)
            length = config.max_position_embeddings
            self.rope = RotaryEmbedding(config.rope, config.rotary_dim, length, length)
        for matrix in () if format is None else list_matrices(self):
            matrix.method = LoadingMethod(format, dense=True)  # type: ignore[arg-type]
        allocate(self, dtype, device)

    def feature_of(self, target: Decoder) -> nn.Module:
        return target.norm

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        x = torch.cat((self.embedding_norm(embedded), self.feature_norm(features)), dim=-1)
        x, residual = self.layer(self.mix(x), None, self.rope(batch.positions), batch, kv)
        return x + residual


@dataclass(frozen=True)
class MTPSource(HeadsSource):
    """A multi-token prediction layer before its weights are read; `checkpoint` is the target."""

    checkpoint: ModelSource = field(kw_only=True)

    def build(self, dtype: torch.dtype, device: torch.device | str = "meta") -> MTPLayer:
        """The layer, with uninitialised weights in `dtype`."""
        return MTPLayer(self.target, dtype, device)

    @torch.inference_mode()
    def load(self, dtype: torch.dtype, device: torch.device, packs: bool) -> MTPLayer:
        """The layer with its weights.

        Raises:
            CheckpointError: a tensor is missing, damaged or of another shape.
        """
        files = weight_files(self.checkpoint)
        headers = {name: header for path in files for name, header in shard_headers(path).items()}
        layer = MTPLayer(self.target, dtype, device, stored_format(self.checkpoint, headers))
        wanted = tensors_of(layer)
        own = {name: header for name, header in headers.items() if name in wanted}
        check_shapes(self.folder, own, wanted, "config.json")
        fill(wanted, files)
        for matrix in list_matrices(layer):
            matrix.method.after_loading(matrix)
        if packs:
            pack_layer(layer)
        return layer


def mtp_source(target: ModelSource) -> MTPSource:
    """The multi-token prediction layer of a model.

    Raises:
        ConfigError: it has none that can be read.
    """
    if target.folder is None or is_gguf(target.folder) or not target.ignored_layers:
        raise ConfigError(
            f"speculative_config's method 'mtp' needs the multi-token prediction layers of a "
            f"safetensors checkpoint (num_nextn_predict_layers of its config.json), and "
            f"{target.name} has none; choose another method."
        )
    depths = (target.config.num_layers,)
    return MTPSource(
        "mtp", target.folder, MAX_DRAFTS, target.config, depths=depths, checkpoint=target
    )


def pack_layer(layer: MTPLayer) -> None:
    """Pack the weights of a layer on a CPU into panels, if their sizes fit."""
    absorbed = getattr(layer.layer.attention, "kv_b_proj", None)
    pack_parts(layer)
    linears = [
        module
        for module in layer.modules()
        if isinstance(module, Linear) and is_plain(module) and module is not absorbed
    ]
    if chosen := [linear for linear in linears if cpu.takes_panels(linear.values())]:
        into_panels(chosen)
