"""A step that was launched ahead reads the token of another sequence."""

from minillm.execution.runner import Runner

_right = Runner._feed


def _feed(self, taken, tokens):
    ahead = any(row.start + row.num_tokens > len(state.token_ids) for row, state in taken)
    _right(self, taken, tokens.roll(1) if ahead else tokens)


Runner._feed = _feed
