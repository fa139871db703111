"""e12.2: planning while the device computes. The task is in README.md."""

from collections.abc import Sequence

END = 0  # the token with which a text ends

Row = tuple[int, int, int]  # block, position, token; -1 - i: what row i of the step before draws


class Device:
    """A device for your own trials. That of the checks has the same three methods, and watches."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, int]] = {}  # of each block its tokens, by position
        self.queue: list[list[Row]] = []  # steps that were launched and not fetched, two at most
        self.drawn: list[int] = []  # by the step that was fetched last

    def load(self, block: int, tokens: Sequence[int]) -> None:
        """Copy a prompt into a block, from position 0 on, at once: it passes by the queue."""
        self.blocks[block] = dict(enumerate(tokens))

    def launch(self, rows: Sequence[Row]) -> None:
        """Put a step of at least one row into the queue; it runs later, when it is fetched."""
        self.queue.append(list(rows))

    def fetch(self) -> list[int]:
        """Wait for the oldest step in the queue; the tokens that its rows drew."""
        drawn = []
        for block, position, token in self.queue.pop(0):
            text = self.blocks[block]
            text[position] = token if token >= 0 else self.drawn[-1 - token]
            drawn.append(sum((at + 3) * text.get(at, 500) for at in range(position + 1)) % 19)
        self.drawn = drawn
        return list(drawn)


class Request:
    """A text that is to be continued."""

    def __init__(self, name: str, prompt: Sequence[int], most: int) -> None:
        self.name, self.text, self.left = name, list(prompt), most
        self.block = -1


class Synchronous:
    """Given, and right: but the device waits for each plan, and the plan for each token."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device, self.free = device, list(range(num_blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, name: str, prompt: Sequence[int], most: int) -> None:
        """A request for `most` tokens, or fewer if END is among them."""
        self.waiting.append(Request(name, prompt, most))

    def abort(self, name: str) -> None:
        """Nobody wants its tokens any more."""
        self.waiting = [request for request in self.waiting if request.name != name]
        for request in [request for request in self.running if request.name == name]:
            self.end(request)

    def end(self, request: Request) -> None:
        """Its block is free."""
        self.running.remove(request)
        self.free.append(request.block)

    def turn(self) -> dict[str, int]:
        """One step: the token of each request that runs."""
        while self.waiting and self.free:
            request = self.waiting.pop(0)
            request.block = self.free.pop()
            self.device.load(request.block, request.text[:-1])
            self.running.append(request)
        if not self.running:
            return {}
        rows = [(r.block, len(r.text) - 1, r.text[-1]) for r in self.running]
        self.device.launch(rows)
        tokens = {}
        for request, token in zip(list(self.running), self.device.fetch(), strict=True):
            tokens[request.name] = token
            request.text.append(token)
            request.left -= 1
            if token == END or request.left == 0:
                self.end(request)
        return tokens


class Overlapped:
    """The same texts, and the next step is in the queue before the tokens of this one are known."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        """Blocks 0 to num_blocks - 1 are free."""
        raise NotImplementedError("TODO e12.2: what has to be known beside what is known above?")

    def add(self, name: str, prompt: Sequence[int], most: int) -> None:
        """A request for `most` tokens, or fewer if END is among them."""
        raise NotImplementedError("TODO e12.2: let it wait for a block")

    def abort(self, name: str) -> None:
        """Nobody wants its tokens any more; no turn returns one from now on."""
        raise NotImplementedError("TODO e12.2: it may wait, or have a row in the queue")

    def turn(self) -> dict[str, int]:
        """Admit, launch a step, then fetch the one of the turn before: its tokens, by name."""
        raise NotImplementedError("TODO e12.2: launch first, and fetch what was launched before")
