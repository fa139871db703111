"""Another way: a table of blocks, and tickets for the rows in the queue.

Each block has a record of its text. A step in the queue is a list of tickets, one per row: the
block and the serial number of the text at that time. A block is free if it has no record and no
ticket, which is looked up when a block is needed.
"""

from collections import deque
from itertools import count

END = 0


class Overlapped:
    """The next step is in the queue before the tokens of this one are known."""

    def __init__(self, device, num_blocks):
        """No texts."""
        self.device = device
        self.texts = dict.fromkeys(range(num_blocks))
        self.line = deque()
        self.steps = deque()
        self.serial = count()

    def add(self, name, prompt, most):
        """At the end of the line."""
        self.line.append((name, tuple(prompt), most))

    def abort(self, name):
        """Out of the line, or off its block."""
        self.line = deque(entry for entry in self.line if entry[0] != name)
        for block, text in self.texts.items():
            if text and text["name"] == name:
                self.texts[block] = None

    def turn(self):
        """Admit, launch, fetch."""
        self.seat()
        places = {ticket: at for at, ticket in enumerate(self.steps[-1])} if self.steps else {}
        rows, tickets = [], []
        for block, text in self.texts.items():
            if text is None or text["todo"] == 0:
                continue
            ticket = (block, text["serial"])
            last = text["first"] if text["first"] is not None else ~places[ticket]
            rows.append((block, text["next"], last))
            tickets.append(ticket)
            text["first"] = None
            text["next"] += 1
            text["todo"] -= 1
        if rows:
            self.device.launch(rows)
            self.steps.append(tickets)
        if len(self.steps) == bool(rows):
            return {}
        return self.hear(self.steps[0])

    def seat(self):
        """Whoever waits takes a block that has neither a text nor a ticket."""
        held = {block for step in self.steps for block, _ in step}
        for block, text in self.texts.items():
            if text is None and block not in held and self.line:
                name, prompt, most = self.line.popleft()
                self.device.load(block, list(prompt[:-1]))
                self.texts[block] = {
                    "name": name, "serial": next(self.serial), "todo": most,
                    "next": len(prompt) - 1, "first": prompt[-1],
                }  # fmt: skip

    def hear(self, tickets):
        """The tokens of the oldest step, for texts that are still where they were."""
        told = {}
        for (block, serial), token in zip(tickets, self.device.fetch(), strict=True):
            text = self.texts[block]
            if text is None or text["serial"] != serial:
                continue
            told[text["name"]] = token
            later = any((block, serial) in step for step in self.steps if step is not tickets)
            if token == END or not later:
                self.texts[block] = None
        self.steps.popleft()
        return told
