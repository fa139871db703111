"""Experts are chosen from all groups."""

from minillm import ops

_route = ops.moe_route


def moe_route(scores, bias, num_chosen, num_groups=1, topk=1, group_score="max", normalize=True):
    return _route(scores, bias, num_chosen, normalize=normalize)


ops.moe_route = moe_route
