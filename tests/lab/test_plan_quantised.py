"""``minillm plan`` and ``info`` of quantised weights: bytes, KV cache and bounds."""

import json
from dataclasses import replace

import pytest

from minillm.cli import main
from minillm.errors import ConfigError
from minillm.lab.commands.quantised_weights import check_fetched
from minillm.lab.links import LINKS
from minillm.lab.parallel_cost import Devices, decode_time
from minillm.lab.parallel_layout import Layout
from minillm.models.checkpoint import open_model
from minillm.models.presets import preset
from minillm.plan.hardware import DATASHEET
from minillm.plan.weight_sizes import WeightSizes
from tests.quantization.test_golden import GOLDEN

H100 = DATASHEET["h100-sxm"]


@pytest.fixture
def minillm(capsys, monkeypatch):
    """Exit code, output and errors of a command."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv):
        capsys.readouterr()
        code = main([*map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def data_of(minillm, *argv):
    code, out, err = minillm("plan", *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_int4_of_a_preset(minillm):
    """0.5 bytes and 4 per group of 32; output matrix in int8, 2 per group; embedding in bf16."""
    found, plain = (
        data_of(minillm, "preset:llama-3.1-8b", "--hardware", "h100", *more)
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


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_gpu_multiplies_at_the_rate_of_16_bits(minillm, how):
    """There activations keep 16 bits: in 8, one scale for a row would cost a real model quality."""
    asked = ("preset:llama-3.1-8b", "--hardware", "h100", "--quantization", how)
    prefill = data_of(minillm, *asked)["predictions"]["prefill"]
    assert prefill["dtype"] == "bfloat16"
    flops = prefill["linear_flops"] + prefill["attention_flops"]
    assert prefill["compute_seconds"] == pytest.approx(flops / 989e12)
    assert "989 TFLOP/s (bfloat16)" in minillm("plan", *asked)[1]


def test_a_device_without_a_known_int8_rate_has_that_of_bf16(minillm):
    asked = ("preset:llama-3.1-8b", "--hardware", "laptop", "--quantization", "int8")
    prefill = data_of(minillm, *asked)["predictions"]["prefill"]
    flops = prefill["linear_flops"] + prefill["attention_flops"]
    assert prefill["compute_seconds"] == pytest.approx(flops / 0.9e12)
    assert "900 GFLOP/s (bfloat16)" in " ".join(minillm("plan", *asked)[1].split())


@pytest.mark.parametrize("name", ["nf4", "gptq-sym", "llm-int8"])
def test_a_quantised_folder(name, minillm):
    source = open_model(GOLDEN / name)
    found = data_of(minillm, GOLDEN / name, "--memory", "1GiB")
    assert found["plan"]["weight_bytes"] < found["weights"]["norms"] * 35_000 * 1.2
    assert found["plan"]["weight_bytes"] > 35_008 / 2
    out = minillm("plan", GOLDEN / name, "--memory", "1GiB")[1]
    assert found["weights"]["name"] in " ".join(out.split())
    assert found["weights"]["name"] in " ".join(minillm("info", GOLDEN / name)[1].split())
    assert source.quantization


def test_devices_share_quantised_weights(minillm):
    asked = ("preset:llama-3.1-70b", "--hardware", "h100", "-tp", 2)
    out = minillm("plan", *asked, "--quantization", "int4")[1]
    assert "21.4 GiB on each GPU, in int4" in out
    found = data_of(minillm, *asked, "--quantization", "int4")["parallel"]
    plain = data_of(minillm, *asked)["parallel"]
    ratios = [four["memory"]["weight_bytes"] / all["memory"]["weight_bytes"]
              for four, all in zip(found, plain, strict=True)]  # fmt: skip
    assert all(0.31 < ratio < 0.34 for ratio in ratios)


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("tiny", "--quantization", "int3"), "--quantization is 'int3'; it must be int8 or int4."),
        (
            (GOLDEN / "nf4", "--speculate", "ngram", "--hardware", "h100"),
            "--speculate predicts with 16-bit weights",
        ),
    ],
    ids=["unknown", "speculate"],
)
def test_what_cannot_be_planned(argv, message, minillm):
    code, _, err = minillm("plan", *argv)
    assert code != 0
    assert message in err


def test_weights_of_a_hub_are_not_fetched_for_a_plan(tmp_path):
    source = replace(open_model(GOLDEN / "nf4"), hub_id="org/name", folder=tmp_path)
    with pytest.raises(ConfigError, match="not fetched yet; load it once"):
        check_fetched(source)
    check_fetched(replace(source, folder=GOLDEN / "nf4"))


def test_published_rates_of_eight_bits():
    assert (H100.rate("int8"), H100.rate("fp8")) == (1979e12, 1979e12)
    assert DATASHEET["a100-sxm"].rate("int8") == 624e12
    assert DATASHEET["a100-sxm"].rate("fp8") == 312e12  # no FP8: as in bf16
    assert DATASHEET["apple-m2"].rate("int8") == DATASHEET["apple-m2"].rate("bfloat16")
