"""Evaluation of a trained model: bits per byte."""

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
