"""The engine makes its cache with a key head for every query head."""

from dataclasses import replace

from minillm.layers import kv_cache

right = kv_cache.cache_spec


def cache_spec(config):
    return right(config if config.mla else replace(config, num_kv_heads=config.num_heads))


kv_cache.cache_spec = cache_spec
