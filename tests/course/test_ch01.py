"""The pieces of chapter 01: products, where they find a knee."""

import math
from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from minillm.config import ModelConfig
from minillm.lab.roofline import step_cost
from minillm.models.decoder import Decoder
from minillm_exercises import record
from minillm_exercises.chapters.ch01 import doubling_length, product_pass
from minillm_exercises.errors import ExerciseError

SMALL = ModelConfig(
    family="llama", vocab_size=96, hidden_size=32, num_layers=3, num_heads=8, num_kv_heads=2,
    head_dim=4, intermediate_size=56, max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_product_pass_does_every_product_once(tied, tokens):
    model = Decoder(replace(SMALL, tie_word_embeddings=tied))
    model.initialize()
    with FlopCounterMode(display=False) as counter:
        logits = product_pass(model, tokens)()
    assert counter.get_total_flops() == step_cost(SMALL, [tokens], [tokens]).linear_flops
    assert logits.shape == (1, SMALL.vocab_size)


def test_the_doubling_length_lies_between_measured_ones(capsys):
    assert doubling_length([1, 8, 128], [3.0, 3.0, 12.0]) == pytest.approx(32)
    assert doubling_length([1, 2, 4], [1.0, 2.0, 4.0]) == pytest.approx(2)
    assert doubling_length([1, 2], [1.0, 1.9]) == math.inf
    record("doubled at", math.inf, "tokens")  # of a busy machine
    assert "doubled at = inf tokens" in capsys.readouterr().out
    with pytest.raises(ExerciseError, match="2 lengths and 1 times"):
        doubling_length([1, 2], [1.0])
