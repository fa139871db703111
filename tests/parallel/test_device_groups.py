"""Ranks whose data travel over process groups: NCCL's on GPUs, here gloo's on CPUs; and a GPU that
is emulated. NCCL itself is not run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minillm import EngineArgs
from minillm.engine.setup import plan_memory
from minillm.errors import ConfigError
from minillm.models.checkpoint import open_model
from minillm.parallel import device_groups, launch, rank, rank_process
from minillm.parallel.communicator import ThreadGroup
from minillm.parallel.device_groups import backend_of, join_devices
from minillm.parallel.meeting import Address
from tests.engine.small import make
from tests.matrix.cells import folder_of
from tests.parallel.rank_groups import on_all
from tests.parallel.test_processes import alone, assert_dead, children, generate

LIMIT = 120
EXPERTS = {"enable_expert_parallel": True}


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CPUs take the way of ranks on GPUs."""
    monkeypatch.setattr(device_groups, "backend_of", lambda device: "gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_the_backend_is_that_of_the_device():
    assert backend_of(torch.device("cuda", 1)) == "nccl"
    assert backend_of(torch.device("cpu")) is None


# ---- communicators -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "ordered"), [(1, False), (1, True), (2, True)])
def test_processes_and_the_death_of_one(stages, ordered, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    address, store = Address("127.0.0.1", 0, "tests").open(hosts=True)
    sizes = {"size": 2, "num_stages": stages}
    plain = {"topology": sizes, "patience": 60, "store": address, "backend": "gloo"}
    plain |= {"device": "cpu", "ordered": ordered}
    command = [sys.executable, "-m", "tests.parallel.group_process"]
    running = [
        subprocess.Popen([*command, json.dumps(plain | {"rank": each})], stdout=subprocess.PIPE,
                         text=True)
        for each in range(2 * stages)
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=LIMIT)[0] for each in running]
        assert [each.returncode for each in running[-2:]] == [0, -signal.SIGKILL], said
        assert all(each.startswith("right\n") for each in said)
        assert said[-2].startswith("right\nRank 0 of 2 stopped, because another rank has failed")
    finally:
        for each in running:
            each.kill()
            each.wait()
    del store


# ---- engines -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_the_tokens_of_one_rank_and_a_rank_that_is_killed(stages, folder, gloo):
    expected = alone(folder)
    llm = make(folder, max_model_len=96, tensor_parallel_size=2, pipeline_parallel_size=stages)
    assert generate(llm) == expected
    assert generate(llm) == expected
    os.kill(llm.engine.runner.process_ids[0], signal.SIGKILL)
    assert_dead(llm, "^Rank 0 of .*SIGKILL")
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_experts(sizes, gloo):
    folder = folder_of("qwen3_moe")
    expected, others = alone(folder), children(os.getpid())
    with make(folder, max_model_len=96, **sizes, **EXPERTS) as llm:
        assert generate(llm) == expected
    assert not {*children(os.getpid())}.difference(others)


@pytest.mark.slow
def test_deterministic_ranks_have_the_tokens_and_bits_of_those_on_cpus(folder, gloo):
    expected = alone(folder, deterministic=True)
    with make(folder, tensor_parallel_size=2, max_model_len=96, deterministic=True) as llm:
        assert generate(llm) == expected


# ---- an emulated GPU ---------------------------------------------------------------------------


@pytest.mark.slow
def test_decode_steps_with_collectives_are_recorded_on_an_emulated_gpu(gloo, monkeypatch):
    """In both ranks every kernel compiles, and sums are in what is recorded and replayed."""
    pytest.importorskip("triton")
    from minillm import LLM, SamplingParams
    from minillm.lab.gpu.emulate import emulated

    monkeypatch.setattr(rank_process, "WORKER", "tests.parallel.emulated_worker")
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "num_gpu_blocks_override": 32}
    with emulated(), LLM("tiny", dtype="bfloat16", tensor_parallel_size=2, **sizes) as llm:
        before = llm.engine.runner._stats()
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        after, steps = llm.engine.runner._stats(), list(llm.trace)
        assert before[0] == before[1]
        assert before[0]["graphs"] == 3  # of 1, 2 and 4 rows
        assert before[0]["launches"] > 0
        layers = llm.engine.source.config.num_layers
        for one, two in zip(before, after, strict=True):
            assert two["sums"] - one["sums"] == len(steps) * (1 + 2 * layers)


def test_ranks_replay_only_graphs_that_all_of_them_have():
    """Otherwise one would pad a step and another would not."""
    groups = ThreadGroup(2, LIMIT).communicators()
    rows = SimpleNamespace(num_rows=8)
    runners: list[Any] = [
        SimpleNamespace(graphs=SimpleNamespace(rows=rows, sizes=sizes), verify_graphs=None)
        for sizes in ((1, 2, 8), (2, 4, 8))
    ]
    pairs = zip(runners, groups, strict=True)
    on_all([lambda r=r, c=c: rank.agree_on_graphs(r, c) for r, c in pairs])
    assert [each.graphs.sizes for each in runners] == [(2, 8), (2, 8)]


# ---- which GPU ---------------------------------------------------------------------------------


class Gpus:
    """The part of `torch.cuda` that is asked."""

    def __init__(self, count: int):
        self.count, self.chosen = count, []

    def device_count(self) -> int:
        return self.count

    def set_device(self, number: int) -> None:
        self.chosen.append(number)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Gpus]:
    def have(count: int) -> Gpus:
        found = Gpus(count)
        monkeypatch.setattr(torch, "get_device_module", lambda *_: found)
        return found

    return have


@pytest.mark.parametrize(
    ("device", "count", "variables", "what"),
    [
        ("cuda", 1, {}, r"^2 ranks on this node need 2 GPUs, and torch sees 1; use fewer ranks"),
        ("cuda:1", 2, {}, r"^device is 'cuda:1', and every rank .*CUDA_VISIBLE_DEVICES\.$"),
    ],
)
def test_ranks_without_a_gpu(device, count, variables, what, gpus, folder):
    args = EngineArgs(folder, tensor_parallel_size=2, dtype="float32")
    source = open_model(folder)
    _, plan = plan_memory(args, source, "float32", torch.device("cpu"))
    gpus(count)
    with pytest.raises(ConfigError, match=what) as caught:
        launch.open_ranks(args, source, plan, torch.device(device), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "local", "bound"), [(1, None, 1), (3, "1", 1), (0, None, 0), (2, "0", 0)]
)
def test_a_rank_takes_the_gpu_of_its_number_on_its_node(rank, local, bound, gpus, monkeypatch):
    """And NCCL, whose first call is made before the memory is counted."""
    chosen = gpus(2).chosen
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    calls: list[Any] = []
    fake = SimpleNamespace(
        init_process_group=lambda backend, **more: calls.append((backend, list(chosen), more)),
        new_group=lambda ranks: SimpleNamespace(size=lambda: len(ranks), ranks=ranks),
        all_reduce=lambda part, group: calls.append((part.device.type, group.ranks)),
    )
    monkeypatch.setattr(device_groups, "distributed", fake)
    monkeypatch.setattr(torch, "zeros", lambda count, device: torch.empty(count, device="meta"))
    address, store = Address("127.0.0.1", 0, "tests").open(hosts=True)
    plain = {"topology": {"size": 2, "num_stages": 2}, "rank": rank, "patience": 9.0}
    plain |= {"store": address, "backend": "nccl", "device": "cuda", "ordered": False}
    place = join_devices(plain)
    assert chosen == [bound]
    (backend, before, more), (_, ranks) = calls
    assert (backend, before) == ("nccl", [bound])
    assert (more["rank"], more["world_size"], more["timeout"].seconds) == (rank, 4, 9)
    assert ranks == ([0, 1] if rank < 2 else [2, 3])
    assert place.rank == rank
    assert (place.before is None, place.after is None) == (rank < 2, rank >= 2)
    del store


def test_more_ranks_than_gpus_on_another_node(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    plain = {"topology": {"size": 4}, "rank": 3, "device": "cuda"}
    with pytest.raises(ConfigError, match=r"^2 ranks on this node need 2 GPUs, and torch sees 1;"):
        join_devices(plain)
