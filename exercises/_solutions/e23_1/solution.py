"""Live states from behind, then each beginning of a token once.

`live` repeats what it knows until nothing is added: a state is live if it is accepting or if a byte
leads from it to a live one. `mask` keeps the state after each beginning that it has seen, so tokens
with a common beginning share the steps. A beginning behind which there is no way stays None, and so
does every longer one.
"""

from typing import Any


def live(automaton: Any) -> set[int]:
    """The accepting states, and those with a way to a live one."""
    found = set(automaton.accepting)
    after = {
        state: {automaton.step(state, byte) for byte in range(256)}
        for state in range(automaton.num_states)
    }
    count = -1
    while count != len(found):
        count = len(found)
        found |= {state for state, states in after.items() if states & found}
    return found


def mask(automaton: Any, alive: set[int], state: int, tokens: list[bytes]) -> list[bool]:
    """The state after each beginning, looked up or found by one step."""
    after: dict[bytes, int | None] = {b"": state}
    for token in tokens:
        for length in range(1, len(token) + 1):
            begin, before = token[:length], after[token[: length - 1]]
            if begin not in after:
                after[begin] = None if before is None else automaton.step(before, begin[-1])
    return [token != b"" and after[token] in alive for token in tokens]


def allowed(
    automaton: Any, alive: set[int], state: int, tokens: list[bytes], end: int
) -> list[bool]:
    """The mask with the end in its place."""
    found = mask(automaton, alive, state, tokens)
    found[end] = state in automaton.accepting
    return found


def forced(automaton: Any, alive: set[int], state: int) -> bytes:
    """While there is one way on and no end."""
    text = b""
    while state not in automaton.accepting:
        ways = {byte: automaton.step(state, byte) for byte in range(256)}
        open_ways = [byte for byte, after in ways.items() if after in alive]
        if len(open_ways) != 1:
            break
        text += bytes(open_ways)
        state = ways[open_ways[0]]
    return text
