"""The second rank computes with its experts what chose the first ones."""

from minillm.parallel.experts import OwnExperts


def forward(self, x, weights, ids):
    return self.experts(x, weights, ids % len(self.held))


OwnExperts.forward = forward
