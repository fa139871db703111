"""The seam between layers and weights: what a layer holds of which tensor."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm.config import ModelConfig, MoEConfig
from minillm.errors import CheckpointError
from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import Matrix, WeightSlice
from minillm.layers.moe import ExpertNames, Experts
from minillm.models import checkpoint
from minillm.models.checkpoint import ModelSource, shard_headers
from minillm.models.decoder import Decoder
from minillm.models.loader import check_tensors, fill
from minillm.models.merged import merge
from minillm.models.presets import PRESETS
from minillm.plan.cost import weight_bytes

F32 = torch.float32
BASE = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)


# ---- what a layer holds -----------------------------------------------------------------------


def saved(folder: Path, **shapes: tuple[int, ...]) -> tuple[Path, dict[str, Tensor]]:
    """A file of tensors in which every number differs."""
    generator = torch.Generator().manual_seed(0)
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors", tensors


def loaded(path: Path, layer: nn.Module) -> nn.Module:
    """The layer with its parts of the file, checked as the loader checks a model."""
    for part in layer.modules():
        if isinstance(part, Matrix):
            part.create(F32, "cpu")
    wanted = {
        each.name: each
        for part in layer.modules()
        if isinstance(part, Matrix)
        for each in part.checkpoint_tensors()
    }
    source = ModelSource("here", BASE, path.parent)
    check_tensors(source, wanted, [(path, n, each) for n, each in shard_headers(path).items()])
    fill(wanted, [path])
    return layer


def narrowed(part: WeightSlice, rank: int, ranks: int, columns: bool = False) -> WeightSlice:
    """What one of several ranks holds: rows, or columns."""
    size = part.shape[int(columns)] // ranks
    held = range(rank * size, (rank + 1) * size)
    return replace(part, columns=held) if columns else replace(part, rows=held)


QKV = {"q_proj": 8, "k_proj": 4, "v_proj": 4}


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_stack_holds_the_rows_of_each_of_its_matrices(tmp_path, ranks, merged):
    """A shard of a stack is not a slice of it: each matrix is cut, with its own bias. The file may
    have one tensor of all."""
    stored = {"w_pack": sum(QKV.values())} if merged else QKV
    shapes = {f"a__{name}__weight": (size, 6) for name, size in stored.items()}
    biases = {f"a__{name}__bias": (size,) for name, size in stored.items()}
    path, tensors = saved(tmp_path, **shapes, **biases)
    if merged:
        for kind in ("weight", "bias"):
            pieces = tensors[f"a.w_pack.{kind}"].split(list(QKV.values()))
            names = (f"a.{name}.{kind}" for name in QKV)
            tensors |= dict(zip(names, pieces, strict=True))
    for rank in range(ranks):
        layer = Linear("a.", 6, QKV, bias=True)
        layer.parts = tuple(narrowed(part, rank, ranks) for part in layer.parts)
        merge(layer, [("w_pack", tuple(QKV))] if merged else [("w_pack", ("q_proj", "other"))])
        assert len(layer.parts) == (1 if merged and ranks == 1 else 3)
        loaded(path, layer)
        assert layer.shape == (16 // ranks, 6)
        for kind, got in (("weight", layer.values()), ("bias", layer.bias)):
            cut = [tensors[f"a.{name}.{kind}"].chunk(ranks)[rank] for name in QKV]
            assert torch.equal(got, torch.cat(cut)), kind
        x = torch.randn(3, 6)
        expected = nn.functional.linear(x, layer.values(), layer.bias)
        torch.testing.assert_close(layer(x), expected)


def test_columns_that_add_up_to_the_product(tmp_path):
    """A row-parallel layer: each rank has the inputs that it computed itself."""
    path, tensors = saved(tmp_path, b__o_proj__weight=(5, 12))
    x, total = torch.randn(3, 12), torch.zeros(3, 5)
    for rank in range(3):
        layer = Linear("b.", 12, {"o_proj": 5})
        layer.parts = tuple(narrowed(part, rank, 3, columns=True) for part in layer.parts)
        loaded(path, layer)
        assert layer.in_features == 4
        assert torch.equal(layer.values(), tensors["b.o_proj.weight"][:, 4 * rank : 4 * rank + 4])
        total += layer(x[:, 4 * rank : 4 * rank + 4])
    torch.testing.assert_close(total, x @ tensors["b.o_proj.weight"].T)


def test_experts_are_cut_one_by_one(tmp_path):
    """Half of the units of every expert, and of the down matrix the columns that belong to them."""
    names = {f"m__experts__{e}__{n}__weight": (8, 6) for e in range(3) for n in ("g", "u")}
    names |= {f"m__experts__{e}__d__weight": (6, 8) for e in range(3)}
    path, tensors = saved(tmp_path, **names)
    layer = Experts("m.", 6, MoEConfig(3, 1, 8), ExpertNames("", "g", "u", "d"))
    layer.gate_up.parts = tuple(narrowed(part, 1, 2) for part in layer.gate_up.parts)
    layer.down.parts = tuple(narrowed(part, 1, 2, columns=True) for part in layer.down.parts)
    loaded(path, layer)
    assert layer.gate_up.values().shape == (3, 8, 6)
    assert layer.down.values().shape == (3, 6, 4)
    for e in range(3):
        gate, up, down = (tensors[f"m.experts.{e}.{n}.weight"] for n in "gud")
        assert torch.equal(layer.gate_up.values()[e], torch.cat((gate[4:], up[4:])))
        assert torch.equal(layer.down.values()[e], down[:, 4:])


def test_a_shard_still_wants_the_whole_tensor_s_shape(tmp_path):
    path, _ = saved(tmp_path, b__o_proj__weight=(5, 8))
    layer = Linear("b.", 12, {"o_proj": 5})
    layer.parts = tuple(narrowed(part, 0, 3, columns=True) for part in layer.parts)
    with pytest.raises(CheckpointError, match=r"shape \[5, 8\], .* describes \[5, 12\]"):
        loaded(path, layer)


def test_a_part_of_another_shape_is_refused():
    """One row would be copied to all of them without a word."""
    layer = Linear("b.", 4, {"o_proj": 5})
    layer.create(F32, "cpu")
    (place,) = layer.checkpoint_tensors()
    with pytest.raises(CheckpointError, match=r"b.o_proj.weight has shape \[1, 4\]; \[5, 4\]"):
        place.load(torch.ones(1, 4))


READ = """
import re, sys, torch
from dataclasses import replace
from pathlib import Path
from minillm.layers.linear import Linear
from minillm.models.loader import fill

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

layer = Linear("b.", 4096, {"o_proj": 8192})
layer.parts = (replace(layer.parts[0], rows=range(1024, 2048)),)
layer.create(torch.float32, "cpu")
before = peak()
fill({each.name: each for each in layer.checkpoint_tensors()}, [Path(sys.argv[1])])
print(peak() - before, layer.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_only_the_part_that_is_held_is_read(tmp_path):
    """An eighth of 128 MiB: its pages of the file, and the memory that they are copied to."""
    save_file({"b.o_proj.weight": torch.ones(8192, 4096)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "model.safetensors")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown, held = map(int, done.stdout.split())
    assert held == 1024 * 4096 * 4
    assert held < grown < 2 * held + 2**23


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_s_bytes_are_those_of_the_cost_model(name):
    """Counted on a device that has no memory."""
    config = PRESETS[name]
    if config.num_layers > 100:
        config = replace(config, num_layers=2, moe_layers=(), sliding_windows=())
    model = Decoder(config, torch.bfloat16, "meta")
    # A router's bias is float32 in every checkpoint, and counted with two bytes.
    biases = sum(2 * each.numel() for each in biases_of(model))
    assert model.num_bytes - biases == weight_bytes(config, "bfloat16")


def biases_of(model: Decoder) -> list[Tensor]:
    return [each for name, each in model.named_buffers() if name.endswith("router.bias")]


def test_the_loader_opens_what_it_needs_and_no_more(tmp_path, monkeypatch):
    """Whole tensors are mapped, not cut: that path has no copy."""
    path, _ = saved(tmp_path, a__weight=(4, 4), b__weight=(4, 4), c__weight=(4, 4))
    asked = []
    opened = checkpoint.safe_open

    class Watched:
        def __init__(self, *arguments, **options):
            self.file = opened(*arguments, **options)

        def __enter__(self):
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.inner.keys()

        def get_tensor(self, name):
            asked.append(("whole", name))
            return self.inner.get_tensor(name)

        def get_slice(self, name):
            asked.append(("part", name))
            return self.inner.get_slice(name)

    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    whole, part = Embedding("a", 4, 4), Embedding("c", 4, 4)
    part.parts = (replace(part.parts[0], rows=range(2)),)
    for layer in (whole, part):
        layer.create(F32, "cpu")
    fill({e.name: e for layer in (whole, part) for e in layer.checkpoint_tensors()}, [path])
    assert sorted(asked) == [("part", "c.weight"), ("whole", "a.weight")]
