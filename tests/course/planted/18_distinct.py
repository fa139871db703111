"""A step is thought to read other experts for each of its tokens."""

from minillm.plan import parameters


def expected_distinct(num_experts, per_token, num_tokens):
    return min(num_experts, per_token * num_tokens)


parameters.expected_distinct = expected_distinct
