"""The price of a token forgets MLA's rotated key, which is cached beside the latent."""

from minillm.cache.spec import CacheSpec

right = CacheSpec.block_values


def block_values(self, block_size):
    return block_size * self.value_dim if self.value_in_key else right(self, block_size)


CacheSpec.block_values = block_values
