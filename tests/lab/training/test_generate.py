"""Greedy text of many rows against transformers' generate."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from minillm.lab.training.generate import greedy_rows, own_text
from minillm.models.checkpoint import ASSETS, open_model
from minillm.models.loader import load_model


def test_greedy_rows_equal_transformers() -> None:
    prompts = (torch.arange(36).view(3, 12) * 101 + 300) % 4096
    rows = greedy_rows(load_model(open_model("tiny"), torch.float32), prompts, 10)
    reference = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    wanted = reference.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=10, do_sample=False,
        eos_token_id=4095,
    )  # fmt: skip
    assert rows.tolist() == wanted.tolist()


def test_own_text_depends_on_the_batch_number_alone() -> None:
    model = load_model(open_model("tiny"), torch.float32)
    stream = np.arange(300, 3000, dtype=np.uint16)
    both, second = (own_text(model, stream, which, 4, 3, 2) for which in ((0, 1), (1,)))
    assert both.shape == (2, 2 * 7)
    assert np.array_equal(both[1], second[0])
    assert np.array_equal(both[0, :4], np.arange(both[0, 0], both[0, 0] + 4))
