"""e12.2: planning while the device computes. The task is in README.md."""

from collections.abc import Sequence

END = 0  # the token that ends a text

Row = tuple[int, int, int]  # block, position, token; -1 - i: the draw of row i before


class Device:
    """A device for your own tests. The device of the checks has the same methods, and counts."""

    def __init__(self) -> None:
        self.blocks: dict[int, dict[int, int]] = {}  # the tokens of each block by position
        self.queue: list[list[Row]] = []  # launched steps that were not fetched, at most two
        self.drawn: list[int] = []  # the tokens of the step that was fetched last

    def load(self, block: int, tokens: Sequence[int]) -> None:
        """Copy a prompt into a block, from position 0 on, at once and not through the queue."""
        self.blocks[block] = dict(enumerate(tokens))

    def launch(self, rows: Sequence[Row]) -> None:
        """Put a step of at least one row into the queue; it runs later, when it is fetched."""
        self.queue.append(list(rows))

    def fetch(self) -> list[int]:
        """Wait for the oldest step in the queue; return the tokens of its rows."""
        drawn = []
        for block, position, token in self.queue.pop(0):
            text = self.blocks[block]
            text[position] = token if token >= 0 else self.drawn[-1 - token]
            drawn.append(sum((at + 3) * text.get(at, 500) for at in range(position + 1)) % 19)
        self.drawn = drawn
        return list(drawn)


class Request:
    """A request with its text so far."""

    def __init__(self, name: str, prompt: Sequence[int], most: int) -> None:
        self.name, self.text, self.left = name, list(prompt), most
        self.block = -1


class Synchronous:
    """Given and correct, but the device waits for each plan, and each plan waits for tokens."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        self.device, self.free = device, list(range(num_blocks))
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, name: str, prompt: Sequence[int], most: int) -> None:
        """Add a request for `most` tokens, or fewer if END is among them."""
        self.waiting.append(Request(name, prompt, most))

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.waiting = [request for request in self.waiting if request.name != name]
        for request in [request for request in self.running if request.name == name]:
            self.end(request)

    def end(self, request: Request) -> None:
        """End a request and free its block."""
        self.running.remove(request)
        self.free.append(request.block)

    def turn(self) -> dict[str, int]:
        """Run one step; return the token of each running request."""
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
    """Returns the same texts, but launches a step before the tokens of the last are known."""

    def __init__(self, device: Device, num_blocks: int) -> None:
        """Make blocks 0 to num_blocks - 1 free."""
        raise NotImplementedError("TODO e12.2: decide what to store in addition to the loop above")

    def add(self, name: str, prompt: Sequence[int], most: int) -> None:
        """Add a request for `most` tokens, or fewer if END is among them."""
        raise NotImplementedError("TODO e12.2: append the request to the waiting ones")

    def abort(self, name: str) -> None:
        """Abort a request: no later turn returns a token of it."""
        raise NotImplementedError("TODO e12.2: the request may wait, or have a row in the queue")

    def turn(self) -> dict[str, int]:
        """Admit, launch a step, fetch the step of the previous turn; return its tokens by name."""
        raise NotImplementedError("TODO e12.2: launch a step, then fetch the previous one")
