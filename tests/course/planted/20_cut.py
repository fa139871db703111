"""Layers are cut by their number: the output matrix costs nothing."""

from minillm.parallel import split
from minillm_exercises.chapters import ch20

_right = split.cut_layers


def cut_layers(costs, output_cost, count):
    return _right(costs, 0.0, count)


split.cut_layers = ch20.cut_layers = cut_layers
