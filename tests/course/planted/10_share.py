"""A decode step reads the cache as if every query head had keys and values of its own."""

from dataclasses import replace

from minillm.plan import cost

_counted = cost.step_cost


def step_cost(config, query_lens, seq_lens, **settings):
    found = _counted(config, query_lens, seq_lens, **settings)
    return replace(
        found, kv_read_bytes=found.kv_read_bytes * config.num_heads // config.num_kv_heads
    )


cost.step_cost = step_cost
