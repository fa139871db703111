"""A token is sent to its experts one by one, not once to each rank that has some of them."""

from minillm.lab import expert_load, parallel_cost

expert_load.ranks_of_a_token = parallel_cost.ranks_of_a_token = lambda size, k, *groups: k
