"""A matrix that may be several checkpoint matrices stacked, and the token embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minillm.linear_methods import EmbeddingMethod, LinearMethod, PlainLinearMethod


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised, frozen parameter: the loader fills it, the trainer unfreezes it."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, where W stacks the named outputs of several checkpoint matrices.

    `Linear("model.layers.0.self_attn.", 576, {"q_proj": 576, "k_proj": 192, "v_proj": 192})`
    reads its input once for three products. `[N, in] -> [N, sum of outputs]`.
    """

    def __init__(self, prefix: str, in_features: int, outputs: dict[str, int], bias: bool = False):
        super().__init__()
        self.prefix = prefix
        self.outputs, self.in_features = outputs, in_features
        out_features = sum(outputs.values())
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None
        self.method: LinearMethod = PlainLinearMethod()

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        return self.method.apply(x, self.weight, self.bias)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each checkpoint name with the view of this layer that holds it."""
        start = 0
        for name, size in self.outputs.items():
            yield f"{self.prefix}{name}.weight", self.weight.data[start : start + size]
            if self.bias is not None:
                yield f"{self.prefix}{name}.bias", self.bias.data[start : start + size]
            start += size


class Embedding(nn.Module):
    """Token embedding, which may also serve as the output matrix (`as_output`)."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int):
        super().__init__()
        self.name, self.in_features = name, hidden_size
        self.weight = empty_parameter(vocab_size, hidden_size)
        self.method: EmbeddingMethod = PlainLinearMethod()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[N] -> [N, d]"""
        return self.method.lookup(input_ids, self.weight)

    def as_output(self, x: Tensor) -> Tensor:
        """Logits with tied weights (Press and Wolf, 2017). [K, d] -> [K, V]"""
        return self.method.apply(x, self.weight, None)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each checkpoint name with the view of this layer that holds it."""
        yield f"{self.name}.weight", self.weight.data
