"""Quality of a model on token windows, absolute and relative to the 16-bit model.

    bits per byte   - sum of log2 p(token) / bytes
    KL              sum over the vocabulary of p log(p / q), p of the 16-bit model, in nats
    same top-1      fraction of positions at which both models prefer the same token

All are means over the scored positions of all windows. Standard errors treat windows as the sample.
A difference of two models is computed per window, because both find the same windows hard: its
error is much smaller than that of either level.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.spec import cache_spec
from minillm.errors import ConfigError
from minillm.lab.comparison.windows import Windows
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.ops.batch import AttentionMode

PER_BATCH = 4  # windows of a forward pass
MOST_LOGITS = 1 << 24  # logits that are held at a time, in float64


@dataclass(frozen=True)
class Estimate:
    """A mean over all windows, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Scores:
    """Sums over the scored positions of each window, float64 [W]. KL and agreement are relative to
    the reference model; None for the reference itself."""

    nats: Tensor
    divergence: Tensor | None = None
    agreements: Tensor | None = None


@torch.inference_mode()
def hidden_states(model: Decoder, windows: Windows, kv_dtype: str = "auto") -> Tensor:
    """Hidden states [W, T - 1, d] from which the scored tokens are predicted."""
    run, length = ForwardPass(model), windows.num_scored
    config, size = model.config, length + -length % 4  # codes are interleaved by 4 positions
    mode: AttentionMode = "plain" if model.plain_torch else "fast"
    spec = cache_spec(config, kv_dtype)
    kv = KVCache(spec, config.num_layers, PER_BATCH, size, model.dtype, mode=mode)
    found = []
    for rows in windows.ids[:, :-1].split(PER_BATCH):
        chunks = [Chunk(i, 0, row) for i, row in enumerate(rows.tolist())]
        hidden, _ = run.run(chunks, kv)
        found.append(hidden.view(len(rows), length, -1))
    return torch.cat(found)


@torch.inference_mode()
def score(
    model: Decoder,
    hidden: Tensor,
    windows: Windows,
    reference: tuple[Decoder, Tensor] | None = None,
) -> Scores:
    """Score every window.

    Args:
        hidden: `hidden_states` of the model.
        reference: the 16-bit model and its hidden states.

    Logits are float32 numbers of the models; log-probabilities are computed in float64.
    """
    sums = torch.zeros(3, len(windows.ids), dtype=torch.float64)
    for number, ids in enumerate(windows.ids):
        width = max(1, MOST_LOGITS // model.config.vocab_size)
        for part in range(0, windows.num_scored, width):
            end = min(part + width, windows.num_scored)
            targets = ids[part + 1 : end + 1]  # position i predicts token i + 1
            logits = log_probabilities(model, hidden[number, part:end])
            sums[0, number] -= logits.gather(1, targets[:, None]).sum()
            if reference is None:
                continue
            wanted = log_probabilities(reference[0], reference[1][number, part:end])
            check_width(wanted, logits)
            sums[1, number] += divergence(wanted, logits).sum()
            sums[2, number] += (wanted.argmax(-1) == logits.argmax(-1)).sum()
    return Scores(*sums) if reference is not None else Scores(sums[0])


def log_probabilities(model: Decoder, hidden: Tensor) -> Tensor:
    """[N, d] -> float64 [N, V]"""
    return model.logits(hidden).float().double().log_softmax(-1)


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL(wanted || found) of log-probabilities [N, V], in nats -> [N]"""
    return (wanted.exp() * (wanted - found)).sum(-1)


def check_width(wanted: Tensor, found: Tensor) -> None:
    """Check that both models have the same number of logits."""
    if wanted.shape != found.shape:
        raise ConfigError(
            f"The models have {wanted.shape[1]:,} and {found.shape[1]:,} logits per token; only "
            "models with the same vocabulary can be compared."
        )


def ratio(sums: Tensor, sizes: Tensor) -> Estimate:
    """sum(sums) / sum(sizes) over windows, with the standard error of a ratio estimator (Cochran,
    Sampling Techniques, 1977, section 6.3)."""
    value, count = float(sums.sum() / sizes.sum()), len(sums)
    rest = sums - value * sizes
    spread = float((rest * rest).sum()) * count / max(1, count - 1)
    return Estimate(value, math.sqrt(spread) / float(sizes.sum()) if count > 1 else math.nan)


def quality(scores: Scores, base: Scores, windows: Windows) -> dict[str, Estimate]:
    """All metrics of a model; `base` are the scores of the 16-bit model."""
    bits, tokens = 1 / math.log(2), torch.full_like(windows.num_bytes, windows.num_scored)
    found = {
        "bits_per_byte": ratio(scores.nats * bits, windows.num_bytes),
        "bits_per_byte_change": ratio((scores.nats - base.nats) * bits, windows.num_bytes),
    }
    if scores.divergence is not None and scores.agreements is not None:
        found["kl"] = ratio(scores.divergence, tokens)
        found["same_top1"] = ratio(scores.agreements, tokens)
    return found


def perplexity(scores: Scores, windows: Windows) -> float:
    """Per token."""
    return math.exp(float(scores.nats.sum()) / windows.num_scored / len(windows.ids))
