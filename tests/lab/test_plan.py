"""``minillm plan`` of several GPUs and of quantised weights: bytes, bounds, and what it refuses."""

import json
import re
from dataclasses import replace

import pytest

from minillm.cli.terminal import seconds
from minillm.errors import ConfigError
from minillm.lab.commands.plan_parallel import layouts
from minillm.lab.commands.quantised_weights import check_fetched
from minillm.lab.hardware import DATASHEET
from minillm.lab.links import LINKS, all_reduce
from minillm.lab.parallel_cost import Devices, decode_time
from minillm.lab.parallel_layout import Layout
from minillm.models.checkpoint import open_model
from minillm.models.presets import preset
from minillm.plan.weight_sizes import WeightSizes
from tests.quantization.test_golden import GOLDEN

H100, NF4 = DATASHEET["h100-sxm"], GOLDEN / "nf4"


def plan_of(cli, *argv):
    """The JSON object of a plan."""
    code, out, err = cli("plan", *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def parallel(cli, *argv):
    """The JSON object, and its entries by (tensor, pipeline, link)."""
    data = plan_of(cli, *argv)
    entries = {(each["layout"]["tensor"], each["layout"]["pipeline"], each["link"]): each
               for each in data["parallel"]}  # fmt: skip
    assert len(entries) == len(data["parallel"])
    return data, entries


L70 = "preset:llama-3.1-70b"


def test_70b_on_four_h100(cli):
    _, out, _ = cli("plan", L70, "-tp", 4, "--gpu", "h100")
    assert max(map(len, out.splitlines())) <= 80
    assert "on 4 x NVIDIA H100 SXM: predictions" in out
    assert "32.9 GiB on each GPU" in out
    assert "445,952 tokens of 80 KiB" in out
    took = seconds(all_reduce(LINKS["nvlink"], 4, 16384).seconds)
    assert f"161 in a step; at batch 1, 16 KiB each: {took} on nvlink" in " ".join(out.split())
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


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite"])
def test_one_gpu_is_what_the_plan_says_without_the_option(cli, name):
    options = "--gpu", "h200", "--max-model-len", 4096, "--max-num-seqs", 32
    before = json.loads(cli("plan", f"preset:{name}", *options, "--json")[1])
    _, entries = parallel(cli, f"preset:{name}", *options, "-tp", 1)
    one = entries[1, 1, None]
    assert one["memory"] == before["plan"]
    assert one["decode"]["1"]["seconds"] == before["predictions"]["decode"]["seconds"]
    assert one["prefill"]["seconds"] == before["predictions"]["prefill"]["seconds"]


def test_options_of_the_plan_hold_on_every_gpu(cli):
    options = ("--memory", "40GB", "--max-model-len", 512, "--gpu-memory-utilization", 0.5,
               "--kv-cache-dtype", "float32")  # fmt: skip
    data, entries = parallel(cli, "preset:llama-3.1-8b", "-tp", 2, "--gpu", "h100", *options)
    assert data["context"] == 512
    memory = entries[2, 1, "pcie"]["memory"]
    assert memory["memory_bytes"] == 40 * 10**9
    assert memory["reserve_bytes"] == 20 * 10**9
    assert memory["settings"]["max_model_len"] == 512
    assert memory["kv_bytes_per_token"] == 131_072  # half of the heads, twice the bytes


def test_stages(cli):
    _, entries = parallel(cli, L70, "-pp", 4, "--gpu", "h100", "--link", "nvlink")
    assert [(tensor, stages) for tensor, stages, _ in entries] == [(1, 1), (1, 2), (1, 4), (1, 8)]
    assert len(entries[1, 4, "nvlink"]["decode"]["64"]["stages"]) == 4
    _, both = parallel(cli, L70, "-tp", 2, "-pp", 3, "--gpu", "h100", "--link", "nvlink")
    assert [(tensor, stages) for tensor, stages, _ in both] == [(1, 3), (2, 3), (4, 3), (8, 3)]
    assert both[2, 3, "nvlink"]["devices"] == 6
    _, out, _ = cli("plan", L70, "-tp", 2, "-pp", 3, "--gpu", "h100")
    assert re.search(r"^  2 x 3 +nvlink", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_sizes_that_are_compared():
    config = preset("smollm2-135m")  # 9 heads over 3 KV heads
    assert [each.tensor for each in layouts(config, Layout(3))] == [1, 3]
    assert [each.pipeline for each in layouts(config, Layout(1, 3))] == [1, 2, 3, 4, 8]
    sizes = [each.tensor for each in layouts(preset("llama-3.1-70b"), Layout(16))]
    assert sizes == [1, 2, 4, 8, 16]


def test_a_context_that_does_not_fit_is_said_with_one_that_does(cli):
    _, out, _ = cli("plan", L70, "-tp", 2, "--gpu", "h100")
    shown = " ".join(out.split())
    assert "One sequence of 131,072 tokens does not fit; --max-model-len 7120 does." in shown
    _, out, _ = cli("plan", L70, "-tp", 2, "--gpu", "h100", "--max-model-len", 7120)
    assert "One sequence of" not in out
    _, out, _ = cli("plan", L70, "-tp", 1, "--gpu", "h100")
    assert "does not fit: no memory is left" in out


MISTAKES = [
    ([L70, "-tp", "3", "--gpu", "h100"], "does not divide 64 attention heads"),
    ([L70, "-tp", "0", "--gpu", "h100"], "both must be at least 1"),
    ([L70, "-pp", "81", "--gpu", "h100"], "it must be at most 80"),
    ([L70, "-tp", "4", "--gpu", "h100", "--link", "nvlnk"], "Did you mean 'nvlink'?"),
    ([L70, "-tp", "4", "--gpu", "h1000"], "is not in the datasheet"),
    ([L70, "-tp", "4", "--memory", "80GB"], "add one, such as --hardware h100"),
    ([L70, "-tp", "4"], "add one, such as --hardware h100"),
    ([L70, "--link", "pcie", "--gpu", "h100"], "--link and -ep need -tp or -pp"),
    ([L70, "-tp", "4", "-ep", "--gpu", "h100"], "has no experts; leave"),
    ([L70, "-tp", "4", "--gpu", "h100", "--dtype", "fp8"], "dtype is 'fp8'"),
    ([L70, "-tp", "4", "--gpu", "h100", "--max-model-len", "0"], "--max-model-len is 0"),
    (["tiny", "--quantization", "int3"], "--quantization is 'int3'; it must be one of int8, int4."),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(cli, argv, message):
    shown = cli("plan", *argv)
    assert shown.refused(message), shown


def test_int4_of_a_preset(cli):
    """0.5 bytes and 4 per group of 32; output matrix in int8, 2 per group; embedding in bf16."""
    found, plain = (
        plan_of(cli, "preset:llama-3.1-8b", "--hardware", "h100", *more)
        for more in (("--quantization", "int4"), ())
    )
    assert (found["weights"]["name"], plain["weights"]) == ("int4", None)
    table = 128256 * 4096
    linears = 8030261248 - 2 * table - 65 * 4096
    due = linears * (0.5 + 4 / 32) + 2 * table + 2 * 65 * 4096 + table * (1 + 2 / 32)
    assert found["plan"]["weight_bytes"] == pytest.approx(due, rel=1e-9)
    more_cache = found["plan"]["kv_cache_bytes"] - plain["plan"]["kv_cache_bytes"]
    assert more_cache == plain["plan"]["weight_bytes"] - found["plan"]["weight_bytes"]
    step = found["predictions"]["decode"]
    assert step["weight_bytes"] == pytest.approx(due - 2 * table, rel=1e-5)
    assert step["memory_seconds"] == pytest.approx(
        (step["weight_bytes"] + step["kv_read_bytes"] + step["kv_write_bytes"]) / H100.bandwidth
    )


@pytest.mark.parametrize("name", ["nf4", "gptq-sym", "llm-int8"])
def test_a_quantised_folder(name, cli):
    source = open_model(GOLDEN / name)
    found = plan_of(cli, GOLDEN / name, "--memory", "1GiB")
    assert found["plan"]["weight_bytes"] < found["weights"]["norms"] * 35_000 * 1.2
    assert found["plan"]["weight_bytes"] > 35_008 / 2
    out = cli("plan", GOLDEN / name, "--memory", "1GiB")[1]
    assert found["weights"]["name"] in " ".join(out.split())
    assert found["weights"]["name"] in " ".join(cli("info", GOLDEN / name)[1].split())
    assert source.quantization


def test_experts_are_read_with_their_own_bytes():
    """Also on the most loaded of several devices, which reads more experts than the others."""
    config, plain = preset("mixtral-8x7b"), WeightSizes.plain("bfloat16")
    layout = Layout(tensor=2, expert_parallel=True)

    def read(weights):
        devices = Devices(H100, LINKS["nvlink"], layout, weights=weights)
        return decode_time(config, devices, batch=4, context=9).stages[0].cost.weight_bytes

    whole, half, none = (read(replace(plain, experts=size)) for size in (2.0, 1.0, 0.0))
    assert read(None) == whole
    assert half - none == pytest.approx((whole - none) / 2, rel=1e-9)
    assert none < 0.1 * whole


def test_weights_of_a_hub_are_not_fetched_for_a_plan(tmp_path):
    source = replace(open_model(GOLDEN / "nf4"), hub_id="org/name", folder=tmp_path)
    with pytest.raises(ConfigError, match="not fetched yet; load it once"):
        check_fetched(source)
    check_fetched(replace(source, folder=GOLDEN / "nf4"))


def test_a_link_may_be_named(cli):
    _, entries = parallel(cli, L70, "-tp", 4, "--gpu", "h100", "--link", "InfiniBand")
    assert {link for _, _, link in entries} == {None, "infiniband"}
    _, out, _ = cli("plan", L70, "-tp", 4, "--gpu", "h100", "--link", "pcie")
    assert "pcie" in out
    assert "nvlink" not in out


def test_devices_share_quantised_weights(cli):
    asked = ("preset:llama-3.1-70b", "--hardware", "h100", "-tp", 2)
    out = cli("plan", *asked, "--quantization", "int4")[1]
    assert "21.4 GiB on each GPU, in int4" in out
    found = plan_of(cli, *asked, "--quantization", "int4")["parallel"]
    plain = plan_of(cli, *asked)["parallel"]
    ratios = [four["memory"]["weight_bytes"] / all["memory"]["weight_bytes"]
              for four, all in zip(found, plain, strict=True)]  # fmt: skip
    assert all(0.31 < ratio < 0.34 for ratio in ratios)
