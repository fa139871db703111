"""The cache salt is ignored: all users share one cache, whatever they ask for."""

from minillm.cache.hash_chain import HashChain
from minillm.cache.radix import RadixTree


def without_salt(start):
    return lambda self, salt: start(self, "")


for index in (HashChain, RadixTree):
    index.start = without_salt(index.start)
