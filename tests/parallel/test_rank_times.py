"""A trace says how long each rank took for a step, and how long it communicated."""

import pytest

from minillm import SamplingParams
from minillm.errors import TraceFileError
from minillm.scheduling.record import RankTime
from minillm.trace.recorder import Trace
from tests.engine.small import make
from tests.trace.simulation import simulate, with_ranks

SIZES = {
    "tp threads": {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"},
    "pp threads": {"pipeline_parallel_size": 2, "distributed_executor_backend": "threads"},
    "tp processes": {"tensor_parallel_size": 2},
}


@pytest.mark.parametrize(
    "kind", [*list(SIZES)[:2], pytest.param("tp processes", marks=pytest.mark.slow)]
)
def test_each_step_has_the_time_of_each_rank(kind, folder, tmp_path):
    llm = make(folder, **SIZES[kind])
    llm.generate(["ab", "abc"], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    records = list(llm.trace)
    assert len(records) > 5
    for record in records:
        assert [each.rank for each in record.ranks] == [0, 1]
        took = record.computed - record.started
        assert all(0 <= each.communicating <= each.seconds for each in record.ranks)
        if kind == "tp threads":  # a pipeline's stages may have begun before their step was read
            assert all(each.seconds <= took for each in record.ranks)
    waits = [each.communicating for record in records for each in record.ranks if each.rank]
    assert max(waits) > 0
    assert "ranks: ms + communication" in llm.trace.table()
    path = tmp_path / "trace.jsonl"
    llm.trace.save(path)
    assert [each.ranks for each in Trace.load(path)] == [each.ranks for each in records]
    llm.close()


def test_one_rank_has_no_such_times(folder):
    llm = make(folder)
    llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)
    assert not any(record.ranks for record in llm.trace)
    assert "ranks" not in llm.trace.table()


def test_a_file_in_which_a_rank_communicates_longer_than_it_takes(tmp_path):
    path, trace = tmp_path / "trace.jsonl", with_ranks(simulate(2, 24), 2)
    rank, seconds, _ = trace[0].ranks[1]
    trace[0].ranks[1] = RankTime(rank, seconds, seconds + 5)
    trace.save(path)
    with pytest.raises(TraceFileError, match="rank 1 communicates longer than its step takes"):
        Trace.load(path)
