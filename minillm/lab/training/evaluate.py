"""Evaluation of a trained model: bits per byte, draft acceptance, completions that parse."""

import ast
import codeop
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.lab.training.attention import causal_rows
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import Decoder
from minillm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BitsPerByte:
    """Total information of some texts under a model, and their size."""

    nats: float
    num_bytes: int
    num_tokens: int

    @property
    def bits_per_byte(self) -> float:
        """nats / ln 2 / UTF-8 bytes"""
        return self.nats / math.log(2) / self.num_bytes


@torch.no_grad()
def logits_of(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32 after each of the T tokens of one sequence."""
    input_ids = torch.tensor(ids, device=model.device)
    return model.logits(
        model(rows_batch(input_ids, len(ids)), causal_rows(model.config, len(ids)))
    ).float()


def text_nats(model: Decoder, ids: Sequence[int], context: int) -> float:
    """-log p of ids[1:]; each token is predicted from at most `context` previous tokens and, if the
    text has them, at least `context` / 2."""
    stride, nats, scored = context // 2, 0.0, 1
    for start in range(0, max(1, len(ids) - 1), stride):
        piece = ids[start : start + context + 1]
        if start + len(piece) <= scored:
            break
        new = start + len(piece) - scored
        logits = logits_of(model, piece[:-1])[-new:]
        targets = torch.tensor(piece[-new:], device=logits.device)
        nats += float(F.cross_entropy(logits, targets, reduction="sum"))
        scored += new
    return nats


def bits_per_byte(
    model: Decoder, tokenizer: Tokenizer, texts: Sequence[str], context: int = 1024
) -> BitsPerByte:
    """Score whole texts. The tokenizer prepends end-of-text, so every byte is predicted."""
    encoded = [tokenizer.encode(text) for text in texts]
    return BitsPerByte(
        nats=sum(text_nats(model, ids, context) for ids in encoded),
        num_bytes=sum(len(text.encode()) for text in texts),
        num_tokens=sum(len(ids) - 1 for ids in encoded),
    )


def matches(draft: Decoder, prompt: Sequence[int], continuation: Sequence[int]) -> list[bool]:
    """Whether the draft's greedy choice is the given token, at each position of `continuation`."""
    ids = [*prompt, *continuation]
    choices = logits_of(draft, ids[:-1]).argmax(-1)[len(prompt) - 1 :]
    return [a == b for a, b in zip(choices.tolist(), continuation, strict=True)]


def count_accepted(agreed: Sequence[bool], num_draft: int = 4) -> tuple[int, int]:
    """(accepted, drafted) of greedy speculative decoding, for a known text of the target.

    A round drafts `num_draft` tokens, keeps those before the first mismatch, and the target adds
    one. Drafts follow the target's own text, so one teacher-forced pass of the draft model over
    that text gives the drafts of every round.
    """
    accepted = drafted = position = 0
    while position < len(agreed):
        window = agreed[position : position + num_draft]
        run = window.index(False) if False in window else len(window)
        accepted += run
        drafted += len(window)
        position += run + 1
    return accepted, drafted


def complete_statements(source: str) -> str:
    """`source` without its incomplete last line and last statements.

    Only text that could be completed by more text is removed (an open bracket, string or block);
    errors stay, so that `parses` finds them.
    """
    lines = source.splitlines()[:-1]
    while lines and _is_open(lines):
        lines.pop()
    return "\n".join(lines) + "\n"


def _is_open(lines: Sequence[str]) -> bool:
    try:
        return codeop.compile_command("\n".join(lines) + "\n", symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def parses(source: str) -> bool:
    """Whether the text has at least one statement and `ast.parse` accepts it."""
    try:
        return bool(ast.parse(source).body)
    except (SyntaxError, ValueError):
        return False
