"""Triton launches on the current device, so the engine makes its model's device the current one."""

import torch

from minillm.models.decoder import Decoder
from minillm.models.deterministic import find_tiles
from minillm.models.forward_pass import Chunk
from minillm.sampling import sampler
from tests.kernels.engine_cases import TINY, generate, open_engine


def test_a_step_runs_on_the_model_s_device(monkeypatch, tmp_path):
    """Each pass, each sampling; a GPU's tensors have an index, a CPU's have none."""
    current, ran = [], []

    class Recorded:
        def __init__(self, index):
            assert index is None  # the model is on the CPU

        def __enter__(self):
            current.append(self)

        def __exit__(self, *error):
            current.pop()

    def watched(place, name):
        original = getattr(place, name)

        def call(*args, **kwargs):
            ran.append((name, bool(current)))
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    llm = open_engine(TINY["llama"].write(tmp_path).folder, "cpu")
    monkeypatch.setattr(torch.accelerator, "device_index", Recorded)
    watched(Decoder, "forward")
    watched(Decoder, "logits")
    watched(sampler, "choose")
    generate(llm, max_tokens=2)
    passes = llm.engine.forward_pass
    passes.logits(passes.run([Chunk(0, 0, [5, 6])], passes.allocate(1, 4))[0])
    find_tiles(passes.model, (8,))
    assert {name for name, _ in ran} == {"forward", "logits", "choose"}
    assert all(inside for _, inside in ran)
