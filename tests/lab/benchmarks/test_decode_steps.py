"""Steps behind contexts that nobody computed are real steps, and what was disturbed is measured
again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from minillm.api.arguments import EngineArgs
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.benchmarks import others
from minillm.lab.benchmarks.decode_steps import DecodeSteps, StepsFailedError
from minillm.lab.benchmarks.others import Calm, Watch, calmest, calmly
from minillm.lab.benchmarks.plotting import check_plot
from minillm.ops.batch import Batch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def steps() -> Iterator[DecodeSteps]:
    found = DecodeSteps(
        EngineArgs("tiny", dtype="float32", device="cpu", max_model_len=256, block_size=16,
                   max_num_seqs=4, num_gpu_blocks_override=80, enable_prefix_caching=False,
                   max_num_batched_tokens=64)
    )  # fmt: skip
    yield found
    found.close()


def test_every_step_is_a_real_decode_step_behind_its_context(steps, monkeypatch):
    batches: list[Batch] = []
    model = steps.engine.runner.model
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda batch, kv: batches.append(batch) or forward(batch, kv)
    )
    found = steps.run(batch=4, context=250, count=5)
    assert len(found) == 5
    assert len(batches) == 6  # one is not timed, and the prompts never came to the model
    for number, batch in enumerate(batches):
        assert len(batch.input_ids) == 4
        assert batch.max_query_len == 1
        assert batch.seq_lens.tolist() == [250 - 7 + number] * 4
    pages = batches[-1].block_tables[:, : 248 // 16 + 1]
    assert len(pages.unique()) == pages.numel()  # nobody shares a page
    order = pages.flatten().diff()
    assert (order.abs() == 1).sum() < len(order) / 4  # nor do they lie in order, or backwards


def test_the_engine_is_as_before_afterwards(steps: DecodeSteps) -> None:
    engine = steps.engine
    model, config = engine.runner.model, engine.scheduler.config
    steps.run(2, 100, 3)
    assert engine.runner.model is model
    assert engine.scheduler.config is engine.scheduler.admission.config is config
    assert not engine.has_work
    assert engine.scheduler.blocks.pool.num_free == 80
    with pytest.raises(StepsFailedError, match="of 5 sequences, or finished"):
        steps.run(5, 100, 3)  # of which 4 have a seat
    assert not engine.has_work
    assert engine.runner.model is model


def test_what_was_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, waited = iter([0.5, 0.3, 0.4, 0.5, 0.0, 0.9]), []

    @contextmanager
    def watching(groups: object) -> Iterator[Watch]:
        yield Watch(next(shares))

    monkeypatch.setattr(others, "watching", watching)
    monkeypatch.setattr(others, "sleep", waited.append)
    values = iter("abcdef")
    assert calmly(lambda: next(values)) == Calm("b", 0.3)  # the least disturbed of three
    assert calmly(lambda: next(values)) == Calm("e", 0.0)  # the first calm one
    assert len(waited) == 3
    rounds = [Calm("a", 0.4), Calm("b", 0.05), Calm("c", 0.2), Calm("d", 0.0)]
    assert [each.value for each in calmest(rounds)] == ["b", "d"]
    assert [each.value for each in calmest(rounds[::2])] == ["c"]


def test_a_picture_needs_a_known_format_and_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--plot is 'a.bmp'; its name must end in .png, .svg"):
        check_plot("a.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedFeatureError, match="--plot needs matplotlib, which is not inst"):
        check_plot("a.png")
