"""Chapter 01b: lines of the program taken out, what then happens, and a picture of the program."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minillm.lab.comparison.candidates import load_base
from minillm.lab.comparison.run import tokenizer_of
from minillm.models.checkpoint import open_model
from minillm_exercises.chapters import ch01b_forward, quality
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.notebook import say
from minillm_exercises.plots import COLOURS, figure, show

TINY, held_out = quality.TINY, quality.text("held_out")
LINES, MARK = inspect.getsource(ch01b_forward).splitlines(), "  # delete: "
DELETED = tuple(line.partition(MARK)[2] for line in LINES if MARK in line)
REAL = Path(__file__).with_name("ch01b_smollm2.json")
Forward = Callable[..., Tensor]  # weights, config, ids -> logits [T, V]


def program(without: str | None = None, swap: tuple[str, str] = (MARK, MARK)) -> Forward:
    """`forward` of the program, without the line of that name, and with a text replaced."""
    lines = (line for line in LINES if line.partition(MARK)[2] != without)
    scope: dict[str, Any] = {"__name__": "program"}
    exec("\n".join(lines).replace(*swap), scope)
    return scope["forward"]


def parts(scope: Mapping[str, Any]) -> SimpleNamespace:
    """The five functions of the page that are written and right, and ours for the others."""

    def wave(*shape: int) -> Tensor:  # numbers between -1 and 1 that are all different
        return torch.arange(float(math.prod(shape))).view(shape).sin()

    cases: dict[str, tuple[Any, ...]] = {
        "norm": (wave(2, 3), wave(3), 0.5),
        "rotate": (wave(2, 3, 4), 100.0),
        "attend": (wave(4, 3, 2), wave(2, 3, 2), wave(2, 3, 2).exp()),
        "mlp": (wave(2, 3), wave(4, 3), wave(4, 3) + 1, wave(3, 4)),
        "logits": (wave(2, 3), wave(3), 0.5, wave(5, 3)),
    }
    ours, yours = {name: getattr(ch01b_forward, name) for name in cases}, {}
    for name, case in cases.items():
        with suppress(Exception):  # of a function that is not written yet, or not right
            torch.testing.assert_close(scope[name](*case), ours[name](*case))
            yours[name] = scope[name]
    rest = ", ".join(name for name in ours if name not in yours)
    say(f"from this page: {', '.join(yours) or 'none'}" + f"; ours: {rest}" * bool(rest))
    return SimpleNamespace(**ours | yours)


@torch.no_grad()
def greedy(forward: Forward, model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a program writes after `ids`, without a cache."""
    known = list(ids)
    for _ in range(count):
        known.append(int(forward(*model, known)[-1].argmax()))
    return known[len(ids) :]


@torch.no_grad()
def judge(forward: Forward, model: Any, ids: Sequence[int], right: Tensor) -> dict[str, Any]:
    """What a program makes of a text: its mean loss in nats per token, the mean divergence from
    the probabilities of the `right` logits [T, V], and the share of the same best tokens; None
    where there is NaN."""
    wanted = right.double().log_softmax(-1)
    own = forward(*model, list(ids)).double().log_softmax(-1)
    found = {
        "loss": -own[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item(),
        "kl": (wanted.exp() * (wanted - own)).sum(-1).mean().item(),
        "same": (own.argmax(-1) == wanted.argmax(-1)).double().mean().item(),
    }
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def measure_real(name: str, lines: Sequence[str] = ("", *DELETED)) -> dict[str, Any]:
    """What `REAL` holds for the model `name` (a download of 93 MB): the same deletions in the same
    program, with its weights. Some minutes."""
    source, prompt = open_model(name), "The capital of France is"
    c, tokenizer, decoder = source.config, tokenizer_of(source), load_base(source, torch.float32)
    weights = {key: each.target for key, each in decoder.checkpoint_tensors().items()}
    config = {"rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta, "head_dim": c.head_dim}
    model = weights, config | {"num_hidden_layers": c.num_layers}
    ids, start = tokenizer.encode(held_out)[:256], tokenizer.encode(prompt)
    right, rows = quality.logits_of(decoder, ids), {}
    for line in lines:
        forward = program(line or None)
        text = tokenizer.decode(greedy(forward, model, start, 12))
        rows[line] = judge(forward, model, ids, right) | {"text": text}
    return {"model": name, "prompt": prompt, "rows": rows}


def real() -> dict[str, Any]:
    """`measure_real("smollm2")`, as it was measured; `make test-external` measures it again."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def draw_map(rows: str, layers: str) -> None:
    """The way of a text through the program: the rows, and what is added to them."""
    fig, ax = figure("way", "height", size=(7.4, 2.5))
    ax.set(xlim=(-0.6, 10.6), ylim=(0, 2.9))
    ax.axis("off")
    grey: dict[str, Any] = {"color": "gray", "zorder": 0}
    ax.plot([0, 10], [0.7, 0.7], lw=3, **grey)
    lines = ((1.0, 5.0, 0.7, 1.8), (5.4, 8.1, 0.7, 1.8), (0.85, 8.3, 2.2, 2.4))
    for start, end, low, high in lines:
        ax.plot([start, start, end, end], [low, high, high, low], lw=1, **grey)
    ax.text(4.6, 2.5, layers, ha="center", fontsize=9)
    ax.text(4.6, 0.1, rows, ha="center", fontsize=9)
    kinds = ("norm", "rotation", "attention", "MLP", "logits")
    upper = {1.7: "norm", 2.85: "rotation", 4.1: "attention", 6.1: "norm", 7.2: "MLP"}
    lower = {0.1: "embedding", 5.0: "+", 8.1: "+", 8.9: "norm", 9.9: "logits"}
    for x, name in (upper | lower).items():
        colour = COLOURS[kinds.index(name)] if name in kinds else "gray"
        box = {"boxstyle": "round", "fc": "white", "ec": colour, "lw": 2}
        y = 1.8 if x in upper else 0.7
        ax.text(x, y, name, ha="center", va="center", bbox=box, fontsize=9)
    show(fig, "Each part reads the rows and adds its result to them (+); the five colours are the "
         "five functions of this chapter.")  # fmt: skip
