"""The logits of all ranks are gathered for every token."""

from minillm.parallel.sampler import ShardedSampler
from minillm.sampling.sampler import Sampler


def choose(self, logits, *arguments, **more):
    return Sampler.choose(self, self.whole(logits), *arguments, **more)


ShardedSampler.choose = choose
