"""A small engine, put together from your exercises. It serves requests with the `tiny` model.

    python engine.py                    three requests, compared with minillm's own engine
    python engine.py "def add(a, b):"   your prompts

`python -m minillm_exercises engine` copies the exercises that you have passed beside this file:

    e03_1.py   KVCache        keys and values of a request, in a row of its own
    e06_1.py   Scheduler      which requests run in a step      (without it: one at a time)
    e07_1.py   BlockManager   keys and values in blocks          (without it: the rows of e03.1)
    e09_1.py   RadixTree      a prompt's known start is copied   (needs e07.1)

This file is yours: change it as you like.
"""

import importlib
import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minillm import LLM, SamplingParams, ops
from minillm.models.forward_pass import Chunk

SEATS, NEW, SLOTS = 2, 24, 512  # requests in a step, tokens to write, longest text
BLOCK_SIZE, NUM_BLOCKS = 16, 96
SHARED = '"""A stack and a queue, with tests."""\n\nimport unittest\n\n\nclass '
PROMPTS = (SHARED + "Stack:\n", "def factorial(n):\n", SHARED + "Queue:\n")


@dataclass
class Request:
    """A prompt and what was written so far; keys and values of `computed` tokens are stored."""

    name: str
    prompt: list[int]
    new: int = NEW
    output: list[int] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    given: int = 0  # tokens of `output` that a branch began with

    @property
    def tokens(self) -> list[int]:
        """The whole text."""
        return self.prompt + self.output


class OneAtATime:
    """In place of e06.1: a single seat."""

    def __init__(self, seats: int) -> None:
        self.queue: list[list] = []

    def add(self, requests: list[tuple[str, int]]) -> None:
        """Requests join the queue."""
        self.queue += [list(each) for each in requests]

    def step(self) -> tuple[list[str | None], list[str]]:
        """The first request makes a token."""
        name, left = self.queue[0]
        self.queue[0][1] = left - 1
        return [name], [self.queue.pop(0)[0]] if left == 1 else []


class Memory:
    """What every memory does. A forward pass calls `write` and `attend` in each layer; `pieces`
    are the requests of the pass with the rows of each in the flat batch."""

    def __init__(self, config) -> None:
        self.config = config
        self.pieces: list[tuple[Request, slice]] = []

    def empty(self, *shape: int) -> Tensor:
        """Memory filled with NaN, so that a wrong read is seen."""
        return torch.full(shape, torch.nan)


class Rows(Memory):
    """e03.1: each request has a row of its own in every layer."""

    def __init__(self, config, cache: type) -> None:
        super().__init__(config)
        self.cache, self.rows = cache, {}

    def begin(self, request: Request) -> int:
        """Make room for a request; returns how many of its tokens are known already."""
        shape = 1, self.config.num_kv_heads, SLOTS, self.config.head_dim
        layers = range(self.config.num_layers)
        self.rows[request.name] = [self.cache(self.empty(*shape), self.empty(*shape))
                                   for _ in layers]  # fmt: skip
        return 0

    def grow(self, request: Request) -> None:
        """Room for one more token: a row has it."""

    def end(self, request: Request) -> None:
        """Forget a request."""
        del self.rows[request.name]

    def write(self, layer: int, key: Tensor, value: Tensor, batch) -> None:
        """Store keys and values [N, Hkv, D]."""
        for request, rows in self.pieces:
            self.rows[request.name][layer].append(0, key[rows], value[rows])

    def attend(self, layer: int, query: Tensor, batch, scale: float, window) -> Tensor:
        """Queries [N, H, D] -> [N, H, D]"""
        return torch.cat([
            self.rows[request.name][layer].attend(0, query[rows]) for request, rows in self.pieces
        ])  # fmt: skip


class Pages(Memory):
    """e07.1: requests have blocks. e09.1: ended texts stay, and their starts are copied."""

    def __init__(self, config, manager: type, tree: type | None) -> None:
        super().__init__(config)
        self.blocks, self.make_tree = manager(NUM_BLOCKS, BLOCK_SIZE), tree
        self.tree = tree() if tree else None
        self.kept: list[str] = []
        shape = config.num_layers, NUM_BLOCKS * BLOCK_SIZE, config.num_kv_heads, config.head_dim
        self.keys, self.values = self.empty(*shape), self.empty(*shape)

    def begin(self, request: Request) -> int:
        """Take blocks for the prompt, and copy what is known of it."""
        known = self.tree.match(request.prompt, "", True) if self.tree else []
        if not self.blocks.allocate(request.name, len(request.prompt)):
            self.forget()
            known = []
            if not self.blocks.allocate(request.name, len(request.prompt)):
                raise MemoryError(f"{NUM_BLOCKS} blocks do not hold {request.name}.")
        own = self.slots(request)[: len(known)]
        self.copy(known, own)
        return len(known)

    def grow(self, request: Request) -> None:
        """Room for one more token."""
        place = self.blocks.append(request.name)
        if place is None:
            self.forget()
            place = self.blocks.append(request.name)
        if place is None:
            raise MemoryError(f"There is no free block for {request.name}.")
        block, _, source = place
        if source is not None:
            self.copy(self.block(source), self.block(block))

    def branch(self, request: Request, token: int) -> Request:
        """A second answer that begins with `token`. Both have the same blocks, until one writes."""
        child = replace(request, name=f"{request.name}, second answer", output=[token], given=1)
        self.blocks.fork(request.name, child.name)
        return child

    def end(self, request: Request) -> None:
        """Give the blocks back; with a tree, the text stays until blocks run out."""
        if self.tree:
            self.kept.append(f"kept {request.name}")
            self.blocks.fork(request.name, self.kept[-1])
            stored = request.tokens[: request.computed]
            self.tree.insert(stored, self.slots(request), "")
        self.blocks.free(request.name)

    def forget(self) -> None:
        """Drop all texts that have ended."""
        for name in self.kept:
            self.blocks.free(name)
        self.kept, self.tree = [], self.make_tree() if self.make_tree else None

    def block(self, number: int) -> list[int]:
        """The slots of a block."""
        return list(range(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE))

    def slots(self, request: Request) -> list[int]:
        """Where a request's tokens lie, by position."""
        table = self.blocks.table(request.name)
        length = max(request.computed, len(request.prompt))
        return [slot for number in table for slot in self.block(number)][:length]

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy keys and values of slots, in all layers."""
        self.keys[:, target], self.values[:, target] = self.keys[:, source], self.values[:, source]

    def write(self, layer: int, key: Tensor, value: Tensor, batch) -> None:
        """Store keys and values [N, Hkv, D]."""
        for request, rows in self.pieces:
            request_slots = self.everything(request)[request.computed :][: rows.stop - rows.start]
            self.keys[layer][request_slots] = key[rows]
            self.values[layer][request_slots] = value[rows]

    def attend(self, layer: int, query: Tensor, batch, scale: float, window) -> Tensor:
        """Queries [N, H, D] -> [N, H, D]"""
        found = []
        for request, rows in self.pieces:
            slots = self.everything(request)[: request.computed + rows.stop - rows.start]
            key, value = (kept[layer][slots].transpose(0, 1) for kept in (self.keys, self.values))
            found.append(ops.causal_attention(query[rows], key, value, scale, window))
        return torch.cat(found)

    def everything(self, request: Request) -> list[int]:
        """All slots of a request's blocks."""
        return [slot for n in self.blocks.table(request.name) for slot in self.block(n)]


@torch.inference_mode()
def forward(llm: LLM, memory: Memory, running: list[Request]) -> Tensor:
    """Compute what each request lacks, in one pass -> logits [B, V] of the last tokens."""
    passes, chunks, start = llm.engine.forward_pass, [], 0
    memory.pieces = []
    for request in running:
        missing = request.tokens[request.computed :]
        chunks.append(Chunk(block=0, start=request.computed, token_ids=missing))
        memory.pieces.append((request, slice(start, start + len(missing))))
        start += len(missing)
    batch = passes.batch(chunks, SLOTS)
    hidden = passes.model(batch, memory)
    return passes.logits(hidden[batch.logits_indices])


def serve(llm: LLM, requests: list[Request], memory: Memory, scheduler: type) -> tuple[int, int]:
    """Serve all requests; returns the numbers of steps and of positions that were computed.

    In a paged memory the last request has a second answer, which begins with the second-best token.
    """
    seats = scheduler(SEATS)
    by_name = {request.name: request for request in requests}
    seats.add([(request.name, request.new) for request in requests])
    left, steps, positions = len(requests), 0, 0
    while left:
        names, ended = seats.step()
        running = [by_name[name] for name in names if name is not None]
        if not running:
            raise RuntimeError(f"Step {steps} runs nothing, and {left} requests have not ended.")
        for request in running:
            if request.running:
                memory.grow(request)
            else:
                request.running, request.computed = True, memory.begin(request)
        for request, row in zip(running, forward(llm, memory, running), strict=True):
            positions += len(request.tokens) - request.computed
            request.computed = len(request.tokens)
            request.output.append(int(row.argmax()))
            if request is requests[-1] and len(request.output) == 1 and isinstance(memory, Pages):
                child = memory.branch(request, int(row.topk(2).indices[1]))
                by_name[child.name], left = child, left + 1
                seats.add([(child.name, child.new - 1)])
        for name in ended:
            memory.end(by_name[name])
        left, steps = left - len(ended), steps + 1
    requests[:] = by_name.values()
    return steps, positions


def part(module: str, name: str) -> type | None:
    """A class of an exercise, or None if its file is not here."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return None


def build(config) -> tuple[Memory, type, list[str]]:
    """The memory, the scheduler, and a line for each part."""
    cache, scheduler = part("e03_1", "KVCache"), part("e06_1", "Scheduler")
    manager, tree = part("e07_1", "BlockManager"), part("e09_1", "RadixTree")
    if manager is None and cache is None:
        raise SystemExit("There is neither e03_1.py nor e07_1.py: pass e03.1 first.")
    memory = Pages(config, manager, tree) if manager else Rows(config, cache)
    lines = [
        "memory: blocks of e07.1" if manager else "memory: rows of e03.1",
        f"steps: {'the scheduler of e06.1' if scheduler else 'one request at a time (no e06.1)'}",
        "prefixes: the tree of e09.1" if manager and tree else "prefixes: computed every time",
    ]
    return memory, scheduler or OneAtATime, lines


def main(prompts: list[str]) -> int:
    """Serve prompts and compare with minillm's own engine; 0 if all texts are equal."""
    llm = LLM("tiny", dtype="float32", device="cpu")
    memory, scheduler, lines = build(llm.engine.forward_pass.model.config)
    prompts = prompts or [*PROMPTS]
    requests = [Request(f"request {at}", llm.tokenizer.encode(text))
                for at, text in enumerate(prompts)]  # fmt: skip
    for request in requests:
        if not 0 < len(request.prompt) <= SLOTS - NEW:
            raise SystemExit(f"The prompt of {request.name} has {len(request.prompt)} tokens; "
                             f"it must have 1 to {SLOTS - NEW}.")  # fmt: skip
    steps, positions = serve(llm, requests, memory, scheduler)
    print(*lines, sep="\n")
    wrong = sum(not report(llm, request) for request in requests)
    whole = sum(len(each.tokens) - 1 for each in requests)
    print(f"\n{steps} steps, {positions} positions computed; with nothing shared it is {whole}.")
    return 1 if wrong else 0


def report(llm: LLM, request: Request) -> bool:
    """Print a text, and whether it is that of minillm's own engine."""
    given, written = request.output[: request.given], request.output[request.given :]
    params = SamplingParams(temperature=0, max_tokens=len(written), ignore_eos=True)
    reply = llm.generate([request.prompt + given], params, use_tqdm=False)[0]
    expected = list(reply.outputs[0].token_ids)
    same = sum(a == b for a, b in zip(written, expected, strict=True))
    equal = written == expected
    verdict = "equal to LLM.generate" if equal else f"{same} of {len(written)} tokens are equal"
    print(f"\n{request.name} ({verdict}):\n{llm.tokenizer.decode(request.tokens)}")
    return equal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
