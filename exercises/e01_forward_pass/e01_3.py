"""e01.3: a forward pass from weights to logits. The task is in README.md."""

from typing import Any

from torch import Tensor


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """Return the logits [T, V] after each of the T tokens `ids`, float32.

    `weights` are those of the file, by name, in float32; do not change them. `config` has
    num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta.
    """
    raise NotImplementedError("TODO e01.3: embedding, layers, last norm, logits")
