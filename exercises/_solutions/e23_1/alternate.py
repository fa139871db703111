"""Another way: edges turned round for `live`, a trie of the tokens for `mask`."""

from collections import defaultdict, deque
from typing import Any


def live(automaton: Any) -> set[int]:
    """A search from the accepting states along the edges turned round."""
    before = defaultdict(set)
    for state in range(automaton.num_states):
        for byte in range(256):
            after = automaton.step(state, byte)
            if after is not None:
                before[after].add(state)
    todo = deque(automaton.accepting)
    seen = set(todo)
    while todo:
        for state in before[todo.popleft()] - seen:
            seen.add(state)
            todo.append(state)
    return seen


def mask(automaton: Any, alive: set[int], state: int, tokens: list[bytes]) -> list[bool]:
    """A walk over the trie; what hangs below a dead state is never visited."""
    root: dict[Any, Any] = {}
    for number, token in enumerate(tokens):
        node = root
        for byte in token:
            node = node.setdefault(byte, {})
        node.setdefault("ends", []).append(number)
    found = [False] * len(tokens)
    todo = [(root, state)]
    while todo:
        node, at = todo.pop()
        for byte, child in node.items():
            if byte == "ends":
                continue
            after = automaton.step(at, byte)
            if after in alive:
                for number in child.get("ends", ()):
                    found[number] = True
                todo.append((child, after))
    return found


def allowed(
    automaton: Any, alive: set[int], state: int, tokens: list[bytes], end: int
) -> list[bool]:
    """Place by place."""
    return [
        state in automaton.accepting if place == end else each
        for place, each in enumerate(mask(automaton, alive, state, tokens))
    ]


def forced(automaton: Any, alive: set[int], state: int) -> bytes:
    """One byte, then the rest."""
    ways = [byte for byte in range(256) if automaton.step(state, byte) in alive]
    if state in automaton.accepting or len(ways) != 1:
        return b""
    return bytes(ways) + forced(automaton, alive, automaton.step(state, ways[0]))
