"""``minillm plan -tp``: what it prints, and what it refuses."""

import json
import re

import pytest

from minillm.cli import main
from minillm.lab.commands.plan_parallel import layouts
from minillm.lab.parallel_layout import Layout
from minillm.models.presets import preset


@pytest.fixture
def plan(capsys, monkeypatch):
    """Exit code, output and errors of ``minillm plan ...``."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv):
        capsys.readouterr()
        code = main(["plan", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def data_of(plan, *argv):
    """The JSON object, and its entries by (tensor, pipeline, link)."""
    code, out, err = plan(*argv, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    entries = {(each["layout"]["tensor"], each["layout"]["pipeline"], each["link"]): each
               for each in data["parallel"]}  # fmt: skip
    assert len(entries) == len(data["parallel"])
    return data, entries


L70 = "preset:llama-3.1-70b"


def test_70b_on_four_h100(plan):
    code, out, _ = plan(L70, "-tp", 4, "--gpu", "h100")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "on 4 x NVIDIA H100 SXM: predictions" in out
    assert "32.9 GiB on each GPU" in out
    assert "445,952 tokens of 80 KiB" in out
    assert "161 in a step; at batch 1, 16 KiB each" in out
    table = [line.split() for line in out.splitlines() if re.match(r"  \d  ", line)]
    assert [(row[0], row[1]) for row in table] == [
        ("1", "-"),
        *((n, link) for n in "248" for link in ("nvlink", "pcie")),
    ]
    assert " ".join(table[0][4:]) == "does not fit - - -"
    by_place = {(row[0], row[1]): row for row in table}
    assert by_place["4", "nvlink"][4:8] == ["445,952", "75.9", "(6%)", "3,598"]
    assert by_place["4", "pcie"][5:7] == ["60.2", "(25%)"]
    assert by_place["2", "nvlink"][4] == "7,120"  # holds one sequence, and not 64
    assert by_place["2", "nvlink"][7] == "-"
    for word in ("Predictions from counts", "datasheet rates", "nothing was measured here"):
        assert word in " ".join(out.split())


def test_json_holds_what_the_table_shows(plan):
    data, entries = data_of(plan, L70, "-tp", 4, "--gpu", "h100")
    assert set(data["links"]) == {"nvlink", "pcie"}
    assert data["context"] == 1024
    four = entries[4, 1, "nvlink"]
    assert four["devices"] == 4
    assert four["fits"]
    assert four["memory"]["weight_bytes"] == pytest.approx(35.3e9, rel=0.002)
    assert four["cached_tokens"] == four["memory"]["num_tokens"] == 445_952
    assert four["decode"]["1"]["tokens_per_second"] == pytest.approx(75.9, abs=0.05)
    assert four["decode"]["64"]["tokens_per_second"] == pytest.approx(3598, abs=0.5)
    (stage,) = four["decode"]["1"]["stages"]
    parts = max(stage["memory_seconds"], stage["compute_seconds"]) + stage["overhead_seconds"]
    assert parts + stage["communication_seconds"] == pytest.approx(four["decode"]["1"]["seconds"])
    share = stage["communication_seconds"] / stage["seconds"]
    assert four["decode"]["1"]["communication"] == pytest.approx(share)
    assert not entries[1, 1, None]["fits"]
    assert entries[2, 1, "pcie"]["decode"]["1"]["fits"]
    assert not entries[2, 1, "pcie"]["decode"]["64"]["fits"]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite"])
def test_one_gpu_is_what_the_plan_says_without_the_option(plan, name):
    options = "--gpu", "h200", "--max-model-len", 4096, "--max-num-seqs", 32
    before = json.loads(plan(f"preset:{name}", *options, "--json")[1])
    _, entries = data_of(plan, f"preset:{name}", *options, "-tp", 1)
    one = entries[1, 1, None]
    assert one["memory"] == before["plan"]
    assert one["decode"]["1"]["seconds"] == before["predictions"]["decode"]["seconds"]
    assert one["prefill"]["seconds"] == before["predictions"]["prefill"]["seconds"]


def test_options_of_the_plan_hold_on_every_gpu(plan):
    options = ("--memory", "40GB", "--max-model-len", 512, "--gpu-memory-utilization", 0.5,
               "--kv-cache-dtype", "float32")  # fmt: skip
    data, entries = data_of(plan, "preset:llama-3.1-8b", "-tp", 2, "--gpu", "h100", *options)
    assert data["context"] == 512
    memory = entries[2, 1, "pcie"]["memory"]
    assert memory["memory_bytes"] == 40 * 10**9
    assert memory["reserve_bytes"] == 20 * 10**9
    assert memory["settings"]["max_model_len"] == 512
    assert memory["kv_bytes_per_token"] == 131_072  # half of the heads, twice the bytes


def test_a_link_may_be_named(plan):
    _, entries = data_of(plan, L70, "-tp", 4, "--gpu", "h100", "--link", "InfiniBand")
    assert {link for _, _, link in entries} == {None, "infiniband"}
    _, out, _ = plan(L70, "-tp", 4, "--gpu", "h100", "--link", "pcie")
    assert "pcie" in out
    assert "nvlink" not in out


def test_stages(plan):
    _, entries = data_of(plan, L70, "-pp", 4, "--gpu", "h100", "--link", "nvlink")
    assert [(tensor, stages) for tensor, stages, _ in entries] == [(1, 1), (1, 2), (1, 4), (1, 8)]
    assert len(entries[1, 4, "nvlink"]["decode"]["64"]["stages"]) == 4
    _, both = data_of(plan, L70, "-tp", 2, "-pp", 3, "--gpu", "h100", "--link", "nvlink")
    assert [(tensor, stages) for tensor, stages, _ in both] == [(1, 3), (2, 3), (4, 3), (8, 3)]
    assert both[2, 3, "nvlink"]["devices"] == 6
    code, out, _ = plan(L70, "-tp", 2, "-pp", 3, "--gpu", "h100")
    assert code == 0
    assert re.search(r"^  2 x 3 +nvlink", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_whole_experts(plan):
    """Of the experts of one token the fullest GPU reads more than its share."""
    common = "preset:deepseek-v3", "-tp", 8, "--gpu", "h200", "--link", "nvlink"
    split, whole = (data_of(plan, *common, *more)[1][8, 1, "nvlink"] for more in ((), ("-ep",)))
    assert whole["layout"]["expert_parallel"]
    assert whole["decode"]["1"]["seconds"] > 1.1 * split["decode"]["1"]["seconds"]
    assert whole["memory"] == split["memory"]


def test_sizes_that_are_compared():
    config = preset("smollm2-135m")  # 9 heads over 3 KV heads
    assert [each.tensor for each in layouts(config, Layout(3))] == [1, 3]
    assert [each.pipeline for each in layouts(config, Layout(1, 3))] == [1, 2, 3, 4, 8]
    assert [each.tensor for each in layouts(preset("llama-3.1-70b"), Layout(16))] == [
        1,
        2,
        4,
        8,
        16,
    ]


def test_a_context_that_does_not_fit_is_said_with_one_that_does(plan):
    _, out, _ = plan(L70, "-tp", 2, "--gpu", "h100")
    shown = " ".join(out.split())
    assert "One sequence of 131,072 tokens does not fit; --max-model-len 7120 does." in shown
    _, out, _ = plan(L70, "-tp", 2, "--gpu", "h100", "--max-model-len", 7120)
    assert "One sequence of" not in out
    _, out, _ = plan(L70, "-tp", 1, "--gpu", "h100")
    assert "does not fit: no memory is left" in out


MISTAKES = [
    ([L70, "-tp", "3", "--gpu", "h100"], "does not divide 64 attention heads"),
    ([L70, "-tp", "3", "--gpu", "h100"], "it can be 1, 2, 4, 8, 16, 32, 64."),
    ([L70, "-tp", "0", "--gpu", "h100"], "both must be at least 1"),
    ([L70, "-pp", "-2", "--gpu", "h100"], "both must be at least 1"),
    ([L70, "-pp", "81", "--gpu", "h100"], "it must be at most 80"),
    ([L70, "-tp", "4", "--gpu", "h100", "--link", "nvlnk"], "Did you mean 'nvlink'?"),
    ([L70, "-tp", "4", "--gpu", "h100", "--link", ""], "Known are nvlink, pcie, infiniband."),
    ([L70, "-tp", "4", "--gpu", "h1000"], "is not in the datasheet"),
    ([L70, "-tp", "4"], "add one, such as --hardware h100"),
    ([L70, "-tp", "4", "--memory", "80GB"], "add one, such as --hardware h100"),
    ([L70, "--link", "pcie", "--gpu", "h100"], "--link and -ep need -tp or -pp"),
    ([L70, "-ep", "--gpu", "h100"], "--link and -ep need -tp or -pp"),
    ([L70, "-tp", "4", "-ep", "--gpu", "h100"], "has no experts; leave"),
    ([L70, "-tp", "4", "--gpu", "h100", "--load"], "leave out --load"),
    ([L70, "-tp", "4", "--gpu", "h100", "--speculate", "ngram"], "leave out --load"),
    (
        [L70, "-tp", "4", "--gpu", "h100", "--speculative-config", '{"method": "ngram"}'],
        "leave out --load",
    ),
    ([L70, "-tp", "4", "--gpu", "h100", "--dtype", "fp8"], "dtype is 'fp8'"),
    ([L70, "-tp", "4", "--gpu", "h100", "--max-model-len", "0"], "--max-model-len is 0"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(plan, argv, message):
    code, out, err = plan(*argv)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("Try 'minillm")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
