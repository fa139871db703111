"""Ranks that Ray starts. Ray is an extra; without it only its sentence is tested."""

import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import EngineDeadError, NodeError, UnsupportedFeatureError
from minillm.parallel import ray_ranks
from tests.parallel.test_processes import OTHERS, children, wait_until

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
TEXTS = ["def fib(n):", "import os"]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedFeatureError, match=r"pip install 'minillm-course\[ray\]'"):
        LLM("tiny", **TWO)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of two CPUs on this machine."""
    found = ray_ranks.import_ray()
    OTHERS.update(children(os.getpid()))
    try:
        found.init(num_cpus=2, include_dashboard=False, object_store_memory=150 << 20)
    except Exception as error:  # it gives its own processes 30 s, whatever the machine does
        pytest.skip(f"Ray does not start on this machine now: {error}")
    yield found
    found.shutdown()
    wait_until(lambda: not children(os.getpid()), "processes are left")


def generate(llm: LLM) -> list[list[int]]:
    found = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


def generate_for_ever(llm: LLM) -> None:
    while True:
        generate(llm)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ray_ranks.RayRanks]:
    """Those of the engines that the test makes."""
    found: list[ray_ranks.RayRanks] = []

    class Seen(ray_ranks.RayRanks):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(ray_ranks, "RayRanks", Seen)
    return found


@needs_ray
def test_the_tokens_of_one_rank_and_the_death_of_an_actor(ray, started):
    with LLM("tiny", dtype="float32") as llm:
        expected = generate(llm)
    llm = LLM("tiny", **TWO)
    assert generate(llm) == expected
    ray.kill(started[0]._actors[1])
    with pytest.raises(EngineDeadError, match=r"^Rank 1 of 2 \(node .*\) is gone .*has ended\.$"):
        generate_for_ever(llm)
    llm.close()
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "CPUs are in use")


@needs_ray
def test_a_cluster_that_is_too_small(ray, monkeypatch):
    monkeypatch.setattr(ray_ranks, "PATIENCE", 2.0)
    start = time.monotonic()
    with pytest.raises(NodeError, match=r"no room for 4 ranks .*: 2 CPUs are in the cluster, 2 "):
        LLM("tiny", **TWO | {"tensor_parallel_size": 4})
    assert time.monotonic() - start < 60
    wait_until(lambda: ray.available_resources().get("CPU") == 2, "CPUs are in use")


@needs_ray
def test_an_actor_that_does_not_start(ray, monkeypatch):
    def fail(self: Any, *_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(ray_ranks.RayRank, "serve", fail)
    with pytest.raises(NodeError, match=r"^Rank . of 2 did not start in Ray: ValueError: planted"):
        LLM("tiny", **TWO)
