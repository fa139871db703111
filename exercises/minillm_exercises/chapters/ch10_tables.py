"""The tables and times of chapter 10, and minillm's own attention to compare with."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from minillm_exercises.chapters.ch10 import Attention, Share, inputs
from minillm_exercises.chapters.common import rounds
from minillm_exercises.timing import measure

State = tuple[float, float, float]


def show_steps(head: Sequence[str], rows: Sequence[Sequence[float]], marked: Sequence[int]) -> None:
    """Show a table of numbers, right-aligned, with the rows `marked` tinted and pointed at."""
    from IPython.display import display

    texts = [[shown(number) for number in row] for row in rows]
    cell = "style='text-align:right;padding:3px 12px'"
    lines = "<tr>" + "".join(f"<th {cell}>{name}</th>" for name in ("", *head)) + "</tr>"
    for number, row in enumerate(texts):
        tint = " style='background:rgba(230,159,0,0.25)'" if number in marked else ""
        arrow = "\u25b6" if number in marked else ""
        cells = "".join(f"<td {cell}>{text}</td>" for text in (arrow, *row))
        lines += f"<tr{tint}>{cells}</tr>"
    told = "; ".join(", ".join(row) for row in texts)
    plain = f"{', '.join(head)}: {told}"
    display({"text/html": f"<table>{lines}</table>", "text/plain": plain}, raw=True)


def shown(number: float) -> str:
    """A number as a table has it: a whole one with commas, another with three significant
    digits, more where it is large."""
    if number == int(number):
        return f"{int(number):,}"
    return f"{number:.3g}" if abs(number) < 100 else f"{number:,.0f}"


def show_states(
    read: Callable[[State, float, float], tuple[State, float]],
    scores: Sequence[float],
    values: Sequence[float],
) -> State:
    """Show the states of a row read one score at a time; the last one is returned. Rows whose
    largest score is new are marked, but for the first."""
    state: State = (-math.inf, 0.0, 0.0)
    rows: list[list[float]] = []
    marked = []
    for score, value in zip(scores, values, strict=True):
        before = state[0]
        state, factor = read(state, score, value)
        if rows and state[0] > before:
            marked.append(len(rows))
        rows.append([score, value, state[0], factor, state[1], state[2], state[2] / state[1]])
    head = ["score", "value", "m", "factor for what was", "z", "o", "result so far, o / z"]
    show_steps(head, rows, marked)
    return state


def show_shares(shares: Mapping[int, Share], faster: Sequence[float], marked: int) -> None:
    """Show attention's share of the pass for each prompt, and what a faster one buys."""
    head = ["prompt (tokens)", "attention (% of the pass)"]
    head += [f"attention {times:g}x as fast, the pass (times as fast)" for times in faster]
    rows = [
        [tokens, 100 * share.share, *(share.gain(times) for times in faster)]
        for tokens, share in shares.items()
    ]
    show_steps(head, rows, [marked])


def times(
    attend: Attention,
    lengths: Sequence[int],
    width: int,
    device: str = "cpu",
    fastest: bool = False,
) -> list[float]:
    """Median seconds of one head of each length on a device, or those of the fastest run. In a
    hurry all heads are as short as the first."""
    found = []
    for tokens in lengths if rounds(2) > 1 else [lengths[0]] * len(lengths):
        q, k, v = inputs(tokens, width, device=device)
        timed = measure(lambda q=q, k=k, v=v: attend(q, k, v), repeats=5, budget=0.4, device=device)
        found.append(min(timed.times) if fastest else timed.median)
    return found


def engine(q: Tensor, k: Tensor, v: Tensor, causal: bool, block: int) -> tuple[str, Tensor]:
    """Attention of q [N, d] over k and v [S, d] by minillm, and by which part of it.

    With Triton that is the "kernel" in tiles of `block`: compiled, on CUDA, where there is a GPU,
    and in Triton's interpreter with TRITON_INTERPRET=1. Otherwise it is the "reference" that the
    kernel is tested against. The result is on the device of `q`.
    """
    device = kernel_device(q)
    home, at = q.device, device or q.device
    query_start, key_start = (
        torch.tensor([0, len(x)], dtype=torch.int32, device=at) for x in (q, k)
    )
    q, k, v = (each[:, None].to(at) for each in (q, k, v))  # [N, 1, d]
    scale = 1 / math.sqrt(q.shape[-1])
    if device is not None:
        from minillm_kernels import flash_attention as kernel

        out = kernel.flash_attention(q, k, v, query_start, key_start, scale, causal, block=block)
        return "kernel", out[:, 0].to(home)
    from minillm_kernels import reference

    out = reference.flash_attention(q, k, v, query_start, key_start, scale, causal)
    return "reference", out[:, 0]


def kernel_device(q: Tensor) -> torch.device | None:
    """Where the kernel can run: on the CPU if kernels are interpreted, else on a GPU; None
    without Triton or without both."""
    if not find_spec("triton"):
        return None
    from minillm_kernels.launch import INTERPRETED

    if INTERPRETED:
        return torch.device("cpu")
    if q.is_cuda:
        return q.device
    return torch.device("cuda") if torch.cuda.is_available() else None
