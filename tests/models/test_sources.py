"""Where a model comes from: what is fetched from the hub and when, what the file system refuses,
and what the authors recommend."""

import errno
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from minillm.api.sampling_params import SamplingParams
from minillm.cli import main
from minillm.errors import CheckpointError, ConfigError, ModelNotFoundError
from minillm.models.checkpoint import HUB_IGNORED, HUB_WEIGHTS, find_folder, open_model
from minillm.models.loader import load_model
from tests.models.parity import whole
from tests.models.test_load_errors import edit_json, load, refused
from tests.models.tiny import prompt


def test_weights_are_fetched_in_one_format_only():
    repository = ["model.safetensors", "consolidated.safetensors", "original/model.safetensors"]
    fetched = filter_repo_objects(
        repository, allow_patterns=list(HUB_WEIGHTS), ignore_patterns=list(HUB_IGNORED)
    )
    assert list(fetched) == repository[:1]


@pytest.fixture
def hub(folder, tmp_path, monkeypatch) -> Path:
    """A snapshot folder, filled by a stand-in for huggingface_hub with what was asked for."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in ("modeling_x.py", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_bytes(b"code")
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)

    def fetch(
        repo_id: str,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        assert repo_id == "some-org/some-model"
        assert revision in (None, snapshot.name)
        every = [path.name for path in folder.iterdir()]
        for name in filter_repo_objects(
            every, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            if name.endswith(".safetensors"):  # later than the files that describe the model
                assert revision == snapshot.name
            shutil.copy(folder / name, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return snapshot


def fetched(hub: Path) -> set[str]:
    return {path.name for path in hub.iterdir()}


def test_describing_a_hub_model_fetches_no_weights(hub):
    source = open_model("some-org/some-model")
    assert find_folder("some-org/some-model") == source.folder == hub
    assert fetched(hub) == {"config.json", "generation_config.json", "chat_template.jinja"}
    load_model(source, torch.float32, load_format="dummy")
    assert not list(hub.glob("*.safetensors"))


def test_loading_a_hub_model_fetches_its_weights(hub, folder):
    ids = prompt(7)
    expected = whole(load(folder), ids)
    assert torch.equal(whole(load("some-org/some-model"), ids), expected)
    assert fetched(hub) == {
        *("config.json", "generation_config.json", "chat_template.jinja", "model.safetensors")
    }


def test_an_unsupported_hub_model_is_refused_without_its_weights(hub, folder):
    edit_json(folder / "config.json", model_type="gpt2")
    refused("some-org/some-model", ConfigError, "'gpt2'")
    assert not list(hub.glob("*.safetensors"))


def test_plan_and_info_of_a_hub_model_fetch_no_weights(hub, capsys):
    assert main(["plan", "some-org/some-model", "--hardware", "h200"]) == 0
    assert main(["info", "some-org/some-model"]) == 0
    assert "not downloaded" in capsys.readouterr().out
    assert not list(hub.glob("*.safetensors"))
    load("some-org/some-model")
    assert main(["info", "some-org/some-model"]) == 0
    assert "1 safetensors file" in capsys.readouterr().out


# What the operating system refuses


def test_folder_that_may_not_be_entered(folder, monkeypatch):
    is_dir = Path.is_dir

    def deny(path: Path) -> bool:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", deny)
    refused(folder, ModelNotFoundError, "cannot be looked up: Permission denied.")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_files_without_permission(folder):
    for name in ("model.safetensors", "generation_config.json", "config.json"):
        (folder / name).chmod(0)
        refused(folder, CheckpointError, name, "Permission denied")


# Sampling settings of the model


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_k": 50.5}, "top_k is 50.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": "0.1"}, "min_p is '0.1'"),
        ({"max_new_tokens": float("inf")}, "max_tokens is inf"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_a_setting_that_does_not_exist_is_blamed_on_its_file(folder, settings, culprit):
    edit_json(folder / "generation_config.json", **settings)
    refused(folder, CheckpointError, "generation_config.json", culprit)


def test_sampling_defaults(folder):
    recommended = {"temperature": 0.6, "top_k": 50.0, "max_new_tokens": 7, "min_p": None}
    edit_json(folder / "generation_config.json", **recommended)
    params = SamplingParams(**open_model(folder).sampling_defaults)
    assert params == SamplingParams(temperature=0.6, top_k=50, max_tokens=7)
