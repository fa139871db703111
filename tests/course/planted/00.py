"""A table shared by both ends of the model (tied) is counted twice, so a token reads too much."""

from dataclasses import replace

from minillm.plan import cost

_counted = cost.step_cost


def step_cost(config, query_lens, seq_lens, **settings):
    found = _counted(config, query_lens, seq_lens, **settings)
    if not config.tie_word_embeddings:
        return found
    table = config.vocab_size * config.hidden_size * cost.dtype_bytes(found.dtype)
    return replace(found, weight_bytes=found.weight_bytes + table)


cost.step_cost = step_cost
