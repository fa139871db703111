"""Chapter 12: steps that are recorded, and the sizes and padding of their graphs."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from minillm import LLM
from minillm.execution.setup import runner_of
from minillm.lab.simulation import Simulation, linear


def into(func: Any, args: Sequence[Any], out: Any) -> Callable[..., object] | None:
    """What writes the result of ``func(*args)`` to where `out` lies, given the same arguments.

    None if there is nothing to write: a view is the same memory in another shape, and a number
    that was returned to Python cannot be written again.
    """
    outs = [each for each in (out if isinstance(out, tuple | list) else (out,))]
    if not outs or not all(isinstance(each, Tensor) for each in outs):
        return None
    memory = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
    if outs[0].untyped_storage().data_ptr() in memory:
        return func if func._schema.is_mutable else None
    if len(outs) == 1 and (found := _with_out(func)) is not None:
        overload, name = found
        return lambda *values, **options: overload(*values, **options, **{name: out})

    def copied(*values: Any, **options: Any) -> None:
        made = func(*values, **options)
        for mine, new in zip(
            outs, made if isinstance(made, tuple | list) else (made,), strict=True
        ):
            mine.copy_(new)

    return copied


def _with_out(func: Any) -> tuple[Any, str] | None:
    """The overload of an operation that writes into memory it is given, and that argument."""
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        *first, last = ((one.name, str(one.type)) for one in overload._schema.arguments)
        written = [one.name for one in overload._schema.arguments if one.is_out]
        if first == wanted and written == [last[0]]:
            return overload, last[0]
    return None


class Again:
    """Records steps for the engine's graphs on a CPU: a recording is the function itself, called
    again over the same tensors. It shows what is computed, and saves nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it once, as a warm-up does."""
        run()
        return run


def give_graphs(llm: LLM) -> LLM:
    """Let an engine in plain torch run its decode steps as graphs, recorded by `Again`.

    Its cache then treats padding as our GPU kernels do: slot -1 is written nowhere, length 0 reads
    nothing.
    """
    runner = runner_of(llm.engine.runner)
    runner.kv.mode = "plain"
    runner.use_graphs(Again())
    return llm


def padding(seen: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Rows of padding when each batch runs in the smallest of `sizes` that holds it; `seen` has
    the number of steps with so many rows."""
    return sum(
        steps * (min(size for size in sizes if size >= rows) - rows) for rows, steps in seen.items()
    )


def batches(requests: int = 400, seats: int = 100, seed: int = 0) -> Counter[int]:
    """How many decode steps of a made-up afternoon had so many rows, by the engine's scheduler."""
    dice = random.Random(seed)
    sim = Simulation(8000, 16, max_num_seqs=seats, seconds=linear(0.010, 0.0001))
    now = 0.0
    for _ in range(requests):
        now += dice.randrange(1, 60) / 1000
        sim.add(dice.randrange(10, 200), dice.choice((8, 20, 40, 80, 160)), arrival=now)
    decodes = [record for record in sim.run() if all(row.num_tokens == 1 for row in record.rows)]
    return Counter(len(record.rows) for record in decodes)
