"""Loading holds the weights and at most one shard.

A subprocess loads a checkpoint of four shards and reads its own high-water mark of resident
memory, in which the pages of a memory-mapped shard count.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minillm.config import ModelConfig
from minillm.models.decoder import Decoder
from tests.models.tiny import BASE

MIB = 1 << 20
MARGIN = 24 * MIB  # what the interpreter, tqdm and torch's first copies take
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
PROGRAM = """
import re, sys, torch
from pathlib import Path
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

torch.ones(64, 64) @ torch.ones(64, 64)
source, before = open_model(sys.argv[1]), peak()
{extra}
model = load_model(source, torch.bfloat16)
print(peak() - before)
"""
HOLDS_ALL = """
import minillm.models.loader as loader
read = loader.read_tensors
loader.read_tensors = lambda *args, kept=[]: [kept.append(t) or t for t in read(*args)]
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> tuple[Path, int, int]:
    """A folder, the bytes of its weights, and those of its largest shard."""
    folder = tmp_path_factory.mktemp("big")
    data = {"model_type": "llama", "tie_word_embeddings": True} | BASE | SIZES
    (folder / "config.json").write_text(json.dumps(data))
    config = ModelConfig(
        family="llama",
        vocab_size=8192,
        hidden_size=1024,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=256,
        intermediate_size=2048,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    tensors = Decoder(config, torch.bfloat16).checkpoint_tensors()
    tensors = {name: torch.ones_like(tensor.target) for name, tensor in tensors.items()}
    # both of the tied tensors, in the first shard: comparing them must not keep it
    tensors = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), **tensors}
    weight_map = {}
    names = list(tensors)
    for shard in range(4):
        file = f"model-{shard + 1:05}-of-00004.safetensors"
        part = names[shard * len(names) // 4 : (shard + 1) * len(names) // 4]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = sum(t.nbytes for name, t in tensors.items() if name != "lm_head.weight")
    return folder, weights, max(p.stat().st_size for p in folder.glob("*.safetensors"))


def peak_growth(folder: Path, extra: str = "") -> int:
    program = PROGRAM.replace("{extra}", extra)
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True
    )
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_weights_and_one_shard(big):
    folder, weights, shard = big
    growth = peak_growth(folder)
    assert weights < growth <= weights + shard + MARGIN, (growth / MIB, weights / MIB, shard / MIB)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_measurement_sees_a_loader_that_keeps_every_shard(big):
    folder, weights, shard = big
    assert peak_growth(folder, HOLDS_ALL) > weights + shard + MARGIN
