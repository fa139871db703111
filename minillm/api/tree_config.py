"""The key `tree` of `speculative_config`: paths of ranks, as in Medusa's `medusa_choices`."""

from typing import Any

from minillm.api.checks import is_whole
from minillm.api.sampling_params import shown
from minillm.errors import ConfigError

AUTO = "auto"  # of the tree, and of the number of drafts
AUTO_NODES = 31  # maximum drafts per row of a tree that is built from measured accuracies
MOST_NODES = 63  # of a given one: 64 positions with the last token
MOST_RANK = 15


def paths_of(given: Any) -> tuple[tuple[int, ...], ...]:
    """The paths of a tree, whatever their order.

    Raises:
        ConfigError: it is not a list of paths, or has the same path twice, a path without the path
            that it continues, or too many.
    """
    if not isinstance(given, list | tuple) or not given:
        raise _wrong(f"is {shown(given)}", "'auto', or a list of paths such as [[0], [1], [0, 0]]")
    for path in given:
        whole = isinstance(path, list | tuple) and len(path) and all(map(is_whole, path))
        if not whole or not all(0 <= rank <= MOST_RANK for rank in path):
            raise _wrong(f"has the path {shown(path)}", f"ranks from 0 to {MOST_RANK}, the best 0")
    paths = tuple(tuple(int(rank) for rank in path) for path in given)
    if len(paths) > MOST_NODES:
        raise _wrong(f"has {len(paths)} paths", f"at most {MOST_NODES}")
    for path in paths:
        if paths.count(path) > 1:
            raise _wrong(f"has the path {shown(list(path))} twice", "paths that differ")
        if len(path) > 1 and path[:-1] not in paths:
            raise _wrong(
                f"has the path {shown(list(path))}",
                f"paths whose beginnings are paths, too: add {shown(list(path[:-1]))}",
            )
    return paths


def _wrong(given: str, must_be: str) -> ConfigError:
    return ConfigError(f"speculative_config's 'tree' {given}; it must be {must_be}.")
