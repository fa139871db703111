"""What travels between a driver and its ranks arrives as it was sent."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from minillm import AsyncEngineArgs
from minillm.api.arguments import EngineArgs
from minillm.engine.setup import plan_memory
from minillm.errors import CheckpointError, NodeError
from minillm.models.checkpoint import open_model
from minillm.parallel.fingerprint import fingerprint
from minillm.parallel.messages import Channel, Kind, Message, SetUp
from minillm.speculative.setup import open_draft

DRAFTED = {"model": "preset:smollm2-135m", "num_speculative_tokens": 3}
SYNTHETIC = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5, 1],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "tiny"},
        {"model": Path("preset:smollm2-135m"), "seed": 7, "speculative_config": DRAFTED},
        {"model": "tiny", "swap_space": 1, "speculative_config": SYNTHETIC, "dtype": "half"},
        {"model": "tiny", "speculative_config": {"method": "suffix", "num_speculative_tokens": 2}},
        {"model": "tiny", "deterministic": True, "max_model_len": 64, "prefix_cache": "radix"},
    ],
)
def test_a_set_up_survives(fields):
    args = EngineArgs(**fields, load_format="dummy")
    source = open_model(args.model)
    draft = open_draft(args, source, None)
    _, plan = plan_memory(args, source, "float32", torch.device("cpu"), draft)
    sent = SetUp(1, args, source, plan, "cpu", draft, {"kind": "memory", "fd": 5}, 20)
    arrived = SetUp.from_bytes(sent.to_bytes())
    assert arrived == replace(sent, args=replace(args, model=str(args.model)))
    json.loads(sent.to_bytes())


def test_what_belongs_to_the_driver_is_not_sent():
    args = AsyncEngineArgs("tiny", max_num_requests=5, tensor_parallel_size=3)
    source = open_model("tiny")
    plan = plan_memory(EngineArgs("tiny"), source, "float32", torch.device("cpu"))[1]
    sent = SetUp(0, args, source, plan, "cpu", None, {}, 20)
    assert SetUp.from_bytes(sent.to_bytes()).args == EngineArgs("tiny", tensor_parallel_size=3)


def other_config(to: Path) -> None:
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))


def other_tensors(to: Path) -> None:
    path = to / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ').replace(b'"F32"', b'"I32"'))


def other_values(to: Path) -> None:
    path = to / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


OTHER = r"is another than the driver's: here config \w{12} and weights \w{12}, on node .* config"


@pytest.mark.parametrize(
    ("change", "prints", "what"),
    [
        (other_config, {}, OTHER),
        (other_tensors, {}, OTHER),
        (other_values, {}, OTHER),
        (shutil.rmtree, {}, r"^Node \S+ does not have the driver's model: .* Copy it to the same"),
        (lambda to: None, {"versions": "minillm 0, torch 1.0"},
         r"^The nodes do not match: .* torch 1\.0; install the same versions on all nodes\.$"),
    ],
    ids=["config", "tensors", "values", "no folder", "versions"],
)  # fmt: skip
def test_a_node_that_is_not_like_the_driver_s(change, prints, what, folder, tmp_path):
    """It has changed since the driver has looked at it."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    args, source = EngineArgs(own), open_model(own)
    plan = plan_memory(args, source, "float32", torch.device("cpu"))[1]
    prints = fingerprint({"model": source}) | prints
    sent = SetUp(1, args, source, plan, "cpu", None, {}, 20, prints).to_bytes()
    change(own)
    with pytest.raises((CheckpointError, NodeError), match=what) as caught:
        SetUp.from_bytes(sent)
    assert "\n" not in str(caught.value)
    assert ".".join(torch.__version__.split(".")[:2]) in fingerprint({})["versions"]


def test_messages_arrive_in_order_and_as_they_were():
    """Also more than a socket holds."""
    sent = [Message(Kind.PLAN, 2**32 - 1, b"[1, 2]"), Message(Kind.CLOSE, 0, b"")]
    sent.append(Message(Kind.DONE, 7, bytes(range(256)) * 5000))
    ours, theirs = Pipe()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: [each.send(ours) for each in sent])
        assert [Message.receive(theirs) for _ in sent] == sent
        done.result()
        ours.close()
        assert list(Channel(theirs).messages()) == []
