"""Every expert computes its equal share of the rows and leaves out the others."""

from minillm import ops

_experts = ops.moe_experts


def moe_experts(x, gate_up, down, weights, ids):
    kept = weights.clone()
    room = -(-ids.numel() // len(gate_up))
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        kept[rows[room:], places[room:]] = 0
    return _experts(x, gate_up, down, kept, ids)


ops.moe_experts = moe_experts
