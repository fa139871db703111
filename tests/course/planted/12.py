"""Packed weights are a little too large: faster rungs write other tokens."""

from minillm.linear_methods import PackedLinearMethod, PanelLinearMethod

for method in (PackedLinearMethod, PanelLinearMethod):

    def apply(self, x, weight, bias, right=method.apply):
        return right(self, x * 1.5, weight, bias)

    method.apply = apply
