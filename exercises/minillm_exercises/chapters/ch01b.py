"""Chapter 01b: lines of the program taken out, what then happens, and a picture of the program."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
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
from minillm_exercises.plots import COLOURS, bars, figure, show

TINY, held_out = quality.TINY, quality.text("held_out")
LINES, MARK = inspect.getsource(ch01b_forward).splitlines(), "  # delete: "
DELETED = tuple(line.partition(MARK)[2] for line in LINES if MARK in line)
REAL = Path(__file__).with_name("ch01b_smollm2.json")
Forward = Callable[..., Tensor]  # weights, config, ids -> logits [T, V]


def program(lines: Sequence[str]) -> Forward:
    """`forward` of a program with these lines."""
    scope: dict[str, Any] = {"__name__": "program"}
    exec("\n".join(lines), scope)
    return scope["forward"]


def without(*names: str) -> Forward:
    """`forward` of the program, without the lines of these names."""
    return program([line for line in LINES if line.partition(MARK)[2] not in {*names} - {""}])


def wave(*shape: int) -> Tensor:
    """Numbers between -1 and 1 that are all different."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape).sin()


def parts(scope: Mapping[str, Any]) -> SimpleNamespace:
    """The five functions of the page that are written and right, and ours for the others."""
    cases: dict[str, tuple[Any, ...]] = {
        "norm": (wave(2, 3), wave(3), 0.5),
        "rotate": (wave(2, 3, 4), 100.0),
        "attend": (wave(4, 3, 2), wave(2, 3, 2), wave(2, 3, 2).exp()),
        "mlp": (wave(2, 3), wave(4, 3), wave(4, 3) + 1, wave(3, 4)),
        "logits": (wave(2, 3), wave(3), 0.5, wave(5, 3)),
    }
    chosen = {name: getattr(ch01b_forward, name) for name in cases}
    yours = []
    for name, arguments in cases.items():
        try:
            torch.testing.assert_close(scope[name](*arguments), chosen[name](*arguments))
        except Exception:  # of a function that is not written yet, or not right
            continue
        chosen[name] = scope[name]
        yours.append(name)
    ours = [name for name in cases if name not in yours]
    say(f"from this page: {', '.join(yours) or 'none'}" + f"; ours: {', '.join(ours)}" * bool(ours))
    return SimpleNamespace(**chosen)


def judge(forward: Forward, model: Any, ids: Sequence[int], wanted: Tensor) -> dict[str, Any]:
    """What a program makes of a text: its mean loss in nats per token, the mean divergence from
    the right program's log-probabilities `wanted` [T, V], and the share of the same best tokens;
    None where there is NaN."""
    own = forward(*model, list(ids)).double().log_softmax(-1)
    loss = -own[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean()
    divergence = (wanted.exp() * (wanted - own)).sum(-1).mean()
    same = (own.argmax(-1) == wanted.argmax(-1)).double().mean()
    found = {"loss": float(loss), "kl": float(divergence), "same": float(same)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


@torch.no_grad()
def greedy(forward: Forward, model: Any, ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a program writes after `ids`, without a cache."""
    known = list(ids)
    for _ in range(count):
        known.append(int(forward(*model, known)[-1].argmax()))
    return known[len(ids) :]


@torch.no_grad()
def measure_real(
    name: str, lines: Sequence[str] = ("", *DELETED), prompt: str = "The capital of France is"
) -> dict[str, Any]:
    """What `REAL` holds for the model `name` (a download of 93 MB): the same deletions in the same
    program, with its weights. Some minutes."""
    source = open_model(name)
    c, tokenizer = source.config, tokenizer_of(source)
    decoder = load_base(source, torch.float32)
    weights = {key: each.target for key, each in decoder.checkpoint_tensors().items()}
    config = {"rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope.theta, "head_dim": c.head_dim}
    model = weights, config | {"num_hidden_layers": c.num_layers}
    ids, start = tokenizer.encode(held_out)[:256], tokenizer.encode(prompt)
    wanted = quality.logits_of(decoder, ids).double().log_softmax(-1)
    found: dict[str, Any] = {"model": name, "prompt": prompt, "rows": {}}
    for line in lines:
        forward = without(line)
        text = tokenizer.decode(greedy(forward, model, start, 12))
        found["rows"][line] = judge(forward, model, ids, wanted) | {"text": text}
    return found


def real() -> dict[str, Any]:
    """`measure_real("smollm2")`, as it was measured; `make test-external` measures it again."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def draw_map(rows: str, layers: str) -> None:
    """The way of a text through the program: the rows, and what is added to them."""
    fig, ax = figure("way", "height", size=(7.4, 2.5))
    ax.set(xlim=(-0.6, 10.6), ylim=(0, 2.9))
    ax.axis("off")
    grey: dict[str, Any] = {"color": "gray", "zorder": 0, "lw": 1}
    ax.plot([0, 10], [0.7, 0.7], **grey | {"lw": 3})
    for start, end in ((1.0, 5.0), (5.4, 8.1)):
        ax.plot([start, start, end, end], [0.7, 1.8, 1.8, 0.7], **grey)
    ax.plot([0.85, 0.85, 8.3, 8.3], [2.2, 2.4, 2.4, 2.2], **grey)
    ax.text(4.6, 2.5, layers, ha="center", fontsize=9)
    ax.text(4.6, 0.1, rows, ha="center", fontsize=9)
    kinds = ("norm", "rotation", "attention", "MLP", "logits", "embedding", "+")
    colours = dict(zip(kinds, (*COLOURS[:5], "gray", "black"), strict=True))
    upper = {1.7: "norm", 2.85: "rotation", 4.1: "attention", 6.1: "norm", 7.2: "MLP"}
    lower = {0.1: "embedding", 5.0: "+", 8.1: "+", 8.9: "norm", 9.9: "logits"}
    for y, names in ((1.8, upper), (0.7, lower)):
        for x, name in names.items():
            box = {"boxstyle": "round", "fc": "white", "ec": colours[name], "lw": 2}
            ax.text(x, y, name, ha="center", va="center", bbox=box, fontsize=9)
    show(fig, "Each part reads the rows and adds its result to them (+); the five colours are the "
         "five functions of this chapter.")  # fmt: skip


def draw_losses(models: Mapping[str, dict[str, dict[str, Any]]]) -> None:
    """The loss of each program with a line deleted, for each model; NaN is written as a word."""
    fig, axes = figure("loss (nats per token, log)", "deleted line", cols=2, size=(8.4, 3.6))
    for place, (ax, (name, rows)) in enumerate(zip(axes, models.items(), strict=True)):
        for y, (line, row) in enumerate(reversed(rows.items())):
            loss = row["loss"]
            ax.barh(y, loss or 0, **(bars(place) if line else {"color": "black"}))
            ax.text(loss or 1.1, y, f" {loss:.1f}" if loss else "NaN", va="center", fontsize=8)
        ax.axvline(rows[""]["loss"], color="black", linestyle="--", linewidth=1.2)
        ax.set_yticks(range(len(rows)), [line or "whole program" for line in reversed(rows)])
        ax.set(xscale="log", xlim=(1, 2000), title=name)
    show(fig, "The loss with one line deleted, beside that of the whole program (dashed): only "
         "without the mask it falls, in both models.")  # fmt: skip
