"""Logits beside those of llama.cpp, from the same files. MINILLM_LLAMA_CPP names a Python that has
llama-cpp-python."""

import os
import subprocess

import numpy as np
import pytest
import torch

from minillm.lab.quantise.gguf_export import write_model
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.quantization.mixed import MixedMethod
from minillm.text.tokenizer import Tokenizer
from tests.models.parity import whole
from tests.models.tiny import Tiny, prompt

LLAMA_CPP = os.environ.get("MINILLM_LLAMA_CPP")
TEXT = "def fib(n):\n    if n < 2:\n        return n\n"
EVALUATE = """
import sys, numpy
from llama_cpp import Llama
path, out, *ids = sys.argv[1:]
model = Llama(path, n_ctx=128, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0,
              flash_attn=False,
              kv_overrides={"tokenizer.ggml.pre": "llama-bpe"})  # "minillm" is unknown to it
model.eval([int(each) for each in ids])
numpy.save(out, model.scores[:len(ids)])
"""
QUANTISE = """
import sys, llama_cpp
source, out, kind = sys.argv[1:]
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.nthread = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind), 1
sys.exit(llama_cpp.llama_model_quantize(source.encode(), out.encode(), settings))
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LLAMA_CPP is None, reason="MINILLM_LLAMA_CPP names no Python"),
]


def both(path, ids, tmp_path):
    """Logits [T, V] of this engine in float32, and of llama.cpp."""
    out = tmp_path / "logits.npy"
    subprocess.run([LLAMA_CPP, "-c", EVALUATE, path, out, *map(str, ids)], check=True)
    own = whole(load_model(open_model(path), torch.float32), torch.tensor(ids))
    return own, torch.from_numpy(np.load(out)).float()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Files of the embedded model: written here, or by llama.cpp's quantiser from F16."""
    folder = tmp_path_factory.mktemp("tiny")

    def path(kind):
        made = folder / f"{kind}.gguf"
        if "_K" in kind:
            source = str(path("F16"))
            subprocess.run([LLAMA_CPP, "-c", QUANTISE, source, str(made), kind], check=True)
        elif not made.exists():
            write_model(open_model("tiny"), made, kind)
        return made

    return path


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("BF16", 0.01), ("Q8_0", 0.03), ("Q4_0", 0.03), ("Q5_K_M", 0.03), ("Q4_K_M", 0.03)],
)
def test_llama_cpp_gives_the_same_logits(kind, tolerance, tiny, tmp_path):
    """llama.cpp rounds activations to bfloat16 or 8 bits, this reference does not."""
    path = tiny(kind)
    own, theirs = both(path, Tokenizer.from_folder(path).encode(TEXT), tmp_path)
    assert torch.equal(theirs.argmax(1), own.argmax(1))
    assert (theirs - own).abs().max() <= tolerance * own.abs().max()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M"])
def test_mixtures_of_llama_cpp_stay_quantised(kind, tiny):
    """v has another type than q and k in some or all layers; nothing is dense."""
    model = load_model(open_model(tiny(kind)), torch.float32)
    methods = [layer.attention.qkv_proj.method for layer in model.layers]
    assert 0 < sum(isinstance(each, MixedMethod) for each in methods) <= len(methods)
    assert all(each.weight is None for each in model.modules() if hasattr(each, "method"))


def test_llama_cpp_gives_the_same_logits_of_qwen3moe(tmp_path):
    """In float32 on both sides."""
    Tiny("qwen3_moe", {"mlp_only_layers": []}).write(tmp_path / "folder")
    write_model(open_model(tmp_path / "folder"), tmp_path / "m.gguf", "F32")
    own, theirs = both(tmp_path / "m.gguf", prompt(37).tolist(), tmp_path)
    assert (theirs - own).abs().max() <= 1e-3 * own.abs().max()
