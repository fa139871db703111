"""Packed weights are a little too large: faster rungs write other tokens."""

from minillm.layers.linear_methods import PackedLinearMethod, PanelLinearMethod

for method in (PackedLinearMethod, PanelLinearMethod):

    def apply(self, matrix, x, bias, right=method.apply):
        return right(self, matrix, x * 1.5, bias)

    method.apply = apply
