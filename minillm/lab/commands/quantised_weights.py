"""The bytes of quantised weights, for commands that predict before they load a model."""

from typing import TYPE_CHECKING

from minillm.errors import ConfigError, ModelNotFoundError
from minillm.plan.weight_sizes import WeightSizes

if TYPE_CHECKING:
    from minillm.models.checkpoint import ModelSource


def weights_of(
    model: str, quantization: str | None, dtype: str, is_cpu: bool
) -> WeightSizes | None:
    """The sizes of a model's weights, or None if they are not quantised. A preset that is not
    needs no import of torch.

    Args:
        quantization: int8 or int4, of a 16-bit model while it is loaded.
        dtype: of activations, and of weights that are not quantised.
        is_cpu: whether a CPU will run the model, which packs weights.
    """
    is_preset = model.startswith("preset:")
    if is_preset and quantization is None:
        return None
    import torch

    from minillm.models.checkpoint import open_model
    from minillm.models.loader import DTYPES
    from minillm.models.weight_sizes import Layout, planned_sizes

    source = open_model(model)
    check_fetched(source)
    layout = Layout(DTYPES[dtype], torch.device("cpu" if is_cpu else "cuda"), packed=is_cpu)
    return planned_sizes(source, layout, quantization, dummy=is_preset)


def check_fetched(source: "ModelSource") -> None:
    """Reject a quantised model of a hub whose weights would have to be fetched."""
    from minillm.models.checkpoint import shard_files

    if not (source.hub_id and source.quantization and source.folder):
        return
    try:
        shard_files(source.folder)
    except ModelNotFoundError as error:
        raise ConfigError(
            f"{source.name} is quantised, and its weight files, which say how, are not fetched "
            "yet; load it once, or give a local folder."
        ) from error
