"""All rows of a step are sampled with the noise of the first one's position."""

from minillm.sampling.sampler import Sampler

_choose = Sampler.choose


def choose(self, logits, rows, positions, forks=(), drafts=None):
    first = {}
    pairs = zip(rows, positions, strict=True)
    positions = [first.setdefault(row, position) for row, position in pairs]
    return _choose(self, logits, rows, positions, forks, drafts or {})


Sampler.choose = choose
