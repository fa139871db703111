"""A step reads no matrices of the layers, only the head."""

from minillm.plan import parameters

parameters.Product.parameters_read = lambda self, num_tokens: 0
