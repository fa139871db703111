"""What is sent: lengths, shared prefixes, conversations, and prompts of exact length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.client import Fields
from minillm.lab.benchmarks.serving.prompts import WORDS, Vocabulary, Writer, any_ids, from_counts
from minillm.lab.benchmarks.serving.workload import (
    DRAWS,
    Conversation,
    Segment,
    Turn,
    fit,
    parse_workload,
)

WORDED = Vocabulary(ids=tuple(range(100, 200)))


def lengths(conversations: list[Conversation]) -> list[int]:
    return [conversation[0].length for conversation in conversations]


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_draws_the_same_conversations(name: str) -> None:
    workload = parse_workload(name)
    assert workload.draw(20, 7) == workload.draw(20, 7)
    if name != "fixed":
        assert workload.draw(20, 7) != workload.draw(20, 8)
    assert parse_workload(workload.describe()) == workload


def test_lognormal_lengths_have_the_stated_median_and_sigma() -> None:
    workload = parse_workload("lognormal:input=300,input_sigma=0.5,output=50,output_sigma=0")
    drawn = workload.draw(4000, 0)
    logs = np.log(lengths(drawn))
    assert np.median(lengths(drawn)) == pytest.approx(300, rel=0.06)
    assert logs.std() == pytest.approx(0.5, rel=0.06)
    assert {conversation[0].max_tokens for conversation in drawn} == {50}


def test_the_mixture_has_the_stated_share() -> None:
    drawn = parse_workload("long-short:short=10,long=400,long_share=0.25").draw(4000, 0)
    assert set(lengths(drawn)) == {10, 400}
    assert np.mean(np.array(lengths(drawn)) == 400) == pytest.approx(0.25, abs=0.04)


def test_requests_of_a_tree_share_their_prefixes() -> None:
    drawn = parse_workload("shared-prefix:roots=2,branches=3,prefix=16,input=8").draw(60, 0)
    ids = [WORDED.as_ids(conversation[0].segments) for conversation in drawn]
    assert {len(one) for one in ids} == {40}
    assert len({tuple(one[:16]) for one in ids}) == 2
    assert len({tuple(one[:32]) for one in ids}) == 6
    assert len({tuple(one[16:32]) for one in ids}) == 6
    assert len({tuple(one) for one in ids}) == 60


def test_a_chat_repeats_the_conversation_and_its_replies() -> None:
    (conversation,) = parse_workload("chat:turns=3,system=5,input=4,input_sigma=0").draw(1, 0)
    writer = Writer(Fields("m", chat=True), WORDED, as_ids=False)
    prompt = writer.prompt(conversation, 2, ["first", "second"])
    assert [one["role"] for one in prompt] == ["user", "assistant", "user", "assistant", "user"]
    assert prompt[1]["content"] == "first"
    assert [len(one["content"].split()) for one in prompt] == [9, 1, 4, 1, 4]
    earlier = writer.prompt(conversation, 1, ["first"])
    assert prompt[:3] == earlier
    plain = Writer(Fields("m", chat=False), WORDED, as_ids=True)
    text = plain.prompt(conversation, 1, [" first"])
    assert text.startswith(plain.prompt(conversation, 0, []) + " first ")
    assert conversation[0].think == 0
    assert conversation[1].think > 0


@given(
    turns=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=4),
    longest=st.integers(2, 500),
)
def test_shortened_conversations_fit(turns: list[tuple[int, int]], longest: int) -> None:
    conversation = tuple(
        Turn((Segment("a", 1), Segment(f"{place}", length - 1 or 1)), out)
        for place, (length, out) in enumerate(turns)
    )
    (found,), changed = fit([conversation], longest)
    total = sum(turn.length + turn.max_tokens for turn in found)
    assert total <= longest
    assert all(turn.length >= 1 and turn.max_tokens >= 1 for turn in found)
    whole = sum(turn.length + turn.max_tokens for turn in conversation)
    assert changed == (whole > longest)


def test_prompts_have_the_exact_length_and_equal_keys_equal_tokens() -> None:
    short, long = (WORDED.as_ids([Segment("k", length)]) for length in (5, 9))
    assert long[:5] == short
    assert len(long) == 9
    assert set(long) <= set(WORDED.ids)
    other = Vocabulary(ids=WORDED.ids, seed=1).as_ids([Segment("k", 9)])
    assert other != long
    assert len(WORDED.as_text([Segment("k", 9)]).split()) == 9


def test_only_words_of_one_token_are_used() -> None:
    counts = [[place] if place % 2 else [place, 0] for place in range(len(WORDS))]
    found = from_counts(counts, seed=0)
    assert found.exact
    assert found.words == WORDS[1::2]
    assert found.ids == tuple(range(1, len(WORDS), 2))
    bytewise = from_counts([[1, 2, 3] for _ in WORDS], seed=0)
    assert not bytewise.exact
    assert bytewise.ids == (1, 2, 3)
    with pytest.raises(ConfigError, match="--vocab-size"):
        from_counts([[] for _ in WORDS], seed=0)
    assert any_ids(100, 0).ids[0] == 25


@pytest.mark.parametrize(("text", "message"), [
    ("lognorml", "Did you mean 'lognormal'"), ("fixed:inptu=3", "Did you mean 'input'"),
    ("fixed:input=0", "from 1 to"), ("fixed:input=many", "it must be a number"),
    ("fixed:input=nan", "it must be a number"), ("long-short:long_share=1.5", "from 0 to 1"),
    ("lognormal:output_sigma=-1", "from 0 to 3"),
])  # fmt: skip
def test_a_wrong_workload_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_workload(text)


def body(**options: Any) -> bytes:
    return Fields("m", **options).body([1, 2], 5)


def test_bodies_ask_for_usage_and_for_the_whole_length() -> None:
    assert b'"include_usage":true' in body(chat=False)
    assert b'"ignore_eos":true' in body(chat=False)
    assert b"ignore_eos" not in body(chat=False, ignore_eos=False)
    assert b'"max_tokens":5' in body(chat=False)
    assert b'"max_completion_tokens":5' in body(chat=True)
