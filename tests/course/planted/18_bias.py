"""The bias of an expert is in its weight, too."""

from minillm import ops

_route = ops.moe_route


def moe_route(scores, bias, *rest, **more):
    return _route(scores if bias is None else scores + bias, None, *rest, **more)


ops.moe_route = moe_route
