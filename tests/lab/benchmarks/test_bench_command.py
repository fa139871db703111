"""`minillm bench`: what it refuses, what it shows and writes, with the embedded model and with
engines that are made up."""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minillm.config import ModelConfig, RopeConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.benchmarks import ceiling, checkpoint, compare
from minillm.lab.benchmarks.ceiling import ONEDNN, OWN, SUMS, Ceiling, best_of
from minillm.lab.benchmarks.compare import Work, cost_of, options, result, statement
from minillm.lab.benchmarks.compare_table import remarks, table
from minillm.lab.benchmarks.contest import Case, Run, Score
from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.commands.bench_options import BENCHMARKS
from minillm.lab.commands.bench_options import OWN as FOLDER
from minillm.lab.hardware import Hardware
from minillm.models.families import parse_config
from minillm.models.presets import PRESETS, preset

ROOT = Path(__file__).resolve().parents[3]
CEILING = Ceiling({SUMS: 10e9, ONEDNN: 20e9, OWN: 15e9}, 1e12, 1e11)
# An engine with the manners of a peer's: 2 ms per step, by its own account.
FAKE_PEER = """
import json, sys
for line in sys.stdin:
    told = json.loads(line)
    if told["do"] == "open":
        answer = {"version": "7", "weights": told["dtype"], "kv_cache": "bf16", "seconds": 1.5}
    elif told["do"] == "offline":
        answer = {"seconds": 2.0, "tokens": sum(told["new_tokens"])}
    else:
        batch, new = len(told["prompts"]), told["new_tokens"]
        answer = [(1 + n / 500, batch, batch, batch * (n + 1 == new)) for n in range(new)]
    print(json.dumps({"ok": answer}), flush=True)
"""
RUBBISH = "print('Loading checkpoint shards: 100%')"


# ---- what is refused --------------------------------------------------------------------------


MISTAKES = """
decoed | there is no benchmark 'decoed'; the benchmarks are decode, prefill
decode --vs openvino,vlm | has no engine 'vlm'; the engines are transformers, vllm
decode --vs vllm --device cuda | leave it out with --device cuda.
decode --vs vllm --quantization int8 | --vs vllm runs 16-bit weights only
decode --quantization int2 | --quantization is 'int2'; it must be one of int8, int4.
decode --vs llamacpp --kv-cache-dtype int8 | --vs llamacpp runs with a cache of 16 bits only
decode --device cuda --kv-cache-dtype int8 | --kv-cache-dtype int8 is for a CPU; leave it out.
decode --kv-cache-dtype fp8 | is not supported; int8 takes the same memory with a tenth
decode --device tpu | --device is 'tpu'; it must be cpu or cuda.
decode --batch 1,-2 | argument --batch: '1,-2' is not a list of integers at least 1.
decode --new-tokens 1 | argument --new-tokens: '1' is not an integer at least 2.
offline --requests 2000000 | '2000000' is not an integer at least 1, at most 1,000,000.
decode --beside 999 | which is 8 per processor.
decode --isa avx1024 | --isa is 'avx1024'; it must be one of avx2, avx512, avx5
decode tiny --context 2040 | --context is 2040; with 32 new tokens it exceeds
decode preset:smollm3 | There is no preset 'smollm3'
speculation tinny | Did you mean 'tiny'?
speculation --beside 2 | there is no option --beside.
prefill tiny --context 128,2048 | exceeds the 2048 positions of this model.
serve tiny --plot /nowhere/a.png | --plot /nowhere/a.png: this is a folder
serve tiny --plot a.bmp | --plot is 'a.bmp'; its name must end in .png
speculation preset:smollm2-135m | random weights
decode --json /nowhere/at/all.json | or its folder does not exist.
decode preset:deepseek-v3 --vs vllm | cannot be written as a checkpoint
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_sentence(line: str, cli: Any) -> None:
    arguments, sentence = line.split(" | ")
    shown = cli("bench", *arguments.split())
    assert shown.refused(sentence), shown


def test_help_shows_examples_and_needs_no_torch() -> None:
    script = (
        "import sys; from minillm.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "finally: sys.stderr.write(str('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (0, "False")
    words = "decode prefill offline speculation scheduler"
    for name in (*words.split(), "make peers"):
        assert name in done.stdout


# ---- with the embedded model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Environments whose "python" is an engine that is made up; openvino's prints rubbish."""
    folder = tmp_path_factory.mktemp("peers")
    for name, script in (("vllm", FAKE_PEER), ("openvino", RUBBISH)):
        engine = folder / f"{name}.py"
        engine.write_text(script)
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{engine}"\n')
        python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_PEERS", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(compare, "measure_ceiling", lambda *ignored: CEILING)
        yield folder


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for Python is a shell script")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["decode", "prefill", "offline"])
def test_a_comparison_from_end_to_end(what, peers, tmp_path, cli):
    file = tmp_path / "result.json"
    arguments = [what, "tiny", "--quick", "--threads", "1", "--vs", "vllm,openvino"]
    arguments += ["--beside", "1"] if what == "decode" else []
    code, out, err = cli("bench", *arguments, "--json", file)
    assert code == 0, err
    found = json.loads(file.read_text())
    assert (found["benchmark"], found["model"], found["threads"]) == (what, "tiny", 1)
    assert list(found["engines"]) == ["minillm", "vllm"]
    assert "answered 'Loading checkpoint shards: 100%'" in found["left_out"]["openvino"]
    assert "openvino answered" in out
    check_results(what, found)
    for one in found["results"]:
        assert one["engine"] in out
        assert len(one["runs"]) == 2
        low, middle, high = (one["tokens_per_second"][each] for each in ("min", "median", "max"))
        assert 0 < low <= middle <= high
    assert "times the best peer, vllm." in " ".join(out.split())
    assert "run 2 of minillm" in err
    assert ("run 2 of vllm, beside 1" in err) == (what == "decode") == ("beside" in found)
    for one in found.get("beside", {"results": []})["results"]:
        assert one["over_idle"] > 0
        assert len(one["runs"]) == 2
    assert "Ceilings before: 1 TFLOP/s in bf16; bandwidth:" in out


def check_results(what: str, found: dict[str, Any]) -> None:
    """What each benchmark tells beyond the speed."""
    engines = [one["engine"] for one in found["results"]]
    if what == "offline":
        assert engines == ["minillm", "vllm"]
        own, peer = found["results"]
        assert own["new_tokens"] == peer["new_tokens"] == 2.0 * peer["tokens_per_second"]["median"]
        assert 0 < own["outside_model"] < 1
        assert peer["outside_model"] is None
        return
    assert engines == ["minillm", "vllm"] * 2
    assert [one["batch"] for one in found["results"]] == [1, 1, 2, 2]
    for one in found["results"]:
        assert one["share_of_bound"] == one["bound_seconds"] / one["step_seconds"]["median"]
    peer = found["results"][3]
    expected = 2 / 0.002 if what == "decode" else 2 * 16 / 1.0
    assert peer["tokens_per_second"]["median"] == pytest.approx(expected)


def test_an_engine_of_ours_that_fails_is_an_exit_code(peers, monkeypatch, cli):
    def start(*ignored: object) -> None:
        raise EngineFailedError("minillm has ended.")

    monkeypatch.setattr(compare.EngineProcess, "ask", start)
    shown = cli("bench", "decode", "tiny", "--quick", "--threads", "1")
    assert shown.code == 1
    assert "minillm has ended." in shown.out


def test_without_peers_all_of_them_are_skipped_with_a_note(tmp_path, monkeypatch, peers):
    monkeypatch.setenv("MINILLM_PEERS", str(tmp_path))
    config = preset("smollm2-135m")
    work = Work("decode", "m", "m", config, (Case(1, 8, 2),), 1, ("vllm", "openvino"), 1, "float32")
    found = compare.measure(work)
    assert found["results"] == []
    assert all("make peers" in note for note in found["left_out"].values())
    assert len(found["left_out"]) == 2


# ---- figures ----------------------------------------------------------------------------------


@pytest.fixture
def work() -> Work:
    config = preset("smollm2-135m")
    cases = (Case(1, 128, 32), Case(16, 128, 32))
    return Work("decode", "m", "m", config, cases, 2, ("minillm", "vllm"), 2, "bfloat16")


def test_a_share_of_the_bound_is_the_bytes_over_the_ceiling(work: Work) -> None:
    runs = [Run(1.0, seconds, 31, 31) for seconds in (0.62, 0.93, 1.24)]
    found = result(work, work.cases[0], Score("minillm", runs), CEILING)
    num_bytes = cost_of(work, work.cases[0]).total_bytes
    assert found["step_seconds"] == pytest.approx({"min": 0.02, "median": 0.03, "max": 0.04})
    assert found["tokens_per_second"]["median"] == pytest.approx(31 / 0.93)
    assert found["bytes_per_second"] == pytest.approx(num_bytes / 0.03)
    assert found["share_of_bound"] == pytest.approx(num_bytes / 20e9 / 0.03)  # the fastest way
    assert found["bound"] == "memory"
    assert 268e6 < num_bytes < 280e6  # the weights, and a little cache


def test_a_prefill_is_bound_by_operations(work: Work) -> None:
    found = result(
        replace(work, what="prefill"), Case(16, 128, 1), Score("vllm", [Run(2.0, 0, 0, 0)]), CEILING
    )
    assert found["bound"] == "compute"
    assert found["tokens_per_second"]["median"] == 1024.0
    assert found["share_of_bound"] == pytest.approx(found["flops"] / 1e12 / 2.0)


def test_a_decode_step_is_counted_at_its_middle_context(work: Work) -> None:
    short, long = (cost_of(work, Case(1, context, 32)).kv_read_bytes for context in (128, 256))
    per_token = (long - short) / 128
    assert short / per_token == 128 + 16


def test_the_best_peer_of_the_same_case_is_compared_with() -> None:
    def one(engine: str, batch: int, speed: float) -> dict[str, Any]:
        case = {"batch": batch, "context": 8, "new_tokens": 4}
        return {"engine": engine, **case, "tokens_per_second": {"median": speed}}

    lines = statement(
        [one("minillm", 1, 30.0), one("vllm", 1, 10.0), one("openvino", 1, 20.0),
         one("minillm", 2, 30.0), one("vllm", 2, 60.0), one("minillm", 4, 1.0)]
    )  # fmt: skip
    assert lines == [
        "B=1 ctx 8: 1.50 times the best peer, openvino.",
        "B=2 ctx 8: 0.50 times the best peer, vllm.",
    ]


def test_every_engine_is_told_the_same_and_has_room_for_everything(work: Work) -> None:
    told = options(replace(work, cases=(Case(16, 1024, 32), Case(1, 2048, 32))))
    assert told["max_model_len"] >= 2048 + 32
    assert told["max_num_batched_tokens"] == 16 * 1024  # every prompt in one step
    assert told["kv_cache_bytes"] >= 16 * (2048 + 32) * 30 * 2 * 3 * 64 * 2


def test_offline_work_has_room_for_all_requests_and_not_for_the_longest_possible(work):
    offline = replace(work, what="offline", cases=(Case(64, 1024, 512),), requests=64)
    told = options(offline)
    prompts, lengths = compare.offline_requests(offline, offline.cases[0])
    tokens = sum(map(len, prompts)) + sum(lengths)
    per_token = 30 * 2 * 3 * 64 * 2
    assert tokens * per_token <= told["kv_cache_bytes"] < 64 * 1536 * per_token
    assert told["max_num_batched_tokens"] == 2048
    assert compare.offline_requests(offline, offline.cases[0]) == (prompts, lengths)


def test_disturbance_is_said_aloud(work: Work) -> None:
    score = Score("minillm", [Run(1.0, 0.6, 31, 31, others=0.4)])
    found = {
        "benchmark": "decode", "results": [result(work, work.cases[0], score, CEILING)],
        "engines": {}, "left_out": {}, "ceiling": {"before": CEILING.as_json()},
    }  # fmt: skip
    assert "Other programs used up to 40% of the processors" in remarks(found)[-1]
    assert table(found)[1][0][-1] == "40%"


def test_the_ceiling_is_the_best_of_both_readings() -> None:
    later = Ceiling({SUMS: 30e9, OWN: 25e9}, 5e11, 2e11)
    best = best_of(CEILING, later)
    assert (best.bandwidth, best.way) == (30e9, SUMS)
    assert (best.rate("bfloat16"), best.rate("float32")) == (1e12, 2e11)
    assert CEILING.way == ONEDNN


def test_the_rate_of_operations_is_that_of_the_faster_product(monkeypatch):
    machine = Hardware("m", 1e9, 10e9, 1e12, 1e-6, "measured", 1e11)
    monkeypatch.setattr(ceiling.ceilings, "measure", lambda **ignored: machine)
    monkeypatch.setattr(ceiling, "ways_to_read", dict)
    for ours, faster in ((3e12, 3e12), (0.0, 1e12)):
        monkeypatch.setattr(ceiling, "our_rate", lambda ours=ours: ours)
        assert ceiling.measure_ceiling("cpu", 1).rate("bfloat16") == faster


# ---- checkpoints for all ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "qwen2.5-3b", "llama-2-7b"])
def test_a_written_config_describes_the_preset(name: str) -> None:
    config = preset(name)
    written = checkpoint.huggingface_config(config, config.dtype)
    assert parse_config(written) == config


def test_only_plain_decoders_are_written() -> None:
    for name in ("deepseek-v3", "mixtral-8x7b", "llama-3.1-8b"):
        with pytest.raises(UnsupportedFeatureError, match="leave out --vs"):
            checkpoint.check_writable(name, PRESETS[name])


def test_first_layers_are_those_of_the_preset() -> None:
    """Of any family; a number of layers that it does not have is an error."""
    for name in ("deepseek-v2-lite", "qwen3-30b-a3b"):
        config = preset(name)
        cut = parse_config(checkpoint.first_layers(name, config, 3))
        assert cut == replace(config, num_layers=3, moe_layers=config.moe_layers[:3])
        for wrong in (0, config.num_layers + 1):
            with pytest.raises(ConfigError, match="must be between 1 and"):
                checkpoint.first_layers(name, config, wrong)


def test_a_written_checkpoint_loads_here_and_in_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from minillm import LLM, SamplingParams

    small = ModelConfig(
        family="qwen3", vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, intermediate_size=48, max_position_embeddings=64, rope=RopeConfig(theta=1e6),
        qk_norm=True, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checkpoint, "preset", lambda name: small)
    folder = checkpoint.checkpoint_of("small", "float32")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.checkpoint_of("small", "float32") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written  # once
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), dtype="float32") as llm:
        (output,) = llm.generate(["Hi there"], params, use_tqdm=False)
    assert len(output.prompt_token_ids or ()) == 8  # a token per byte
    assert output.outputs[0].text
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    import torch

    ids = torch.tensor([output.prompt_token_ids])
    for _ in range(6):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    assert ids[0, 8:].tolist() == output.outputs[0].token_ids


def test_a_benchmark_that_is_run_as_a_file_names_its_command():
    own = {name: one.module for name, one in BENCHMARKS.items() if one.module.startswith(FOLDER)}
    assert own
    for name, module in own.items():
        with pytest.raises(SystemExit, match=f"'minillm bench {name}'"):
            runpy.run_path(str(ROOT / f"{module.replace('.', '/')}.py"), run_name="__main__")
