"""Linear layers, which may merge several checkpoint matrices, and the token embedding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minillm.layers.linear_methods import (
    CheckpointTensor,
    Matrix,
    WeightSlice,
    frozen,
    joined,
    load_plain,
)


class Linear(Matrix):
    """y = x W^T + b, [N, in] -> [N, out], where W concatenates several checkpoint matrices.

    `Linear("model.layers.0.self_attn.", 576, {"q_proj": 576, "k_proj": 192, "v_proj": 192})`
    computes three projections in one matrix product.
    """

    def __init__(self, prefix: str, in_features: int, outputs: dict[str, int], bias: bool = False):
        super().__init__([
            WeightSlice.whole(f"{prefix}{name}", size, in_features)
            for name, size in outputs.items()
        ])  # fmt: skip
        self.is_biased = bias
        self.register_parameter("bias", None)
        self.bias: Tensor | None

    def create(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the weight and the bias."""
        super().create(dtype, device)
        if self.is_biased:
            self.bias = frozen(torch.empty(self.out_features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]"""
        return self.method.apply(self, x, self.bias)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """The checkpoint tensors that the layer holds, whole or in part."""
        yield from super().checkpoint_tensors()
        if self.bias is not None:
            targets = self.bias.data.split([len(part.rows) for part in self.parts])
            yield from joined(
                CheckpointTensor(f"{part.name}.bias", target, part.slice_of_rows, load_plain)
                for part, target in zip(self.parts, targets, strict=True)
            )


class Embedding(Matrix):
    """Token embedding, which may also be the output matrix (`as_output`)."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int):
        super().__init__([WeightSlice.whole(name, vocab_size, hidden_size)])

    def forward(self, input_ids: Tensor) -> Tensor:
        """[N] -> [N, d]"""
        return self.method.lookup(self, input_ids)

    def as_output(self, x: Tensor) -> Tensor:
        """Logits with tied weights (Press and Wolf, 2017). [K, d] -> [K, V]"""
        return self.method.apply(self, x, None)
