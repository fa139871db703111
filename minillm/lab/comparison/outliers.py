"""Plants outlier channels in a model without changing its function.

Some channels of the norms before products are multiplied by a factor, and the columns that read
them are divided by it. Large language models have such channels (Dettmers et al., 2022, arXiv
2208.07339, section 3); the embedded models have none.
"""

import torch

from minillm.models.calibration import layer_of
from minillm.models.decoder import Decoder
from minillm.models.scaled_pairs import norm_readers

FACTOR, STEP = 64.0, 32  # one channel of 32, 64 times as large


@torch.no_grad()
def plant_outliers(model: Decoder, factor: float = FACTOR, step: int = STEP) -> None:
    """Multiply every `step`-th channel of each norm inside the layers, in place.

    `factor` is a power of 2, so that no number is rounded.
    """
    for index in range(len(model.layers)):
        for norm, readers in norm_readers(layer_of(model, index)):
            norm[::step] *= factor
            for matrix in readers:
                matrix.weight.data[..., ::step] /= factor
