"""Encodes the corpus, packs it into rows of tokens, and defines the order of the rows."""

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from minillm.lab.training import corpus
from minillm.models.checkpoint import ASSETS

TOKENIZER = ASSETS / "tiny" / "tokenizer.json"  # of all models that are trained here
END_OF_TEXT = 0  # id of the token between two files, which is also the end of a sequence
CUT_EVERY = 4000  # a line break is separated from its indentation every 2000 to 4000 characters


@dataclass(frozen=True)
class TokenStreams:
    """Training text as token ids, files joined by end-of-text."""

    stdlib: np.ndarray  # [number of tokens] uint16
    packages: np.ndarray  # [number of tokens] uint16


def encode_file(tokenizer: Tokenizer, text: str, generator: random.Random) -> list[int]:
    """Token ids of one training file; some line breaks are separated from their indentation.

    The tokenizer joins both into one token. A prompt that ends in a line break has the separate
    form, so the model must have seen it in training.
    """
    ids: list[int] = []
    start = 0
    while start < len(text):
        cut = text.find("\n", start + generator.randrange(CUT_EVERY // 2, CUT_EVERY)) + 1
        end = cut or len(text)
        ids += tokenizer.encode(text[start:end], add_special_tokens=False).ids
        start = end
    return ids


def encode_corpus(manifest: corpus.Manifest, tokenizer: Tokenizer, seed: int = 0) -> TokenStreams:
    """Tokens of the training split, files in an order drawn from `seed`."""
    generator = random.Random(seed)
    streams = []
    for stdlib in (True, False):
        files = manifest.select(held_out=False, stdlib=stdlib)
        generator.shuffle(files)
        ids: list[int] = [END_OF_TEXT]
        for file in tqdm(files, desc="Encoding", unit="file"):
            ids += encode_file(tokenizer, corpus.read(file).decode(), generator)
            ids.append(END_OF_TEXT)
        streams.append(np.array(ids, dtype=np.uint16))
    return TokenStreams(*streams)


@lru_cache(maxsize=4)
def _epoch_order(count: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def row(stream: np.ndarray, index: int, window: int, seed: int) -> np.ndarray:
    """Row `index` of endless shuffled epochs over `stream`: `window` + 1 tokens (int64).

    Every epoch visits each token once, in a new order with new row boundaries. The result depends
    only on the arguments, so a resumed run continues with the same rows.
    """
    count = (len(stream) - 1) // window - 1
    epoch, place = divmod(index, count)
    shift = int(np.random.default_rng((seed, epoch, 1)).integers(window))
    start = int(_epoch_order(count, epoch, seed)[place]) * window + shift
    return stream[start : start + window + 1].astype(np.int64)


def held_out_rows(manifest: corpus.Manifest, tokenizer: Tokenizer, window: int = 512) -> Tensor:
    """A sample of held-out standard-library text: 64 evenly spaced rows [64, window + 1]."""
    files = manifest.select(held_out=True, stdlib=True)
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(corpus.read(file).decode()).ids  # after an end-of-text token
    starts = np.linspace(0, len(ids) - window - 1, 64).astype(int)
    return torch.tensor([ids[start : start + window + 1] for start in starts])
