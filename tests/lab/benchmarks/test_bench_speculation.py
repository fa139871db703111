"""`minillm bench speculation`: what it counts, and what it refuses."""

import json
from pathlib import Path

import pytest

from minillm import LLM
from minillm.api.sampling_params import SamplingParams
from minillm.cli import main
from minillm.lab.benchmarks.speculation import (
    PLAIN,
    SpeculationWork,
    copy_prompt,
    measure,
    prompts_of,
    timed,
)
from minillm.lab.benchmarks.speculation_table import drafted_per_accepted

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


def test_drafted_for_each_accepted_token():
    one = {"num_drafts": 4, "acceptance": [0.75, 0.5], "num_draft_tokens": 8}
    assert drafted_per_accepted(one) == "1.60"
    assert drafted_per_accepted({"num_drafts": 0, "acceptance": [], "num_draft_tokens": 0}) == "-"


def test_what_follows_a_copy_is_in_the_prompt():
    assert copy_prompt([1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def test_the_command_writes_json(tmp_path: Path, capsys):
    file = tmp_path / "found.json"
    command = ["bench", "speculation", "tiny", "--quick", "--acceptance", "0.5,0.5"]
    command += ["--threads", "1"]
    assert main([*command, "--json", str(file)]) == 0
    assert "synthetic" in capsys.readouterr().out
    assert json.loads(file.read_text())["synthetic_acceptance"] == [0.5, 0.5]
