"""`minillm compare`: its numbers beside independent ones, planted bugs, tables and errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.__main__ import main
from minillm.errors import ConfigError
from minillm.lab.comparison import candidates, metrics, run, sizes, table, windows
from minillm.lab.comparison.candidates import open_candidate, parse
from minillm.models.checkpoint import ASSETS, open_model
from tests.lab.comparison import checks
from tests.planting import broken

TINY = str(ASSETS / "tiny")

CHECKS = (
    (metrics, checks.scores_equal_numpy), (metrics, checks.divergence_is_directed),
    (metrics, checks.errors_are_those_of_a_ratio), (metrics, checks.changes_are_paired),
    (windows, checks.windows_are_the_text), (sizes, checks.sizes_are_counted),
)  # fmt: skip
BUGS = (
    (metrics, "(wanted.exp() * (wanted - found))", "(found.exp() * (found - wanted))",
     checks.divergence_is_directed),
    (metrics, "(wanted.exp() * (wanted - found))", "(found.exp() * (found - wanted))",
     checks.scores_equal_numpy),
    (metrics, "ids[part + 1 : end + 1]", "ids[part:end]", checks.scores_equal_numpy),
    (metrics, "reference[1][number, part:end]", "reference[1][number - 1, part:end]",
     checks.scores_equal_numpy),
    (metrics, "Chunk(i, 0, row)", "Chunk(0, 0, row)", checks.scores_equal_numpy),
    (metrics, "scores.nats - base.nats) * bits", "scores.nats - base.nats.roll(1)) * bits",
     checks.changes_are_paired),
    (metrics, "rest = sums - value * sizes", "rest = sums - sums.mean()",
     checks.errors_are_those_of_a_ratio),
    (metrics, "* count / max(1, count - 1)", "", checks.errors_are_those_of_a_ratio),
    (windows, "count_bytes(tokenizer, row[1:])", "count_bytes(tokenizer, row)",
     checks.windows_are_the_text),
    (windows, "starts = [i * (len(ids) - length) // steps", "starts = [i * length",
     checks.windows_are_the_text),
    (sizes, '"head" if is_head else "embedding" if matrix is model.embedding else "linears"',
     '"head" if is_head else "linears"', checks.sizes_are_counted),
    (sizes, 'sizes.add("scales", found.num_bytes - found.codes.nbytes)', "pass",
     checks.sizes_are_counted),
    (sizes, "return self.linears + self.embedding + self.head + self.scales + self.other",
     "return self.linears + self.scales + self.other", checks.sizes_are_counted),
    (sizes, "math.prod(found.shape) * bits / 8", "found.codes.nbytes", checks.sizes_are_counted),
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "check"), CHECKS, ids=lambda each: getattr(each, "__name__", str(each))[:50]
)
def test_numbers_are_right(module, check) -> None:
    check(module)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("module", "right", "wrong", "check"),
    BUGS,
    ids=lambda each: getattr(each, "__name__", str(each))[:40],
)
def test_planted_bug_is_found(module, right, wrong, check) -> None:
    with pytest.raises(AssertionError):
        check(broken(module, right, wrong))


# ---- candidates -------------------------------------------------------------------------------


def test_names_of_methods() -> None:
    found = parse("gptq:3:64:act-order")
    assert (found.recipe.bits, found.recipe.group_size, found.recipe.act_order) == (3, 64, True)
    assert parse("rtn:4:row").recipe.group_size == -1
    assert parse("int8").loading == "int8"
    assert parse("int8").eight_bit_head
    assert parse("int8:head16").recipe.method == "int8"
    assert parse("nf4:no-double:head8").eight_bit_head
    assert parse("smoothquant").eight_bit_inputs
    assert not parse(TINY).is_method


@pytest.mark.parametrize(("name", "message"), [
    ("gptc:4", "neither a file nor a folder nor a method.*Did you mean 'gptq'"),
    ("nf4:4", "'nf4:4' has '4'; after nf4 there may be no-double, head8"),
    ("rtn:9:128", "9 bits are not possible"),
    ("./nowhere", "There is no file or folder './nowhere'"),
    ("nowhere.gguf", "There is no file or folder 'nowhere.gguf'"),
    ("preset:qwen3-8b", "has no weights; give it as MODEL"),
])  # fmt: skip
def test_a_wrong_name_is_one_sentence(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(name)


def test_inputs_in_8_bits_change_little() -> None:
    text = checks.windows()
    outputs = [
        metrics.hidden_states(
            open_candidate(parse(name), open_model("tiny"), torch.float32, None).model, text
        )
        for name in ("rtn:8:32", "rtn:8:32:a8")
    ]
    difference = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert 1e-4 < difference < 0.05
    x = torch.tensor([[1.0, -127.0, 0.4], [0.0, 0.0, 0.0]])
    assert candidates.rounded(x).tolist() == [[1.0, -127.0, 0.0], [0.0, 0.0, 0.0]]


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "held.txt"
    file.write_text(windows.read_text()[:20_000], "utf-8")
    return file


@pytest.fixture(scope="module")
def found(text) -> dict:
    names = ("int8", "rtn:3:32", TINY)
    return run.compare(run.Work("tiny", tuple(map(parse, names)), text, 4, 96, speed=False))


def test_the_model_itself_has_no_divergence(found) -> None:
    """A folder with the same weights: every paired number is exactly 0."""
    base, int8, three, same = found["results"]
    (mine,) = same["quality"]
    assert abs(mine["kl"]["value"]) < 1e-12
    assert mine["bits_per_byte_change"]["value"] == mine["bits_per_byte_change"]["error"] == 0
    assert mine["same_top1"]["value"] == 1
    assert mine["bits_per_byte"] == base["quality"][0]["bits_per_byte"]
    assert int8["quality"][0]["kl"]["value"] < 0.002 < three["quality"][0]["kl"]["value"]
    assert mine["kl_run"] == base["quality"][0]["kl_run"]
    assert same["disk"]["how"] == "measured"
    assert same["disk"]["total"] == base["disk"]["total"]


def test_cells_are_the_numbers_of_the_json(found, capsys) -> None:
    """What is printed, beside the JSON data."""
    from minillm.cli.terminal import Terminal

    table.show(json.loads(json.dumps(found)), Terminal())
    printed = capsys.readouterr().out
    for row in found["results"][1:]:
        (line,) = (x for x in printed.splitlines() if x.strip().startswith(f"{row['name']} ")
                   and "W" in x and "±" in x)  # fmt: skip
        cells = re.split(r"\s{2,}", line.strip())
        quality = row["quality"][0]
        assert cells[2] == f"{row['bits_per_weight']:.2f}"
        assert cells[3] == f"{row['disk']['total'] / 1e6:.2f}"
        assert cells[5] == f"{quality['bits_per_byte']['value']:.4f}"
        for cell, metric in (6, "bits_per_byte_change"), (7, "kl"), (9, "kl_run"):
            value, error = map(float, cells[cell].split(" ±"))
            assert value == pytest.approx(quality[metric]["value"], rel=5e-3, abs=5e-6)
            assert error == pytest.approx(quality[metric]["error"], rel=5e-2, abs=5e-6)
        assert cells[8] == f"{quality['same_top1']['value']:.1%}"


def test_a_model_runs_as_in_the_engine() -> None:
    """The log-probabilities of a text with int8 are the engine's, and not those of float32."""
    text = checks.windows()
    model = open_candidate(parse("int8"), open_model("tiny"), torch.float32, None).model
    exact = metrics.score(model, metrics.hidden_states(model, text), text).nats
    served, _ = run.as_run(run.Work("tiny", ()), run.Base(open_model("tiny")), model)
    found = metrics.score(served, metrics.hidden_states(served, text), text).nats
    prompts = [{"prompt_token_ids": row.tolist()} for row in text.ids]
    with LLM("tiny", quantization="int8") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for nats, plain, output in zip(found, exact, outputs, strict=True):
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        wanted = -sum(entry[token].logprob for token, entry in pairs)
        assert float(nats) == pytest.approx(wanted, rel=1e-6)
        assert abs(plain - wanted) > 1e-3


def test_seeds_are_shown_with_their_spread() -> None:
    row = {"quality": [{"kl": {"value": v, "error": 0.001}} for v in (0.02, 0.03, 0.04)]}
    assert table.with_error(row, "kl") == "0.0300 ±0.0010 (0.0200 to 0.0400)"
    assert [table.significant(x, 3, "+") for x in (2.5086, -0.00012, 0.0)] == [
        "+2.51", "-0.00012", "+0"
    ]  # fmt: skip


def test_kl_run_has_the_cache_of_the_engine(text) -> None:
    """In float32 the part due to arithmetic is nothing, and with codes of 8 bits it is theirs."""
    kinds = "auto", "int8"
    works = [run.Work("tiny", (), text, 2, 64, speed=False, dtype="float32", kv_cache_dtype=kind)
             for kind in kinds]  # fmt: skip
    found = [run.compare(work) for work in works]
    plain, eight = (each["results"][0]["quality"][0]["kl_run"]["value"] for each in found)
    assert abs(plain) < 1e-6
    assert 1e-5 < eight < 0.005
    assert ["KV cache in 8 bits" in str(each["notes"]) for each in found] == [False, True]


def test_command_writes_json_and_a_plot(text, tmp_path, capsys) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    files = ["--text", str(text), "--json", str(out), "--plot", str(plot)]
    small = ["--windows", "3", "--length", "64", "--no-speed", "--threads", "1"]
    assert main(["compare", "tiny", "int4", "rtn:4:64", *small, *files]) == 0
    printed = capsys.readouterr().out
    assert "3 windows of 64 tokens" in printed
    assert "embedding (tied output)" in printed
    names = [row["name"] for row in json.loads(out.read_text())["results"]]
    assert names == ["16 bit", "int4", "rtn:4:64"]
    assert "<svg" in plot.read_text()


@pytest.mark.slow
def test_speed_of_a_shape(capsys, tmp_path, monkeypatch) -> None:
    """Random weights: no quality. The rounds are shortened."""
    from minillm.lab.comparison import speed

    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(speed, "calmly", lambda run: speed.Calm(run(), 0.0))
    monkeypatch.setattr(speed, "measure_ceiling", lambda *_: speed.Ceiling({"x": 1e10}, 1e9, 1e9))
    work = run.Work("tiny", (parse("int8"), parse("rtn:4:64")), None, 2, 32)
    rows = run.compare(work)["results"]
    assert [row["name"] for row in rows] == ["16 bit", "int8", "rtn:4:64"]
    for row in rows:
        assert [case["batch"] for case in row["speed"]["by_batch"]] == [1, 16]
        for case in row["speed"]["by_batch"]:
            step = case["batch"] / case["tokens_per_second"]
            assert case["of_read_ceiling"] == pytest.approx(case["bytes_per_step"] / step / 1e10)
    read = [row["speed"]["by_batch"][0]["bytes_per_step"] for row in rows]
    assert read[0] > read[1]


@pytest.mark.parametrize(("arguments", "message"), [
    (["tiny", "int8", "--text", "nowhere.txt"], "The text nowhere.txt cannot be read"),
    (["tiny", "int8", "--windows", "9999"], "The text has .* but 9999 windows of 512 need"),
    (["tiny", "int8", "--length", "1"], "--length is 1; it must be from 2"),
    (["tiny", "int8", "--windows", "0"], "--windows: '0' is not an integer at least 1"),
    (["tiny", "int8", "int8"], "int8 is given twice"),
    (["tiny", "int8", "--plot", "x.txt"], "its name must end in"),
    (["tiny", "int8", "--json", "nowhere/x.json"], "its folder does not exist"),
    (["tiny", "int8", "--dtype", "float64"], "--dtype is 'float64'; it must be one of auto"),
    (["preset:smollm2-135m", "int8", "--no-speed"], "has random weights, so only speed"),
    (["tiny", "int4", "--kv-cache-dtype", "fp8"], "int8 takes the same memory"),
    (["preset:smollm2-135m", "gptq"], "gptq needs a calibration text"),
    (["tiny", "tiny-draft", "--windows", "2", "--no-speed"], "has another shape than tiny"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(arguments, message, cli, monkeypatch) -> None:
    monkeypatch.setattr(run, "Speed", lambda *_: None)
    shown = cli("compare", *arguments)
    assert shown.code == 2
    assert re.search(message, shown.err), shown.err


def test_other_tokenizers_are_refused(text, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    data = json.loads((other / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="have different tokenizers"):
        run.compare(run.Work("tiny", (parse(str(other)),), text, 2, 32, speed=False))


def test_calibration_and_text_must_differ(text) -> None:
    with pytest.raises(ConfigError, match="must not see the text"):
        run.compare(run.Work("tiny", (parse("int8"),), text, 2, 32, text, speed=False))
