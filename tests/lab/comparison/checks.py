"""Checks of the comparison's numbers against independent computations in numpy and float64.

Each takes the module to check, so that the tests of planted bugs can give it a broken copy.
"""

import math
from types import ModuleType

import numpy as np
import torch

from minillm.config import ModelConfig
from minillm.lab.comparison.windows import Windows
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.quantize import quantize_weights
from minillm.text.tokenizer import Tokenizer

NUM, LENGTH = 5, 12


def windows() -> Windows:
    """Random token windows with random sizes."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 4096, (NUM, LENGTH), generator=generator)
    sizes = torch.randint(20, 60, (NUM,), generator=generator)
    return Windows("random", ids, sizes.double())


def models() -> tuple[Decoder, Decoder]:
    """The embedded model, and a version in 4 bits."""
    first, second = (load_model(open_model("tiny"), torch.float32) for _ in range(2))
    quantize_weights(second, "int4")
    return first, second


def numpy_log_probabilities(model: Decoder, ids: torch.Tensor) -> np.ndarray:
    """[T, V], from the training pass: one window, no KV cache."""
    from minillm.lab.training.trainer import logits_of

    x = logits_of(model, ids.tolist()).numpy().astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def scores_equal_numpy(metrics: ModuleType) -> None:
    """Nats, KL and agreement of every window."""
    text, (base, other) = windows(), models()
    hidden = [metrics.hidden_states(each, text) for each in (base, other)]
    found = metrics.score(other, hidden[1], text, (base, hidden[0]))
    for number, ids in enumerate(text.ids):
        p, q = (numpy_log_probabilities(each, ids)[:-1] for each in (base, other))
        nats = -sum(q[i, ids[i + 1]] for i in range(LENGTH - 1))
        kl = (np.exp(p) * (p - q)).sum()
        agreed = (p.argmax(-1) == q.argmax(-1)).sum()
        assert math.isclose(found.nats[number], nats, rel_tol=1e-5)
        assert math.isclose(found.divergence[number], kl, rel_tol=1e-3)
        assert found.agreements[number] == agreed


def divergence_is_directed(metrics: ModuleType) -> None:
    """sum p log(p / q), by hand: p = (1/2, 1/2), q = (3/4, 1/4)."""
    p, q = (torch.tensor([each]).double().log() for each in ((0.5, 0.5), (0.75, 0.25)))
    assert math.isclose(float(metrics.divergence(p, q)), 0.5 * math.log(4 / 3))


def errors_are_those_of_a_ratio(metrics: ModuleType) -> None:
    """The standard error beside the jackknife, and beside that of a mean for equal sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(60, generator=generator).double() + 5
    sums = 2 * sizes + torch.randn(60, generator=generator).double()
    found = metrics.ratio(sums, sizes)
    assert math.isclose(found.value, float(sums.sum() / sizes.sum()))
    left = np.array([
        float((sums.sum() - a) / (sizes.sum() - b)) for a, b in zip(sums, sizes, strict=True)
    ])  # fmt: skip
    jackknife = math.sqrt(59 / 60 * ((left - left.mean()) ** 2).sum())
    assert math.isclose(found.error, jackknife, rel_tol=0.02)
    equal = metrics.ratio(sums, torch.full((60,), 4.0).double())
    assert math.isclose(equal.error, float(sums.std()) / 4 / math.sqrt(60))


def changes_are_paired(metrics: ModuleType) -> None:
    """Windows that differ much, and a change that is the same in all: its error is nearly 0."""
    text = windows()
    text = Windows(text.name, text.ids, torch.full((NUM,), 40.0).double())
    base = metrics.Scores(torch.tensor([10.0, 90.0, 30.0, 70.0, 50.0]).double())
    other = metrics.Scores(base.nats + 1.0, base.nats * 0, base.nats * 0)
    found = metrics.quality(other, base, text)
    assert math.isclose(found["bits_per_byte_change"].value, 1 / math.log(2) / 40)
    assert found["bits_per_byte_change"].error < 1e-9
    assert found["bits_per_byte"].error > 0.1


def windows_are_the_text(module: ModuleType) -> None:
    """Bytes are those of tokens 2 to T of each window; windows do not overlap."""
    tokenizer = Tokenizer.from_folder(open_model("tiny").folder or "")
    text = "".join(f"def f{i}(x):\n    return x + {i}  # café ✓\n" for i in range(200))
    found = module.cut_windows(tokenizer, text, "text", 7, 64)
    again = module.cut_windows(tokenizer, text, "text", 7, 64)
    assert torch.equal(found.ids, again.ids)
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = [next(s for s in range(len(ids)) if ids[s : s + 64] == row)
              for row in found.ids.tolist()]  # fmt: skip
    for row, size in zip(found.ids.tolist(), found.num_bytes, strict=True):
        pieces = [tokenizer.token_bytes[i] for i in row]
        assert int(size) == len(b"".join(pieces[1:]))
    assert starts[0] == 0
    assert found.ids[-1].tolist() == ids[-64:]
    whole = module.cut_windows(tokenizer, text, "text", 1, len(ids))
    first = len(tokenizer.token_bytes[ids[0]])
    assert int(whole.num_bytes[0]) == len(text.encode()) - first


def bytes_of_tiny(config: ModelConfig) -> dict[str, int]:
    """Numbers of the embedded model's tensors, by kind, from its shapes."""
    d, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
    attention = d * (heads + 2 * kv) * size + heads * size * d
    norms = layers * (2 * d + 2 * size) + d
    return {"linears": layers * (attention + 3 * d * inner),
            "embedding": config.vocab_size * d, "other": norms}  # fmt: skip


def sizes_are_counted(sizes: ModuleType) -> None:
    """Bytes in memory, on disk and of a file to be made, from the shapes of the model."""
    from minillm.lab.comparison.candidates import open_candidate, parse

    source = open_model("tiny")
    numbers = bytes_of_tiny(source.config)
    disk = sizes.disk_sizes(source)
    assert disk.as_json() == {
        "linears": 2 * numbers["linears"], "embedding": 2 * numbers["embedding"], "head": 0,
        "scales": 0, "other": 2 * numbers["other"], "total": 2 * sum(numbers.values()),
    }  # fmt: skip
    opened = open_candidate(parse("rtn:3:64"), source, torch.float32, None)
    groups = numbers["linears"] / 64
    packed = sizes.packed_sizes(opened)
    assert packed.linears == numbers["linears"] * 3 / 8
    assert packed.scales == groups * (2 + 3 / 8)
    assert packed.embedding == 2 * numbers["embedding"]
    assert packed.total == packed.linears + packed.scales + packed.embedding + packed.other
    assert sizes.bits_per_weight(packed, opened.model) == 3 + (16 + 3) / 64
    held = sizes.memory_sizes(opened.model)
    assert (held.linears, held.scales) == (numbers["linears"], groups * 3)
    eight = open_candidate(parse("int8"), source, torch.float32, None)
    held = sizes.memory_sizes(eight.model)
    assert (held.linears, held.embedding) == (numbers["linears"], numbers["embedding"])
    assert held.scales == 2 * (numbers["linears"] + numbers["embedding"]) / 32
    assert sizes.packed_sizes(eight).total == held.total
