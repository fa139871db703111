"""The engine makes its cache with a key head for every query head."""

from dataclasses import replace

from minillm.execution import setup as execution_setup
from minillm.models import forward_pass

right = execution_setup.cache_spec


def cache_spec(config):
    return right(config if config.mla else replace(config, num_kv_heads=config.num_heads))


for module in (execution_setup, forward_pass):
    module.cache_spec = cache_spec
