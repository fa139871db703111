"""`minillm bench speculation`: what it counts, and what it refuses."""

import json
from pathlib import Path

import pytest

from minillm import LLM
from minillm.api.sampling_params import SamplingParams
from minillm.cli import main
from minillm.lab.benchmarks.speculation import PLAIN, SpeculationWork, measure, prompts_of, timed
from minillm.lab.commands import bench_speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def found():
    work = SpeculationWork(
        model="tiny", variants={PLAIN: None, "ngram 4": NGRAM}, workloads=("copy",), batches=(1, 2),
        new_tokens=24, repeats=2, threads=1, dtype="float32",
    )  # fmt: skip
    return measure(work, lambda what: None)


def test_each_variant_at_each_batch_is_beside_plain_decoding(found):
    cells = [(one["batch"], one["variant"]) for one in found["results"]]
    assert cells == [(1, PLAIN), (1, "ngram 4"), (2, PLAIN), (2, "ngram 4")]
    for one in found["results"]:
        assert one["same_tokens"]
        if one["variant"] == PLAIN:
            assert one["ratio"]["median"] == 1
            assert one["tokens_per_step"] == 1
            assert (one["num_drafts"], one["acceptance"]) == (0, [])
        else:
            assert one["num_draft_tokens"] >= one["num_drafts"] > 0
            assert one["tokens_per_step"] > 1
            assert one["acceptance"] == sorted(one["acceptance"], reverse=True)


def test_a_run_counts_what_the_engine_did():
    llm = LLM("tiny", dtype="float32", speculative_config=NGRAM, enable_prefix_caching=False)
    prompts = prompts_of("copy", 2, llm)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    run = timed(llm, prompts, params)
    assert [len(ids) for ids in run.token_ids] == [20, 20]
    assert run.num_tokens == 38  # the clock starts at the first tokens
    assert run.counts["num_drafts"] >= run.accepted_at[0]
    assert sum(run.accepted_at) == llm.engine.scheduler.counters.num_accepted_tokens
    assert not llm.engine.has_work


@pytest.mark.slow
def test_the_command_writes_json(tmp_path: Path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    variants = {PLAIN: None, "ngram 4": NGRAM}
    monkeypatch.setattr(bench_speculation, "real_variants", lambda *_: variants)
    monkeypatch.setattr(bench_speculation, "WORKLOADS", ("copy",))
    command = ["bench", "speculation", "tiny", "--quick", "--threads", "1"]
    assert main([*command, "--json", str(file)]) == 0
    assert "over plain" in capsys.readouterr().out
    found = json.loads(file.read_text())["results"]
    assert [one["variant"] for one in found] == [PLAIN, "ngram 4"] * 2
