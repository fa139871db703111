"""FP8 in blocks of 128 x 128 with matrices that they do not divide.

DeepSeek-V3's `weight_scale_inv` has a scale for each block, counted from the first row of its own
matrix. The last blocks of a side may be incomplete. Stacked matrices (q, k and v; gate and up;
experts) then have blocks that do not begin at multiples of 128 rows of the stack.
"""

import pytest
import torch

from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.quantization.kernels import scales_of_blocks
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.readers import scales
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.tiny import Tiny
from tests.quantization.test_quantized_engines import RANKS, tokens
from tests.quantization.test_reader_matrix import check, write

# Rows: q 192, k and v 64, gate and up 320. Columns: 192 and 320.
DENSE = Tiny("llama", {
    "num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 320, "head_dim": 64,
    "num_attention_heads": 3, "num_key_value_heads": 1})  # fmt: skip
# Rows: q_a 160, kv_a 176, q_b and kv_b 320, experts 136. Columns: 192, 160, 144 and 136.
LATENT = Tiny("deepseek_v3", {
    "num_hidden_layers": 2, "hidden_size": 192, "moe_intermediate_size": 136, "head_dim": 16,
    "q_lora_rank": 160, "kv_lora_rank": 160, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16,
    "v_head_dim": 36})  # fmt: skip
EXPERTS = Tiny("qwen3_moe", {
    "num_hidden_layers": 1, "hidden_size": 192, "head_dim": 64, "moe_intermediate_size": 160,
    "num_attention_heads": 6})  # fmt: skip
TINIES = {"dense": DENSE, "latent": LATENT, "experts": EXPERTS}


def parts(folder) -> dict[str, tuple[Matrix, torch.Tensor]]:
    """Each matrix that stays quantised, and the values of each of its parts."""
    found = {}
    for matrix in load_model(open_model(folder), torch.float32).modules():
        if isinstance(matrix, Matrix) and isinstance(matrix.method, QuantizedMethod):
            rows = matrix.values().flatten(0, -2).split([len(p.rows) for p in matrix.parts])
            found |= {p.name: (matrix, v) for p, v in zip(matrix.parts, rows, strict=True)}
    return found


@pytest.mark.parametrize("name", TINIES)
def test_each_matrix_has_its_own_blocks(checkpoint_of, tmp_path, name):  # noqa: F811
    """Bit for bit the values of numpy, and logits beside transformers."""
    checkpoint = checkpoint_of(TINIES[name])
    due = write(checkpoint, "fp8 blocks", "plain", tmp_path)
    found = parts(tmp_path)
    assert len(found) > 0.5 * len(due)
    for part, (_, values) in found.items():
        assert torch.equal(values, due[f"{part}.weight"]), part
    check(checkpoint, due, tmp_path)


def test_seams_are_within_blocks_of_the_stack(checkpoint_of, tmp_path):  # noqa: F811
    """What makes the case: 128 rows of a stack have two scales, so a kernel for blocks of 128 rows
    would be wrong, and the stack has a scale for each row."""
    write(checkpoint_of(DENSE), "fp8 blocks", "plain", tmp_path)
    found = parts(tmp_path)
    for part in ("self_attn.k_proj", "mlp.up_proj"):
        matrix = found[f"model.layers.0.{part}"][0]
        stacked = matrix.method.quantized(matrix)
        assert len(set(stacked.scales[:, 0].tolist())) >= 4
        assert scales_of_blocks(stacked.scales) is None
    down = found["model.layers.0.mlp.down_proj"][0]
    assert scales_of_blocks(down.method.quantized(down).scales) is not None


def test_two_ranks_cut_blocks(checkpoint_of, tmp_path):  # noqa: F811
    """Rows 80 to 159 and columns 80 to 159 of each expert: a rank's part begins inside a block."""
    write(checkpoint_of(EXPERTS), "fp8 blocks", "plain", tmp_path)
    assert tokens(tmp_path, **RANKS) == tokens(tmp_path)


BY_ROW = scales.ScaleBlocks.by_row


def from_the_first_row_held(self, found):
    """A rank whose blocks begin with its own rows."""
    values, index = BY_ROW(self, found)
    start = self.part.rows.start % self.sides[0]
    return torch.cat((values[:1].expand(start, -1), values))[: len(values)], index


def of_the_whole_stack(self, found):
    """Blocks that begin at multiples of 128 rows of a stack of gate and up."""
    values, index = BY_ROW(self, found)
    return (values.roll(64, 0) if self.part.name.endswith("up_proj") else values), index


def no_incomplete_block(self, found):
    """Scales for whole blocks only; the rest has the scale of the last whole one."""
    values, index = BY_ROW(self, found)
    whole = len(values) // 128 * 128 or len(values)
    values[whole:] = values[whole - 1]
    return values, index


@pytest.mark.mutation
@pytest.mark.parametrize("bug", [no_incomplete_block, of_the_whole_stack], ids=["last", "stack"])
def test_wrong_blocks_are_seen(checkpoint_of, tmp_path, monkeypatch, bug):  # noqa: F811
    checkpoint = checkpoint_of(LATENT if bug is no_incomplete_block else DENSE)
    due = write(checkpoint, "fp8 blocks", "plain", tmp_path)
    monkeypatch.setattr(scales.ScaleBlocks, "by_row", bug)
    with pytest.raises(AssertionError):
        check(checkpoint, due, tmp_path)


@pytest.mark.mutation
def test_a_rank_with_blocks_of_its_own_is_seen(checkpoint_of, tmp_path, monkeypatch):  # noqa: F811
    write(checkpoint_of(EXPERTS), "fp8 blocks", "plain", tmp_path)
    alone = tokens(tmp_path)
    monkeypatch.setattr(scales.ScaleBlocks, "by_row", from_the_first_row_held)
    assert tokens(tmp_path, **RANKS) != alone
