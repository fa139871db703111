"""The engine on a GPU, if there is one: the same tokens as on the CPU."""

import pytest
import torch

from minillm import ops
from tests.kernels.engine_cases import TINY, generate, logprobs, open_engine, tokens

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or ops.backend_of(torch.device("cuda:0")).name != "triton",
    reason="there is no GPU that the kernels know",
)


@pytest.mark.parametrize("arguments", [{}, {"deterministic": True}], ids=["fast", "deterministic"])
@pytest.mark.parametrize("family", TINY)
def test_a_gpu_says_what_the_cpu_says(family, arguments, tmp_path):
    folder = TINY[family].write(tmp_path).folder
    expected = generate(open_engine(folder, "cpu"), max_tokens=24)
    outputs = generate(open_engine(folder, "cuda", **arguments), max_tokens=24)
    assert tokens(outputs) == tokens(expected)
    for got, wanted in zip(outputs, expected, strict=True):
        assert logprobs(got) == pytest.approx(logprobs(wanted), abs=5e-4)


def test_the_gpu_s_random_numbers_are_the_cpu_s(tmp_path):
    """Half of the requests are drawn: a kernel with other noise would have chosen other tokens."""
    folder = TINY["llama"].write(tmp_path).folder
    drawn = tokens(generate(open_engine(folder, "cuda"), max_tokens=24))[2:]
    assert drawn == tokens(generate(open_engine(folder, "cpu"), max_tokens=24))[2:]
