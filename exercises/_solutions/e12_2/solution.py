"""An end is seen one step late, so the code must not depend on when it is seen: only rows count.

Two lists are enough: the requests with a row in the step in the queue, and those with a row in the
step before. A request that is in the second list but not in the first will never have a row again,
whether it had all its tokens, wrote END or was aborted. At that moment its block becomes free.
Neither the end nor the abort is a special case.

Why wait for that moment? The queue runs in order, so a later step could use the block at once. But
some writes do not go through this queue: a prompt that was computed elsewhere, or a block that is
swapped in, uses another queue, and does not wait for a row that is still to run.

Only the value of a token is not known yet. Its position is known, and so is the row in which the
device will have it, which is enough for a plan. So a number of tokens that is known in advance
costs no extra row, and an END costs exactly one. A plan that needs more about a token, such as a
grammar that allows only some tokens next, has to wait for it, or must run on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

END = 0


@dataclass(eq=False)
class Request:
    """A request with its text so far."""

    name: str
    prompt: list[int]
    most: int
    rows: int = 0  # how many it has had in steps that were launched
    block: int = -1
    over: bool = False  # END was seen, or it was aborted: no token of it is told any more


class Overlapped:
    """The next step is in the queue before the tokens of this one are known."""

    def __init__(self, device: Any, num_blocks: int) -> None:
        """Make blocks 0 to num_blocks - 1 free."""
        self.device, self.free = device, list(range(num_blocks))
        self.waiting: list[Request] = []
        self.flying: list[Request] = []  # row by row, who is in the step that was launched last

    def add(self, name: str, prompt: Sequence[int], most: int) -> None:
        """Add a request for `most` tokens, or fewer if END is among them."""
        self.waiting.append(Request(name, list(prompt), most))

    def abort(self, name: str) -> None:
        """Abort a request: no later turn returns a token of it."""
        self.waiting = [request for request in self.waiting if request.name != name]
        for request in self.flying:
            if request.name == name:
                request.over = True

    def turn(self) -> dict[str, int]:
        """Admit, launch a step, fetch the step of the previous turn; return its tokens by name."""
        before = self.flying
        self.flying = [r for r in before if not r.over and r.rows < r.most]
        self.flying += self.admitted()
        if self.flying:
            self.device.launch([self.row(request, before) for request in self.flying])
        return self.told(before) if before else {}

    def admitted(self) -> list[Request]:
        """Those who waited longest and find a block now."""
        new = []
        while self.waiting and self.free:
            request = self.waiting.pop(0)
            request.block = self.free.pop()
            self.device.load(request.block, request.prompt[:-1])
            new.append(request)
        return new

    def row(self, request: Request, before: list[Request]) -> tuple[int, int, int]:
        """A request's next row: the token is on its way, unless it is the prompt's last."""
        position = len(request.prompt) - 1 + request.rows
        token = -1 - before.index(request) if request in before else request.prompt[-1]
        request.rows += 1
        return request.block, position, token

    def told(self, before: list[Request]) -> dict[str, int]:
        """The tokens of the step before; the blocks of those who will never have a row again."""
        tokens = {}
        for request, token in zip(before, self.device.fetch(), strict=True):
            if not request.over:
                tokens[request.name] = token
                request.over = token == END
            if request not in self.flying:
                self.free.append(request.block)
        return tokens
